"""What sources, the coordinator and sinks say to each other, and how it is packed as bytes.

Messages may be late, lost with whoever sent or awaited them, and overtake each other. Whoever takes
one judges it by its numbers alone:

- An announcement by (incarnation, number): only growing ones are taken.
- What a coordinator says by its term, and what is said to a sink by that sink's incarnation.
- A word about prompts by its mark, and by that of the word that it answers.
- An answer with records by the number of its question: what has been put since, or was given back,
  may be assigned again, and an answer from before that names records that their source let go.

What a source says of a record is compared with the record itself, by its head's `check`, before
anything of it is put.

What came from elsewhere has the types that its message has, or is refused as a whole; another
version of shmbus is refused by its version, before anything else of it is read.
"""

from __future__ import annotations

import struct
from collections.abc import Collection
from typing import Annotated, Any, Final, NamedTuple, TypeAlias, cast, get_args

import msgspec

from shmbus import errors
from shmbus.ledger import REASONS
from shmbus_ext import _core
from shmbus_ext._core import OriginHead

ORIGIN_BYTES: Final = 32
#: A record among all buses: the bus's identity, then producer id and sequence with their high bytes
#: first, so that they sort as numbers. Bytes, since a relay hashes each of them many times, and a
#: hash of bytes is remembered; it is what the core reads, too.
Origin: TypeAlias = Annotated[bytes, msgspec.Meta(min_length=ORIGIN_BYTES, max_length=ORIGIN_BYTES)]
_ID: Final = struct.Struct(">QQ")
_IDENTITY_BYTES: Final = ORIGIN_BYTES - _ID.size


def is_of(origin: Origin, bus: str) -> bool:
    """Whether a record is of the bus of this identity."""
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
    """Return heads that a bus announced; `clock_ns` is its machine's clock minus the reader's.

    `splits` has the reader's number of each of the bus's splits; heads of others are left out.
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


#: More than anything that is counted, and what the segment's words of 64 bits hold.
_LARGEST = 2**62
Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_LARGEST)]
#: Of a coordinator, or -1 of who has heard none; the next one is greater, and never near the end.
Term: TypeAlias = Annotated[int, msgspec.Meta(ge=-1, le=_LARGEST // 2)]
#: Of the ledger, for a record's end.
Reason: TypeAlias = Annotated[str, msgspec.Meta(pattern=f"^({'|'.join(REASONS)})$")]
#: The identity of a bus: 128 bits.
Identity: TypeAlias = Annotated[str, msgspec.Meta(pattern="^[0-9a-f]{32}$")]
_Id: TypeAlias = Annotated[str, msgspec.Meta(min_length=1, max_length=_core.MAX_ID_BYTES)]
_Round: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
_Place: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=_core.MAX_GROUP_SIZE)]
#: 0 where a failure was reported by one who does not know it.
_Size: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=_core.MAX_GROUP_SIZE)]
#: What all buses call a split; and a bus's labels by its own numbers, "" for one without.
Label: TypeAlias = Annotated[str, msgspec.Meta(max_length=_core.SPLIT_LABEL_BYTES)]
Labels: TypeAlias = Annotated[tuple[Label, ...], msgspec.Meta(max_length=_core.MAX_SPLITS)]
#: What all buses call a group: id, round, split.
GroupName: TypeAlias = tuple[_Id, _Round | None, Label]
#: Of one block.
_Records: TypeAlias = Annotated[tuple[Origin, ...], msgspec.Meta(max_length=_core.MAX_GROUP_SIZE)]

#: Of a piece of weights: a piece is a block of the connection.
_MOST_PIECE_BYTES = 64 << 20

#: Where a source's announcements have come to: its incarnation, and the number of the last one.
Mark: TypeAlias = tuple[int, int]


class Subscription(NamedTuple):
    """A coordinator to a source: announce all that you hold.

    `question` grows with each that asks for what is held from now on.
    """

    bus: str
    term: Term = 0
    question: Count = 0


class Announcement(NamedTuple):
    """A source to the coordinator: heads of what it holds, as the core packs them.

    `whole` says that it holds nothing else; otherwise they are what came since the one before.
    `answers` are term and question of the newest Subscription that was there when it was made.
    `splits` has the labels of the heads' splits.
    """

    bus: str
    mark: Mark
    whole: bool
    heads: bytes
    answers: tuple[int, int] = (0, 0)
    splits: Labels = (_core.TRAIN,)


class SinkStateWanted(NamedTuple):
    """A coordinator to a sink: say what you have, and take no assignment of an earlier term."""

    sink: str
    term: Term


class SinkState(NamedTuple):
    """A sink to the coordinator, as an answer or since it has just begun.

    `settled` are on its bus, and their source has not said that it released them. `owed` it has
    taken on and will put.
    """

    sink: str
    incarnation: int
    term: int
    settled: frozenset[Origin]
    owed: frozenset[Origin]


class MissingSample(msgspec.Struct, frozen=True, array_like=True):
    """A sample that failed, or never came: of which group, and why. `attempt` is the next one."""

    group: GroupName
    group_size: _Size
    need: _Size
    index: _Place
    attempt: Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
    reason: str

    def __post_init__(self) -> None:
        """Refuse what fits no row of a bus."""
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
        """What it is known by: the same sample asked for once more is another one."""
        return (self.group, self.index, self.attempt)


class Assignment(NamedTuple):
    """The coordinator to a sink: put these, a group.

    `nbytes` is what they take; `checks` are the checksums of the heads by which they were grouped.
    `missing` are samples of it that will not come: its trainer is told that they failed.
    """

    sink: str
    incarnation: int
    term: int
    origins: _Records
    nbytes: Count = 0
    checks: tuple[int, ...] = ()
    missing: tuple[MissingSample, ...] = ()


class Assignments(NamedTuple):
    """The coordinator to a sink: several groups, as if each were said alone, in this order."""

    groups: tuple[Assignment, ...]


class Drop(NamedTuple):
    """The coordinator to a sink: have sources let these go, whose payload goes nowhere.

    A sink writes it down before, so that a part of a group is never left behind without the reason
    why the rest of it has gone.
    """

    sink: str
    incarnation: int
    term: int
    reason: Reason
    origins: tuple[Origin, ...]


class Fetch(NamedTuple):
    """A sink to a source: send these records, of which it asks under this number."""

    bus: str
    sink: str
    incarnation: int
    origins: _Records
    number: int = 0


class Fetched(NamedTuple):
    """The source's answer: those that it holds. `gone` had left after the announcement `mark`.

    `number` is that of the Fetch. On its way it names no `origins`: the block beside it does, whose
    splits have the labels `splits`.
    """

    sink: str
    incarnation: int
    origins: tuple[Origin, ...]
    gone: tuple[Origin, ...]
    mark: Mark
    number: int = 0
    splits: Labels = (_core.TRAIN,)


class Returned(NamedTuple):
    """A sink to the coordinator: `gone` had gone at their source after its announcement `mark`.

    `rest` was assigned with them, and is not put.
    """

    sink: str
    gone: frozenset[tuple[Origin, Mark]]
    rest: frozenset[Origin]


class Settled(NamedTuple):
    """A sink to the coordinator: these are on its bus, and in its journal."""

    sink: str
    origins: frozenset[Origin]


class Release(NamedTuple):
    """A sink to a source: these may go, for this reason of its ledger."""

    bus: str
    sink: str
    origins: frozenset[Origin]
    reason: Reason


class Released(NamedTuple):
    """The source's answer: they have gone, and `mark` was its last announcement by then."""

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
    """A coordinator to all: say who you are. One that begins has term 0: it will be the newest."""

    term: Term = 0


class Hello(NamedTuple):
    """A source or a sink to the coordinator: who it is, when it begins and now and then.

    `largest_record` and `largest_group` are bytes that its bus takes, `largest_count` records of a
    group; 0 of a source. `held`, `moving` and `settled` count records. `term` and `coordinator` are
    of the newest coordinator that it has heard, `asked` of the newest Wanted, `mark` of its newest
    announcement. `oldest_ns` is when its oldest record was committed. `offers`: it has prompts.
    `splits`: those of a sink's bus.
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
    """The coordinator to a source: what its producers are to see of the trainers' buses."""

    policy_version: Count
    paused: str | None


class Wanted(NamedTuple):
    """The coordinator to a source: its producers are asked for these samples, and for no others.

    `number` grows within a term; an older list than the newest taken is ignored.
    """

    bus: str
    term: Term
    number: Count
    samples: tuple[MissingSample, ...]


class Unanswered(NamedTuple):
    """A source to the coordinator: this sample was asked for, and whoever had it died."""

    bus: str
    sample: MissingSample


class Cancelled(NamedTuple):
    """The coordinator to a source: these groups need no more samples."""

    groups: tuple[GroupName, ...]


class Begun(NamedTuple):
    """A sink to the coordinator: these groups are made, though one of their key may have ended."""

    groups: tuple[GroupName, ...]


class PromptOffer(NamedTuple):
    """A request of a trainer's bus, by its number there; its prompt is beside the message."""

    number: Count
    group: GroupName
    group_size: Annotated[int, msgspec.Meta(ge=1, le=_core.MAX_GROUP_SIZE)]
    need: Annotated[int, msgspec.Meta(ge=1, le=_core.MAX_GROUP_SIZE)]
    level: Annotated[int, msgspec.Meta(ge=0, lt=_core.REQUEST_LEVELS)]
    nbytes: Count


class Prompts(NamedTuple):
    """A sink to the source of this incarnation, -1 for one that it has not heard yet.

    Workers are to make `offers`, and no more what is `over`: numbers on the bus of the sink.
    """

    bus: str
    trainer: Identity
    incarnation: int
    mark: Mark
    over: tuple[Count, ...] = ()
    offers: tuple[PromptOffer, ...] = ()


class Demand(NamedTuple):
    """A source to a sink: which of its requests are here, and how many samples are wanted.

    `answers`: the newest Prompts. `ended`: answered, and no record is here any more.
    """

    bus: str
    trainer: Identity
    mark: Mark
    answers: Mark
    here: tuple[Count, ...]
    ended: tuple[Count, ...] = ()
    wants: Count = 0


class Peers(NamedTuple):
    """The coordinator to a sink: where buses are. `complete`: a bus that is not named has gone.

    `first`: other splits than "train" are this one's.
    """

    addresses: tuple[tuple[str, str], ...]
    complete: bool
    first: bool = True


class Transfer(NamedTuple):
    """Bytes that a version of weights goes over as: all of it, or its patch.

    `pool` is the identity of the trainer's pool, by which `sequence` and `base` count; `base` is 0
    for all of the version.
    """

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
    """The publisher's side to a mirror: get this, from there; what it says of itself is beside it.

    `nbytes` are those of the transfer, in pieces of `piece_bytes`, and `size` of the version.
    `digests`: whether its blocks are to have theirs.
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
    """A mirror to its upstream: send these pieces, at once or when you have them."""

    transfer: Transfer
    pieces: Annotated[tuple[Count, ...], msgspec.Meta(max_length=256)]


class VersionPiece(NamedTuple):
    """A piece, with its checksum as the publisher's side computed it.

    The last piece has the digest: of a whole version over the checksums of its pieces, of a patch
    over all elements that the patch is about, as they are after it.
    """

    transfer: Transfer
    number: Count
    crc: Count
    digest: Count | None = None


class PiecesGone(NamedTuple):
    """The answer to PiecesWanted of one who has no such transfer, or has it no more."""

    transfer: Transfer


class EngineRow(NamedTuple):
    """A reader of a mirror's pool: what it runs, and what it refused, and why.

    `sequence` is that of the trainer's pool, 0 for what did not come from there; `refuses` is the
    same of what it refused, or is loading, by `code`. `holds`: whether it has a lease.
    """

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
    """A mirror to the publisher's side: what it has and gets, and who reads it.

    It has the version `sequence` of the trainer's pool `pool`, 0 for none. `done` is the transfer
    that it has got whole and still hands on, `getting` the one of which it has so many `pieces`.
    `error` is why it can take none; `damaged` counts pieces that were not what was sent.
    """

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

#: Each message's number is its place in the union.
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


#: What decoding raises: also for text that is no UTF-8, and for lists that are too deep.
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
    """Return the message of these bytes."""
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
