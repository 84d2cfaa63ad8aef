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


def not_of_its_kind(name: str, array: NDArray[Any]) -> tuple[str, str] | None:
    """Return the expected and the actual kind if a conversion would change a field's numbers."""
    kinds, expected = _KINDS[name]
    if array.dtype.kind not in kinds:
        return expected, str(array.dtype)
    if name == "tokens" and array.dtype.kind == "u" and array.max(initial=0) > _LARGEST:
        return expected, str(array.max())
    return None


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
        raise _bad(t, name, "what samples have of their own", "an array of the whole group")
    length = len(row["tokens"]) if "tokens" in row else 0
    for name in ("tokens", "loss_mask", *(("logprobs",) if logprobs else ())):
        array = row.get(name)
        if array is None or array.ndim != 1 or len(array) != length or not length:
            got = "none" if array is None else f"shape {array.shape}"
            raise _bad(t, name, "one value a token", got)
        if (wrong := not_of_its_kind(name, array)) is not None:
            raise _bad(t, name, *wrong)
    mask = row["loss_mask"] != 0
    sampled = np.flatnonzero(mask)
    if not len(sampled) or sampled[0] == 0:
        got = f"{len(sampled)} sampled of {length}"
        raise _bad(t, "loss_mask", "a prompt, and then a sampled token", got)
    begin = int(sampled[0])
    values = None
    if logprobs:
        values = np.where(mask, row["logprobs"], 0)[begin:]
        if not np.isfinite(values).all():
            raise _bad(t, "logprobs", "finite numbers", "others")
    return Parted(
        row["tokens"][:begin].tolist(),
        row["tokens"][begin:].tolist(),
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
    raise ValueError(
        f"group {t.instance_id!r}, sample {t.index}, field 'routed_experts': expected the numbers "
        f"of experts, 0 to 32767, of at most {len(row['tokens'])} tokens [n, layers, k], got "
        f"{got}; put them as the sampler gives them, or leave them out"
    )


def _bad(t: shmbus.Trajectory, field: str, expected: str, got: str) -> ValueError:
    return ValueError(
        f"group {t.instance_id!r}, sample {t.index}, field {field!r}: expected {expected}, got "
        f"{got}; put the whole sequence, a mask of what was sampled, and the sampler's logprobs"
    )
