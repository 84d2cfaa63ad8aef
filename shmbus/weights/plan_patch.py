"""Patch through a plan: writes only the changed elements of an engine's rank.

A patch lists changed elements by tensor of a version; a plan maps them to places in a model. On a
CUDA device one launch looks up every change and one writes them; elsewhere torch does.

Invariant: nothing is written unless the elements to overwrite equal the patch's base: checked by
the digest that guards every patch, or, for a part of a tensor without its own digest, against the
base's own bytes; on a device at each 16th element, because the base comes over PCIe.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from shmbus.pool import PatchRun
from shmbus.tensors.copy_plan import CopyPlan
from shmbus.tensors.copy_table import Pair, may_cut
from shmbus.weights.load_plan import LoadPlan, Recorded, bits
from shmbus.weights.patches import VersionChanges

#: Of `mixed` in `shmbus_ext/pool/patch_elements.h`, as a number with a sign.
_SALT: Final = 0x9E3779B97F4A7C15 - (1 << 64)
#: Threads that read a patch; more wait for memory.
_READERS: Final = 8
#: Runs listed by a thread per turn.
_RUNS: Final = 64
#: Limit of element numbers in a device index.
_MOST_ELEMENTS: Final = 1 << 31
_INTEGER: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
#: Changes per kernel program, dimensions, and the stride of elements compared with the base.
LANES: Final = 1024
DIMS: Final = 3
EVERY: Final = 16
#: Unused dimension: every element lies in its first part.
_NO_DIM: Final = (1 << 62, 1, 0)


class _Changes(NamedTuple):
    """A run with its copies and writes."""

    run: PatchRun
    copies: list[Recorded]
    elements: npt.NDArray[np.uint32]
    values: npt.NDArray[np.uint8]


class PlanPatch:
    """Writes of one patch into one model; built by `of`."""

    def __init__(self, writes: list[_TorchScatter] | list[_KernelScatter]) -> None:
        self._writes = writes
        self._whole: list[Pair] = []
        #: True if a changed tensor needs the loader.
        self.needs_loader = False

    @classmethod
    def of(
        cls,
        plan: LoadPlan,
        changes: VersionChanges,
        pairs: list[Pair],
        base: torch.Tensor | None,
    ) -> PlanPatch | None:
        """Look up a patch's changes; return None if the model holds a different base."""
        by_tensor: dict[str, list[tuple[Recorded, Pair]]] = {}
        for name, each, pair in zip(plan.names(), plan.copies, pairs, strict=True):
            by_tensor.setdefault(name, []).append((each, pair))
        sparse: list[tuple[PatchRun, list[Recorded]]] = []
        whole: list[Pair] = []
        needs_loader = False
        for name, runs in changes.runs():
            needs_loader = needs_loader or name in plan.refused
            plain: list[Recorded] = []
            for each, pair in by_tensor.get(name, ()):
                if _is_sparse(each, runs):
                    plain.append(each)
                else:
                    whole.append(pair)
            if plain:
                sparse += [(run, plain) for run in runs]
        device = plan.copies[0].target.device if plan.copies else torch.device("cpu")
        kernel = device.type == "cuda" and may_cut()
        scatter: Any = _KernelScatter if kernel else _TorchScatter
        writes = scatter.all_of(_listed(changes, sparse), base)
        if writes is None:
            return None
        made = cls(writes)
        made._whole, made.needs_loader = whole, needs_loader
        return made

    @torch.no_grad()
    def apply(self) -> None:
        """Write; on a device, ordered on its current stream."""
        for each in self._writes:
            each.write()
        if self._whole:
            CopyPlan(self._whole).copy()


def _listed(
    changes: VersionChanges, sparse: list[tuple[PatchRun, list[Recorded]]]
) -> Iterator[_Changes]:
    """Yield the writes of runs, read by several threads."""
    with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
        parts = [sparse[at : at + _RUNS] for at in range(0, len(sparse), _RUNS)]
        found = readers.map(lambda part: [changes.listed(run) for run, _ in part], parts)
        for part, listed in zip(parts, found, strict=True):
            for (run, copies), (elements, values) in zip(part, listed, strict=True):
                if len(elements):
                    yield _Changes(run, copies, elements, values)


def _is_sparse(each: Recorded, runs: list[PatchRun]) -> bool:
    """Return whether a copy allows writes of single elements."""
    size = each.source.dtype.itemsize
    dims = sum(step > 0 for step in each.source.strides)
    return (
        each.target.dtype == each.source.dtype
        and dims <= DIMS
        and all(
            run.piece.width == size
            and run.piece.rows * run.piece.row_bytes // size < _MOST_ELEMENTS
            for run in runs
        )
    )


def _dims_of(each: Recorded) -> list[tuple[int, int, int]]:
    """Return step in the source, size, step in the target; the widest step first."""
    dims = zip(each.source.strides, each.source.sizes, each.target.stride(), strict=True)
    return sorted((dim for dim in dims if dim[0] > 0), key=lambda dim: -dim[0])


def _is_whole(each: Recorded, run: PatchRun) -> bool:
    """Return whether a copy contains a run's whole piece."""
    source, piece, width = each.source, run.piece, run.piece.width
    end = piece.offset + (piece.rows - 1) * piece.stride + piece.row_bytes
    step = 1
    for size, own in zip(reversed(source.sizes), reversed(source.strides), strict=True):
        if own not in (0, step):
            return False
        step *= size
    return source.start <= piece.offset and end <= source.start + step * width


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number


class _TorchScatter:
    """Changes of one copy, looked up and written by torch."""

    def __init__(
        self, flat: torch.Tensor, to: torch.Tensor, new: torch.Tensor, places: torch.Tensor
    ) -> None:
        self._flat, self._to, self._new, self._places = flat, to, new, places

    @classmethod
    def all_of(
        cls, listed: Iterator[_Changes], base: torch.Tensor | None
    ) -> list[_TorchScatter] | None:
        """Look up every change; return None if the model holds a different base."""
        made = []
        for run, copies, elements, values in listed:
            width = run.piece.width
            places = torch.from_numpy(elements.astype(np.int64))
            new = torch.from_numpy(values).view(_INTEGER[width])
            length, gap, offset = _rows_of(run)
            at = places + places // length * gap + offset
            for each in copies:
                to, inside = _placed(each, at, width)
                kept = inside.nonzero().squeeze(1)
                device = each.target.device
                flat = bits(_flat(each.target))
                own = cls(flat, to[kept].to(device), new[kept].to(device), places[kept].to(device))
                if len(kept) == len(places):
                    wanted = _signed(run.base_digest)
                elif base is None:
                    return None
                else:
                    old = base.view(_INTEGER[width])[at[kept]]
                    wanted = int(_digest(old, places[kept], width))
                if int(_digest(flat[own._to], own._places, width)) != wanted:
                    return None
                made.append(own)
        return made

    def write(self) -> None:
        """Write them."""
        self._flat.index_copy_(0, self._to, self._new)


def _rows_of(run: PatchRun) -> tuple[int, int, int]:
    """Return the elements of a row, between two rows, and before the first."""
    piece, width = run.piece, run.piece.width
    length = piece.row_bytes // width
    return length, (piece.stride // width - length if piece.rows > 1 else 0), piece.offset // width


def _flat(target: torch.Tensor) -> torch.Tensor:
    """View a tensor's whole memory, element by element."""
    storage = target.untyped_storage()
    count = storage.nbytes() // target.element_size()
    made = torch.empty(0, dtype=target.dtype, device=target.device)
    return made.set_(storage, 0, (count,), (1,))


def _placed(each: Recorded, at: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the places of version elements in a target's memory, and a mask of valid ones."""
    left = at - each.source.start // width
    to = torch.full_like(left, int(each.target.storage_offset()))
    inside = left >= 0
    for step, size, own_step in _dims_of(each):
        index = left // step
        inside &= index < size
        to += index * own_step
        left = left - index * step
    inside &= left == 0
    return to, inside


def _digest(values: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
    """Digest elements as a patch does, modulo 2**64."""
    plain = values.to(torch.int64) & ((1 << 8 * width) - 1)
    return ((plain + _SALT) * (2 * places + 1)).sum()


class _KernelScatter:
    """Changes of equal width, for every copy of a device together."""

    def __init__(self, device: torch.device, width: int, found: list[_Changes]) -> None:
        self._device, self._width = device, width
        pinned = device.type == "cuda"
        count = sum(len(each.elements) for each in found)
        places = torch.empty(count, dtype=torch.int32, pin_memory=pinned)
        values = torch.empty(count * width, dtype=torch.uint8, pin_memory=pinned)
        at = 0
        for each in found:
            end = at + len(each.elements)
            places.numpy()[at:end] = each.elements.view(np.int32)
            values.numpy()[at * width : end * width] = each.values
            at = end
        self._elements = places.to(device, non_blocking=True)
        self._values = values.to(device, non_blocking=True).view(_INTEGER[width])
        self._table = torch.empty(0)
        self._digests = torch.zeros(0, dtype=torch.int64)

    @classmethod
    def all_of(
        cls, listed: Iterator[_Changes], base: torch.Tensor | None
    ) -> list[_KernelScatter] | None:
        """Look up every change; return None if the model holds a different base."""
        widths: dict[int, list[_Changes]] = {}
        for each in listed:
            widths.setdefault(each.run.piece.width, []).append(each)
        there = base is not None and (base.is_pinned() or base.is_cuda)
        address = base.data_ptr() if base is not None and there else 0
        made = []
        for width, found in widths.items():
            own = cls(found[0].copies[0].target.device, width, found)
            if not own._compare(found, address):
                return None
            made.append(own)
        return made

    def _compare(self, found: list[_Changes], base: int) -> bool:
        """Build the table of every copy, and compare the present elements with the base."""
        rows: list[tuple[int, ...]] = []
        wanted: list[int] = []
        first = 0
        known: dict[int, tuple[int, ...]] = {}
        for run, copies, elements, _ in found:
            for each in copies:
                is_whole = _is_whole(each, run)
                if not is_whole and not base:
                    return False
                placed = known.get(id(each))
                if placed is None:
                    dims = _dims_of(each)
                    dims = [_NO_DIM] * (DIMS - len(dims)) + dims
                    known[id(each)] = placed = (
                        each.source.start // self._width,
                        *(number for dim in dims for number in dim), each.target.data_ptr(),
                    )  # fmt: skip
                rows.append((
                    first, len(elements), *_rows_of(run), *placed, len(wanted),
                    0 if is_whole else base,
                ))  # fmt: skip
                wanted.append(_signed(run.base_digest) if is_whole else 0)
            first += len(elements)
        table = np.array(rows, np.int64)
        # A program handles some changes of a copy.
        parts = -(-table[:, 1] // LANES)
        which = np.repeat(np.arange(len(table)), parts)
        ahead = (np.arange(len(which)) - np.repeat(np.cumsum(parts) - parts, parts)) * LANES
        cut = table[which]
        cut[:, 0] += ahead
        cut[:, 1] = np.minimum(cut[:, 1] - ahead, LANES)
        self._table = torch.from_numpy(cut).to(self._device)
        self._digests = torch.zeros(len(wanted), dtype=torch.int64, device=self._device)
        self._launch(write=False)
        return bool(self._digests.tolist() == wanted)

    def _launch(self, *, write: bool) -> None:
        from shmbus.tensors.scatter_kernel import launch

        numbers: Any = {"lanes": LANES, "width": self._width, "salt": _SALT, "every": EVERY}
        with torch.cuda.device(self._device if self._device.type == "cuda" else -1):
            launch(self._table, self._elements, self._values, self._digests, write=write, **numbers)

    def write(self) -> None:
        """Write them."""
        self._launch(write=True)
