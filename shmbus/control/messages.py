"""Control messages between the daemon and its clients: MessagePack in length-prefixed frames.

Invariants:

- Messages carry no payload. A group travels as the locations of its records in the segment (24
  bytes each), an identity as (producer_id, sequence), 16 bytes, a lasting name as a bus identity
  followed by an identity, 32 bytes; the core packs them.
- Input from a socket is bounded before decoding, and validated by the types of its struct. A frame
  must hold exactly a single message of its direction; otherwise ProtocolError.
- A new field needs a default: two builds of one VERSION understand each other.
"""

from __future__ import annotations

import struct
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from shmbus import errors
from shmbus.base import limits
from shmbus.base.ledger import Ledger
from shmbus.data.status_types import BusEvent, Count, DaemonStatus, GroupCells, GroupState
from shmbus_ext import _core

#: The protocol's version, equal on both sides.
VERSION = 2

#: Bytes of a lasting name, and of all names in a message, with the groups that they stand for.
NAME_BYTES = 32
NAMES_BYTES = limits.MAX_MESSAGE_BYTES // (2 * NAME_BYTES) * NAME_BYTES

_HEAD = struct.Struct("<I")

Asked: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_REQUESTED)]
Step: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=limits.MAX_REQUESTED)]
Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Label: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=_core.SPLIT_LABEL_BYTES)]
Text: TypeAlias = Annotated[str, msgspec.Meta(max_length=1000)]


class _Message(msgspec.Struct, tag=True, omit_defaults=True, kw_only=True):
    pass


class _Request(_Message):
    id: Count


class _Answer(_Message):
    #: Number of the request.
    id: int


# --- from clients


class Hello(_Message):
    """The first message: required options, and the number and next step before a reconnect."""

    version: int
    bus: Text
    created_unix_ns: Count = 0
    pid: Count = 0
    label: Text = ""
    rank: Count = 0
    world_size: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_CLIENTS)] = 1
    policy: dict[str, Any] = {}
    client: Annotated[int, msgspec.Meta(ge=-1, lt=limits.MAX_CLIENTS)] = -1
    next_step: Annotated[int, msgspec.Meta(ge=0, le=limits.MAX_REQUESTED)] = 0
    observer: bool = False
    split: Label = "train"


class Held(_Message):
    """A lease of an earlier daemon, with the reason of its end and the step of Trained."""

    token: Count
    identities: bytes
    reason: Annotated[int, msgspec.Meta(ge=_core.LEASE_HELD, lt=_core.REASONS)] = _core.LEASE_HELD
    step: Step = -1
    trained_at: Step = -1


class Claim(_Message):
    """After a Hello with a client number: its earlier leases, in one or more Claims."""

    groups: list[Held]
    last: bool = True


class Take(_Request):
    """Lease up to `max_groups`; a request `ahead` of need yields to other attached clients."""

    max_groups: Asked
    timeout_s: Seconds | None = None
    ahead: bool = False
    gathers: bool = False


class TakeStep(_Request):
    """Lease this rank's shard of its next step; every rank must send the same numbers."""

    groups: Asked | None = None
    tokens: Asked | None = None
    max_wait_s: Seconds | None = None
    field: Text = "tokens"
    timeout_s: Seconds | None = None
    only_full: bool = False
    gathers: bool = False


class End(_Message):
    """Release these leases, for one of the core's reasons. Answered by Ended, in order."""

    numbers: list[Count]
    reason: Annotated[int, msgspec.Meta(ge=0, lt=_core.REASONS)]


class GiveBack(_Message):
    """End these leases without releasing: their groups come next."""

    numbers: list[Count]


class Trained(_Message):
    """These leases are trained, as step `step` in the trainer's count; -1 withdraws the note."""

    numbers: list[Count]
    step: Step


class GetTrained(_Request):
    """Ask for the samples on the bus trained before `step`, in order after `after`."""

    step: Step
    after: bytes = b""


class EndTrained(_Request):
    """End the samples of these lasting names, now or later, in place of its earlier list."""

    names: bytes
    more: bool = False


class SetPolicyVersion(_Request):
    """Publish the policy version."""

    policy_version: Count


class GetLedger(_Request):
    """Ask for the ledger."""


class GetStatus(_Request):
    """Ask for a status."""


class GetGroups(_Request):
    """Ask for up to `groups` incomplete groups, the oldest first, with `cells` cells of each."""

    groups: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_GROUPS_SHOWN)] = 1
    cells: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_CELLS_SHOWN)] = limits.MAX_CELLS_SHOWN


class GetEvents(_Request):
    """Ask for up to `limit` events behind number `after`: the newest, for a trace the oldest."""

    after: Count = 0
    limit: Annotated[int, msgspec.Meta(ge=1, le=limits.MAX_EVENTS_SHOWN)] = 1
    groups: bool = True
    trace: bool = False


class GetGroup(_Request):
    """Ask for a group's cells and events."""

    instance_id: Text
    round: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    split: Label = "train"


class TakeSnapshot(_Request):
    """Write everything undelivered to a new directory; no lease is given meanwhile."""

    directory: Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]


class Bye(_Message):
    """Leave: the daemon takes back every lease of this client immediately."""


Request: TypeAlias = (
    Hello | Claim | Take | TakeStep | End | GiveBack | Trained | GetTrained | EndTrained
    | SetPolicyVersion | GetLedger | GetStatus | GetGroups | GetGroup | GetEvents | TakeSnapshot
    | Bye
)  # fmt: skip


# --- from the daemon


class Welcome(_Message):
    """The answer to Hello. `policy` holds every option of the stash, by name."""

    version: int
    client: int
    pid: int
    policy: dict[str, Any] = {}


class Granted(_Message):
    """A leased group of `size`; `places` has PLACE_BYTES for each of its trajectories."""

    number: int
    size: int
    places: bytes


class Leases(_Answer):
    """The answer to Take and TakeStep. `step` is -1 without ranks."""

    groups: list[Granted] = []
    step: int = -1


class Claimed(_Message):
    """The answer to the last Claim: leases kept, as (token, new number), and the others."""

    kept: list[tuple[int, int]] = []
    ended: list[int] = []
    lost: list[int] = []


class Ended(_Message):
    """Ended leases, counted in the ledger; `unknown` were not this client's."""

    numbers: list[int]
    unknown: list[int] = []


class TrainedReply(_Answer):
    """The answer to GetTrained: lasting names in order, each group with the least of its names."""

    names: bytes = b""
    more: bool = False
    groups: list[tuple[str, int | None, str]] = []


class Done(_Answer):
    """The answer to SetPolicyVersion and EndTrained."""


class LedgerReply(_Answer):
    """The answer to GetLedger."""

    ledger: Ledger


class StatusReply(_Answer):
    """The answer to GetStatus; its reader adds what only an observer finds."""

    daemon: DaemonStatus


class GroupsReply(_Answer):
    """The answer to GetGroups, of at most GROUPS_REPLY_BYTES; `omitted` groups are left out."""

    groups: list[GroupCells] = []
    omitted: int = 0


class EventsReply(_Answer):
    """The answer to GetEvents; `missed` counts omitted events, `newest` is the next `after`."""

    events: list[BusEvent] = []
    newest: int = 0
    missed: int = 0


class GroupReply(_Answer):
    """The answer to GetGroup: cells while on the bus, holder, and history."""

    state: GroupState
    group: GroupCells | None = None
    holder: str = ""
    held_s: float = 0.0
    events: list[BusEvent] = []


class SnapshotTaken(_Answer):
    """The answer to TakeSnapshot: the manifest, identical to the disk's."""

    manifest: bytes


class Refused(_Message):
    """The request `id` failed, or with -1 the connection, closed next by the daemon."""

    kind: Literal["protocol", "value", "busy", "closed", "version", "not_found", "failed"]
    message: str
    id: int = -1


Reply: TypeAlias = (
    Welcome | Leases | Claimed | Ended | Done | TrainedReply | LedgerReply | StatusReply
    | GroupsReply | GroupReply | EventsReply | SnapshotTaken | Refused
)  # fmt: skip

_encoder = msgspec.msgpack.Encoder()
_request_decoder = msgspec.msgpack.Decoder(Request)
_reply_decoder = msgspec.msgpack.Decoder(Reply)


def frame(message: _Message) -> bytes:
    """Encode a message with its length in front."""
    body = _encoder.encode(message)
    if len(body) > limits.MAX_MESSAGE_BYTES:
        raise errors.ProtocolError(
            f"a {type(message).__name__} message of {len(body)} bytes: at most "
            f"{limits.MAX_MESSAGE_BYTES} fit into a frame; take fewer groups at a time"
        )
    return _HEAD.pack(len(body)) + body


def decode_request(body: bytes) -> Request:
    """Decode a client's message; ProtocolError for an invalid message."""
    request: Request = _decode(_request_decoder, body)
    return request


def decode_reply(body: bytes) -> Reply:
    """Decode a daemon's message; ProtocolError for an invalid message."""
    reply: Reply = _decode(_reply_decoder, body)
    return reply


def _decode(decoder: msgspec.msgpack.Decoder[Any], body: bytes) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise errors.ProtocolError(
            f"a frame of {len(body)} bytes is no control message of version {VERSION}: {error}"
        ) from error


def split_names(packed: bytes) -> set[bytes]:
    """Return the lasting names of a packed sequence."""
    return {packed[at : at + NAME_BYTES] for at in range(0, len(packed), NAME_BYTES)}


class FrameBuffer:
    """Bytes in, frames out, with at most one incomplete frame in memory."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """Add received bytes; return the complete bodies."""
        kept = self._bytes
        if kept:
            kept += data
        buffer = kept if kept else data
        at = 0
        bodies = []
        while len(buffer) - at >= _HEAD.size:
            (size,) = _HEAD.unpack_from(buffer, at)
            if size > limits.MAX_MESSAGE_BYTES:
                raise errors.ProtocolError(
                    f"a frame of {size} bytes was announced, at most {limits.MAX_MESSAGE_BYTES} "
                    "are allowed; the peer is no shmbus client, or sends too much at a time"
                )
            if len(buffer) - at - _HEAD.size < size:
                break
            at += _HEAD.size
            bodies.append(bytes(buffer[at : at + size]))
            at += size
        if kept:
            del kept[:at]
        else:
            kept += buffer[at:]
        return bodies
