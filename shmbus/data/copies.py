"""Groups and trajectories that outlive their lease: the originals' interface over owned memory.

Invariants:

- A copy holds no part of a bus: copies can be pickled, sent everywhere, and kept for ever.
- A copy offers the original's readable attributes, under the same names. Only methods that end a
  lease are missing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus import errors
from shmbus.data.sample_rows import Row, put_rows, rows_of
from shmbus_ext import _core

_T_co = TypeVar("_T_co", bound="_core.Trajectory | TrajectoryCopy", covariant=True)


class ReadGroup(Generic[_T_co]):
    """Attributes over all samples of a group, under lease or copied."""

    __slots__ = ()

    size: int

    if TYPE_CHECKING:

        def __len__(self) -> int: ...
        def __iter__(self) -> Iterator[_T_co]: ...

    @property
    def split(self) -> str:
        """Purpose of the group: "train", or the producers' own label."""
        return next(iter(self)).split

    @property
    def need(self) -> int:
        """Samples that complete the group: `size`, unless its producers asked for fewer."""
        return next(iter(self)).need

    @property
    def complete(self) -> bool:
        """True if every sample needed by the group is here."""
        return len(self) >= self.need

    @property
    def scores(self) -> NDArray[np.float64]:
        """The scores of the present samples, ordered by index: float64 [len(group)]."""
        return np.fromiter((sample.score for sample in self), np.float64, len(self))

    @property
    def shared(self) -> dict[str, NDArray[Any]]:
        """Arrays shared by all samples, as given to `put_group`; {} without shared arrays."""
        first = next(iter(self))
        if first.index != 0:
            return {}
        names = first.keys()
        at = len(_core.SHARED_PREFIX)
        return {name[at:]: first[name] for name in names if name.startswith(_core.SHARED_PREFIX)}

    @property
    def metas(self) -> list[Any]:
        """The metas of the present samples, ordered by index; None for a sample without meta."""
        return [sample.meta for sample in self]


class TrajectoryCopy(msgspec.Struct, eq=False):
    """A trajectory that owns its arrays, made by `Trajectory.copy`.

    Its attributes are those of `Trajectory`. ``copy[name]`` returns a field's array, writable by
    the caller.
    """

    instance_id: str
    index: int
    group_size: int
    need: int
    round: int | None
    split: str
    key: str | tuple[str, int] | tuple[str, int | None, int]
    _score: float
    policy_version: int
    newest_policy_version: int
    producer_id: int
    sequence: int
    committed_ns: int
    nbytes: int
    meta: Any
    _arrays: dict[str, NDArray[Any]]

    #: Like every trajectory delivered under lease.
    failed: ClassVar[bool] = False
    released: ClassVar[bool] = False

    def __getitem__(self, name: str) -> NDArray[Any]:
        try:
            return self._arrays[name]
        except KeyError:
            raise KeyError(f"{name!r}: this trajectory has the fields {self.keys()}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._arrays

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def keys(self) -> tuple[str, ...]:
        """Return the names of the array fields, in the producer's order."""
        return tuple(self._arrays)

    def values(self) -> tuple[NDArray[Any], ...]:
        """Return the arrays of all fields, in the producer's order."""
        return tuple(self._arrays.values())

    def items(self) -> tuple[tuple[str, NDArray[Any]], ...]:
        """Return the names of the array fields with their arrays."""
        return tuple(self._arrays.items())

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return a field's array, or the default for an unknown field."""
        return self._arrays.get(name, default)

    def shape(self, name: str, /) -> tuple[int, ...]:
        """Return a field's shape."""
        return self[name].shape

    @property
    def scored(self) -> bool:
        """True with a score."""
        return not math.isnan(self._score)

    @property
    def score(self) -> float:
        """The reward; for a sample put with ``score=None``, the score set here."""
        if not self.scored:
            raise errors.UnscoredError(
                f"trajectory {self.instance_id!r}[{self.index}] of producer {self.producer_id}: "
                "expected a score, got none yet: it was put with score=None; set its score first"
            )
        return self._score

    @score.setter
    def score(self, value: float) -> None:
        try:
            score = float(value)
        except OverflowError as error:
            raise ValueError(f"score: expected a number of float's range, got {value}") from error
        # PyTorch's, for a tensor that holds no single number
        except (TypeError, RuntimeError) as error:
            raise TypeError(f"score: expected a number, got {type(value).__name__}") from error
        if not math.isfinite(score):
            raise ValueError(f"score: expected a finite number, got {score}")
        self._score = score

    @property
    def rows(self) -> list[Row]:
        """Its rows, of views; a single row with all fields, unless put with ``rows=``."""
        return rows_of(self)

    def copy(self) -> TrajectoryCopy:
        """Copy the trajectory once more, with arrays of its own."""
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the keywords of `Producer.put` to put the trajectory again.

        Returns
        -------
        dict
            "instance_id", "group_size", "index", "score", "policy_version", "round", "split",
            "need", "meta", and each array field by its name: the arrays of this copy, not copied
            again. "policy_version" is a pair for a trajectory sampled by several versions. "rows"
            holds the fields of rows, for a trajectory put with rows.
        """
        several = self.newest_policy_version != self.policy_version
        return {
            "instance_id": self.instance_id,
            "group_size": self.group_size,
            "index": self.index,
            "score": self._score if self.scored else None,
            "policy_version": (
                (self.policy_version, self.newest_policy_version)
                if several
                else self.policy_version
            ),
            "round": self.round,
            "split": self.split,
            "need": None if self.need == self.group_size else self.need,
            "meta": self.meta,
            **put_rows(self),
        }

    def __repr__(self) -> str:
        score = self._score if self.scored else None
        return (
            f"<TrajectoryCopy {self.instance_id!r}[{self.index}/{self.group_size}] "
            f"score={score!r} policy_version={self.policy_version} fields={self.keys()!r}>"
        )


class GroupCopy(ReadGroup[TrajectoryCopy], msgspec.Struct, eq=False):
    """A group that owns its samples, ordered by index, and a sequence of them: `Group.copy`.

    `size` counts a complete group's samples; ``len(group)`` counts the present samples.
    """

    instance_id: str
    round: int | None
    size: int
    trajectories: list[TrajectoryCopy]

    def __len__(self) -> int:
        return len(self.trajectories)

    def __iter__(self) -> Iterator[TrajectoryCopy]:
        return iter(self.trajectories)

    @overload
    def __getitem__(self, position: int) -> TrajectoryCopy: ...
    @overload
    def __getitem__(self, position: slice) -> list[TrajectoryCopy]: ...
    def __getitem__(self, position: int | slice) -> TrajectoryCopy | list[TrajectoryCopy]:
        return self.trajectories[position]

    def copy(self) -> GroupCopy:
        """Copy the group once more, with arrays of its own."""
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the group as plain values.

        Returns
        -------
        dict
            "instance_id", "round", "size", and "trajectories": a list of dicts from
            `TrajectoryCopy.to_dict`, which `Producer.put_many` takes unchanged.
        """
        return {
            "instance_id": self.instance_id,
            "round": self.round,
            "size": self.size,
            "trajectories": [sample.to_dict() for sample in self.trajectories],
        }

    def __repr__(self) -> str:
        round = "" if self.round is None else f" round={self.round}"
        return f"<GroupCopy {self.instance_id!r}{round} {len(self)}/{self.size}>"
