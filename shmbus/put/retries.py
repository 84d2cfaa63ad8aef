"""Samples that failed, and samples that the collector asks for again.

Invariant: what this producer was asked for and has not done is asked of others once it closes.
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from shmbus import limits
from shmbus._arguments import TRAIN, check_count, check_split
from shmbus._keys import make_key
from shmbus.put.asynchronous import AsynchronousPuts
from shmbus_ext import _core

__all__ = ["RetryPuts", "WantedSample"]


class WantedSample(msgspec.Struct, frozen=True):
    """A sample that the collector asks for again: `put` it as any other, or `fail` it.

    Attributes
    ----------
    instance_id : str
        The prompt's key.
    round : int | None
        Where its producers gave one.
    index : int
        Which sample of its group.
    group_size : int | None
        Samples in a complete group; None where all that is known of the group are failures that did
        not say it.
    attempt : int
        1 for the first time that it is asked for.
    reason : str
        Why it is asked for: what `fail` was told, or who died, or how long it has been missing.
    split : str
        Who its group is for.
    need : int | None
        Samples that complete its group; None where that is not known.
    """

    instance_id: str
    round: int | None
    index: int
    group_size: int | None
    attempt: int
    reason: str
    split: str = TRAIN
    need: int | None = None


class RetryPuts(AsynchronousPuts):
    """`fail` and `wanted`: the producers' side of the retry table."""

    def _begin_retries(self) -> None:
        self._taken: dict[tuple[Hashable, int], WantedSample] = {}
        self._taking = _core.RecursiveLock()

    def _successor(self) -> _core.Segment | None:
        segment = super()._successor()
        if segment is not None:
            self._taken.clear()  # of the removed bus
        return segment

    def fail(
        self,
        instance_id: str | int,
        index: int,
        reason: str,
        *,
        group_size: int | None = None,
        need: int | None = None,
        split: str | None = None,
        round: int | None = None,
        policy_version: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Report that a sample failed: its group need not wait for it in vain.

        The report is a small record of the ring, in order with what this producer puts, and as safe
        from any death. The consumer asks for the sample again (`wanted`) as often as its
        `sample_retries` says, and then gives its group up, as its `on_failure` says. The ledger
        counts reports as committed, and in the end as dropped with the reason "failed".

        Parameters
        ----------
        instance_id : str or int
            The prompt's key, as for `put`.
        index : int
            Which sample of its group failed, from 0.
        reason : str
            What operators and the next producer of the sample are told; its first 500 characters.
        group_size : int, optional
            Samples in its group; None where this producer does not know.
        need : int, optional
            Samples that complete it, as for `put`.
        split : str, optional
            Who the group is for, as for `put`.
        round : int, optional
            Which round of the prompt this is, as for `put`.
        policy_version : int, default 0
            Version of the policy that was to sample it.
        timeout : float, optional
            Seconds to wait for space: None waits for ever, 0 does not wait.

        Raises
        ------
        TypeError, ValueError
            The reason is no str, the index is no int of 0 or more, or as for `put`.
        BusFullError, BusClosedError, BusRemovedError, StallError
            As for `put`, which also says when this blocks.
        """
        if not isinstance(reason, str):
            raise TypeError(f"reason: expected a str, got {type(reason).__name__}")
        reason = reason[: limits.FAIL_REASON_CHARS].encode("utf-8", "replace").decode()
        index = check_count("index", index, 0)
        number = _core.SPLIT_TRAIN
        if split is not None:
            number = _core.split_number(self._here(), check_split(split))
        with self._taking:
            request = self._taken.get((make_key(str(instance_id), round, number), index))
        if group_size is None and request is not None:
            group_size, need = request.group_size, request.need
        (self._fail_unsized if group_size is None else self._fail)(
            instance_id,
            group_size=index + 1 if group_size is None else group_size,
            need=need,
            split=split,
            index=index,
            score=0.0 if request is None else float(request.attempt),
            policy_version=policy_version,
            round=round,
            meta=reason,
            timeout=timeout,
        )

    def wanted(self, limit: int | None = None) -> list[WantedSample]:
        """Take samples that the consumer asks for again, each handed to one producer at a time.

        Where nothing is asked for, this reads one word of shared memory. What is taken here is
        asked of others when this producer closes without an answer, and counts as failed once more
        when it dies, or does not answer within the consumer's `retry_timeout`.

        Parameters
        ----------
        limit : int, optional
            How many at the most; None for all. Workers that share the work take few at a time.

        Returns
        -------
        list[WantedSample]
            Those that nobody has taken, in the order of asking. None of them is handed out again.
        """
        if limit is not None:
            limit = check_count("limit", limit, 1)
        segment = self._here()
        found: list[WantedSample] = []
        if not _core.retry_noted(segment)[0]:
            return found
        mine = set()
        with self._taking:
            requests = sorted(_core.retry_requests(segment), key=lambda row: row[1])
            for (
                row,
                number,
                claimant,
                id_,
                round,
                split,
                size,
                need,
                index,
                attempt,
                why,
                _,
            ) in requests:
                at = (make_key(id_, round, split), index)
                if attempt == _core.RETRY_PAUSE:
                    continue
                if claimant == self.producer_id + 1:
                    mine.add(at)
                elif (
                    not claimant
                    and (limit is None or len(found) < limit)
                    and _core.retry_claim(segment, row, number, self.producer_id)
                ):
                    label = _core.split_label(segment, split)
                    found.append(
                        WantedSample(
                            id_, round, index, size or None, attempt, why, label, need or None
                        )
                    )
                    self._taken[at] = found[-1]
                    mine.add(at)
            for at in self._taken.keys() - mine:
                del self._taken[at]  # answered, or asked of another
        return found

    def close(self) -> None:
        """Abort open reservations and leave the bus; what was committed stays."""
        if not self.closed:
            # What it was asked for and has not done is for others now.
            for row, _, claimant, *_ in _core.retry_requests(self._segment) if self._taken else ():
                if claimant == self.producer_id + 1:
                    _core.retry_unclaim(self._segment, row, self.producer_id)
        super().close()

    def __del__(self) -> None:
        if getattr(self, "_taken", None):
            self.close()
