"""Cache of seen tensors: detects any change beyond their values.

A trainer and a server exchange the same thousand tensors again and again, and a full inspection
of every tensor costs more than the start of every copy.

Invariant: tensors count as the same only with the same memory and the same layout: earlier
findings still hold. Undetectable cases count as changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, is_, methodcaller
from typing import Any, Final, TypeAlias

import torch

from shmbus.tensors.views import is_elsewhere, is_sharded

#: Attributes of a tensor's layout in its memory.
_LAYOUT: Final = (
    attrgetter("dtype"), attrgetter("shape"), methodcaller("stride"), attrgetter("device"),
)  # fmt: skip
#: Dtypes without lazy negatives and conjugates; laziness belongs to complex numbers.
_NEVER_LAZY: Final = frozenset(
    value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
    and not value.is_complex
    and value not in (torch.float16, torch.float32, torch.float64)
)

#: Memory and layout of tensors; equal only for the same memory and layout.
_Look: TypeAlias = tuple[object, object]


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Return whether two sequences hold the same objects in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


class SeenTensors:
    """Tensors by name, as seen at construction."""

    def __init__(self, tensors: Mapping[str, object]) -> None:
        self._names, self._tensors = _tensors_of(tensors)
        # Tied tensors come once. Memory behind a DTensor or another wrapper may move unseen.
        self._once = tuple({id(tensor): tensor for tensor in self._tensors}.values())
        #: True if `still` can detect every move of these tensors.
        self.can_tell = not any(is_sharded(each) or is_elsewhere(each) for each in self._once)
        if self.can_tell:
            self._suspects = [each for each in self._once if each.dtype not in _NEVER_LAZY]
            self._look = _look_at(self._once)

    def still(self, tensors: Mapping[str, object]) -> bool:
        """Return whether the tensors match by name, with unchanged memory and layout."""
        if not self.can_tell:
            return False
        # Identical objects need no inspection.
        names: list[str] = list(tensors)
        found: Sequence[object] = list(tensors.values())
        if len(found) != len(self._tensors):
            names, found = _tensors_of(tensors)
        if names != self._names or not are_same(found, self._tensors):
            return False
        return _look_at(self._once) == self._look and not _any_lazy(self._suspects)


def _tensors_of(found: Mapping[str, object]) -> tuple[list[str], list[torch.Tensor]]:
    values: list[Any] = list(found.values())
    if all(issubclass(kind, torch.Tensor) for kind in set(map(type, values))):
        return list(found), values
    tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
    return list(tensors), list(tensors.values())


def _any_lazy(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether a tensor lazily negates or conjugates its memory."""
    return any(map(torch.Tensor.is_neg, tensors)) or any(map(torch.Tensor.is_conj, tensors))


def _look_at(tensors: tuple[torch.Tensor, ...]) -> _Look:
    # By columns: a tuple per tensor takes twice as long for thousands of tensors.
    return (
        [*map(torch.Tensor.data_ptr, tensors)],
        [[*map(ask, tensors)] for ask in _LAYOUT],
    )
