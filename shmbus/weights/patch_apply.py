"""Update of a model from the previous version by a patch.

Invariants:

- A patch applies only to tensors loaded by this subscriber with exactly the patch's base, and not
  written since, as far as torch counts writes; the patch itself detects writes missed by torch at
  the patched places. In doubt the whole version is loaded.
- Tensors beyond an in-place patch, like parts, casts, or device tensors, are copied whole after any
  change of them.
- A model that follows by patches is compared with the manifest once: afterwards unchanged
  identity, memory and write counts of its tensors suffice.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from shmbus.tensors.copy_table import Pair
from shmbus.tensors.tensor_cache import SeenTensors
from shmbus.tensors.views import byte_view, count_writes, is_elsewhere
from shmbus.weights.loading import Loading
from shmbus.weights.manifest import Manifest, TensorPlace
from shmbus.weights.patches import VersionChanges
from shmbus.weights.source import dtype_name

#: Tensors compared after a patch when a sample is requested.
SAMPLED_TENSORS: Final = 4


class PlainModel:
    """Model whose host tensors correspond to the published tensors, element by element."""

    def __init__(
        self,
        manifest: Manifest,
        how: tuple[bool, bool],
        named: Mapping[str, object],
        memory: list[tuple[str, npt.NDArray[np.uint8]]],
    ) -> None:
        self._manifest, self._how, self._memory = manifest, how, memory
        self._seen = SeenTensors(named)
        self._tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
        self._written = self._written_now()

    def _count(self) -> None:
        count_writes(self._tensors)
        self._written = self._written_now()

    def _written_now(self) -> list[int]:
        # By torch's count of writes.
        return [*map(attrgetter("_version"), self._tensors)]

    def still(
        self, manifest: Manifest, how: tuple[bool, bool], named: Mapping[str, object]
    ) -> bool:
        """Return whether the tensors stayed unmoved and unwritten."""
        return (
            manifest is self._manifest
            and how == self._how
            and self._seen.still(named)
            and self._written_now() == self._written
        )

    def apply(self, patch: VersionChanges) -> int | None:
        """Apply changes; return the bytes of changed tensors, or None after a base mismatch."""
        written = 0
        try:
            for name, memory in self._memory:
                if patch.changed(name):
                    if not patch.apply(name, memory):
                        return None
                    written += memory.nbytes
        finally:
            self._count()
        return written


class LoadedModel:
    """Record of a model's version by the last load."""

    def __init__(self) -> None:
        self._known = False
        self._origin: object = None
        self._sequence = 0
        self._state: tuple[object, ...] = ()
        self._plain: PlainModel | None = None

    def forget(self) -> None:
        """Forget everything, for example during a write of the model."""
        self._known = False

    def remember(
        self,
        origin: object,
        sequence: int,
        pairs: Mapping[str, Pair],
        plain: PlainModel | None = None,
    ) -> None:
        """Record a version of these tensors, with the results of earlier checks."""
        self._origin, self._sequence = origin, sequence
        self._state, self._plain, self._known = _state_of(pairs), plain, True

    def followed(self, sequence: int) -> None:
        """Record the step from the known version to the next, by a patch."""
        self._sequence, self._known = sequence, True

    def has(self, origin: object, sequence: int, pairs: Mapping[str, Pair]) -> bool:
        """Return whether the tensors still hold the version."""
        return self._is(origin, sequence) and self._state == _state_of(pairs)

    def plain(
        self,
        origin: object,
        sequence: int,
        manifest: Manifest,
        how: tuple[bool, bool],
        named: Mapping[str, object],
    ) -> PlainModel | None:
        """Return a plain model still known to hold the version, without another comparison."""
        found = self._plain if self._is(origin, sequence) else None
        return found if found is not None and found.still(manifest, how, named) else None

    def _is(self, origin: object, sequence: int) -> bool:
        return self._known and (self._origin, self._sequence) == (origin, sequence)


def _state_of(pairs: Mapping[str, Pair]) -> tuple[object, ...]:
    """Return a state list that changes with a tensor's memory or with a write by torch."""
    found = []
    for name, (target, _) in pairs.items():
        at = (target.data_ptr(), target.device, target.dtype, tuple(target.shape), target.stride())
        # torch counts no writes of inference tensors and wrappers: make the list unequal to any
        # list.
        uncounted = target.is_inference() or is_elsewhere(target)
        found.append((name, at, object() if uncounted else target._version))
    return tuple(found)


def _is_plain(manifest: Manifest, place: TensorPlace, name: str, target: torch.Tensor) -> bool:
    """Return whether the target holds the tensor's own elements in order."""
    return (
        name not in manifest.slices
        and tuple(target.shape) == place.shape  # not a shard
        and target.device.type == "cpu"
        and target.is_contiguous()
        and dtype_name(target.dtype) == place.dtype
        and not (target.is_conj() or target.is_neg())
    )


def plain_model(
    manifest: Manifest,
    how: tuple[bool, bool],
    named: Mapping[str, object],
    pairs: Mapping[str, Pair],
) -> PlainModel | None:
    """Return the reusable part of a model paired with a version."""
    if any(isinstance(value, torch.Tensor) and value.is_inference() for value in named.values()):
        return None
    places = manifest.by_name()
    memory: dict[tuple[int, int], tuple[str, npt.NDArray[np.uint8]]] = {}
    for name, (target, _) in pairs.items():
        place = places[manifest.root(name)]
        if not _is_plain(manifest, place, name, target):
            return None
        memory[target.data_ptr(), place.offset] = place.name, byte_view(target)
    return PlainModel(manifest, how, named, list(memory.values()))


def apply_changes(
    version: int, manifest: Manifest, pairs: Mapping[str, Pair], patch: VersionChanges
) -> int | None:
    """Apply the changes to tensors with the patch's base."""
    places = manifest.by_name()
    done: set[tuple[int, int]] = set()  # tied tensors count once
    copied: dict[str, Pair] = {}
    written = 0
    for name, pair in pairs.items():
        place = places[manifest.root(name)]
        target = pair[0]
        if not patch.changed(place.name):
            continue
        if not _is_plain(manifest, place, name, target):
            copied[name] = pair
            continue
        one = (target.data_ptr(), place.offset)
        if one in done:
            continue
        done.add(one)
        count_writes([target])
        if not patch.apply(place.name, byte_view(target)):
            return None
        written += target.numel() * target.element_size()
    return written + (Loading(copied).copy(version) if copied else 0)


def compare(
    manifest: Manifest, pairs: Mapping[str, Pair], patch: VersionChanges, *, sample: bool
) -> bool:
    """Compare a patched model with the whole version, bit for bit."""
    places = manifest.by_name()
    plain = [
        (name, target)
        for name, (target, _) in pairs.items()
        if target.numel() and _is_plain(manifest, places[manifest.root(name)], name, target)
    ]
    if sample:
        plain = random.sample(plain, min(SAMPLED_TENSORS, len(plain)))
    return all(patch.same(places[manifest.root(name)].name, it) for name, it in plain)
