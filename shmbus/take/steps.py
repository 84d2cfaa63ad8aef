"""The shards of one rank, of the steps that the ranks of a daemon share.

Invariant: no variable has the groups of a step on their way to the caller, so that those which an
exception keeps from the caller are ready again.
"""

from __future__ import annotations

import time
from typing import Any

from shmbus._arguments import check_timeout, clamp_request
from shmbus.client.daemon_client import DaemonClient
from shmbus.group import Group
from shmbus.take.attached import AttachedConsumer, seconds_left

__all__ = ["StepTakes"]


class StepTakes(AttachedConsumer):
    """`take_step`."""

    def take_step(
        self,
        *,
        groups: int | None = None,
        tokens: int | None = None,
        max_wait: float | None = None,
        field: str = "tokens",
        timeout: float | None = None,
        only_full: bool = False,
    ) -> list[Group]:
        """Take this rank's shard of its next step, once there are groups for every rank.

        The shards of a step are disjoint, decided once, and balanced by the length of `field`. A
        rank that died and restarts first gets the groups again that it had not acknowledged. All
        ranks have to ask for a step with the same numbers. Blocks until then, or for `timeout`.

        Parameters
        ----------
        groups : int, optional
            How many groups each rank gets.
        tokens : int, optional
            Instead: as many whole groups as fit into this many elements of `field` for each rank.
            The only group of a rank may have more.
        max_wait : float, optional
            Seconds after the step's first group was complete, after which the step is formed with
            fewer groups, at least one for each rank. None waits until it is full.
        field : str
            The field whose length is the weight of a trajectory.
        timeout : float, optional
            Seconds to wait: None waits without limit, 0 does not wait.
        only_full : bool
            Never form a step that is not full, whatever `max_wait`: for a caller that prefetches.

        Returns
        -------
        list[Group]
            Leased to the caller. Empty at the timeout; the next call then asks for the same step.

        Raises
        ------
        ValueError
            The ranks ask for one step in different ways, both or neither of groups and tokens are
            given, or the Consumer has no ranks.
        StallError
            Nothing has moved for too long, under ``on_stall="raise"``.
        DaemonUnavailableError
            The daemon has not answered for CLIENT_WAIT_S (30 s).
        BusClosedError
            The consumer is closed, or was made before a fork.
        """
        if (groups is None) == (tokens is None):
            raise ValueError(
                f"take_step: expected one of groups and tokens, got groups={groups!r} and "
                f"tokens={tokens!r}"
            )
        groups = None if groups is None else clamp_request("groups", groups)
        tokens = None if tokens is None else clamp_request("tokens", tokens)
        check_timeout(max_wait)
        check_timeout(timeout)
        source = self._require_source()
        if self._options.world_size == 1 or not isinstance(source, DaemonClient):
            raise ValueError("take_step: expected a Consumer of world_size 2 or more; use take")

        step: dict[str, Any] = {
            "groups": groups, "tokens": tokens, "max_wait": max_wait, "field": field,
            "only_full": only_full,
        }  # fmt: skip

        def wait(slice_s: float | None) -> bool:
            return source.receive_step(timeout=slice_s, **step)

        watch = self._watch
        deadline = None if timeout is None else time.monotonic() + timeout
        if not wait(watch.first_s(timeout)) and not watch.go_on(
            wait, source.segment, "this rank's step", timeout
        ):
            return []
        return source.hand_out(Group, self, -1) or self.take_step(
            timeout=seconds_left(deadline), **step
        )
