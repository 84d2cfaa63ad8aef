"""Control messages: frames from any pieces, all else is refused, and frames are bounded."""

import random
import struct

import msgspec
import pytest

from shmbus import ProtocolError
from shmbus.base import limits
from shmbus.control import messages

REQUESTS: list[messages.Request] = [
    messages.Hello(version=1, bus="b", policy={"group_timeout": 3.0}, client=5, rank=1),
    messages.Claim(groups=[messages.Held(token=1, identities=bytes(32), reason=0, step=4)]),
    messages.Take(id=1, max_groups=64, timeout_s=0.5),
    messages.TakeStep(id=2, tokens=4096, max_wait_s=1.0),
    messages.End(numbers=[1, 2, 3], reason=0),
    messages.GiveBack(numbers=[4]),
    messages.SetPolicyVersion(id=3, policy_version=12),
    messages.GetLedger(id=4),
    messages.GetStatus(id=5),
    messages.Bye(),
]


def test_frames_are_put_together_from_any_pieces(seed: int) -> None:
    rng = random.Random(seed)
    stream = b"".join(messages.frame(m) for m in REQUESTS * 20)
    buffer = messages.FrameBuffer()
    found = []
    at = 0
    while at < len(stream):
        size = rng.choice([1, 2, 3, 5, 50, 500])
        found += [messages.decode_request(body) for body in buffer.feed(stream[at : at + size])]
        at += size
    assert found == REQUESTS * 20


def test_a_buffer_that_is_received_into_again_changes_no_frame() -> None:
    sent = [messages.frame(messages.GetLedger(id=number)) for number in range(20)]
    data = b"".join(sent)
    frames, received = messages.FrameBuffer(), bytearray(7)
    bodies: list[bytes] = []
    for at in range(0, len(data), len(received)):
        piece = data[at : at + len(received)]
        received[: len(piece)] = piece
        bodies += frames.feed(memoryview(received)[: len(piece)])
    assert bodies == [frame[4:] for frame in sent]


def test_an_oversized_frame_is_refused_by_its_announcement_alone() -> None:
    with pytest.raises(ProtocolError, match=str(limits.MAX_MESSAGE_BYTES)):
        messages.FrameBuffer().feed(struct.pack("<I", limits.MAX_MESSAGE_BYTES + 1))
    with pytest.raises(ProtocolError, match="fewer groups"):
        messages.frame(
            messages.Leases(
                id=1,
                groups=[messages.Granted(number=1, size=1, places=bytes(limits.MAX_MESSAGE_BYTES))],
            )
        )


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "Nonsense"}),
        msgspec.msgpack.encode({"type": "Take", "id": 1}),
        msgspec.msgpack.encode({"type": "Take", "id": -1, "max_groups": 1}),
        msgspec.msgpack.encode({"type": "Take", "id": 1, "max_groups": 0}),
        msgspec.msgpack.encode({"type": "Take", "id": 1, "max_groups": 1, "timeout_s": -1.0}),
        msgspec.msgpack.encode({"type": "End", "numbers": [1], "reason": 256}),
        msgspec.msgpack.encode({"type": "End", "numbers": ["1"], "reason": 0}),
        msgspec.msgpack.encode({"type": "Hello", "version": 1, "bus": "b" * 2000}),
        msgspec.msgpack.encode({"type": "Hello", "version": 1, "bus": "b", "client": 10**6}),
        messages.frame(messages.Bye())[4:] + b"\x00",
        b"\x91" * 10_000,
    ],
)
def test_what_is_no_request_is_a_protocol_error(body: bytes) -> None:
    with pytest.raises(ProtocolError, match="control message"):
        messages.decode_request(body)


def test_damaged_messages_never_raise_anything_else(seed: int) -> None:
    rng = random.Random(seed)
    bodies = [messages.frame(m)[4:] for m in REQUESTS]
    for _ in range(20_000):
        body = bytearray(rng.choice(bodies))
        for _ in range(rng.randint(1, 4)):
            kind = rng.randrange(3)
            at = rng.randrange(len(body) + 1)
            if kind == 0 and at < len(body):
                body[at] = rng.randrange(256)
            elif kind == 1:
                body[at:at] = rng.randbytes(rng.randint(1, 8))
            else:
                del body[at : at + rng.randint(1, 8)]
        try:
            messages.decode_request(bytes(body))
        except ProtocolError:
            continue
