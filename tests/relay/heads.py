"""Heads of records as tests write them, and a reader's records by their heads."""

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from shmbus.relay.messages import Origin, OriginHead, unpack_heads
from shmbus.relay.record_reader import RecordReader, reason_of
from shmbus.relay.sink import Journal
from shmbus_ext import _core

_ROW = struct.Struct("=32sqqqQdIHHHBBI")
_NO_REASON = 2**32 - 1


class RecordHead(NamedTuple):
    producer_id: int
    sequence: int
    instance_id: str
    round: int | None
    group_size: int
    index: int
    score: float
    policy_version: int
    nbytes: int
    made_ns: int
    check: int
    need: int
    reason: str | None = None
    split: int = 0


def make_origin(bus: str, producer_id: int, sequence: int) -> Origin:
    """Return the name of a record on the bus of this identity."""
    return bytes.fromhex(bus) + struct.pack(">QQ", producer_id, sequence)


def healed(journal: Journal, committed: int) -> Journal:
    """Return its report on a free lane: the part of the intent on the bus."""
    done = journal.intent[: committed - journal.before]
    return journal._replace(
        settled=journal.settled.union(done),
        intent=journal.intent[len(done) :],
        before=journal.before + len(done),
    )


def pack_head(origin: Origin, head: RecordHead | OriginHead) -> bytes:
    """Return the bytes of a head, as `_core.read_heads` writes them."""
    id_, reason = head.instance_id.encode(), (head.reason or "").encode()
    row = _ROW.pack(
        origin, _core.NO_ROUND if head.round is None else head.round, head.policy_version,
        head.made_ns, head.nbytes, head.score, head.check, head.group_size, head.need, head.index,
        len(id_), head.split, _NO_REASON if head.reason is None else len(reason),
    )  # fmt: skip
    return row + id_ + reason


def pack_heads(heads: Iterable[OriginHead]) -> bytes:
    return b"".join(pack_head(each.origin, each) for each in heads)


def head_of(bus: str, head: RecordHead) -> OriginHead:
    """Return the global name of a head on the bus of this identity."""
    packed = pack_head(make_origin(bus, head.producer_id, head.sequence), head)
    (made,) = _core.unpack_heads(packed, bytes(range(16)))
    return made


def poll(reader: RecordReader, max_records: int = 1000) -> list[OriginHead]:
    _, records = reader.poll(max_records)
    return unpack_heads(reader.identity, _core.read_heads(records, reason_of))


def export(reader: RecordReader, origins: Sequence[Origin]) -> bytes:
    return bytes(reader.export(origins, bytearray(4 << 20)))
