"""Whole groups, put by one call.

Invariant: a group is in the ring with all of its samples or with none, whatever happens to the
process that puts it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from shmbus._arguments import check_timeout
from shmbus.put.asynchronous import AsynchronousPuts
from shmbus.put.rounds import RoundPuts

__all__ = ["GroupPuts"]

#: What belongs to the group, and so cannot be a sample's own.
_OF_THE_GROUP = ("instance_id", "group_size", "index", "round", "split", "need", "timeout")


class GroupPuts(AsynchronousPuts, RoundPuts):
    """`put_group` and `aput_group`."""

    def put_group(
        self,
        instance_id: str | int,
        samples: Iterable[Mapping[str, Any]],
        *,
        meta: object = None,
        split: str | None = None,
        round: int | None = None,
        policy_version: int | tuple[int, int] | None = None,
        need: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Put all samples of a prompt in one call: all of them are in the ring afterwards, or none.

        That holds against a full bus, an exception, and SIGKILL. The group gets a round of its
        own, so the same prompt can be put again at any time.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, as for `put`.
        samples : iterable of mapping
            The group, in the order of its indices: of each sample its score, its arrays, and what
            else of `put` belongs to a sample (meta, policy_version).
        meta : object, optional
            The meta of samples that have none of their own, as for `put`.
        split : str, optional
            Who the group is for, as for `put`.
        round : int, optional
            Which round of the prompt this is; None takes `next_round()`.
        policy_version : int or tuple of (int, int), optional
            Of samples that have none of their own, as for `put`.
        need : int, optional
            Samples that complete the group, as for `put`.
        timeout : float, optional
            Seconds to wait for space for all of them: None waits for ever, 0 does not wait.

        Returns
        -------
        int
            The group's round.

        Raises
        ------
        TypeError, ValueError
            There is no sample, one is no mapping, or as for `put`; the message says which sample.
        RecordTooLargeError
            Together they are larger than `record_limit`, a quarter of the bus.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`; nothing of the group is in the ring.

        Notes
        -----
        While it copies, other threads of this process wait for the interpreter lock; a group of
        16 MiB takes some milliseconds.

        Examples
        --------
        A prompt and its completions::

            producer.put_group("q1", [{"score": 1.0, "tokens": first}, {"tokens": second}])
        """
        items, round = self._group_items(
            instance_id, samples, meta, split, round, policy_version, need
        )
        self._put_group(items, timeout)
        return round

    async def aput_group(
        self,
        instance_id: str | int,
        samples: Iterable[Mapping[str, Any]],
        *,
        meta: object = None,
        split: str | None = None,
        round: int | None = None,
        policy_version: int | tuple[int, int] | None = None,
        need: int | None = None,
        timeout: float | None = None,
    ) -> int:
        """Put a whole group as `put_group` does, without blocking the event loop.

        Parameters
        ----------
        instance_id, samples, meta, split, round, policy_version, need
            As for `put_group`. The arrays must not change before this returns.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.

        Returns
        -------
        int
            The group's round.

        Raises
        ------
        TypeError, ValueError, RecordTooLargeError
            As for `put_group`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put_group`.
        asyncio.CancelledError
            The task was cancelled during the wait; nothing of the group was put.
        """
        check_timeout(timeout)
        items, round = self._group_items(
            instance_id, samples, meta, split, round, policy_version, need
        )
        await self._retry(lambda: self._put_group(items, 0), timeout)
        return round

    def _group_items(
        self,
        instance_id: str | int,
        samples: Iterable[Mapping[str, Any]],
        meta: object,
        split: str | None,
        round: int | None,
        policy_version: int | tuple[int, int] | None,
        need: int | None,
    ) -> tuple[list[dict[str, Any]], int]:
        """Return the arguments of `put` for each sample, and the group's round."""
        if isinstance(samples, (str, bytes, Mapping)) or not isinstance(samples, Iterable):
            raise TypeError(
                f"samples: expected an iterable of mappings, one a sample, got "
                f"{type(samples).__name__}"
            )
        listed = list(samples)
        if not listed:
            raise ValueError("samples: expected at least one, got an empty iterable")
        if round is None:
            round = self.next_round()
        common: dict[str, Any] = {"instance_id": instance_id, "group_size": len(listed)}
        common |= {"round": round, "split": split, "need": need, "meta": meta}
        if policy_version is not None:
            common["policy_version"] = policy_version
        items = []
        for index, sample in enumerate(listed):
            if not isinstance(sample, Mapping):
                raise TypeError(
                    f"put_group: sample {index}: expected a mapping of put's arguments, got "
                    f"{type(sample).__name__}"
                )
            own = [name for name in _OF_THE_GROUP if name in sample]
            if own:
                raise ValueError(
                    f"put_group: sample {index}: {own[0]!r} belongs to the group; pass it to "
                    "put_group, which numbers the samples in their order"
                )
            items.append({**common, **sample, "index": index})
        return items, round
