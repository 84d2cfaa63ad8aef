"""Extra fields of a batch: arrays of a sample, or a value of its meta, packed with the tokens.

Invariants:

- One `ExtraFields` knows one dtype and one row shape per field: the declared form, or the first
  sample's. A sample of a different form is refused, so batches can be joined and compared.
- Bytes are copied unchanged; a change of dtype follows on the batch's device.
- A sample without an optional field gets its fill; a sample without a required field is refused.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.base.arguments import check_text
from shmbus.batch.gather import RAGGED, SEQUENCE, TOKEN, ExtraSpec, FieldNames, PackPlan, measure
from shmbus.data.sample_rows import SHARED_PREFIX
from trainer_adapter.batches.rows import RowSplit, selected

ExtraKind = Literal["token", "ragged", "sequence", "support", "group", "meta"]
KINDS: Final = ("token", "ragged", "sequence", "support", "group", "meta")
#: Kinds with a free number of rows per sample.
_OF_ROWS: Final = ("ragged", "support", "group")
_CODES: Final = {"token": TOKEN, "sequence": SEQUENCE, **dict.fromkeys(_OF_ROWS, RAGGED)}
#: Suffix of the field with the lengths of each token's part of a "support" field.
COUNTS: Final = "_counts"

#: Dtypes missing in NumPy: integers or void items of this many bytes carry their bits.
BYTES_OF_BITS: Final = {
    getattr(torch, name): width
    for name, width in (
        ("bfloat16", 2), ("float8_e4m3fn", 1), ("float8_e4m3fnuz", 1), ("float8_e5m2", 1),
        ("float8_e5m2fnuz", 1), ("float8_e8m0fnu", 1),
    )
    if hasattr(torch, name)
}  # fmt: skip
#: Each field begins on a cache line, a valid alignment for every dtype.
ALIGN: Final = 64


class ExtraField(msgspec.Struct, frozen=True, kw_only=True):
    """One extra field with details beyond its kind.

    Attributes
    ----------
    kind : "token" | "ragged" | "sequence" | "support" | "group" | "meta"
        "token": a row per token, [n, ...], packed like the tokens, [T, ...]. "ragged": a free
        number of rows, joined along the first dimension. "sequence": an array of one shape per
        sample, stacked, [S, ...]. "support": the ids in each token's sampling mask, integers, a
        sample's ids in one array, beside a "token" field NAME_counts with the number of ids per
        token, 0 for the whole vocabulary. "group": the ``shared=`` of `Producer.put_group`, once
        per group, joined along the first dimension. "meta": a value of the meta per sample, in a
        list.
    dtype : torch.dtype or str, optional
        Of the batch's tensor; by default the record's. Two-byte integers are the bits of a
        "bfloat16", and one-byte integers the bits of a "float8", since NumPy lacks both.
    shape : tuple of int, optional
        Of a row: without the dimension of tokens or rows. The first sample decides without `shape`
        and `fill`; with `fill` the default is ().
    fill : number, or any value for "meta"; optional
        Stands for a sample without the field; without a fill such a group is malformed. Requires a
        `dtype`. A "ragged" field of such a sample gets no rows.
    field : str, optional
        The producers' name of the field, if different from the batch's.
    """

    kind: ExtraKind
    dtype: Any = None
    shape: tuple[int, ...] | None = None
    fill: Any = msgspec.UNSET
    field: str | None = None

    @property
    def optional(self) -> bool:
        """True if a sample may lack the field."""
        return self.fill is not msgspec.UNSET


GivenExtraFields: TypeAlias = "Mapping[str, ExtraKind | ExtraField]"


class _Form(NamedTuple):
    """Form of a field's rows: in the records, and as a tensor of the same bytes."""

    dtype: np.dtype[Any]
    sizes: tuple[int, ...]
    bits: torch.dtype

    @property
    def row_bytes(self) -> int:
        return int(self.dtype.itemsize) * math.prod(self.sizes)


class _Field(NamedTuple):
    name: str
    given: ExtraField
    target: torch.dtype | None

    @property
    def source(self) -> str:
        named = self.given.field or self.name
        return SHARED_PREFIX + named if self.given.kind == "group" else named


class _Rows(NamedTuple):
    """Rows of a field found in a plan, -1 for a sample without the field; no dtype without rows."""

    dtype: np.dtype[Any] | None
    sizes: tuple[int, ...]
    rows: NDArray[np.int64]


class _Column(NamedTuple):
    """One array field of a batch: its form, its rows per sample, and the start of its bytes."""

    field: _Field
    form: _Form
    rows: NDArray[np.int64]
    lacks: NDArray[np.bool_]
    #: False if no sample has the field: nothing is copied.
    present: bool
    at: int

    @property
    def nbytes(self) -> int:
        return int(self.rows.sum()) * self.form.row_bytes


class MeasuredExtras(NamedTuple):
    """The extra fields of one batch, before they are copied."""

    arrays: list[_Column]
    #: Values of the meta, by the field's name.
    metas: dict[str, list[Any]]
    #: Size of the array fields in one block.
    nbytes: int
    #: Names of the columns added to the groups, in the place of fields.
    added: tuple[str, ...]

    def outs(self, block: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], ...]:
        """Return the place of each array field in a block of `nbytes`."""
        places = []
        for one in self.arrays:
            place = block[one.at : one.at + one.nbytes]
            if not one.present:
                place[:] = 0
                place = place[:0]
            places.append(place)
        return tuple(places)

    def places(self) -> tuple[tuple[int, int], ...]:
        """Return the start of each array field in the block, and the widest word of its rows."""
        return tuple((one.at, math.gcd(one.form.row_bytes, 8)) for one in self.arrays)

    @property
    def lacking(self) -> bool:
        """True if a sample lacks an optional array field: its bytes must be 0."""
        return any(bool(one.lacks.any()) for one in self.arrays)

    def values(
        self, block: Tensor, sizes: NDArray[np.int64], rows: RowSplit | None
    ) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
        """Make a batch's extra fields from the block of copied bytes."""
        extra: dict[str, Any] = dict(self.metas)
        if rows is not None:
            extra = {name: rows.repeated(values) for name, values in extra.items()}
        kinds = dict.fromkeys(self.metas, "meta")
        offsets: dict[str, Tensor] = {}
        for one in self.arrays:
            name, kind = one.field.name, one.field.given.kind
            borders = np.zeros(len(one.rows) + 1, np.int64)
            np.cumsum(one.rows, out=borders[1:])
            values = _tensor(one, block, borders)
            if kind == "group":
                borders = borders[np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])]
            elif kind == "ragged" and rows is not None:
                values, borders = rows.cut(values, borders, one.field.source)
            elif kind == "sequence" and rows is not None:
                values = selected(values, rows.sample_of)
            extra[name], kinds[name] = values, kind
            if kind in _OF_ROWS:
                offsets[name] = torch.from_numpy(borders).to(block.device)
        return extra, offsets, kinds


class ExtraFields:
    """The extra fields of a handler, or of one call of `pack`."""

    def __init__(self, given: GivenExtraFields) -> None:
        if not isinstance(given, Mapping):
            raise TypeError(
                f"extra_fields: expected a dict of names and kinds, got {type(given).__name__}; "
                'pass {"ref_logprobs": "token"}'
            )
        fields = [_checked(name, one) for name, one in given.items()]
        for one in [one for one in fields if one.given.kind == "support"]:
            counts = ExtraField(kind="token", dtype=torch.int64, shape=())
            counts = msgspec.structs.replace(counts, field=one.source + COUNTS)
            fields.append(_Field(one.name + COUNTS, counts, torch.int64))
        self._arrays = [one for one in fields if one.given.kind != "meta"]
        self._metas = [one for one in fields if one.given.kind == "meta"]
        self._forms: dict[str, _Form] = {}

    @classmethod
    def of(cls, given: GivenExtraFields | ExtraFields | None) -> ExtraFields:
        """Return an ExtraFields unchanged, or a new one for a mapping."""
        return given if isinstance(given, ExtraFields) else cls({} if given is None else given)

    @property
    def supports(self) -> dict[str, str]:
        """The producers' names of the "support" fields, by the batch's."""
        return {one.name: one.source for one in self._arrays if one.given.kind == "support"}

    def declared(self, name: str) -> tuple[ExtraField, torch.dtype | None] | None:
        """Return the declaration of a name of the batch and its dtype there, if any."""
        fields = (*self._arrays, *self._metas)
        return next(((one.given, one.target) for one in fields if one.name == name), None)

    @property
    def sources(self) -> list[str]:
        """The producers' names of the array fields."""
        return [one.source for one in self._arrays]

    def measure(
        self, groups: list[shmbus.Group], names: FieldNames
    ) -> tuple[PackPlan, MeasuredExtras]:
        """Measure groups with the extra fields absent from their columns, after all checks."""
        added = _column_names(groups) if any([group.annotated for group in groups]) else ()
        fields = [one for one in self._arrays if one.name not in added]
        plan = measure(groups, names, tuple([self._spec(one) for one in fields]))
        if not fields and not self._metas:
            return plan, MeasuredExtras([], {}, 0, added)
        trajectories = plan.trajectories
        arrays: list[_Column] = []
        at = 0
        for one, found in zip(fields, plan.extras, strict=True):
            rows = _Rows(*found)
            if one.given.kind == "group" and not one.given.optional:
                _require_shared(one, rows.rows, trajectories)
            form = self._form(one, rows, trajectories)
            arrays.append(_column(one, form, rows, plan.samples[3], at))
            at += -(-arrays[-1].nbytes // ALIGN) * ALIGN
        metas = {one.name: [_meta(one, t) for t in trajectories] for one in self._metas}
        # After all checks: a refused batch decides no form.
        self._forms |= {one.field.name: one.form for one in arrays if one.present}
        return plan, MeasuredExtras(arrays, metas, at, added)

    def _spec(self, field: _Field) -> ExtraSpec:
        form = self._forms.get(field.name)
        # One sample carries a "group" field for its group.
        optional = field.given.optional or field.given.kind == "group"
        known = () if form is None else (form.dtype, form.sizes)
        return ExtraSpec(field.source, _CODES[field.given.kind], optional, *known)

    def _form(self, field: _Field, found: _Rows, trajectories: list[shmbus.Trajectory]) -> _Form:
        known = self._forms.get(field.name)
        if known is not None:
            return known
        declared = field.given.shape
        if declared is None and field.given.optional:
            declared = ()
        if found.dtype is None:
            assert field.target is not None, "an optional field has a dtype"
            return _Form(_dtype_of_bits(field.target), declared or (), field.target)
        first = trajectories[int(np.argmax(found.rows >= 0))]
        if declared is not None and found.sizes != declared:
            raise _refusal(first, field, f"rows of shape {declared}", str(found.sizes))
        bits = bits_of(found.dtype, field.target)
        if bits is None:
            raise _refusal(
                first,
                field,
                "a dtype that torch has",
                f"{found.dtype.str!r}; send it as another one, or as bytes",
            )
        return _Form(found.dtype, found.sizes, bits)


def _column_names(groups: list[shmbus.Group]) -> tuple[str, ...]:
    """Return the columns of groups; raise ValueError for a group with a missing column."""
    names = sorted({name for group in groups for name in group.columns})
    for group in groups:
        missing = [name for name in names if name not in group.columns]
        if missing:
            raise ValueError(
                f"group {group.instance_id!r}: expected the column {missing[0]!r}, as other groups "
                "of its batch have it, got none; annotate_group returns the same names for all"
            )
    return tuple(names)


def _require_shared(
    field: _Field, rows: NDArray[np.int64], trajectories: list[shmbus.Trajectory]
) -> None:
    """Raise ValueError for a group with a missing shared field in its first sample."""
    before = None
    for t, count in zip(trajectories, rows.tolist(), strict=True):
        group = t.instance_id, t.round
        if group != before and count < 0:
            raise _refusal(t, field, "it once for the group, by put_group(shared=)", "none")
        before = group


def _checked(name: object, given: object) -> _Field:
    if not isinstance(name, str):
        raise TypeError(f"extra_fields: expected str names, got {name!r}")
    field = ExtraField(kind=given) if isinstance(given, str) else given  # type: ignore[arg-type]
    if not isinstance(field, ExtraField):
        raise TypeError(
            f"extra_fields: {name!r}: expected a kind or an ExtraField, got {given!r}; a kind is "
            f"one of {', '.join(map(repr, KINDS))}"
        )
    kind: object = field.kind
    if not isinstance(kind, str) or kind not in KINDS:
        near = difflib.get_close_matches(str(field.kind), KINDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "'token' has a row a token"
        raise ValueError(
            f"extra_fields: {name!r}: expected one of {', '.join(map(repr, KINDS))}, got "
            f"{field.kind!r}; {hint}"
        )
    if field.field is not None:
        check_text(f"extra_fields: {name!r}: field", field.field)
    if field.kind == "meta" and (field.dtype is not None or field.shape is not None):
        raise ValueError(
            f"extra_fields: {name!r}: expected no dtype and no shape of a value of the meta, got "
            f"{field.dtype} and {field.shape}; its values come as they are, in a list"
        )
    shape: object = field.shape
    if shape is not None and not (
        isinstance(shape, tuple) and all(isinstance(size, int) and size >= 0 for size in shape)
    ):
        raise TypeError(
            f"extra_fields: {name!r}: shape: expected a tuple of sizes, got {field.shape!r}; (48, "
            "8) for instance"
        )
    target = _checked_dtype(name, field)
    if field.kind != "meta" and field.optional and target is None:
        raise ValueError(
            f"extra_fields: {name!r}: expected a dtype beside fill, got none; a batch may have no "
            'sample with the field: ExtraField(kind="token", fill=0, dtype="float32")'
        )
    if field.kind != "meta" and field.optional:
        try:
            torch.empty(1, *(field.shape or ()), dtype=target, device="cpu")[:] = field.fill
            kept = torch.empty((), dtype=target, device="cpu").fill_(field.fill).item()
            if not np.isclose(kept, field.fill, rtol=0.1, atol=0, equal_nan=True):
                raise ValueError(f"it would become {kept}")
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(
                f"extra_fields: {name!r}: expected a fill that fits {target}, got {field.fill!r}: "
                f"{error}"
            ) from error
    return _Field(name, field, target)


def _checked_dtype(name: str, field: ExtraField) -> torch.dtype | None:
    if field.dtype is None or isinstance(field.dtype, torch.dtype):
        return field.dtype
    found = getattr(torch, field.dtype, None) if isinstance(field.dtype, str) else None
    if not isinstance(found, torch.dtype):
        raise ValueError(
            f"extra_fields: {name!r}: dtype: expected one of torch's, got {field.dtype!r}; "
            '"float32" or torch.float32 for instance'
        )
    return found


def _column(
    field: _Field, form: _Form, found: _Rows, lengths: NDArray[np.int64], at: int
) -> _Column:
    rows, lacks = found.rows, found.rows < 0
    if lacks.any():
        ragged, token = field.given.kind in _OF_ROWS, field.given.kind == "token"
        filler: Any = lengths if token else 0 if ragged else 1
        rows = np.where(lacks, filler, rows)
    return _Column(field, form, rows, lacks, found.dtype is not None, at)


def bits_of(dtype: np.dtype[Any], target: torch.dtype | None) -> torch.dtype | None:
    """Return the torch dtype of the same bytes, if any."""
    # A stand-in for a dtype missing in NumPy names the dtype in its metadata; ml_dtypes in its own
    # name.
    said: Mapping[str, Any] = dtype.metadata or {}
    name = said.get("shmbus", dtype.name if dtype.kind == "V" else None)
    known = None if name is None else getattr(torch, name, None)
    if known in BYTES_OF_BITS:
        return known
    if target in BYTES_OF_BITS and dtype.itemsize == BYTES_OF_BITS[target] and dtype.kind in "iuV":
        return target
    if name is not None:
        return None
    try:
        return torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None


def _dtype_of_bits(target: torch.dtype) -> np.dtype[Any]:
    """Return the NumPy dtype of as many bytes."""
    if target in BYTES_OF_BITS:
        return np.dtype(f"u{BYTES_OF_BITS[target]}")
    return torch.empty(0, dtype=target, device="cpu").numpy().dtype


def _tensor(one: _Column, block: Tensor, borders: NDArray[np.int64]) -> Tensor:
    """Return the rows of one field, in the requested dtype, with its fill."""
    form, field = one.form, one.field
    flat = block[one.at : one.at + one.nbytes].view(form.bits)
    values = flat.view(int(borders[-1]), *form.sizes)
    if field.target is not None:
        values = values.to(field.target)
    if one.lacks.any() and field.given.kind not in _OF_ROWS:
        for sample in np.flatnonzero(one.lacks).tolist():
            values[int(borders[sample]) : int(borders[sample + 1])] = field.given.fill
    return values


def _refusal(t: shmbus.Trajectory, field: _Field, expected: str, got: str) -> ValueError:
    return ValueError(
        f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: field "
        f"{field.source!r}: expected {expected}, as extra_fields asks, got {got}"
    )


def _meta(field: _Field, t: shmbus.Trajectory) -> Any:
    meta = t.meta
    if isinstance(meta, dict) and field.source in meta:
        return meta[field.source]
    if field.given.optional:
        return field.given.fill
    got = f"the keys {sorted(map(str, meta))}" if isinstance(meta, dict) else repr(meta)
    raise ValueError(
        f"trajectory {t.instance_id!r}[{t.index}] of producer {t.producer_id}: meta: expected a "
        f"value of {field.source!r}, as extra_fields asks, got {got}; put it, or give it a fill by "
        "ExtraField"
    )
