"""Value-preserving conversion of Atropos' ScoredDataGroup to a bus group's samples, and back.

A sequence is a sample: its numbers are arrays of int64 and float64, its remaining items meta. Items
of the whole group lie in the meta of sample 0, under GROUP_KEY.

Invariants:

- `group_of` inverts `samples_of`, with None for each absent key.
- A refused group puts nothing: every check comes before the first record.
- Numbers are finite, as JSON requires: a reader can write every number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import shmbus
from shmbus.batch.gather import MAX_SCORE

__all__ = ["ENV_KEY", "GROUP_KEY", "KEYS", "env_id_of", "group_of", "is_atropos", "samples_of"]

#: The keys of a group, in the order in which the API server of Atropos 0.4.0 answers them.
KEYS: Final = (
    "tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "generation_params",
    "inference_logprobs", "overrides", "group_overrides", "images", "env_id", "distill_token_ids",
    "distill_logprobs",
)  # fmt: skip
#: Key in sample 0's meta for the items of the whole group.
GROUP_KEY: Final = "atropos"
#: Key of the environment's number among them.
ENV_KEY: Final = "env_id"
#: The mask's value at tokens without training.
MASKED: Final = -100

_FLOATS = ("advantages", "ref_logprobs", "inference_logprobs")
_TABLES: tuple[tuple[str, type[np.generic]], ...] = (
    ("distill_token_ids", np.int64),
    ("distill_logprobs", np.float64),
)
_OBJECTS = ("messages", "overrides")
_OF_THE_GROUP = ("generation_params", "group_overrides", "images", ENV_KEY)
#: Key of optional items whose number differs from the sequences'.
_UNEVEN = "uneven"


def _numbers(where: str, values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    """Return a sequence's numbers; integers written as floats are accepted."""
    try:
        array = np.asarray(values)
        if array.size == 0 and array.ndim <= 1:
            return np.empty(0, dtype)
        if array.dtype.kind == "O" and all(isinstance(each, int) for each in array.flat):
            raise ValueError("a number beyond 64 bits")
        if array.dtype.kind not in "biuf" or array.ndim != 1:
            raise ValueError("not a flat list of numbers")
        if array.dtype.kind == "f" and not np.isfinite(array).all():
            raise ValueError("a number that is not finite")
        with np.errstate(invalid="ignore"):  # misfits raise below
            found = array.astype(dtype)
        if dtype is np.int64 and array.dtype.kind in "uf" and not np.array_equal(found, array):
            raise ValueError("a number that is no 64-bit integer")
    except (TypeError, ValueError, OverflowError) as error:
        kind = "64-bit integers" if dtype is np.int64 else "finite numbers"
        raise ValueError(
            f"{where}: expected a list of {kind}, got {error}; correct it and send the group again"
        ) from error
    return found


def _typed(where: str, values: Any, dtype: type[np.generic]) -> NDArray[Any]:
    if isinstance(values, np.ndarray) and values.dtype.type is dtype and values.ndim == 1:
        return values
    try:
        found = np.array(values, dtype)
        if dtype is np.float64 and not np.isfinite(found).all():
            raise ValueError
    except (OverflowError, ValueError):
        return _numbers(where, values, dtype)
    return found


def _listed(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)) or (isinstance(value, np.ndarray) and value.ndim):
        return value
    raise ValueError(
        f"{name}: expected a list with an item for each sequence, got {type(value).__name__}"
    )


def _table(where: str, values: Any, dtype: type[np.generic]) -> NDArray[Any] | None:
    """Return [position][k] as a 2-D array; None if k differs between positions."""
    rows = [_numbers(f"{where}[{at}]", row, dtype) for at, row in enumerate(_listed(where, values))]
    if len({len(row) for row in rows}) > 1:
        return None
    return np.stack(rows) if rows else np.empty((0, 0), dtype)


def _scores(value: Any, count: int) -> list[float]:
    scores: list[float]
    if type(value) is list and all(type(each) is float and math.isfinite(each) for each in value):
        scores = value  # a few numbers need no array for the check
    else:
        scores = [float(score) for score in _numbers("scores", value, np.float64)]
    if len(scores) != count:
        raise ValueError(
            f"scores: expected {count}, one for each sequence of tokens, got {len(scores)}; a "
            "sample without a score cannot be compared with its group"
        )
    for index, score in enumerate(scores):
        if abs(score) > MAX_SCORE:
            raise ValueError(
                f"scores[{index}]: expected a number within {MAX_SCORE:g}, got {score:g}; scale "
                "the reward"
            )
    return scores


def samples_of(
    group: Mapping[str, Any], *, policy_version: int = 0, typed: bool = False
) -> list[dict[str, Any]]:
    """Return the samples of a group, in the form of `Producer.put_group`.

    Parameters
    ----------
    group : mapping
        With the keys of `KEYS`; tokens, masks and scores are required. Lists or arrays: tokens and
        masks [sequence, position], int64; scores [sequence], float64.
    policy_version : int
        The policy version of every sample.
    typed : bool
        The caller guarantees int and float items, and finite values in arrays. Such arrays are used
        without a copy.

    Returns
    -------
    list of dict
        A sample for each sequence; empty for an empty group.

    Raises
    ------
    ValueError
        A value impossible in a sample, or unusable for training; the message names it.

    Notes
    -----
    Beside Atropos' arrays each sample has ``loss_mask`` (uint8, 1 except where the mask is -100),
    for training by `OnlineDataHandler`.
    """
    numbers = _typed if typed else _numbers
    rows = _listed("tokens", group.get("tokens"))
    count = len(rows)
    masks = _listed("masks", group.get("masks"))
    if len(masks) != count:
        raise ValueError(
            f"masks: expected {count}, one for each sequence of tokens, got {len(masks)}"
        )
    scores = _scores(group.get("scores"), count)
    whole = {key: group[key] for key in _OF_THE_GROUP if group.get(key) is not None}
    records: list[dict[str, Any]] = []
    metas: list[dict[str, Any]] = [{} for _ in range(count)]
    for index in range(count):
        tokens = numbers(f"tokens[{index}]", rows[index], np.int64)
        mask = numbers(f"masks[{index}]", masks[index], np.int64)
        if len(mask) != len(tokens):
            raise ValueError(
                f"masks[{index}]: expected {len(tokens)} numbers, one for each token, got "
                f"{len(mask)}; correct it and send the group again"
            )
        records.append(
            {
                "score": scores[index],
                "policy_version": policy_version,
                "tokens": tokens,
                "masks": mask,
                "loss_mask": (mask != MASKED).view(np.uint8),
            }
        )
    uneven = _add_optional(group, records, metas, numbers)
    if uneven:
        whole[_UNEVEN] = uneven
    for index, (record, meta) in enumerate(zip(records, metas, strict=True)):
        if index == 0:
            meta[GROUP_KEY] = whole
        if meta:
            record["meta"] = meta
    return records


def _add_optional(
    group: Mapping[str, Any],
    records: list[dict[str, Any]],
    metas: list[dict[str, Any]],
    numbers: Any,
) -> dict[str, Any]:
    """Add the optional items; return the keys without an item for each sequence."""
    count = len(records)
    uneven: dict[str, Any] = {}
    for name in (*_FLOATS, *_OBJECTS, *(name for name, _ in _TABLES)):
        value = group.get(name)
        if value is not None and len(_listed(name, value)) != count:
            uneven[name] = value if name in _OBJECTS else _plain(name, value)
    for name in _FLOATS:
        if name not in uneven and (value := group.get(name)) is not None:
            for index, record in enumerate(records):
                record[name] = numbers(f"{name}[{index}]", value[index], np.float64)
    for name in _OBJECTS:
        if name not in uneven and (value := group.get(name)) is not None:
            for index, meta in enumerate(metas):
                meta[name] = value[index]
    for name, dtype in _TABLES:
        if name not in uneven and (value := group.get(name)) is not None:
            for index, record in enumerate(records):
                table = _table(f"{name}[{index}]", value[index], dtype)
                if table is None:
                    metas[index][name] = _plain(f"{name}[{index}]", value[index])
                else:
                    record[name] = table
    return uneven


def _plain(where: str, value: Any) -> Any:
    if isinstance(value, (list, tuple, np.ndarray)):
        return [_plain(where, each) for each in value]
    number = value.item() if isinstance(value, np.generic) else value
    if isinstance(number, (int, float)) and math.isfinite(number):
        return number
    raise ValueError(f"{where}: expected finite numbers, got {number!r}")


def is_atropos(group: shmbus.Group) -> bool:
    """Return True if `samples_of` made the bus group."""
    meta = group[0].meta if len(group) else None
    return isinstance(meta, dict) and isinstance(meta.get(GROUP_KEY), dict)


def env_id_of(group: shmbus.Group) -> int | None:
    """Return the number of a group's environment; None without a number."""
    number = group[0].meta[GROUP_KEY].get(ENV_KEY)
    return number if isinstance(number, int) else None


def group_of(group: shmbus.Group) -> dict[str, Any]:
    """Return the ScoredDataGroup of a bus group.

    Parameters
    ----------
    group : Group
        Leased. A group from elsewhere needs ``tokens``; its ``loss_mask`` and ``logprobs`` become
        masks and inference_logprobs.

    Returns
    -------
    dict
        Every key of `KEYS`, with lists of int and float, and None for absent items.

    Raises
    ------
    ValueError
        A group from elsewhere with numbers or rows impossible in Atropos; or a group with the mark
        of `samples_of` and missing items.
    UnscoredError
        A sample has no score yet.
    """
    if not is_atropos(group):
        return _of_another_producer(group)
    try:
        return _of_records(group)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{GROUP_KEY!r} in its meta marks a group of samples_of, which lacks something: {error}"
        ) from error


def _of_records(group: shmbus.Group) -> dict[str, Any]:
    samples = group.trajectories
    metas = [sample.meta or {} for sample in samples]
    whole = metas[0][GROUP_KEY]
    uneven = whole.get(_UNEVEN, {})
    found: dict[str, Any] = dict.fromkeys(KEYS)
    found["tokens"] = [sample["tokens"].tolist() for sample in samples]
    found["masks"] = [sample["masks"].tolist() for sample in samples]
    found["scores"] = [sample.score for sample in samples]
    for name in _OF_THE_GROUP:
        found[name] = whole.get(name)
    for name in (*_FLOATS, *(name for name, _ in _TABLES)):
        if name in uneven:
            found[name] = uneven[name]
        elif name in samples[0] or name in metas[0]:
            found[name] = [
                sample[name].tolist() if name in sample else meta[name]
                for sample, meta in zip(samples, metas, strict=True)
            ]
    for name in _OBJECTS:
        if name in uneven:
            found[name] = uneven[name]
        elif name in metas[0]:
            found[name] = [meta[name] for meta in metas]
    return found


def _of_another_producer(group: shmbus.Group) -> dict[str, Any]:
    samples = group.trajectories
    found: dict[str, Any] = dict.fromkeys(KEYS)
    tokens = [_tokens_of(sample) for sample in samples]
    found["tokens"] = [each.tolist() for each in tokens]
    found["masks"] = [
        _masks_of(sample, each).tolist() for sample, each in zip(samples, tokens, strict=True)
    ]
    found["scores"] = [sample.score for sample in samples]
    for ours, theirs in (("logprobs", "inference_logprobs"), ("advantages", "advantages")):
        if all(ours in sample for sample in samples):
            found[theirs] = [_floats_of(sample, ours).tolist() for sample in samples]
    return found


def _tokens_of(sample: shmbus.Trajectory) -> NDArray[Any]:
    if len(sample.rows) > 1:
        raise ValueError(
            f"tokens[{sample.index}]: expected one row, got {len(sample.rows)}; one after the "
            "other they would be another sequence"
        )
    if "tokens" not in sample:
        raise ValueError(f"tokens[{sample.index}]: expected the tokens of the sequence, got none")
    tokens: NDArray[Any] = sample["tokens"]
    if tokens.dtype.kind not in "iu" or tokens.ndim != 1:
        raise ValueError(
            f"tokens[{sample.index}]: expected whole numbers in one dimension, got {tokens.dtype} "
            f"in {tokens.ndim}"
        )
    return tokens


def _masks_of(sample: shmbus.Trajectory, tokens: NDArray[Any]) -> NDArray[Any]:
    if "loss_mask" not in sample:
        return tokens
    mask: NDArray[Any] = sample["loss_mask"]
    if mask.shape != tokens.shape:
        raise ValueError(
            f"loss_mask[{sample.index}]: expected {tokens.size} numbers, one for each token, got "
            f"the shape {mask.shape}"
        )
    return np.where(mask.astype(bool), tokens, MASKED)


def _floats_of(sample: shmbus.Trajectory, name: str) -> NDArray[Any]:
    numbers: NDArray[Any] = sample[name]
    if numbers.dtype.kind not in "biuf" or not np.isfinite(numbers).all():
        raise ValueError(f"{name}[{sample.index}]: expected finite numbers")
    return numbers
