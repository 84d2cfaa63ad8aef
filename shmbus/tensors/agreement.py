"""Stating specs in the segment, and comparing them with those of the other side.

Invariants:

- Every wait looks here first, so a difference ends it on both sides, whoever came second.
- What a process has stated is held against nobody who came after its end.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from shmbus.channel.endpoint import Endpoint
from shmbus.errors import DamagedError
from shmbus.tensors.specs import (
    SpecMismatchError,
    Statement,
    TensorSpec,
    differences,
    show,
    step_differences,
)

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
        alive, claims = endpoint.presence(self._other)
        # Which process of the other side had ended before this one came; 0 for none.
        self._gone_before = 0 if alive else claims
        # Which one's difference was told here.
        self._told = 0
        # What was compared already: both statements as they are, and a step like the last one.
        self._agreed = False
        self._passed: Mapping[str, TensorSpec] | None = None
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
        _, claim = self._endpoint.presence(self._side)
        statement = msgspec.structs.replace(statement, claim=claim)
        if statement == self.own:
            return
        try:
            self._endpoint.state(msgspec.msgpack.encode(statement))
        except ValueError as error:
            raise ValueError(
                f"specs: {error}; give the {len(statement.specs)} tensors shorter names, or send "
                "several as one; nothing was sent"
            ) from error
        self.own = statement
        self._agreed, self._passed = False, None

    def forget_own(self) -> None:
        """Let the next step say what is sent: that which has stated it was not sent."""
        self.own = None
        self._agreed, self._passed = False, None

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
                raise DamagedError(
                    f"channel {self._endpoint.name!r}: the {self._other}'s specs are none ({error})"
                ) from error
            self._seen = version
            self._agreed, self._passed = False, None
        if self._agreed:
            return
        if self.other is None or self.own is None or self.sender is None or self.receiver is None:
            return
        found = [] if self.other.refused else differences(self.sender.specs, self.receiver.specs)
        if not (self.other.refused or found):
            self._agreed = True
            return
        if self._forget_the_gone():
            return
        self._told = self.other.claim
        if self.other.refused:
            raise SpecMismatchError(
                f"channel {self._endpoint.name!r}: the {self._other} has refused a step: "
                f"{self.other.refused}"
            )
        raise self.mismatch(found)

    @property
    def agreed(self) -> int | None:
        """Return the version of the other's statement that was compared, 0 where there is none.

        None while there is one that contradicts this side, or is not looked at.
        """
        return self._seen if self._agreed or self.other is None else None

    def has_passed(self, step: Mapping[str, TensorSpec]) -> bool:
        """Whether these very specs were those of the last step that passed."""
        return step is self._passed

    def differences_of(self, step: Mapping[str, TensorSpec]) -> list[str]:
        """Say how a step differs from what is expected, and where it is sent from what is sent."""
        if step == self._passed:
            return []
        sender = self.own if self._side == "sender" else None
        found = step_differences(step, sender, self.receiver)
        if found and sender is not None and self.other is not None and self._forget_the_gone():
            found = step_differences(step, sender, self.receiver)
        if not found:
            self._passed = step
        return found

    def _forget_the_gone(self) -> bool:
        """Forget the other statement where it is not to be held against this side.

        That of a living process is, and once that of one which has ended beside this side: both
        sides are told a difference, also where the first one to see it ends with it.
        """
        assert self.other is not None
        claim = self.other.claim
        alive, newest = self._endpoint.presence(self._other)
        succeeded = claim != newest
        ended_before = claim == self._gone_before
        told_and_gone = claim == self._told and not alive
        if not (succeeded or ended_before or told_and_gone):
            return False
        self.other = None
        self._agreed, self._passed = False, None
        return True

    def mismatch(self, found: list[str]) -> SpecMismatchError:
        """Say what differs, with both specs."""
        sent = "nothing yet" if self.sender is None else show(self.sender.specs)
        expected = "nothing yet" if self.receiver is None else show(self.receiver.specs)
        return SpecMismatchError(
            f"channel {self._endpoint.name!r}: {'; '.join(found)}. The sender states {sent}, the "
            f"receiver {expected}; no step passes: correct one side and start it again"
        )
