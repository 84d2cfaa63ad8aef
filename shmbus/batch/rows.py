"""Samples of several rows, for who packs each row as a sequence of its own."""

from __future__ import annotations

from shmbus.rows import row_fields, row_lengths

__all__ = ["row_fields", "row_lengths"]
