"""ScoredGroup: the view of one group for a callable for advantages, or a filter.

Invariants:

- Metas are decoded, and fields looked up, only on request.
- A value missing in a group is an error with the sample's name, never a filler.
"""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

import shmbus

__all__ = ["ScoredGroup"]

TRUNCATED_REASONS: Final = frozenset({"length", "max_tokens", "abort"})
"""Values of ``meta["finish_reason"]`` of a truncated sample: servers say "length" or "max_tokens"
where a limit was reached, and "abort" where a request was cancelled."""

#: Keys of a meta with several rewards by name.
REWARD_KEYS: Final = ("scores", "rewards")

Sight = typing.Literal["scores", "group", "both"]


def meta_value(meta: object, key: str) -> Any:
    """Return a value of a meta; None if missing or unhashable."""
    value = meta.get(key) if isinstance(meta, dict) else None
    if isinstance(value, dict):
        # SGLang's finish_reason is {"type": "length", "length": 512}.
        value = value.get("type")
    return value if isinstance(value, (str, bool, int)) else None


class ScoredGroup:
    """One group of n samples, in the order of their indices.

    A trainer gets a ScoredGroup from a handler, or makes its own to test a callable.

    Parameters
    ----------
    scores : [n]
    lengths : [n], optional
        Tokens of each sample.
    metas : sequence, optional
        The meta of each sample.
    fields : mapping of str to sequence of arrays, optional
        An array of each sample, by the field's name.
    policy_versions : [n], optional
    instance_id : str, optional

    Attributes
    ----------
    scores : float64 [n]
    instance_id : str
    """

    def __init__(
        self,
        scores: ArrayLike,
        lengths: ArrayLike | None = None,
        *,
        metas: Sequence[Any] | None = None,
        fields: Mapping[str, Sequence[NDArray[Any]]] | None = None,
        policy_versions: ArrayLike | None = None,
        instance_id: str = "",
    ) -> None:
        self.scores: NDArray[np.float64] = np.asarray(scores, np.float64)
        self.instance_id = instance_id
        self._lengths = lengths
        self._metas = metas
        self._fields = fields or {}
        self._versions = policy_versions
        self._trajectories: Sequence[shmbus.Trajectory] | None = None

    @classmethod
    def of(
        cls,
        scores: NDArray[np.float64],
        trajectories: Sequence[shmbus.Trajectory],
        lengths: Sequence[int],
    ) -> ScoredGroup:
        """Make one of leased trajectories.

        Parameters
        ----------
        scores : float64 [n]
        trajectories : sequence of shmbus.Trajectory, [n]
        lengths : sequence of int, [n]

        Returns
        -------
        ScoredGroup
        """
        made = cls(scores, lengths, instance_id=trajectories[0].instance_id)
        made._trajectories = trajectories
        return made

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        return f"<ScoredGroup {self.instance_id!r} of {len(self)}>"

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each sample, int64 [n]."""
        return np.asarray(self._known("lengths", self._lengths), np.int64)

    @functools.cached_property
    def metas(self) -> list[Any]:
        """The meta of each sample, None without a meta."""
        if self._trajectories is not None:
            return [t.meta for t in self._trajectories]
        return list(self._known("metas", self._metas))

    @functools.cached_property
    def truncated(self) -> NDArray[np.bool_]:
        """Samples cut off, by their ``meta["finish_reason"]``, bool [n]."""
        reasons = [meta_value(meta, "finish_reason") for meta in self.metas]
        return np.array([reason in TRUNCATED_REASONS for reason in reasons], np.bool_)

    @property
    def policy_versions(self) -> NDArray[np.int64]:
        """The policy version of each sample, int64 [n]."""
        versions = self._versions
        if self._trajectories is not None:
            versions = [t.policy_version for t in self._trajectories]
        return np.asarray(self._known("policy_versions", versions), np.int64)

    def field(self, name: str) -> list[NDArray[Any]]:
        """Return an array field of each sample.

        Parameters
        ----------
        name : str

        Returns
        -------
        list of array, [n]
            Read-only views of the ring.

        Raises
        ------
        KeyError
            A sample lacks it.
        """
        if self._trajectories is not None:
            return [t[name] for t in self._trajectories]
        if name not in self._fields:
            raise KeyError(f"{name!r}: this group has the fields {tuple(self._fields)}")
        return list(self._fields[name])

    def rewards(self, name: str) -> NDArray[np.float64]:
        """Return one of several rewards of each sample.

        Parameters
        ----------
        name : str
            An array field of one element, or a key of the meta, or of its ``"scores"`` or
            ``"rewards"``.

        Returns
        -------
        float64 [n]

        Raises
        ------
        ValueError
            A sample without this number, named in the message.
        """
        return np.array([self._reward(name, index) for index in range(len(self))], np.float64)

    def _reward(self, name: str, index: int) -> float:
        array = self._array(name, index)
        if array is not None:
            if np.size(array) != 1:
                raise ValueError(
                    f"{self._sample(index)}: field {name!r}: expected one number, a reward, got "
                    f"shape {np.shape(array)}; ask for it by field({name!r})"
                )
            return float(np.asarray(array).reshape(()))
        meta = self.metas[index] if self._trajectories or self._metas is not None else None
        places = [meta] + [meta.get(key) for key in REWARD_KEYS if isinstance(meta, dict)]
        for place in places:
            if isinstance(place, dict) and isinstance(place.get(name), (int, float)):
                return float(place[name])
        raise ValueError(
            f"{self._sample(index)}: expected a reward {name!r}, as an array field or in the meta, "
            f"got the meta {meta!r}; put it with each sample of a group"
        )

    def _array(self, name: str, index: int) -> Any:
        if self._trajectories is not None:
            trajectory = self._trajectories[index]
            return trajectory.get(name)
        return self._fields[name][index] if name in self._fields else None

    def _sample(self, index: int) -> str:
        return f"group {self.instance_id!r}, sample {index}"

    def _known(self, name: str, value: Any) -> Any:
        if value is None:
            raise ValueError(
                f"group {self.instance_id!r}: {name}: expected those of its samples, got scores "
                "alone; pass the callable to a handler or to pack, or make a ScoredGroup with them"
            )
        return value


def groups_of(
    trajectories: Sequence[shmbus.Trajectory], lengths: Sequence[int], sizes: Sequence[int]
) -> list[ScoredGroup]:
    """Lay leased trajectories out as groups."""
    groups = []
    end = 0
    for size in sizes:
        start, end = end, end + size
        own = trajectories[start:end]
        scores = np.array([t.score for t in own], np.float64)
        groups.append(ScoredGroup.of(scores, own, lengths[start:end]))
    return groups


def sight_of(function: Callable[..., Any]) -> Sight:
    """Find the expected view of a callable for advantages, by its signature."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return "scores"
    positional = [
        parameter
        for parameter in signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    required = [one for one in positional if one.default is one.empty]
    if len(required) == 2:
        return "both"
    if len(required) <= 1 and positional:
        wanted = positional[0].annotation
        if wanted is ScoredGroup or (
            isinstance(wanted, str) and wanted.strip("'\"").rpartition(".")[2] == "ScoredGroup"
        ):
            return "group"
    return "scores"
