"""A trajectory as a msgpack message, for contenders that move bytes.

The struct becomes an array, its arrays become adjacent binary strings. Decoding copies no array:
the result views the message.
"""

from typing import Any

import msgspec
import numpy as np

from bench.contenders.base import Received
from bench.workload import Source, Workload

__all__ = ["Decoder", "Encoder"]


class _Message(msgspec.Struct, array_like=True, gc=False):
    instance_id: str
    group_size: int
    index: int
    score: float
    policy_version: int
    tokens: memoryview
    loss_mask: memoryview
    logprobs: memoryview


class Encoder:
    """Encoder of messages."""

    def __init__(self, workload: Workload) -> None:
        self._encoder = msgspec.msgpack.Encoder()
        self._group_size = workload.group_size

    def encode(self, instance_id: str, index: int, source: Source) -> bytes:
        """Make one message."""
        tokens, loss_mask, logprobs = source
        return self._encoder.encode(
            _Message(
                instance_id,
                self._group_size,
                index,
                1.0,
                3,
                tokens.data,
                loss_mask.data,
                logprobs.data,
            )
        )


class Decoder:
    """Decoder of messages into arrays."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(_Message)

    def decode(self, message: Any) -> Received:
        """Make arrays over a message; the message has to stay unchanged."""
        one = self._decoder.decode(message)
        arrays = (
            np.frombuffer(one.tokens, np.int32),
            np.frombuffer(one.loss_mask, np.uint8),
            np.frombuffer(one.logprobs, np.float32),
        )
        return one.instance_id, one.index, arrays
