"""A token row as prompt and response, for stacks with separate arguments.

Invariants:

- The tokens before the first sampled token form the prompt; the rest is the response, with its
  mask.
- A missing field, or a lossy conversion, is an error with the sample and the field, never filled
  in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.data.sample_rows import SHARED_PREFIX

_LARGEST: Final = np.iinfo(np.int64).max
#: Accepted kinds of dtypes per field, and their names.
_KINDS: Final = {
    "tokens": ("biu", "whole numbers below 2**63"),
    "loss_mask": ("biuf", "numbers"),
    "logprobs": ("iuf", "real numbers"),
}


_PUT: Final = "put the whole sequence, a mask of what was sampled, and the sampler's logprobs"


def bad_field(
    t: shmbus.Trajectory, field: str, expected: str, got: str, step: str = _PUT
) -> ValueError:
    """Return the error for a field of a sample unfit for a stack, with the remedy."""
    return ValueError(
        f"group {t.instance_id!r}, sample {t.index}, field {field!r}: expected {expected}, got "
        f"{got}; {step}"
    )


def checked_field(
    t: shmbus.Trajectory, row: Mapping[str, NDArray[Any]], name: str, step: str = _PUT
) -> NDArray[Any]:
    """Return a row's field [n], whose numbers survive the conversion to a stack's type."""
    array, tokens = row.get(name), row.get("tokens")
    if array is None or tokens is None or array.ndim != 1 or len(array) != len(tokens):
        got = "none" if array is None else f"shape {array.shape}"
        raise bad_field(t, name, "one value a token", got, step)
    if not len(array):
        raise bad_field(t, name, "one value a token", f"shape {array.shape}", step)
    kinds, expected = _KINDS[name]
    if array.dtype.kind not in kinds:
        raise bad_field(t, name, expected, str(array.dtype), step)
    if name == "tokens" and array.dtype.kind == "u" and array.max(initial=0) > _LARGEST:
        raise bad_field(t, name, expected, str(array.max()), step)
    return array


def shared_name(t: shmbus.Trajectory) -> str | None:
    """Return a field shared by the whole group, without a place in these stacks."""
    return next((name for name in t.keys() if name.startswith(SHARED_PREFIX)), None)  # noqa: SIM118


class Parted(NamedTuple):
    """A row of p prompt tokens and n response tokens."""

    prompt: list[int]
    response: list[int]
    #: 1 for sampled tokens.
    mask: list[int]
    #: Sampler logprobs; 0 under a mask of 0.
    logprobs: list[float] | None


def part_row(t: shmbus.Trajectory, row: Mapping[str, NDArray[Any]], logprobs: bool) -> Parted:
    """Part a row of a sample."""
    if (name := shared_name(t)) is not None:
        raise bad_field(t, name, "what samples have of their own", "an array of the whole group")
    tokens = checked_field(t, row, "tokens")
    mask = checked_field(t, row, "loss_mask") != 0
    values = checked_field(t, row, "logprobs") if logprobs else None
    sampled = np.flatnonzero(mask)
    if not len(sampled) or sampled[0] == 0:
        got = f"{len(sampled)} sampled of {len(tokens)}"
        raise bad_field(t, "loss_mask", "a prompt, and then a sampled token", got)
    begin = int(sampled[0])
    if values is not None:
        values = np.where(mask, values, 0)[begin:]
        if not np.isfinite(values).all():
            raise bad_field(t, "logprobs", "finite numbers", "others")
    return Parted(
        tokens[:begin].tolist(),
        tokens[begin:].tolist(),
        mask[begin:].astype(int).tolist(),
        None if values is None else values.tolist(),
    )


def experts_of(t: shmbus.Trajectory, row: Mapping[str, NDArray[Any]]) -> NDArray[np.int16] | None:
    """Return the routed experts of a row's tokens, if the row holds them."""
    array = row.get("routed_experts")
    if array is None:
        return None
    got = f"{array.dtype} in shape {array.shape}"
    if array.dtype.kind in "iu" and array.ndim == 3 and 0 < len(array) <= len(row["tokens"]):
        found = array.astype(np.int16)
        if array.size and found.min() >= 0 and np.array_equal(found, array):
            return found
        got = f"{array.min(initial=0)} to {array.max(initial=0)}"
    most = f"of at most {len(row['tokens'])} tokens [n, layers, k]"
    raise bad_field(
        t, "routed_experts", f"the numbers of experts, 0 to 32767, {most}", got,
        "put them as the sampler gives them, or leave them out",
    )  # fmt: skip
