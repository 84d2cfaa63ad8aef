"""Modules of Triton's kernels, imported where a signal cannot break them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading

__all__ = ["import_kernels"]


def import_kernels(module: str) -> None:
    """Import a module of kernels, in a thread without signals; nothing without Triton."""
    if importlib.util.find_spec("triton") is None:
        return

    def run() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=run, name="shmbus-kernels")
    thread.start()
    thread.join()
