"""Modules of Triton's kernels, imported where a signal cannot break them."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import threading

__all__ = ["import_kernels"]


def import_kernels(module: str) -> None:
    """Import a module of kernels, and Triton with it, before it is needed; nothing without Triton.

    In a thread, where no signal's handler runs: an import of Triton that Ctrl-C ends half-way
    leaves it broken for the life of the process.

    Parameters
    ----------
    module : str
        Its name. Where it cannot be imported, who uses it gets the error.
    """
    if importlib.util.find_spec("triton") is None:
        return

    def run() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=run, name="shmbus-kernels")
    thread.start()
    thread.join()
