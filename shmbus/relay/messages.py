"""Messages between sources, the coordinator and sinks, and their packing as bytes.

Messages may come late, overtake each other, or be lost with sender or receiver. A receiver judges a
message by its numbers alone:

- An announcement by (incarnation, number): only growing pairs are taken.
- A coordinator's message by its term, and a message to a sink also by the sink's incarnation.
- A message about prompts by its mark, and by the mark of the message answered.
- An answer with records by the number of its question: records put since, or given back, may be
  assigned again, and an old answer may name records already released by their source.

A sink compares a source's claim about a record with the record itself, by the head's `check`,
before the put.

Incoming messages have the declared types, or are refused whole. Messages of another shmbus version
are refused by their version, before anything else is read.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, cast, get_args

import msgspec

from shmbus import errors
from shmbus.base.ledger import REASONS
from shmbus_ext import _core
from shmbus_ext._core import OriginHead

ORIGIN_BYTES: Final = 32
#: A record's name across buses: the bus's identity, then producer id and sequence, high bytes
#: first, to sort as numbers. Bytes cache their hash, and a relay hashes each name many times; the
#: core reads the same form.
Origin: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=ORIGIN_BYTES, max_length=ORIGIN_BYTES)]
_ID: Final = struct.Struct(">QQ")
_IDENTITY_BYTES: Final = ORIGIN_BYTES - _ID.size


def is_of(origin: Origin, bus: str) -> bool:
    """Return True if the record lies on the bus with this identity."""
    return origin.startswith(bytes.fromhex(bus))


def bus_of(origin: Origin) -> str:
    """Return the identity of a record's bus."""
    return origin[:_IDENTITY_BYTES].hex()


def by_bus(origins: Collection[Origin]) -> list[tuple[str, Collection[Origin]]]:
    """Return records bus by bus, in their order."""
    if not origins:
        return []
    lowest = min(origins)[:_IDENTITY_BYTES]
    if max(origins).startswith(lowest):
        return [(lowest.hex(), origins)]
    found: dict[bytes, list[Origin]] = {}
    for origin in origins:
        found.setdefault(origin[:_IDENTITY_BYTES], []).append(origin)
    return [(identity.hex(), found[identity]) for identity in sorted(found)]


def name_origin(origin: Origin) -> str:
    """Return a record's name for people: producer and sequence on its bus."""
    return "/".join(map(str, _ID.unpack_from(origin, _IDENTITY_BYTES)))


def unpack_heads(
    bus: str, packed: bytes, clock_ns: int = 0, splits: bytes = b"\0"
) -> list[OriginHead]:
    """Return a bus's announced heads; `clock_ns` is its machine's clock minus the reader's.

    `splits` maps the bus's split numbers to the reader's; heads of unmapped splits are left out.
    """
    try:
        heads = _core.unpack_heads(packed, splits)
    except ValueError as error:
        raise errors.ProtocolError(f"relay: an announcement of bus {bus}: {error}") from error
    identity = bytes.fromhex(bus)
    for head in heads:
        if not head.origin.startswith(identity):
            raise errors.ProtocolError(
                f"relay: an announcement of bus {bus} names records of another one"
            )
        head.clock_ns = clock_ns
    return heads


#: Above every count, and within a 64-bit word of the segment.
_LARGEST = 2**62
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
#: A coordinator's term, or -1 before the first; each new term is greater, and never near the end.
Term: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=_LARGEST // 2)]
#: Of the ledger, for a record's end.
Reason: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(REASONS)})$")]
#: The identity of a bus: 128 bits.
Identity: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=_core.MAX_ID_BYTES)]
_Round: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Place: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=_core.MAX_GROUP_SIZE)]
#: 0 in a failure report from a producer without the group's size.
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_core.MAX_GROUP_SIZE)]
#: The shared name of a split; also a bus's labels by its own numbers, "" for an unlabelled split.
Label: TypeAlias = Annotated[str, msgspec.Meta(max_length=_core.SPLIT_LABEL_BYTES)]
Labels: TypeAlias = Annotated[tuple[Label, ...], msgspec.Meta(max_length=_core.MAX_SPLITS)]
#: The shared name of a group: id, round, split.
GroupName: TypeAlias = tuple[_Id, _Round | None, Label]
#: Records of a block.
_Records: TypeAlias = Annotated[tuple[Origin, ...], msgspec.Meta(max_length=_core.MAX_GROUP_SIZE)]

#: Of a piece of weights: a piece is a block of the connection.
_MOST_PIECE_BYTES = 64 << 20

#: A source's position in its announcements: its incarnation, and the number of the last
#: announcement.
Mark: TypeAlias = tuple[int, int]


class Subscription(NamedTuple):
    """To a source: announce all records held from now on; `question` counts these requests."""

    bus: str
    term: Term = 0
    question: Count = 0


class Announcement(NamedTuple):
    """From a source to the coordinator: heads of held records, as the core packs them.

    With `whole` the heads are the full set; otherwise the records new after the announcement
    before. `answers` holds term and question of the newest Subscription known by then. `splits`
    holds the labels of the heads' splits.
    """

    bus: str
    mark: Mark
    whole: bool
    heads: bytes
    answers: tuple[int, int] = (0, 0)
    splits: Labels = (_core.TRAIN,)


class SinkStateWanted(NamedTuple):
    """From a coordinator to a sink: send your state, and take no assignment of an earlier term."""

    sink: str
    term: Term


class SinkState(NamedTuple):
    """From a sink: records not released at their source, and accepted records not yet put."""

    sink: str
    incarnation: int
    term: int
    settled: frozenset[Origin]
    owed: frozenset[Origin]


class MissingSample(msgspec.Struct, frozen=True, array_like=True):
    """A failed or missing sample: its group, and the reason. `attempt` counts the next attempt."""

    group: GroupName
    group_size: _Size
    need: _Size
    index: _Place
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    reason: str

    def __post_init__(self) -> None:
        """Refuse values that fit no row of a bus."""
        size = len(self.group[0].encode())
        if size > _core.MAX_ID_BYTES:
            raise ValueError(
                f"instance_id: expected at most {_core.MAX_ID_BYTES} bytes of UTF-8, got {size}"
            )
        if self.need > self.group_size or (self.group_size and self.index >= self.group_size):
            raise ValueError(
                f"expected need and index within group_size={self.group_size}, got "
                f"need={self.need} and index={self.index}"
            )

    @property
    def id(self) -> tuple[GroupName, int, int]:
        """The sample's key; a repeated request for the same sample gets another key."""
        return (self.group, self.index, self.attempt)


class Assignment(NamedTuple):
    """To a sink: put these records, a group, and report the group's missing samples as failed."""

    sink: str
    incarnation: int
    term: int
    origins: _Records
    nbytes: Count = 0
    checks: tuple[int, ...] = ()
    missing: tuple[MissingSample, ...] = ()


class Assignments(NamedTuple):
    """From the coordinator to a sink: groups to put, in order."""

    groups: tuple[Assignment, ...]


class Drop(NamedTuple):
    """To a sink: write the drop down, then have sources release these records, unused."""

    sink: str
    incarnation: int
    term: int
    reason: Reason
    origins: tuple[Origin, ...]


class Fetch(NamedTuple):
    """From a sink to a source: send these records; `number` counts the questions."""

    bus: str
    sink: str
    incarnation: int
    origins: _Records
    number: int = 0


class Fetched(NamedTuple):
    """The source's answer: the records still held. `gone` had left after the announcement `mark`.

    `number` repeats the Fetch. On the wire `origins` stays empty: the attached block names them,
    with splits labelled by `splits`.
    """

    sink: str
    incarnation: int
    origins: tuple[Origin, ...]
    gone: tuple[Origin, ...]
    mark: Mark
    number: int = 0
    splits: Labels = (_core.TRAIN,)


class Returned(NamedTuple):
    """From a sink: `gone` had left their source after an announcement; `rest` will not come."""

    sink: str
    gone: frozenset[tuple[Origin, Mark]]
    rest: frozenset[Origin]


class Settled(NamedTuple):
    """From a sink to the coordinator: records now on its bus and in its journal."""

    sink: str
    origins: frozenset[Origin]


class Release(NamedTuple):
    """From a sink to a source: release these records; `reason` goes into the ledger."""

    bus: str
    sink: str
    origins: frozenset[Origin]
    reason: Reason


class Released(NamedTuple):
    """The source's answer: the released records, and `mark`, its last announcement by then."""

    bus: str
    sink: str
    origins: frozenset[Origin]
    mark: Mark


class Confirmation(NamedTuple):
    """A sink to the coordinator: their source has released them, after the announcement `mark`."""

    bus: str
    origins: frozenset[Origin]
    mark: Mark


class HelloWanted(NamedTuple):
    """From a coordinator, with term 0 at its start, to every peer: send a Hello."""

    term: Term = 0


class Hello(NamedTuple):
    """From a source or sink to the coordinator: identity and counts, at its start and periodically.

    `largest_record` and `largest_group` are byte limits of its bus, `largest_count` the limit of
    records in a group; 0 from a source. `held`, `moving` and `settled` count records. `term` and
    `coordinator` name the newest coordinator known, `asked` the newest Wanted, `mark` its newest
    announcement. `oldest_ns` is the commit time of its oldest record. `offers`: its bus carries
    prompts. `splits`: labels of a sink's bus.
    """

    address: str
    is_sink: bool
    name: str
    bus: Identity
    incarnation: Count
    term: Term
    coordinator: str
    policy_version: Count
    paused: str | None
    largest_record: Count
    largest_group: Count
    largest_count: Count
    clock_ns: Count
    held: Count
    moving: Count
    settled: Count
    asked: tuple[int, int] = (0, 0)
    mark: Mark = (-1, -1)
    oldest_ns: Count = 0
    offers: bool = False
    splits: Labels = ()


class Steering(NamedTuple):
    """From the coordinator to a source: the trainers' policy version and pause."""

    policy_version: Count
    paused: str | None


class Wanted(NamedTuple):
    """To a source: its producers should make these samples only; an older number is ignored."""

    bus: str
    term: Term
    number: Count
    samples: tuple[MissingSample, ...]


class Unanswered(NamedTuple):
    """From a source to the coordinator: the producer of this requested sample died."""

    bus: str
    sample: MissingSample


class Cancelled(NamedTuple):
    """From the coordinator to a source: these groups need no more samples."""

    groups: tuple[GroupName, ...]


class Begun(NamedTuple):
    """From a sink to the coordinator: these groups began, though a namesake may have ended."""

    groups: tuple[GroupName, ...]


class PromptOffer(NamedTuple):
    """A request of a trainer's bus, by its number there; the payload holds the prompt."""

    number: Count
    group: GroupName
    group_size: Annotated[int, msgspec.Meta(ge=1, le=_core.MAX_GROUP_SIZE)]
    need: Annotated[int, msgspec.Meta(ge=1, le=_core.MAX_GROUP_SIZE)]
    level: Annotated[int, msgspec.Meta(ge=0, lt=_core.REQUEST_LEVELS)]
    nbytes: Count


class Prompts(NamedTuple):
    """To the source of this incarnation: make `offers`, stop `over`, by the sink's numbers."""

    bus: str
    trainer: Identity
    incarnation: int
    mark: Mark
    over: tuple[Count, ...] = ()
    offers: tuple[PromptOffer, ...] = ()


class Demand(NamedTuple):
    """From a source: the sink's requests here, those `ended` without records here, and demand."""

    bus: str
    trainer: Identity
    mark: Mark
    answers: Mark
    here: tuple[Count, ...]
    ended: tuple[Count, ...] = ()
    wants: Count = 0


class Peers(NamedTuple):
    """From the coordinator to a sink: addresses of buses. `complete`: an unnamed bus is gone.

    `first`: splits besides "train" belong to this sink.
    """

    addresses: tuple[tuple[str, str], ...]
    complete: bool
    first: bool = True


class Transfer(NamedTuple):
    """A transfer of a version in the trainer's pool: whole with `base` 0, otherwise its patch."""

    pool: str
    sequence: Count
    base: Count


class PoolGeometry(NamedTuple):
    """Sizes of a pool; its layout's version comes first."""

    layout: int
    slot_bytes: Count
    slots: Count
    max_slots: Count
    meta_bytes: Count
    block_bytes: Count
    patch_bytes: Count


class VersionOffer(NamedTuple):
    """From the weights publisher to a mirror: get this transfer from this upstream.

    The payload holds the version's meta. `nbytes` is the transfer's size, in pieces of
    `piece_bytes`, and `size` the version's. `digests`: store digests of its blocks.
    """

    transfer: Transfer
    upstream: str
    nbytes: Count
    piece_bytes: Annotated[int, msgspec.Meta(ge=1, le=_MOST_PIECE_BYTES)]
    version: Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
    size: Count
    digests: bool
    text: str
    geometry: PoolGeometry


class PiecesWanted(NamedTuple):
    """From a mirror to its upstream: send these pieces, at once or on arrival."""

    transfer: Transfer
    pieces: Annotated[tuple[Count, ...], msgspec.Meta(max_length=256)]


class VersionPiece(NamedTuple):
    """A piece, with the publisher's checksum; the last piece carries the transfer's digest."""

    transfer: Transfer
    number: Count
    crc: Count
    digest: Count | None = None


class PiecesGone(NamedTuple):
    """Answer to PiecesWanted from an upstream without the transfer."""

    transfer: Transfer


class EngineRow(NamedTuple):
    """A reader of a mirror's pool; `sequence` and `refuses` count in the trainer's pool."""

    label: str
    alive: bool
    version: int | None
    refused: int | None
    error: str
    sequence: Count = 0
    refuses: Count = 0
    code: Count = 0
    holds: bool = False


class MirrorState(NamedTuple):
    """From a mirror to the weights publisher: its versions, transfers, faults and readers."""

    address: str
    bus: str
    pool: str
    sequence: Count
    version: int | None
    done: Transfer | None
    getting: Transfer | None
    upstream: str
    pieces: Count
    error: str
    damaged: Count
    engines: tuple[EngineRow, ...] = ()


Message: TypeAlias = (
    Subscription | Announcement | SinkStateWanted | SinkState | Assignment | Assignments | Drop
    | Fetch | Fetched | Returned | Settled | Release | Released | Confirmation | HelloWanted
    | Hello | Steering | Peers | Wanted | Unanswered | VersionOffer | PiecesWanted | VersionPiece
    | PiecesGone | MirrorState | Cancelled | Begun | Prompts | Demand
)  # fmt: skip


#: Raised with every change of a message or of its meaning.
PROTOCOL: Final = 7

#: A message's number is its place in the union.
_KINDS: Final[tuple[type[Any], ...]] = get_args(Message)
_NUMBER_OF: Final = {kind: number for number, kind in enumerate(_KINDS)}
_DECODERS: Final = tuple(msgspec.msgpack.Decoder(kind) for kind in _KINDS)
_ENCODER: Final = msgspec.msgpack.Encoder()


class _Frame(msgspec.Struct, array_like=True):
    protocol: int
    layout: int
    sender: str
    kind: int
    body: msgspec.Raw


#: Decoding errors: also invalid UTF-8, and lists nested too deep.
_NOT_ONE: Final = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_FRAME: Final = msgspec.msgpack.Decoder(_Frame)


class Envelope(NamedTuple):
    """A received message, with its records."""

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
    """Return the message in these bytes."""
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
            f"{frame.layout}, and {receiver} protocol {ours[0]} with bus layout {ours[1]}: install "
            "the same version of shmbus on both nodes, then start the relay again (the rings keep "
            "the samples put meanwhile)"
        )
    if not 0 <= frame.kind < len(_KINDS):
        raise errors.ProtocolError(f"relay: {frame.sender} sent a message of kind {frame.kind}")
    try:
        message = cast("Message", _DECODERS[frame.kind].decode(frame.body))
    except _NOT_ONE as error:
        raise errors.ProtocolError(
            f"relay: {frame.sender} sent an invalid {_KINDS[frame.kind].__name__}: {error}"
        ) from error
    return Envelope(frame.sender, message, payload)
