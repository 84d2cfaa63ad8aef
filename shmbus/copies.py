"""Groups and trajectories that outlive their lease: read as the originals, and owned.

Invariants:

- A copy holds nothing of a bus: it can be pickled, sent anywhere, and kept for ever.
- What can be read of an original can be read of its copy, by the same names. Only what ends a lease
  is missing.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus import errors
from shmbus.rows import Row, put_rows, rows_of
from shmbus_ext import _core


class _Sample(Protocol):
    @property
    def score(self) -> float: ...
    @property
    def meta(self) -> Any: ...
    @property
    def need(self) -> int: ...
    @property
    def split(self) -> str: ...
    @property
    def index(self) -> Any: ...
    def keys(self) -> tuple[str, ...]: ...
    def __getitem__(self, name: str, /) -> NDArray[Any]: ...


_T_co = TypeVar("_T_co", bound=_Sample, covariant=True)


class ReadGroup(Generic[_T_co]):
    """What is read of all samples of a group at once, of one under lease or of a copy."""

    __slots__ = ()

    size: int

    if TYPE_CHECKING:

        def __len__(self) -> int: ...
        def __iter__(self) -> Iterator[_T_co]: ...

    @property
    def split(self) -> str:
        """Who the group is for: "train", or what its producers said."""
        return next(iter(self)).split

    @property
    def need(self) -> int:
        """Samples that complete the group: `size`, unless its producers asked for fewer."""
        return next(iter(self)).need

    @property
    def complete(self) -> bool:
        """Whether every sample is here that the group needs."""
        return len(self) >= self.need

    @property
    def scores(self) -> NDArray[np.float64]:
        """The scores of the samples that are here, ordered by index: float64 [len(group)]."""
        return np.fromiter((sample.score for sample in self), np.float64, len(self))

    @property
    def shared(self) -> dict[str, NDArray[Any]]:
        """Arrays that all samples have in common, as `put_group` was given them; {} for none."""
        first = next(iter(self))
        if first.index != 0:
            return {}
        names = first.keys()
        at = len(_core.SHARED_PREFIX)
        return {name[at:]: first[name] for name in names if name.startswith(_core.SHARED_PREFIX)}

    @property
    def metas(self) -> list[Any]:
        """The metas of the samples that are here, ordered by index; None where there was none."""
        return [sample.meta for sample in self]


class TrajectoryCopy(msgspec.Struct, eq=False):
    """A trajectory that owns its arrays: `Trajectory.copy` makes it.

    Its attributes are those of `Trajectory`. ``copy[name]`` is a field's array, which the caller
    may write to.
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

    #: As of every trajectory that is delivered and was not acknowledged.
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
        """Return the names of the array fields, each with its array."""
        return tuple(self._arrays.items())

    def get(self, name: str, default: Any = None, /) -> Any:
        """Return a field's array, or the default where there is no such field."""
        return self._arrays.get(name, default)

    def shape(self, name: str, /) -> tuple[int, ...]:
        """Return a field's shape."""
        return self[name].shape

    @property
    def scored(self) -> bool:
        """Whether it has a score."""
        return not math.isnan(self._score)

    @property
    def score(self) -> float:
        """The reward; of one that was put with ``score=None``, what was set here."""
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
            raise ValueError(f"score: expected one that a float can hold, got {value}") from error
        except (TypeError, RuntimeError) as error:  # PyTorch's of a tensor that is no number
            raise TypeError(f"score: expected a number, got {type(value).__name__}") from error
        if not math.isfinite(score):
            raise ValueError(f"score: expected a finite number, got {score}")
        self._score = score

    @property
    def rows(self) -> list[Row]:
        """Its rows, of views; one with all fields, unless it was put with ``rows=``."""
        return rows_of(self)

    def copy(self) -> TrajectoryCopy:
        """Copy it once more, with arrays of its own."""
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Return the keywords of `Producer.put` that put it again.

        Returns
        -------
        dict
            "instance_id", "group_size", "index", "score", "policy_version", "round", "split",
            "need", "meta", and each array field by its name: the arrays of this copy, not copied
            again. "policy_version" is a pair where it was sampled by several. "rows" has the
            fields of rows, where it was put with them.
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

    `size` is that of a complete group; ``len(group)`` is how many are here.
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
        """Copy it once more, with arrays of its own."""
        return copy.deepcopy(self)

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as plain values.

        Returns
        -------
        dict
            "instance_id", "round", "size", and "trajectories": a list of the dicts that
            `TrajectoryCopy.to_dict` gives, which `Producer.put_many` takes as it is.
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
