"""Compare a rank's memory with a slot, along a load plan, in slices of bounded time.

Invariant: only reads. A cast copy is compared with a fresh cast of the slot's bytes.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import torch

from shmbus.tensors.copy_plan import CopyPlan
from shmbus.weights.load_plan import LoadPlan, Recorded, bits

#: Bytes between two looks at the clock, and of scratch memory on a device.
PART_BYTES: Final = 16 << 20


def comparable(plan: LoadPlan, tensors: Mapping[str, torch.Tensor]) -> list[Recorded]:
    """Return a plan's copies in the slot's order, with witnesses equal to the slot right now."""
    equal = [
        each
        for each in plan.witnesses
        if compare_slice([each], tensors, 0, 0, math.inf).differs is None
    ]
    return sorted([*plan.copies, *equal], key=lambda each: each.source.start)


class Slice(NamedTuple):
    """Progress: the next copy and its next part, bytes compared, the first differing byte."""

    copy: int
    part: int
    nbytes: int
    differs: int | None


@torch.no_grad()
def compare_slice(
    copies: Sequence[Recorded],
    tensors: Mapping[str, torch.Tensor],
    copy: int,
    part: int,
    budget_s: float,
) -> Slice:
    """Compare from a cursor until the time is spent, a byte differs, or the copies end."""
    deadline = time.monotonic() + budget_s
    nbytes = 0
    for each in itertools.islice(copies, copy, None):
        first = next(iter(tensors.values()))
        source = each.source.view(first.untyped_storage(), first.device)
        for target, wanted in itertools.islice(_parts(each.target, source), part, None):
            differs = _first_difference(target, wanted)
            part, nbytes = part + 1, nbytes + target.nbytes
            if differs is not None or time.monotonic() >= deadline:
                return Slice(copy, part, nbytes, differs)
        copy, part = copy + 1, 0
    return Slice(copy, 0, nbytes, None)


def _parts(target: torch.Tensor, source: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Halve a copy along its first dimension until the parts are small."""
    if target.nbytes <= PART_BYTES:
        yield target, source
        return
    dim, size = next((dim, size) for dim, size in enumerate(target.shape) if size > 1)
    for start, end in ((0, size // 2), (size // 2, size)):
        cut = (dim, start, end - start)
        yield from _parts(target.narrow(*cut), source.narrow(*cut))


def _first_difference(target: torch.Tensor, source: torch.Tensor) -> int | None:
    """Return the payload offset in bytes of the first differing element."""
    wanted = source
    if (source.dtype, source.device) != (target.dtype, target.device):
        wanted = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        CopyPlan([(wanted, source)]).copy()
    pair = bits(target), bits(wanted)
    with contextlib.suppress(RuntimeError):  # rows of other lengths stay narrow
        pair = pair[0].view(torch.int64), pair[1].view(torch.int64)
    if torch.equal(*pair):
        return None
    index = (bits(target) != bits(wanted)).nonzero()[0].tolist()
    steps: int = sum(at * step for at, step in zip(index, source.stride(), strict=True))
    return (int(source.storage_offset()) + steps) * source.element_size()
