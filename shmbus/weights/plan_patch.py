"""A patch through a plan: only the elements that changed, where an engine's rank has them.

A patch says which elements of which tensor of a version changed; a plan says where they are in a
model. Finding out goes before the engine pauses; writing, on whichever device, is a scatter.

Invariant: nothing is written unless the elements that would be were those of the patch's base, by
the digest that guards every patch: of a part of a tensor it is made anew of the base's own bytes.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np
import torch

from shmbus.pool import PatchRun
from shmbus.tensors.copy_plan import CopyPlan
from shmbus.tensors.copy_table import Pair
from shmbus.weights.load_plan import LoadPlan, Recorded, bits
from shmbus.weights.patches import VersionChanges

__all__ = ["PlanPatch"]

#: Of `mixed` in `shmbus_ext/pool/patch_elements.h`, as a number with a sign.
_SALT: Final = 0x9E3779B97F4A7C15 - (1 << 64)
#: Threads that read a patch; more wait for memory.
_READERS: Final = 4
#: Numbers of elements that fit into an index of the device.
_MOST_ELEMENTS: Final = 1 << 31


class PlanPatch:
    """What is written of one patch into one model; made by `of`."""

    def __init__(self) -> None:
        self._writes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._whole: list[Pair] = []
        #: Whether something changed that the loader has to load.
        self.needs_loader = False
        self.nbytes = 0

    @classmethod
    def of(
        cls,
        plan: LoadPlan,
        changes: VersionChanges,
        pairs: list[Pair],
        base: torch.Tensor | None,
    ) -> PlanPatch | None:
        """Look up what a patch changes; None where the model does not have its base."""
        made = cls()
        by_tensor: dict[str, list[tuple[Recorded, Pair]]] = {}
        for name, each, pair in zip(plan.names(), plan.copies, pairs, strict=True):
            by_tensor.setdefault(name, []).append((each, pair))
        sparse: list[tuple[PatchRun, list[Recorded]]] = []
        for name, runs in changes.runs():
            if name in plan.refused:
                made.needs_loader = True
            plain: list[tuple[Recorded, Pair]] = []
            whole: list[tuple[Recorded, Pair]] = []
            for each, pair in by_tensor.get(name, ()):
                (plain if _is_sparse(each, runs) else whole).append((each, pair))
            made._whole += [pair for _, pair in whole]
            if plain:
                sparse += [(run, [each for each, _ in plain]) for run in runs]
        wanted: list[int] = []
        found: list[torch.Tensor] = []
        with ThreadPoolExecutor(min(_READERS, os.cpu_count() or 1)) as readers:
            listed = readers.map(lambda each: changes.listed(each[0]), sparse)
            for (run, copies), (elements, values) in zip(sparse, listed, strict=True):
                if not made._add(run, copies, elements, values, base, wanted, found):
                    return None
        if found and [*torch.stack(found).tolist()] != wanted:
            return None
        made.nbytes += sum(target.nbytes for target, _ in made._whole)
        return made

    def _add(
        self,
        run: PatchRun,
        copies: list[Recorded],
        elements: Any,
        values: Any,
        base: torch.Tensor | None,
        wanted: list[int],
        found: list[torch.Tensor],
    ) -> bool:
        """Look up one run; add what is to be compared. False where the base is not there."""
        piece, width = run.piece, run.piece.width
        device = copies[0].target.device
        places = torch.from_numpy(elements.view(np.int32)).to(device).to(torch.int64)
        new = torch.from_numpy(values).view(_INTEGER[width]).to(device)
        length = piece.row_bytes // width
        at = places + piece.offset // width
        if piece.rows > 1:
            rows = places // length
            at += rows * (piece.stride // width - length)
        for each in copies:
            to, inside = _placed(each, at, width)
            some = not inside.all().item()
            own_places, own_new = places, new
            if some:
                kept = inside.nonzero().squeeze(1)
                to, own_places, own_new = to[kept], places[kept], new[kept]
            if not len(to):
                continue
            flat = bits(_flat(each.target))
            found.append(_digest(flat[to], own_places, width))
            if not some:
                wanted.append(_signed(run.base_digest))
            elif base is None:
                return False
            else:
                there = at[kept].cpu()
                old = base.view(_INTEGER[width])[there]
                wanted.append(int(_digest(old, own_places.cpu(), width)))
            self._writes.append((flat, to, own_new))
            self.nbytes += len(to) * width
        return True

    @torch.no_grad()
    def apply(self) -> None:
        """Write; on a device, ordered on its current stream."""
        for flat, to, values in self._writes:
            flat.index_copy_(0, to, values)
        if self._whole:
            CopyPlan(self._whole).copy()


_INTEGER: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


def _is_sparse(each: Recorded, runs: list[PatchRun]) -> bool:
    """Whether elements of a copy can be written one by one."""
    size = each.source.dtype.itemsize
    return each.target.dtype == each.source.dtype and all(
        run.piece.width == size and run.piece.rows * run.piece.row_bytes // size < _MOST_ELEMENTS
        for run in runs
    )


def _flat(target: torch.Tensor) -> torch.Tensor:
    """View all of the memory that a tensor lies in, element by element."""
    storage = target.untyped_storage()
    count = storage.nbytes() // target.element_size()
    made = torch.empty(0, dtype=target.dtype, device=target.device)
    return made.set_(storage, 0, (count,), (1,))


def _placed(each: Recorded, at: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return where elements of a version are in a target's memory, and which of them are at all."""
    source, target = each.source, each.target
    left = at - source.start // width
    to = torch.full_like(left, int(target.storage_offset()))
    inside = left >= 0
    dims = sorted(range(target.dim()), key=lambda dim: -source.strides[dim])
    for dim in dims:
        step = source.strides[dim]
        if step == 0:
            continue
        index = left // step
        inside &= index < source.sizes[dim]
        to += index * target.stride(dim)
        left = left - index * step
    inside &= left == 0
    return to, inside


def _digest(values: torch.Tensor, places: torch.Tensor, width: int) -> torch.Tensor:
    """Digest elements as a patch does, modulo 2**64."""
    plain = values.to(torch.int64) & ((1 << 8 * width) - 1)
    return ((plain + _SALT) * (2 * places + 1)).sum()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >= 1 << 63 else number
