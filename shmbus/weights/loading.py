"""Copies of a version into a model in place: the whole check first, then the bytes.

Invariant: no element of the model is written before every name, shape and dtype was compared. If a
copy fails afterwards, the error reports a torn model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from shmbus.errors import DamagedError
from shmbus.tensors.copy_plan import CopyPlan
from shmbus.tensors.copy_table import Pair
from shmbus.tensors.device.driver import CudaDriverError
from shmbus.tensors.tensor_cache import SeenTensors
from shmbus.tensors.views import has_memory, is_sharded
from shmbus.weights.errors import ManifestError
from shmbus.weights.manifest import Manifest, Slice, view_of
from shmbus.weights.rounding import peak_of, require_range
from shmbus.weights.weight_source import dtype_name, local_part

#: Target of `load_into`: a module, or tensors by name.
Targets = torch.nn.Module | Mapping[str, torch.Tensor]


class Fit(NamedTuple):
    """Required fit of a version and a model; see `Weights.load_into`."""

    strict: bool = True
    cast: bool = False
    slices: Mapping[str, Slice] | None = None


def named_of(model: Targets | Mapping[str, object]) -> Mapping[str, object]:
    """Return a module's entries, or the given mapping, by name; values may be no tensors."""
    if isinstance(model, torch.nn.Module):
        return model.state_dict(keep_vars=True)
    if not isinstance(model, Mapping):
        raise TypeError(
            f"model: expected a torch.nn.Module, or tensors by name, got {type(model).__name__}"
        )
    return model


def targets_of(model: Targets | Mapping[str, object]) -> dict[str, torch.Tensor]:
    """Return a module's tensors, or the given tensors, by name."""
    found: Any = named_of(model)
    if isinstance(found, dict) and all(
        issubclass(kind, torch.Tensor) for kind in set(map(type, found.values()))
    ):
        return found
    return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}


class LoadCache:
    """Checks of a buffer and a model, reused for the next version in the buffer."""

    def __init__(self) -> None:
        self._kept: tuple[tuple[bool, bool], SeenTensors, Loading] | None = None

    def get(self, named: Mapping[str, object], how: tuple[bool, bool]) -> Loading | None:
        """Return the loading cached for these targets with the same strictness and casting."""
        if self._kept is None or self._kept[0] != how or not self._kept[1].still(named):
            return None
        return self._kept[2]

    def put(
        self, targets: Mapping[str, torch.Tensor], how: tuple[bool, bool], loading: Loading
    ) -> None:
        """Cache a loading with its targets."""
        self._kept = how, SeenTensors(targets), loading


def paired(
    version: int,
    manifest: Manifest,
    tensors: dict[str, torch.Tensor],
    targets: Mapping[str, torch.Tensor],
    fit: Fit,
) -> dict[str, Pair]:
    """Check everything, and return the pairs to copy."""
    targets = {name: target.detach() for name, target in targets.items()}
    found = destinations(targets, fit.slices or {})
    faults = _faults(manifest, targets, found, fit)
    if faults:
        raise ManifestError(
            f"version {version} does not fit the model; the model is unchanged", faults
        )
    names = set(manifest.names())
    pairs = {
        name: _pair(name, view_of(tensors, manifest, name), target)
        for name, target in found.items()
        if name in names
    }
    faults = _tied(manifest, pairs)
    if faults:
        raise ManifestError(
            f"version {version}: expected one value for tensors tied in the model, got several; "
            "the model is unchanged: untie the model's tensors, or tie the published tensors",
            faults,
        )
    return pairs


class Loading:
    """Copies into a model, checked and sorted once, repeatable for every version."""

    def __init__(self, pairs: Mapping[str, Pair]) -> None:
        self._plan = CopyPlan([*pairs.values()])
        self._casts = [(n, *pair) for n, pair in pairs.items() if pair[0].dtype != pair[1].dtype]
        #: Devices of the targets.
        self.devices = self._plan.devices

    def require_range(self) -> None:
        """Raise ManifestError for magnitudes beyond a target's range."""
        require_range([(name, to.dtype, peak_of(own, to.dtype)) for name, to, own in self._casts])

    @torch.no_grad()
    def copy(self, version: int) -> int:
        """Copy; return the bytes written, after their arrival."""
        try:
            self._plan.copy()
        except (RuntimeError, OSError, CudaDriverError) as error:
            raise DamagedError(
                f"version {version}: copying it failed: {error}. The model is torn: load a whole "
                "version before its next use"
            ) from error
        return self._plan.nbytes


def destinations(
    targets: Mapping[str, torch.Tensor], slices: Mapping[str, Slice]
) -> dict[str, torch.Tensor]:
    """Return target tensors by published names: fused tensors by their parts."""
    fused = {part.of for part in slices.values()}
    found = {name: tensor for name, tensor in targets.items() if name not in fused}
    for name, part in slices.items():
        whole = targets.get(part.of)
        if whole is None or is_sharded(whole) or not _is_inside(part, whole):
            continue
        view = whole.narrow(part.dim, part.start, part.length)
        found[name] = view.squeeze(part.dim) if part.drop_dim else view
    return found


def _is_inside(part: Slice, whole: torch.Tensor) -> bool:
    return (
        0 <= part.dim < whole.dim()
        and part.start >= 0
        and part.length >= 0
        and part.start + part.length <= whole.shape[part.dim]
        and not (part.drop_dim and part.length != 1)
    )


def _faults(
    manifest: Manifest,
    targets: Mapping[str, torch.Tensor],
    found: Mapping[str, torch.Tensor],
    fit: Fit,
) -> list[str]:
    """List every misfit, in the order missing, unexpected, shape, dtype."""
    places, slices = manifest.by_name(), fit.slices or {}
    missing, unexpected, shapes, dtypes = [], [], [], []
    for name, part in slices.items():
        if name not in found:
            shapes.append(f"slice {name!r}: {part} is not inside a plain tensor of the model")
    shapes += uncovered(targets, slices)
    for name, target in found.items():
        problem = _unwritable(target)
        if problem:
            shapes.append(f"{name!r} of the model {problem}")
            continue
        if name not in places and name not in manifest.slices:
            missing.append(f"missing: {name!r}")
            continue
        dtype, shape = manifest.shape_of(name, places)
        if shape != tuple(target.shape):
            shapes.append(f"shape of {name!r}: expected {list(target.shape)}, got {list(shape)}")
        casts = fit.cast and torch.can_cast(getattr(torch, dtype), target.dtype)
        if dtype != dtype_name(target.dtype) and not casts:
            dtypes.append(f"dtype of {name!r}: expected {dtype_name(target.dtype)}, got {dtype}")
    if fit.strict:
        taken = {manifest.root(name) for name in found}
        unexpected = [f"unexpected: {t.name!r}" for t in manifest.tensors if t.name not in taken]
    # A load of nothing is no load, in any mode: the row would say that the version runs.
    missing += [] if found else ["missing: a tensor of the model"]
    needed = missing if fit.strict or len(missing) >= len(found) else []
    return [*needed, *unexpected, *shapes, *dtypes]


def _tied(manifest: Manifest, pairs: Mapping[str, Pair]) -> list[str]:
    """List overlapping destinations fed from different published bytes."""
    spans = sorted(
        (str(target.device), target.data_ptr(), _end_of(target), name)
        for name, (target, _) in pairs.items()
        if target.numel()
    )
    faults = []
    reach: list[tuple[str, int, int, str]] = []  # earlier spans that may overlap the next
    for span in spans:
        device, start, _, name = span
        reach = [other for other in reach if other[0] == device and other[2] > start]
        faults += [
            f"{other[3]!r} and {name!r} of the model share memory, and are published apart"
            for other in reach
            if _overlap(pairs[other[3]][0], pairs[name][0])
            and not _is_one(manifest, other[3], name, pairs)
        ]
        reach.append(span)
    return faults


def _end_of(tensor: torch.Tensor) -> int:
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.data_ptr()) + (last + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors with overlapping spans share a byte."""
    if one.is_contiguous() and other.is_contiguous():
        return True
    # By addresses alone: nothing is read, and device addresses work too.
    return np.shares_memory(np.asarray(_Addresses(one)), np.asarray(_Addresses(other)))


class _Addresses:
    """A tensor's addresses as numpy takes them."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "shape": tuple(tensor.shape),
            "strides": tuple(step * size for step in tensor.stride()),
            "typestr": f"|V{size}",
            "data": (tensor.data_ptr(), True),
        }


def _is_one(manifest: Manifest, one: str, other: str, pairs: Mapping[str, Pair]) -> bool:
    """Return whether two destinations relate like their sources in one published tensor."""
    (target, source), (target2, source2) = pairs[one], pairs[other]
    there = (target2.data_ptr() - target.data_ptr()) // target.element_size()
    here = (source2.data_ptr() - source.data_ptr()) // source.element_size()
    return (
        manifest.root(one) == manifest.root(other)
        and target.dtype == target2.dtype
        and there == here
        and (target.stride(), source.stride()) == (target2.stride(), source2.stride())
    )


def uncovered(targets: Mapping[str, torch.Tensor], slices: Mapping[str, Slice]) -> list[str]:
    """List incompletely covered fused tensors: each row must come exactly once."""
    parts: dict[str, list[Slice]] = {}
    for part in slices.values():
        parts.setdefault(part.of, []).append(part)
    faults = []
    for name, found in parts.items():
        whole = targets.get(name)
        dim = found[0].dim
        if whole is None or not 0 <= dim < whole.dim():
            continue  # reported for the slice
        end, made_up = 0, True
        for part in sorted(found, key=lambda part: part.start):
            made_up = made_up and part.dim == dim and part.start == end
            end = part.start + part.length
        if not made_up or end != whole.shape[dim]:
            said = ", ".join(f"{part.start} to {part.start + part.length}" for part in found)
            length = sum(part.length for part in found)
            faults.append(
                f"the slices of {name!r} are {length} of {whole.shape[dim]} rows ({said}): each "
                "row has to be in one of them"
            )
    return faults


def _unwritable(target: torch.Tensor) -> str:
    """Return the reason against copies into a tensor in place; empty for a writable tensor."""
    if target.is_meta:
        return "is on the meta device and has no memory"
    local = target.to_local() if is_sharded(target) else target
    if local.layout != torch.strided:
        return f"has the layout {local.layout}, expected torch.strided"
    if not has_memory(local):
        return "has no memory: its storage was freed, as FSDP does between forward passes"
    if local.is_conj() or local.is_neg():
        return "is a lazy conjugate or negative of other memory; call resolve_conj().resolve_neg()"
    if any(not step and size > 1 for step, size in zip(local.stride(), local.shape, strict=True)):
        return "is expanded: several of its elements are one; call clone()"
    return ""


def _pair(name: str, view: torch.Tensor, target: torch.Tensor) -> Pair:
    if is_sharded(target):
        start, local, _ = local_part(name, target)
        for dim, (at, size) in enumerate(zip(start, local.shape, strict=True)):
            if size != view.shape[dim]:
                view = view.narrow(dim, at, size)
        target = local
    return target, view
