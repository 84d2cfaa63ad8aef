"""Columns: arrays added to a complete group after its samples were put.

Reference logprobs, a teacher's logprobs, values: computed only after a group is complete. They
reach a batch like extra fields.

Invariants:

- A column holds one array per sample, of one dtype and one row shape across a batch: a row per
  token, or, of kind "sequence", one array or number per sample.
- The groups of a batch carry the same columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import shmbus
from trainer_adapter.batches.batch import Batch
from trainer_adapter.batches.extra_fields import ExtraFields, declared_dtype

__all__ = ["add_columns", "check_columns", "column_names"]


def check_columns(
    group: shmbus.Group, given: Any, tokens: str, wanted: ExtraFields | None
) -> dict[str, list[NDArray[Any]]]:
    """Return columns given to a group, as arrays of its samples; raise for a mismatch."""
    if not isinstance(given, Mapping):
        raise TypeError(
            f"annotate_group: expected a dict of names and arrays for group "
            f"{group.instance_id!r}, got {type(given).__name__}"
        )
    found: dict[str, list[NDArray[Any]]] = {}
    for name, values in given.items():
        if name in group.columns or any(name in t for t in group.trajectories):
            raise ValueError(
                f"annotate_group: group {group.instance_id!r}: expected names that no field of its "
                f"samples and no column has, got {name!r}; each column is written once"
            )
        samples = group.trajectories
        if not isinstance(values, Sequence | np.ndarray) and not hasattr(values, "detach"):
            raise TypeError(f"{_of(group, name)}: expected a list, got {type(values).__name__}")
        if len(values) != len(samples):
            raise ValueError(
                f"{_of(group, name)}: expected {len(samples)} arrays, one a sample, got "
                f"{len(values)}"
            )
        kind = column_kind(wanted, name)
        found[name] = [as_array(one) for one in values]
        for t, one in zip(samples, found[name], strict=True):
            rows = t.shape(tokens)[0]
            if one.dtype.kind not in "biuf":
                raise TypeError(
                    f"{_of(group, name)}: sample {t.index}: expected numbers, got {one.dtype}"
                )
            if kind == "token" and one.shape[:1] != (rows,):
                raise ValueError(
                    f"{_of(group, name)}: sample {t.index}: expected {rows} rows, one a token, got "
                    f"shape {one.shape}; a number or an array a sample is "
                    f"extra_fields={{{name!r}: 'sequence'}}"
                )
    return found


def as_array(one: Any) -> NDArray[Any]:
    """Return an array of one sample; a tensor may carry a graph, or a device, or bfloat16."""
    if hasattr(one, "detach"):
        one = one.detach().cpu()
        one = (one.float() if one.dtype == torch.bfloat16 else one).numpy()
    return np.asarray(one, order="C")


def column_kind(wanted: ExtraFields | None, name: str) -> str:
    """Return the kind of a column: its kind in `extra_fields`, or "token"."""
    declared = None if wanted is None else wanted.declared(name)
    kind = "token" if declared is None else declared.kind
    if kind not in ("token", "sequence"):
        raise ValueError(
            f"extra_fields: {name!r}: expected 'token' or 'sequence' of a column that "
            f"annotate_group adds, got {kind!r}"
        )
    return kind


def column_names(groups: Sequence[shmbus.Group]) -> tuple[str, ...]:
    """Return the columns of groups; raise ValueError for a group with a missing column."""
    if not any([group.annotated for group in groups]):
        return ()
    names = sorted({name for group in groups for name in group.columns})
    for group in groups:
        missing = [name for name in names if name not in group.columns]
        if missing:
            raise ValueError(
                f"group {group.instance_id!r}: expected the column {missing[0]!r}, as other groups "
                "of its batch have it, got none; annotate_group returns the same names for all"
            )
    return tuple(names)


def add_columns(batch: Batch, groups: Sequence[shmbus.Group], wanted: ExtraFields | None) -> None:
    """Add the columns of its groups to a packed batch."""
    for name in column_names(groups):
        arrays = [one for group in groups for one in group.columns[name]]
        owners = [(group, t) for group in groups for t in group.trajectories]
        for (group, t), one in zip(owners, arrays, strict=True):
            kind = column_kind(wanted, name)
            first = arrays[0]
            shapes = (
                (one.shape, first.shape) if kind == "sequence" else (one.shape[1:], first.shape[1:])
            )
            if one.dtype != first.dtype or shapes[0] != shapes[1]:
                raise ValueError(
                    f"{_of(group, name)}: sample {t.index}: expected {first.dtype} of shape "
                    f"{shapes[1]}, as the first of its batch, got {one.dtype} of {shapes[0]}"
                )
        values = torch.from_numpy(np.concatenate(arrays) if kind == "token" else np.stack(arrays))
        declared = None if wanted is None else wanted.declared(name)
        values = values.to(
            batch.tokens.device, None if declared is None else declared_dtype(declared)
        )
        if kind == "sequence":
            values = values.index_select(0, batch.sample_of.long())
        batch.extra = {**batch.extra, name: values}
        batch.extra_kinds = {**batch.extra_kinds, name: kind}


def _of(group: shmbus.Group, name: str) -> str:
    return f"annotate_group: group {group.instance_id!r}: column {name!r}"
