"""Tensors as they were seen: whether anything but values of them has changed since.

A trainer and a server exchange the same thousand tensors again and again, and to look at each of
them costs more than to begin to copy all of them. Torch's own compiler asks the same question
before it runs what it compiled, and asks it in one call; where a torch has no such call, or one
that sees less, each tensor is looked at.

Invariant: tensors that count as the same lie in the same memory, seen alike, so that what was found
out of them holds; what cannot be told counts as changed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, is_, methodcaller
from typing import Any, Final

import torch

from trainer_adapter.weights.sharded import is_sharded

__all__ = ["SeenTensors", "are_same", "comparer_of"]

#: What tells how a tensor lies in its memory.
_LAYOUT: Final = (attrgetter("dtype"), attrgetter("shape"), methodcaller("stride"))

_Columns = list[list[object]]


def are_same(some: Sequence[object], others: Sequence[object]) -> bool:
    """Whether they are the same objects, in the same order."""
    return len(some) == len(others) and all(map(is_, some, others))


class SeenTensors:
    """Tensors by name, as they were when this was made.

    Parameters
    ----------
    tensors : mapping
        What is no tensor is not looked at. They are kept, as objects: their memory is not.
    """

    def __init__(self, tensors: Mapping[str, object]) -> None:
        self._names, self._tensors = _tensors_of(tensors)
        # What is tied comes once. A DTensor's own part may move without a trace.
        self._once = list({id(tensor): tensor for tensor in self._tensors}.values())
        self._told = not any(is_sharded(tensor) for tensor in self._once)
        if self._told:
            self._addresses = self._addresses_now()
            self._columns = self._columns_now()
            self._guard = comparer_of(self._once)

    @property
    def can_tell(self) -> bool:
        """Return whether `still` may ever be true."""
        return self._told

    def still(self, tensors: Mapping[str, object]) -> bool:
        """Whether these are the same tensors under the same names, and lie where and how they did.

        Parameters
        ----------
        tensors : mapping
            By name.

        Returns
        -------
        bool
            False also where it cannot be told.
        """
        if not self._told:
            return False
        # The very same objects need not be asked what they are.
        names: list[str] = list(tensors)
        found: Sequence[object] = list(tensors.values())
        if len(found) != len(self._tensors):
            names, found = _tensors_of(tensors)
        if names != self._names or not are_same(found, self._tensors):
            return False
        if self._addresses_now() != self._addresses:
            return False
        # The guard also minds what does not matter here, such as the mode of autograd.
        guard = self._guard
        return (guard is not None and guard(*self._once)) or self._columns_now() == self._columns

    def _addresses_now(self) -> list[int]:
        return [*map(torch.Tensor.data_ptr, self._once)]

    def _columns_now(self) -> _Columns:
        # By columns: a tuple a tensor takes twice as long, and there may be thousands.
        return [[*map(ask, self._once)] for ask in _LAYOUT]


def _tensors_of(found: Mapping[str, object]) -> tuple[list[str], list[torch.Tensor]]:
    """Return names and tensors, in order."""
    values: list[Any] = list(found.values())
    if all(issubclass(kind, torch.Tensor) for kind in set(map(type, values))):
        return list(found), values
    tensors = {name: each for name, each in found.items() if isinstance(each, torch.Tensor)}
    return list(tensors), list(tensors.values())


def comparer_of(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return what tells whether tensors are as these are: devices, dtypes, shapes and strides.

    Parameters
    ----------
    tensors : sequence of Tensor
        Each of them once.

    Returns
    -------
    callable | None
        Of as many tensors; it may say no where only a mode of autograd differs. None where this
        torch has no such thing.
    """
    made = _made_guard(tensors) if tensors and _guards_see_all() else None
    return made if made is not None and made(*tensors) else None


def _made_guard(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    try:
        kind: Any = torch._C._dynamo.guards.TensorGuards
        made = kind(
            *tensors,
            dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
            dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
        )
        check: Callable[..., bool] = made.check
    except (AttributeError, TypeError, ValueError, RuntimeError, SystemError):
        return None
    return check


@functools.cache
def _guards_see_all() -> bool:
    """Whether this torch has guards, and they see what they are asked for here."""
    memory = torch.zeros(6, dtype=torch.int32)
    matrix = memory.view(2, 3)
    guard = _made_guard([matrix])
    others = (
        memory.view(3, 2),
        memory,
        torch.as_strided(memory, (2, 3), (1, 2)),
        matrix.view(torch.float32),
        matrix.view(torch.int16)[:, :3],
    )
    try:
        return guard is not None and guard(matrix) and not any(map(guard, others))
    except (TypeError, RuntimeError):
        return False
