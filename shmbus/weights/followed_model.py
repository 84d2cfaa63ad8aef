"""A model that follows versions by patches: its tensors, and the version that they hold.

Invariants:

- A patch applies only to tensors loaded by this subscriber with exactly the patch's base, and not
  written since, as far as torch counts writes; the patch itself detects writes missed by torch at
  the patched places. In doubt the whole version is loaded.
- Tensors beyond an in-place patch, like parts, casts, or device tensors, are copied whole after any
  change of them.
- The model is compared with the manifest once: afterwards unchanged identity, memory and write
  counts of its tensors suffice.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from shmbus.tensors.copy_table import Pair
from shmbus.tensors.tensor_cache import SeenTensors
from shmbus.tensors.views import byte_view, count_writes, is_elsewhere
from shmbus.weights.loading import Fit, Loading
from shmbus.weights.manifest import Manifest, TensorPlace
from shmbus.weights.patch_policy import VersionChanges
from shmbus.weights.weight_source import dtype_name

#: Tensors compared after a patch when a sample is requested.
SAMPLED_TENSORS: Final = 4


class FollowedModel:
    """Tensors paired with a version: patched in place, or copied whole."""

    def __init__(
        self,
        manifest: Manifest,
        fit: Fit,
        named: Mapping[str, object],
        pairs: Mapping[str, Pair],
    ) -> None:
        self._manifest, self._fit = manifest, fit
        self._seen = SeenTensors(named)
        self._tensors = [value for value in named.values() if isinstance(value, torch.Tensor)]
        #: Published names and bytes of tensors patched in place, tied tensors once.
        self._memory: dict[tuple[int, int], tuple[str, npt.NDArray[np.uint8]]] = {}
        #: Published names of the remaining tensors, by their own names.
        self._copied: dict[str, str] = {}
        places = manifest.by_name()
        for name, (target, _) in pairs.items():
            place = places[manifest.root(name)]
            if _is_plain(manifest, place, name, target):
                self._memory[target.data_ptr(), place.offset] = place.name, byte_view(target)
            else:
                self._copied[name] = place.name
        self._written = self._written_now()

    def _written_now(self) -> object:
        """Return torch's counts of writes; unequal to any value if a tensor has no count."""
        if any(each.is_inference() or is_elsewhere(each) for each in self._tensors):
            return object()
        return [*map(attrgetter("_version"), self._tensors)]

    def still(self, manifest: Manifest, fit: Fit, named: Mapping[str, object]) -> bool:
        """Return whether the tensors stayed unmoved and unwritten."""
        return (
            manifest is self._manifest
            and fit == self._fit
            and self._seen.still(named)
            and self._written_now() == self._written
        )

    def apply(
        self, version: int, patch: VersionChanges, pairs: Callable[[], Mapping[str, Pair]]
    ) -> int | None:
        """Apply changes; return the bytes of changed tensors, or None after a base mismatch."""
        changed = [name for name, of in self._copied.items() if patch.changed(of)]
        written = 0
        try:
            for name, memory in self._memory.values():
                if patch.changed(name):
                    if not patch.apply(name, memory):
                        return None
                    written += memory.nbytes
            if changed:
                now = pairs()
                written += Loading({name: now[name] for name in changed}).copy(version)
        finally:
            count_writes(self._tensors)
            self._written = self._written_now()
        return written

    def is_equal(self, patch: VersionChanges, *, sample: bool) -> bool:
        """Compare tensors patched in place with the whole version, bit for bit."""
        chosen = [each for each in self._memory.values() if each[1].nbytes]
        if sample:
            chosen = random.sample(chosen, min(SAMPLED_TENSORS, len(chosen)))
        return all(patch.same(*each) for each in chosen)


class LoadedModel:
    """Record of a model's version by the last load."""

    def __init__(self) -> None:
        self._place: tuple[object, int] | None = None
        self._model: FollowedModel | None = None

    def forget(self) -> None:
        """Forget everything, for example during a write of the model."""
        self._place = self._model = None

    def remember(self, origin: object, sequence: int, model: FollowedModel) -> None:
        """Record a version of these tensors."""
        self._place, self._model = (origin, sequence), model

    def holding(
        self,
        origin: object,
        sequence: int,
        manifest: Manifest,
        fit: Fit,
        named: Mapping[str, object],
    ) -> FollowedModel | None:
        """Return the model if its tensors still hold the version."""
        found = self._model if self._place == (origin, sequence) else None
        return found if found is not None and found.still(manifest, fit, named) else None


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
