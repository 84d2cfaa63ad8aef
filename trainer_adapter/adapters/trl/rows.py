"""Samples of a bus as TRL's rows: whole sequences, several per forked sample.

Invariants:

- A missing field is never filled in: an error names the group, the sample and the field.
- The arrays of a row are copies, so a row never keeps space of the ring.
- A fork is a separate row: rows of one sample are never joined.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.batch.gather import FieldNames, PackedBatch, gather, measure
from shmbus.data.sample_rows import SHARED_PREFIX, row_fields, row_lengths
from trainer_adapter.adapters.prompt_response import not_of_its_kind, shared_name
from trainer_adapter.adapters.trl.samples import Expected

_NAMES: Final = FieldNames()
_NEEDED: Final = frozenset({"tokens", "loss_mask", "logprobs"})
#: Remedies for a missing field.
_FILL: Final = {
    "tokens": "put the prompt's and the completion's token ids",
    "loss_mask": "put 1 for each token that the model sampled, 0 for prompt and tools",
    "logprobs": "put the sampler's logprob of each token: TRL's ratio starts from them",
}


class RowArrays(NamedTuple):
    """A whole sequence of n tokens."""

    input_ids: NDArray[np.int64]
    completion_mask: NDArray[np.int64]
    #: Each aligned to the row's token; 0 under a mask of 0.
    old_log_probs: NDArray[np.float32]


def read_rows(group: shmbus.Group, expected: Expected) -> list[list[RowArrays]]:
    """Copy a group out of the ring."""
    arrays, lengths = _packed_rows(group)
    if arrays is None:
        return [read_sample(t, expected) for t in group]
    # TRL counts positions itself, so their memory holds the mask in TRL's form.
    mask = arrays.position_ids
    np.copyto(mask, arrays.loss_mask)
    ids, logprobs = arrays.tokens, arrays.logprobs
    rows: list[list[RowArrays]] = []
    end = 0
    for t, of_sample in zip(group, lengths, strict=True):
        mine = []
        for length in of_sample:
            begin, end = end, end + length
            row = RowArrays(ids[begin:end], mask[begin:end], logprobs[begin:end])
            _check_limits(t, row, expected)
            mine.append(row)
        rows.append(mine)
    return rows


def _packed_rows(group: shmbus.Group) -> tuple[PackedBatch | None, list[list[int]]]:
    """Copy every row in one pass of C, or leave it to `read_sample` and its error messages."""
    try:
        measured = measure([group], _NAMES)
    except ValueError:
        return None, []
    for names in measured.field_names:
        if not _NEEDED.issubset(row_fields(names)) or "advantages" in names:
            return None, []
        if any(name.startswith(SHARED_PREFIX) for name in names):
            return None, []
    lengths = [[length] for length in measured.samples[3].tolist()]
    if measured.has_rows:
        for position, t in enumerate(group):
            of_rows = row_lengths(t)
            if of_rows is not None:
                lengths[position] = of_rows[:, 0].tolist()
    memory = np.empty(measured.nbytes, np.uint8)
    arrays = gather(measured, memory, np.zeros(len(lengths), np.float32))
    return (arrays if arrays.clean else None), lengths


def read_sample(t: shmbus.Trajectory, expected: Expected) -> list[RowArrays]:
    """Copy a sample out of the ring, row by row, with every check."""
    if (name := shared_name(t)) is not None:
        raise _bad(
            t, name, "what samples have of their own", "an array of the whole group",
            "TRL has no place for it: leave shared= out",
        )  # fmt: skip
    if "advantages" in t:
        raise _bad(
            t, "advantages", "no such field", "one",
            "TRL has one advantage a sample: leave it out, or name a kind of advantages",
        )  # fmt: skip
    return [_read_row(t, row, expected) for row in t.rows]


def _read_row(t: shmbus.Trajectory, row: Mapping[str, Any], expected: Expected) -> RowArrays:
    fields: dict[str, Any] = {name: row.get(name) for name in _FILL}
    for name, array in fields.items():
        if array is None:
            raise _bad(t, name, "this field", "none", _FILL[name])
        if array.ndim != 1 or array.shape != fields["tokens"].shape or not array.size:
            raise _bad(t, name, "[n], one value a token", f"shape {array.shape}", _FILL[name])
        if (wrong := not_of_its_kind(name, array)) is not None:
            raise _bad(t, name, *wrong, _FILL[name])
    ids = np.array(fields["tokens"], np.int64)
    mask = (fields["loss_mask"] != 0).astype(np.int64)
    logprobs = np.where(mask, fields["logprobs"], 0).astype(np.float32)
    if not np.isfinite(logprobs).all():
        raise _bad(t, "logprobs", "finite numbers", "others", _FILL["logprobs"])
    found = RowArrays(ids, mask, logprobs)
    _check_limits(t, found, expected)
    return found


def _check_limits(t: shmbus.Trajectory, row: RowArrays, expected: Expected) -> None:
    length = len(row.input_ids)
    if expected.row_tokens is not None and length > expected.row_tokens:
        raise _bad(
            t, "tokens", f"at most {expected.row_tokens}, the trainer's token_budget", str(length),
            "raise token_budget, or make shorter samples",
        )  # fmt: skip
    limit = expected.completion_tokens
    if limit is not None and length > limit and np.count_nonzero(row.completion_mask) > limit:
        longest = _longest_run(row.completion_mask)
        if longest > limit:
            raise _bad(
                t, "tokens", f"at most {limit} sampled in a turn, max_completion_length",
                str(longest), "raise max_completion_length, or lower the workers' limit",
            )  # fmt: skip


def _bad(t: shmbus.Trajectory, field: str, expected: str, got: str, step: str) -> ValueError:
    return ValueError(
        f"group {t.instance_id!r}, sample {t.index}, field {field!r}: expected {expected}, got "
        f"{got}; {step}"
    )


def _longest_run(mask: NDArray[np.int64]) -> int:
    borders = np.flatnonzero(np.diff(np.concatenate(([0], mask, [0]))))
    return int((borders[1::2] - borders[::2]).max(initial=0))
