"""Measurements of shmbus and of other ways to move a trajectory; ``python -m bench`` runs them."""

from __future__ import annotations

__all__: list[str] = []
