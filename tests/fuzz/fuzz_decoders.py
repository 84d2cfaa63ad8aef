"""The Python decoders of what a record carries: they return a value, or raise what they promise.

An input's first byte chooses: meta, a dtype, heads of records, or a whole record of a bus that is
read through a Consumer.
"""

import atexit
import contextlib
import os
import struct
from pathlib import Path

import numpy as np
from harness import run

import shmbus
from shmbus.data import encoding
from shmbus_ext import _core

_NAME = f"fuzz-{os.getpid()}"
_RECORD_BYTES = 512


def fuzz_meta(data: bytes) -> None:
    """Any bytes decode, or raise ValueError."""
    with contextlib.suppress(ValueError):
        encoding.decode_meta(data)


def fuzz_dtype(data: bytes) -> None:
    """Any description gives a plain dtype without objects, or a TypeError."""
    try:
        dtype = encoding.decode_dtype("field", data)
    except TypeError:
        return
    assert isinstance(dtype, np.dtype) and not dtype.hasobject, dtype


def fuzz_heads(data: bytes) -> None:
    """Any bytes give heads for a group table, or a ValueError."""
    with contextlib.suppress(ValueError):
        _core.GroupTable().put(_core.unpack_heads(data), 0.0)


class FuzzedBus:
    def __init__(self) -> None:
        shmbus.Bus.create(_NAME, "256KiB", max_producers=2, extent_bytes=4096).close()
        atexit.register(shmbus.unlink, _NAME)
        self.file = Path(f"/dev/shm/shmbus.{_NAME}").open("r+b", buffering=0)  # noqa: SIM115
        self.producer = shmbus.Producer(_NAME)
        self.consumer = shmbus.Consumer(_NAME)
        self.number = 0

    def run(self, data: bytes) -> None:
        """Put a record, overwrite what the input says, and read it to the end."""
        self.number += 1
        mark = b"marker-%08d" % self.number
        array = np.arange(64, dtype=np.int32)
        self.producer.put(mark.decode(), group_size=1, index=0, data=array, meta={"a": 1})
        self.file.seek(0)
        start = self.file.read().index(mark) // 64 * 64 - 128
        for at in range(0, len(data) - 2, 3):
            offset, value = struct.unpack_from("<HB", data, at)
            self.file.seek(max(start, 0) + offset % _RECORD_BYTES)
            self.file.write(bytes([value]))
        for group in self.consumer.take(8, timeout=0):
            for sample in group:
                repr(sample)
                with contextlib.suppress(ValueError):
                    _ = sample.meta
                with contextlib.suppress(TypeError):
                    for name in sample.keys():  # noqa: SIM118
                        sample[name].tobytes()
            group.ack()
        assert self.consumer.stats().balanced

    def close(self) -> None:
        self.consumer.close()
        self.producer.close()
        self.file.close()


class Decoders:
    """Targets that the first byte of an input chooses from."""

    def __init__(self) -> None:
        self.bus = FuzzedBus()

    def run(self, data: bytes) -> None:
        ways = [fuzz_meta] * 3 + [fuzz_dtype] * 3 + [fuzz_heads, self.bus.run]
        if data:
            ways[data[0] % 8](data[1:])

    def close(self) -> None:
        self.bus.close()


if __name__ == "__main__":
    run(Decoders)
