"""The state of an OnlineDataHandler in a checkpoint, so that nothing is trained twice or skipped.

Invariants:

- A trajectory is identified by its producer and its sequence number, unique on one bus only.
- A state is plain ints, strs and lists, for any serialiser.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import msgspec

import shmbus

__all__ = ["HandlerState", "identities"]

STATE_VERSION: Final = 1

Identity = tuple[int, int]


def identities(groups: Iterable[shmbus.Group]) -> set[Identity]:
    """Return the identity of each trajectory: its producer and its sequence number there.

    Parameters
    ----------
    groups : iterable of shmbus.Group

    Returns
    -------
    set of (int, int)
    """
    return {(t.producer_id, t.sequence) for group in groups for t in group}


class HandlerState(msgspec.Struct, frozen=True):
    """Progress of a handler.

    Attributes
    ----------
    step, policy_version : int
    bus_created_unix_ns : int
        Creation time of its bus.
    trained : set of (int, int)
        Identities of the trajectories of all batches that were yielded, acknowledged or not.
    requests : dict | None
        Requests that were offered and not trained, as `shmbus.Consumer.requests_state` has them.
    offer : dict | None
        Where it stands in the prompts of `OnlineDataHandler.offer`.
    """

    step: int
    policy_version: int
    bus_created_unix_ns: int
    trained: set[Identity]
    requests: Any = None
    offer: Any = None

    def as_dict(self) -> dict[str, Any]:
        """Return the state as a dict, for `parse`.

        Returns
        -------
        dict
        """
        state = {
            "version": STATE_VERSION,
            "step": self.step,
            "policy_version": self.policy_version,
            "bus_created_unix_ns": self.bus_created_unix_ns,
            "trained": sorted(map(list, self.trained)),
        }
        if self.requests is not None:
            state["requests"] = self.requests
        if self.offer is not None:
            state["offer"] = self.offer
        return state

    @classmethod
    def parse(cls, state: Any) -> HandlerState:
        """Read a dict of `as_dict`.

        Parameters
        ----------
        state : dict

        Returns
        -------
        HandlerState

        Raises
        ------
        ValueError
            It is not a handler's state, or of another version.
        """
        if not isinstance(state, dict) or state.get("version") != STATE_VERSION:
            version = state.get("version") if isinstance(state, dict) else type(state).__name__
            raise ValueError(
                f"state_dict: expected version {STATE_VERSION}, got {version!r}; it is not a "
                "handler's state, or was saved by another version of shmbus"
            )
        try:
            parsed = cls(
                int(state["step"]),
                int(state["policy_version"]),
                int(state["bus_created_unix_ns"]),
                _pairs(state["trained"]),
                state.get("requests"),
                state.get("offer"),
            )
        except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
            # OverflowError: of an infinite number; RuntimeError: PyTorch's, of a tensor.
            raise ValueError(
                f"state_dict: expected what state_dict() returned, got {sorted(state)}: {error!r}"
            ) from error
        if parsed.step < 0:
            raise ValueError(
                f"state_dict: expected step 0 or more, got {parsed.step}; it was never saved"
            )
        return parsed


def _pairs(rows: Iterable[Iterable[Any]]) -> set[Identity]:
    """Return rows of two numbers as a set of pairs; there may be very many."""
    columns = list(zip(*rows, strict=True))
    if not columns:
        return set()
    producers, sequences = columns
    return set(zip(map(int, producers), map(int, sequences), strict=True))
