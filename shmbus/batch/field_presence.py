"""Presence of fields in a batch's samples: filler in place of a field would be trained on.

Invariants:

- Either every sample of a group contains a field, or no sample.
- Either every group of a batch contains logprobs, or no group: without them no ratio exists.
- A batch of samples with equal fields costs nothing here.
"""

from __future__ import annotations

from collections.abc import Sequence

from shmbus.batch.field_names import FieldNames
from shmbus_ext import _core


class MixedLogprobsError(ValueError):
    """Some groups of a batch contain logprobs, and some groups lack them."""

    def __init__(self, message: str, lacking: list[int]) -> None:
        super().__init__(message)
        self.lacking = lacking


def check_presence(
    groups: Sequence[_core.GroupBase], names: FieldNames, has: int, lacks: int
) -> bool:
    """Refuse fields in only part of a group, and logprobs in only some groups."""
    if has & lacks:
        for group in groups:
            _check_siblings(group.trajectories, names)
        if has & lacks & _core.HAS_LOGPROBS:
            raise _mixed(groups, str(names.logprobs))
    return bool(has & _core.HAS_LOGPROBS)


def _check_siblings(samples: list[_core.Trajectory], names: FieldNames) -> None:
    for name in names.as_tuple()[1:]:
        having = [name in sample for sample in samples]
        if any(having) and not all(having):
            one, other = samples[having.index(False)], samples[having.index(True)]
            raise ValueError(
                f"trajectory {one.instance_id!r}[{one.index}] of producer {one.producer_id}: field "
                f"{name!r}: expected in every sample of a group or in none, got none, while "
                f"[{other.index}] of producer {other.producer_id} has it; put it with each sample"
            )


def _mixed(groups: Sequence[_core.GroupBase], name: str) -> MixedLogprobsError:
    having = [name in group.trajectories[0] for group in groups]
    first, other = groups[having.index(False)].trajectories[0], groups[having.index(True)]
    return MixedLogprobsError(
        f"group {first.instance_id!r} of producer {first.producer_id}: field {name!r}: expected in "
        f"every group of a batch or in none, got none, while group {other.instance_id!r} has it; "
        "put it in all groups, pack them apart, or read none by fields=FieldNames(logprobs=None)",
        [position for position, there in enumerate(having) if not there],
    )
