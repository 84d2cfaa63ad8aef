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
from trainer_adapter.batches.extra_fields import BYTES_OF_BITS, ExtraFields, bits_of
from trainer_adapter.batches.finite import SampleError
from trainer_adapter.batches.rows import RowSplit, selected


def check_columns(
    group: shmbus.Group, given: Any, tokens: str, wanted: ExtraFields
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
        try:
            found[name] = [as_array(one) for one in values]
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(f"{_of(group, name)}: expected arrays of numbers: {error}") from error
        for t, one in zip(samples, found[name], strict=True):
            rows = t.shape(tokens)[0]
            if one.dtype.kind not in "biuf" or one.dtype.itemsize > 8:
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
    """Return an array of one sample, float32 in place of a dtype missing in NumPy."""
    known = bits_of(one.dtype, None) if isinstance(one, np.ndarray) else None
    if known is not None and known in BYTES_OF_BITS:
        one = torch.tensor(one.view(f"i{one.itemsize}"), device="cpu").view(known)
    if hasattr(one, "detach"):
        one = (one.float() if one.dtype in BYTES_OF_BITS else one).detach().cpu().numpy()
    return np.asarray(one, order="C")


def column_kind(wanted: ExtraFields, name: str) -> str:
    """Return the kind of a column: its kind in `extra_fields`, or "token"."""
    declared = wanted.declared(name)
    kind = "token" if declared is None else declared[0].kind
    if kind not in ("token", "sequence"):
        raise ValueError(
            f"extra_fields: {name!r}: expected 'token' or 'sequence' of a column that "
            f"annotate_group adds, got {kind!r}"
        )
    return kind


def column_tensors(
    groups: Sequence[shmbus.Group],
    names: Sequence[str],
    wanted: ExtraFields,
    rows: RowSplit | None,
    loss_mask: torch.Tensor,
    lengths: NDArray[np.int64],
) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return a batch's columns as tensors and as kinds; `lengths` has the tokens of each sample."""
    begins = np.cumsum(lengths) - lengths
    extra: dict[str, torch.Tensor] = {}
    kinds = {name: column_kind(wanted, name) for name in names}
    for name, kind in kinds.items():
        arrays = [one for group in groups for one in group.columns[name]]
        owners = [(group, t) for group in groups for t in group.trajectories]
        first = 0 if kind == "sequence" else 1
        declared = wanted.declared(name)
        shape = None if declared is None else declared[0].shape
        expected = arrays[0].dtype, arrays[0].shape[first:] if shape is None else shape
        for sample, ((group, t), one) in enumerate(zip(owners, arrays, strict=True)):
            if (one.dtype, one.shape[first:]) != expected:
                raise ValueError(
                    f"{_of(group, name)}: sample {t.index}: expected {expected[0]} of shape "
                    f"{expected[1]}, as the first of its batch or extra_fields, got {one.dtype} of "
                    f"{one.shape[first:]}"
                )
            if not np.isfinite(one).all():
                begin = int(begins[sample])
                trained = loss_mask[begin : begin + int(lengths[sample])].cpu().numpy()
                if trained.any() if kind == "sequence" else not np.isfinite(one[trained]).all():
                    raise SampleError(
                        f"{_of(group, name)}: sample {t.index}: expected finite numbers for "
                        "trained tokens; correct what computes them, or mask the tokens",
                        sample,
                    )
        values = torch.from_numpy(np.concatenate(arrays) if kind == "token" else np.stack(arrays))
        values = values.to(loss_mask.device, None if declared is None else declared[1])
        if kind == "sequence" and rows is not None:
            values = selected(values, rows.sample_of)
        extra[name] = values
    return extra, kinds


def _of(group: shmbus.Group, name: str) -> str:
    return f"annotate_group: group {group.instance_id!r}: column {name!r}"
