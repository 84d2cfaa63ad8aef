"""A trajectory as one msgpack message: for the contenders that move bytes.

One struct as an array, arrays as binary strings beside each other. Decoding copies no array: they
are views of the message.
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
    """Makes messages."""

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
    """Makes arrays of messages."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(_Message)

    def decode(self, message: Any) -> Received:
        """Make the arrays of one message, which has to stay as it is."""
        one = self._decoder.decode(message)
        arrays = (
            np.frombuffer(one.tokens, np.int32),
            np.frombuffer(one.loss_mask, np.uint8),
            np.frombuffer(one.logprobs, np.float32),
        )
        return one.instance_id, one.index, arrays
