"""Device tensors as pieces of equal size, for one launch of all copies.

A launch per tensor costs the host some microseconds, and tensors of a few MiB wait for it; a single
launch, with a piece per processor, runs at the rate of memory. `cut` is pure. Without Triton torch
copies the tensors uncut.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import threading
from collections.abc import Sequence
from typing import Final, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

#: A target tensor and its source.
Pair: TypeAlias = tuple[torch.Tensor, torch.Tensor]

#: Bytes from which a copy of its own is faster: 2 us on a device of 2 TB/s, the cost of a launch.
LARGE_BYTES: Final = 4 << 20

#: Bytes of a piece, moved by a program of the kernel at once.
PIECE_BYTES: Final = 32 << 10
WORD_BYTES: Final = 8
ADDRESS_BYTES: Final = 16

#: Row bytes below which torch makes a strided copy: a table of shorter rows is as long as the data.
ROW_BYTES: Final = 256

Table = npt.NDArray[np.int64]


class Cut(NamedTuple):
    """Pieces by kind of copy, int64 [pieces, 4]: target, source, words, unused."""

    whole: Table
    rest: Table
    odd: Table


def spans_of(target: torch.Tensor, source: torch.Tensor) -> Table | None:
    """Return a copy's byte runs, [runs, 3]: target, source, bytes; None if unfit for the kernel."""
    size = target.element_size()
    lazy = any(each.is_conj() or each.is_neg() for each in (target, source))
    if (target.dtype, target.shape) != (source.dtype, source.shape) or lazy or not target.numel():
        return None
    dims = [
        (count, to * size, of * size)
        for count, to, of in zip(target.shape, target.stride(), source.stride(), strict=True)
        if count > 1
    ]
    run = size
    while dims and dims[-1][1:] == (run, run):
        run *= dims.pop()[0]
    starts = np.array([[target.data_ptr(), source.data_ptr()]], np.int64)
    for count, to, of in reversed(dims):
        steps = np.arange(count, dtype=np.int64)[:, None, None] * np.array([to, of], np.int64)
        starts = (steps + starts).reshape(-1, 2)
    uneven = (target.data_ptr() | source.data_ptr()) % ADDRESS_BYTES
    if uneven or any(step % ADDRESS_BYTES for _, *steps in dims for step in steps):
        return None
    if dims and (run < ROW_BYTES or any(min(steps) <= 0 for _, *steps in dims)):
        return None
    return np.column_stack([starts, np.full(len(starts), run, np.int64)])


def cut(spans: Sequence[tuple[int, int, int]] | Table) -> Cut:
    """Cut copies into pieces."""
    found = np.asarray(spans, np.int64).reshape(-1, 3)
    to, of, size = found.T
    counts = size // PIECE_BYTES
    each = np.repeat(np.arange(len(found)), counts)
    ahead = (np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)) * PIECE_BYTES
    whole = _table(to[each] + ahead, of[each] + ahead, np.full(len(each), PIECE_BYTES))
    done = counts * PIECE_BYTES
    words = (size - done) // WORD_BYTES
    rest = _table(to + done, of + done, words)[words > 0]
    done = done + words * WORD_BYTES
    odd = _table(to + done, of + done, size - done)[size > done]
    return Cut(whole, rest, odd)


def _table(to: Table, of: Table, count: Table) -> Table:
    return np.stack([to, of, count, np.zeros_like(to)], axis=1)


@functools.cache
def may_cut() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


def import_kernels(module: str) -> None:
    """Import a module of kernels, in a thread without signals; skip without Triton."""
    if importlib.util.find_spec("triton") is None:
        return

    def run() -> None:
        with contextlib.suppress(Exception):
            importlib.import_module(module)

    thread = threading.Thread(target=run, name="shmbus-kernels")
    thread.start()
    thread.join()


def prepare_copies(device: torch.device) -> None:
    """Import the device copy code, if this process may hold device tensors."""
    if device.type == "cuda" or torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        import_kernels("shmbus.tensors.copy_kernel")


def is_alike(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether a CUDA copy within one device suits the kernel."""
    return (
        target.is_cuda and target.device == source.device and spans_of(target, source) is not None
    )


class CopyTable:
    """Copies to one device, cut and ready for repeated launches.

    Sources may be registered host memory; the kernel reads them over PCIe.
    """

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self._pairs = pairs  # keeps their memory alive
        spans = [spans_of(*pair) for pair in pairs]
        found = cut(np.concatenate([each for each in spans if each is not None]))
        device = pairs[0][0].device
        self._device = device
        kinds = zip(found, (True, False, False), (False, False, True), strict=True)
        #: Per table: flags for whole pieces, and for a bytewise copy.
        self._tables = [
            (torch.from_numpy(table).to(device), whole, odd)
            for table, whole, odd in kinds
            if len(table)
        ]

    def begin(self) -> None:
        """Copy, ordered on the device's current stream."""
        from shmbus.tensors.copy_kernel import launch

        words = PIECE_BYTES // WORD_BYTES
        with torch.cuda.device(self._device):
            for table, whole, odd in self._tables:
                launch(table, len(table), words=words, whole=whole, odd=odd)
