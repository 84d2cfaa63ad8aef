"""How the fuzz targets in Python are run: by atheris, by random mutations, or over kept cases.

Usage of a target: ``python TARGET.py [libFuzzer options] [corpus]`` with atheris installed (extra
``fuzz``); ``--random SECONDS SEED FILES...`` mutates the files without it; ``--replay FILES...``.
"""

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol


class Bytes:
    """Reads an input from its front; zeros follow its end."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def __bool__(self) -> bool:
        return self._at < len(self._data)

    def take(self, count: int) -> bytes:
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, nbytes: int = 1) -> int:
        return int.from_bytes(self.take(nbytes), "little")


class Target(Protocol):
    """What is fuzzed, made once for all inputs."""

    def run(self, data: bytes) -> None:
        """Meet one input."""

    def close(self) -> None:
        """Let go of everything."""


def run(make: Callable[[], Target]) -> None:
    name = Path(sys.argv[0]).stem
    target = make()
    fuzz_one = target.run
    try:
        if sys.argv[1:2] == ["--replay"]:
            for path in sys.argv[2:]:
                fuzz_one(Path(path).read_bytes())
            print(f"{name}: {len(sys.argv) - 2} cases")
        elif sys.argv[1:2] == ["--random"]:
            seconds, seed = float(sys.argv[2]), int(sys.argv[3])
            print(f"{name}: seed {seed}, {_mutate(fuzz_one, seconds, seed, sys.argv[4:])} cases")
        else:
            import atheris

            atheris.instrument_all()
            atheris.Setup(sys.argv, fuzz_one)
            atheris.Fuzz()
    finally:
        target.close()


def _mutate(fuzz_one: Callable[[bytes], None], seconds: float, seed: int, names: list[str]) -> int:
    rng = random.Random(seed)
    corpus = [Path(name).read_bytes() for name in names] or [b""]
    end = time.monotonic() + seconds
    count = 0
    while time.monotonic() < end:
        data = bytearray(rng.choice(corpus))
        for _ in range(rng.randrange(8)):
            at = rng.randrange(len(data) + 1)
            way = rng.randrange(4)
            if way == 0:
                data[at : at + 1] = rng.randbytes(1)
            elif way == 1:
                data[at:at] = rng.randbytes(rng.randrange(9))
            elif way == 2:
                del data[at : at + rng.randrange(9)]
            else:
                other = rng.choice(corpus)
                data[at:] = other[rng.randrange(len(other) + 1) :]
        count += 1
        try:
            fuzz_one(bytes(data))
        except BaseException:
            print(f"seed {seed}, case {count}: {bytes(data).hex()}", file=sys.stderr)
            raise
    return count
