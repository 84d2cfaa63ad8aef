"""Bringing a model to a version by its patch: what leased weights do beside loading the whole.

Invariant: a model that did not have the patch's base is loaded whole, or its error says that it has
some of both.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Literal

import torch

from shmbus._arguments import check_int64
from shmbus.errors import DamagedError
from shmbus.weights.carriers.base import CarriedVersion
from shmbus.weights.carriers.patched import CarriedPatch, PatchedVersion
from shmbus.weights.copies import Pair
from shmbus.weights.errors import TORN_CODE, PatchBaseError
from shmbus.weights.loading import Loading, Targets, targets_of
from shmbus.weights.manifest import Manifest, Slice
from shmbus.weights.patched_load import (
    LoadedModel,
    PlainModel,
    apply_changes,
    compare,
    plain_model,
)

__all__ = ["FollowingWeights"]


class FollowingWeights(ABC):
    """What leased weights know of patches.

    Attributes
    ----------
    version, sequence : int
        The publisher's number, and publications before it, and one.
    manifest : Manifest
        Its tensors.
    loaded : "whole" | "patch" | None
        How `load_into` brought a model to this version, once it has.
    """

    version: int
    sequence: int
    manifest: Manifest
    loaded: Literal["whole", "patch"] | None = None
    _known: LoadedModel | None
    _compares: Literal["off", "sample", "all"]

    @abstractmethod
    def _open(self) -> CarriedVersion: ...

    @abstractmethod
    def _paired(
        self,
        targets: dict[str, torch.Tensor],
        *,
        strict: bool = True,
        cast: bool = False,
        slices: Mapping[str, Slice] | None = None,
    ) -> dict[str, Pair]: ...

    def _follow(
        self,
        carried: CarriedVersion,
        patch: CarriedPatch | None,
        origin: object,
        known: LoadedModel,
        named: Mapping[str, object],
        *,
        strict: bool,
        cast: bool,
        slices: Mapping[str, Slice] | None,
    ) -> int:
        """Change what changed, if that is enough; else copy everything."""
        how = strict, cast
        if patch is not None and not slices and self._compares == "off":
            plain = known.plain(origin, patch.base_sequence, self.manifest, how, named)
            if plain is not None:
                written = self._follow_plain(carried, known, plain, patch)
                if written is not None:
                    return written
        targets = targets_of(named)
        pairs = self._paired(targets, strict=strict, cast=cast, slices=slices)
        carried.prepare({target.device for target in targets.values()})
        carried.loading()
        usable = patch is not None and known.has(origin, patch.base_sequence, pairs)
        known.forget()
        written = self._apply(patch, pairs) if patch is not None and usable else None
        self.loaded = "whole" if written is None else "patch"
        if written is None:
            written = Loading(pairs).copy(self.version)
        plain = None if slices else plain_model(self.manifest, how, named, pairs)
        known.remember(origin, self.sequence, pairs, plain)
        return written

    def _follow_plain(
        self,
        carried: CarriedVersion,
        known: LoadedModel,
        plain: PlainModel,
        patch: CarriedPatch,
    ) -> int | None:
        """Apply a patch to a model that was checked before; None where all has to be copied."""
        carried.loading()
        known.forget()
        written = plain.apply(patch)
        if written is not None:
            known.followed(self.sequence)
            self.loaded = "patch"
        return written

    def _apply(self, patch: CarriedPatch, pairs: Mapping[str, Pair]) -> int | None:
        """Apply a patch, and compare as this subscriber does; None where all has to be copied."""
        written = apply_changes(self.version, self.manifest, pairs, patch)
        if written is None or self._compares == "off":
            return written
        sample = self._compares == "sample"
        return written if compare(self.manifest, pairs, patch, sample=sample) else None

    def patch_base(self) -> int | None:
        """Return the version from which a patch leads to this one.

        Returns
        -------
        int | None
            None where there is no patch.

        Raises
        ------
        BusClosedError
            These weights are closed.
        """
        patch = self._patch()
        return None if patch is None else patch.base_version

    def _patch(self) -> CarriedPatch | None:
        carried = self._open()
        return carried.patch() if isinstance(carried, PatchedVersion) else None

    def apply_patch(
        self, model: Targets, *, base: int, slices: Mapping[str, Slice] | None = None
    ) -> int:
        """Bring a model from one version to this one by what changed, and by nothing else.

        For those who know what their model has; `load_into` finds out by itself, and loads the
        whole version where it has to.

        Parameters
        ----------
        model : torch.nn.Module | mapping of Tensor
            With the base in it, bit for bit.
        base : int
            The version that it has.
        slices : mapping of Slice, optional
            As for `load_into`.

        Returns
        -------
        int
            Bytes of the tensors in which something changed.

        Raises
        ------
        PatchBaseError
            This version has no patch, or one for another base. Nothing was changed.
        ManifestError
            What does not fit. Nothing was changed.
        DamagedError
            The model did not have the base: it has some of this version.
        BusClosedError
            These weights are closed.
        """
        base = check_int64("base", base)
        carried = self._open()
        patch = self._patch()
        if patch is None or patch.base_version != base:
            has = "no patch" if patch is None else f"a patch for version {patch.base_version} alone"
            raise PatchBaseError(
                f"version {self.version} has {has}, the model has version {base}: nothing was "
                "changed; load the whole version with load_into()",
                None if patch is None else patch.base_version,
            )
        targets = targets_of(model)
        pairs = self._paired(targets, slices=slices)
        carried.prepare({target.device for target in targets.values()})
        carried.loading()
        if self._known is not None:
            self._known.forget()
        written = self._apply(patch, pairs)
        if written is None:
            error = DamagedError(
                f"version {self.version}: the model was not version {base}, for which its patch "
                "is, and has some of both now; load the whole version with load_into() before it "
                "is used"
            )
            carried.refused(TORN_CODE, str(error))
            raise error
        self.loaded = "patch"
        carried.applied()
        return written
