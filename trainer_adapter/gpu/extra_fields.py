"""Extra fields of leased groups, copied from the ring to the device by a kernel.

Invariants:

- The bytes are those of the host's pack; a change of dtype is made on the device.
- The table of copies is kept until the kernel has read it: its block joins the batch's others.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import torch

import shmbus
from shmbus.batch.extra_fields import COPY_WORDS, plan_extras
from shmbus.batch.gather import members
from trainer_adapter.batches.extra_fields import ExtraFields, GivenExtraFields, MeasuredExtras
from trainer_adapter.gpu.memory import Staging, StagingBlock

__all__ = ["copy_extras"]

#: Bytes of a program's copy: enough for some warps, and few enough for many programs.
CHUNK_BYTES: Final = 16_384
CHUNK_ENTRY_BYTES: Final = COPY_WORDS * 8


def copy_extras(
    groups: list[shmbus.Group],
    lengths: list[int],
    wanted: GivenExtraFields | ExtraFields | None,
    device: torch.device,
    shift: int,
    blocks: list[StagingBlock],
    staging: Staging,
) -> dict[str, Any]:
    """Start the copies of extra fields, on the current stream."""
    fields = ExtraFields.of(wanted)
    if fields is None:
        return {}
    trajectories = members(groups)[0]
    measured = fields.measure(trajectories, lengths)
    # Rows of a sample that lacks an optional field are not copied.
    make = torch.zeros if measured.lacking else torch.empty
    there = make(measured.nbytes, dtype=torch.uint8, device=device)
    if measured.columns:
        _copy(measured, trajectories, lengths, there, shift, blocks, staging)
    extra, offsets, kinds = measured.values(there)
    return {"extra": extra, "extra_offsets": offsets, "extra_kinds": kinds}


def _copy(
    measured: MeasuredExtras,
    trajectories: list[shmbus.Trajectory],
    lengths: list[int],
    there: torch.Tensor,
    shift: int,
    blocks: list[StagingBlock],
    staging: Staging,
) -> None:
    from trainer_adapter.gpu.kernel import launch_copy

    # At most one chunk a sample and field that is not full.
    most = measured.nbytes // CHUNK_BYTES + len(trajectories) * len(measured.columns)
    block = staging.take(most * CHUNK_ENTRY_BYTES)
    blocks.append(block)
    places = measured.places()
    chunks, launches = plan_extras(
        trajectories,
        lengths,
        measured.specs(),
        places,
        block.array[: most * CHUNK_ENTRY_BYTES].view(np.int64),
        shift=shift,
        chunk_bytes=CHUNK_BYTES,
    )
    assert chunks <= most, f"{chunks} chunks of extra fields, at most {most} expected"
    for (first, count), (_, width) in zip(launches, places, strict=True):
        if count:
            launch_copy(block.host, first * CHUNK_ENTRY_BYTES, count, width, there)
