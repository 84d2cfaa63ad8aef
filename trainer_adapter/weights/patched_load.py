"""Bringing a model from the version before to this one by what changed.

Invariants:

- A patch is applied only to tensors that this subscriber has loaded with exactly its base, and that
  nothing has written since, as far as torch counts that; the patch itself finds what torch missed
  where it writes. Whoever is in doubt loads the whole version.
- Tensors that a patch cannot be applied to in place, such as parts, casts, or those on a device,
  are copied whole if anything of them changed.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Final

import torch

from trainer_adapter.weights.carriers.patched import CarriedPatch
from trainer_adapter.weights.copies import Pair
from trainer_adapter.weights.loading import Loading
from trainer_adapter.weights.manifest import Manifest, TensorPlace
from trainer_adapter.weights.source import dtype_name

__all__ = ["LoadedModel", "apply_changes", "compare"]

#: Tensors that are compared after a patch where a sample is asked for.
SAMPLED_TENSORS: Final = 4


class LoadedModel:
    """Which version a model has, by what was loaded into it last."""

    def __init__(self) -> None:
        self._origin: object = None
        self._sequence = 0
        self._state: tuple[object, ...] = ()

    def forget(self) -> None:
        """Know nothing, such as while a model is written."""
        self._state = ()

    def remember(self, origin: object, sequence: int, pairs: Mapping[str, Pair]) -> None:
        """Know that these tensors have that version."""
        self._origin, self._sequence = origin, sequence
        self._state = _state_of(pairs)

    def has(self, origin: object, sequence: int, pairs: Mapping[str, Pair]) -> bool:
        """Whether these tensors are known to have that version still."""
        return (
            bool(self._state)
            and (self._origin, self._sequence) == (origin, sequence)
            and self._state == _state_of(pairs)
        )


def _state_of(pairs: Mapping[str, Pair]) -> tuple[object, ...]:
    """List what differs where other memory is meant, or torch has written the same."""
    found = []
    for name, (target, _) in pairs.items():
        at = (target.data_ptr(), target.device, target.dtype, tuple(target.shape), target.stride())
        found.append((name, at, target._version))
    return tuple(found)


def _place_of(manifest: Manifest, places: Mapping[str, TensorPlace], name: str) -> TensorPlace:
    """Find the tensor that a name, an alias or a slice leads to."""
    at = name
    while at in manifest.slices:
        at = manifest.slices[at].of
    return places[at]


def _is_plain(manifest: Manifest, place: TensorPlace, name: str, target: torch.Tensor) -> bool:
    """Whether the target has the tensor's own elements, in its own order."""
    return (
        name not in manifest.slices
        and tuple(target.shape) == place.shape  # not a shard of it
        and target.device.type == "cpu"
        and target.is_contiguous()
        and dtype_name(target.dtype) == place.dtype
        and not (target.is_conj() or target.is_neg())
    )


def apply_changes(
    version: int, manifest: Manifest, pairs: Mapping[str, Pair], patch: CarriedPatch
) -> int | None:
    """Change what changed, in tensors that have the patch's base.

    Parameters
    ----------
    version : int
        For messages.
    manifest : Manifest
        Of the version that is loaded.
    pairs : mapping of (target, source)
        By published names, checked.
    patch : CarriedPatch
        Of that version.

    Returns
    -------
    int | None
        Bytes of the tensors in which something changed; None where a tensor was not the base's.
        Some may be changed then: all has to be copied.

    Raises
    ------
    TornWeightsError
        A copy failed.
    """
    places = manifest.by_name()
    done: set[tuple[int, int]] = set()  # tied tensors of the model are one
    copied: dict[str, Pair] = {}
    written = 0
    for name, pair in pairs.items():
        place = _place_of(manifest, places, name)
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
        if not patch.apply(place.name, target):
            return None
        written += target.numel() * target.element_size()
    return written + (Loading(copied).copy(version) if copied else 0)


def compare(
    manifest: Manifest, pairs: Mapping[str, Pair], patch: CarriedPatch, *, sample: bool
) -> bool:
    """Compare a model that was patched with the whole version, bit for bit.

    Parameters
    ----------
    manifest : Manifest
        Of the version.
    pairs : mapping of (target, source)
        By published names.
    patch : CarriedPatch
        Which was applied.
    sample : bool
        Whether a few tensors are enough.

    Returns
    -------
    bool
        False where one differs. Tensors that are cast, cut or elsewhere are not compared.
    """
    places = manifest.by_name()
    plain = [
        (name, target)
        for name, (target, _) in pairs.items()
        if target.numel() and _is_plain(manifest, _place_of(manifest, places, name), name, target)
    ]
    if sample:
        plain = random.sample(plain, min(SAMPLED_TENSORS, len(plain)))
    return all(patch.same(_place_of(manifest, places, name).name, it) for name, it in plain)
