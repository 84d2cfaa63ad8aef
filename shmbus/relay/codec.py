"""Messages as bytes: who says it, with which version, and one message. Payload goes beside it.

Invariants:

- What came from elsewhere has the types that its message has, or is refused as a whole.
- Another version of shmbus is refused by its version, before anything else of it is read.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple, cast

import msgspec

from shmbus import errors
from shmbus.relay import messages
from shmbus.relay.messages import Message
from shmbus_ext import _core

__all__ = ["Envelope", "pack", "unpack"]

#: Raised with every change of a message or of its meaning.
PROTOCOL: Final = 3

#: Each message's number is its place here.
_KINDS: Final[tuple[type[Any], ...]] = (
    messages.Subscription,
    messages.Announcement,
    messages.SinkStateWanted,
    messages.SinkState,
    messages.Assignment,
    messages.Drop,
    messages.Fetch,
    messages.Fetched,
    messages.Returned,
    messages.Settled,
    messages.Release,
    messages.Released,
    messages.Confirmation,
    messages.HelloWanted,
    messages.Hello,
    messages.Steering,
    messages.Peers,
    messages.Wanted,
    messages.Unanswered,
    messages.Assignments,
)
_NUMBER_OF: Final = {kind: number for number, kind in enumerate(_KINDS)}
_DECODERS: Final = tuple(msgspec.msgpack.Decoder(kind) for kind in _KINDS)
_ENCODER: Final = msgspec.msgpack.Encoder()


class _Frame(msgspec.Struct, array_like=True):
    protocol: int
    layout: int
    sender: str
    kind: int
    body: msgspec.Raw


#: What decoding raises: beside msgspec's own errors, for text that is no UTF-8, and for lists that
#: are too deep.
_NOT_ONE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FRAME: Final = msgspec.msgpack.Decoder(_Frame)


class Envelope(NamedTuple):
    """A message that has come, with the records that it carries."""

    sender: str
    message: Message
    payload: bytes | memoryview = b""


def pack(sender: str, message: Message) -> bytes:
    """Return the bytes of a message."""
    body = msgspec.Raw(_ENCODER.encode(message))
    number = _NUMBER_OF[type(message)]
    return _ENCODER.encode(_Frame(PROTOCOL, _core.LAYOUT_VERSION, sender, number, body))


def unpack(
    packed: bytes | memoryview, payload: bytes | memoryview = b"", receiver: str = "this process"
) -> Envelope:
    """Return the message of these bytes.

    Parameters
    ----------
    packed : bytes
        The message.
    payload : bytes, optional
        The records that it carries.
    receiver : str
        Who has it now, for the text of a refusal.

    Raises
    ------
    LayoutMismatchError
        The sender runs a shmbus that speaks otherwise; the message has both sides' names and
        numbers.
    ProtocolError
        They are no message.
    """
    try:
        frame = _FRAME.decode(packed)
    except _NOT_ONE as error:
        raise errors.ProtocolError(
            f"relay: expected a message, got other bytes: {error}"
        ) from error
    ours = (PROTOCOL, _core.LAYOUT_VERSION)
    if (frame.protocol, frame.layout) != ours:
        raise errors.LayoutMismatchError(
            f"relay: {frame.sender} speaks protocol {frame.protocol} with bus layout "
            f"{frame.layout}, and {receiver} protocol {ours[0]} with bus layout {ours[1]}: they "
            "are different versions of shmbus; install the same one on both nodes, then start the "
            "relay again (what was put meanwhile is in its ring, and goes on)"
        )
    if not 0 <= frame.kind < len(_KINDS):
        raise errors.ProtocolError(f"relay: {frame.sender} sent a message of kind {frame.kind}")
    try:
        message = cast("Message", _DECODERS[frame.kind].decode(frame.body))
    except _NOT_ONE as error:
        raise errors.ProtocolError(
            f"relay: {frame.sender} sent a {_KINDS[frame.kind].__name__} that is none: {error}"
        ) from error
    return Envelope(frame.sender, message, payload)
