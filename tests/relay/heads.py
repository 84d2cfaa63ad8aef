"""Heads of records as tests write them, and a reader's records by their heads."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from shmbus.relay.messages import Origin, OriginHead, unpack_heads
from shmbus.relay.record_reader import RecordReader, reason_of
from shmbus.relay.sink import Journal
from shmbus_ext import _core

__all__ = ["RecordHead", "export", "head_of", "healed", "make_origin", "poll"]


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
    committed_ns: int
    check: int
    need: int
    reason: str | None = None
    split: int = 0


def make_origin(bus: str, producer_id: int, sequence: int) -> Origin:
    """Return what a record of the bus of this identity is known by."""
    return bytes.fromhex(bus) + struct.pack(">QQ", producer_id, sequence)


def healed(journal: Journal, committed: int) -> Journal:
    """Return what it says once the lane is nobody's: which part of the intent is on the bus."""
    done = journal.intent[: committed - journal.before]
    return journal._replace(
        settled=journal.settled.union(done),
        intent=journal.intent[len(done) :],
        before=journal.before + len(done),
    )


def head_of(bus: str, head: RecordHead) -> OriginHead:
    """Return what a head of the bus of this identity is among all buses."""
    return OriginHead(make_origin(bus, head.producer_id, head.sequence), *head[2:])


def poll(reader: RecordReader, max_records: int = 1000) -> list[OriginHead]:
    _, records = reader.poll(max_records)
    return unpack_heads(reader.identity, _core.read_heads(records, reason_of))


def export(reader: RecordReader, origins: Sequence[Origin]) -> bytes:
    return bytes(reader.export(origins, bytearray(4 << 20)))
