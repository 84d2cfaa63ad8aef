"""Stating specs in the segment, and comparing them with those of the other side.

Invariant: every wait looks here first, so a difference ends it on both sides, whoever came second.
"""

from __future__ import annotations

import msgspec

from shmbus.channel import ChannelDamagedError, Endpoint
from trainer_adapter.channel.specs import SpecMismatchError, Statement, differences, show

__all__ = ["Agreement"]


class Agreement:
    """One side's look at both statements.

    Parameters
    ----------
    endpoint : Endpoint
        Of the channel.
    side : "sender" | "receiver"
        This one.
    """

    def __init__(self, endpoint: Endpoint, side: str) -> None:
        self._endpoint = endpoint
        self._side = side
        self._other = "receiver" if side == "sender" else "sender"
        self._seen = 0
        self.own: Statement | None = None
        self.other: Statement | None = None
        endpoint.on_wake = self.check

    @property
    def sender(self) -> Statement | None:
        """Return what the sender has stated."""
        return self.own if self._side == "sender" else self.other

    @property
    def receiver(self) -> Statement | None:
        """Return what the receiver has stated."""
        return self.own if self._side == "receiver" else self.other

    def state(self, statement: Statement) -> None:
        """State what this side says."""
        if statement != self.own:
            self.own = statement
            self._endpoint.state(msgspec.msgpack.encode(statement))

    def check(self) -> None:
        """Compare with the other side.

        Raises
        ------
        SpecMismatchError
            They contradict each other, or the other side has refused a step.
        """
        if self._endpoint.stated(self._other) != self._seen:
            version, data = self._endpoint.statement(self._other)
            if version == 0:
                return
            try:
                self.other = msgspec.msgpack.decode(data, type=Statement)
            except msgspec.MsgspecError as error:
                raise ChannelDamagedError(
                    f"channel {self._endpoint.name!r}: the {self._other}'s specs are none ({error})"
                ) from error
            self._seen = version
        if self.other is None or self.own is None or self.sender is None or self.receiver is None:
            return
        if self.other.refused:
            raise SpecMismatchError(
                f"channel {self._endpoint.name!r}: the {self._other} has refused a step: "
                f"{self.other.refused}"
            )
        found = differences(self.sender.specs, self.receiver.specs)
        if found:
            raise self.mismatch(found)

    def mismatch(self, found: list[str]) -> SpecMismatchError:
        """Say what differs, with both specs."""
        sent = "nothing yet" if self.sender is None else show(self.sender.specs)
        expected = "nothing yet" if self.receiver is None else show(self.receiver.specs)
        return SpecMismatchError(
            f"channel {self._endpoint.name!r}: {'; '.join(found)}. The sender states {sent}, the "
            f"receiver {expected}; no step passes: correct one side and start it again"
        )
