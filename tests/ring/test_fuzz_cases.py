"""The cases that fuzzing in Python kept, run again; `make check-fuzz` has those in C."""

import importlib
import random
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from shmbus.control import messages

FUZZ = Path(__file__).parents[1] / "fuzz"


@pytest.mark.parametrize("target", ["decoders", "control", "snapshot"])
def test_every_kept_case_ends_as_promised(target: str) -> None:
    cases = sorted(map(str, (FUZZ / "corpus" / target).iterdir()))
    assert len(cases) >= 10
    argv = [sys.executable, str(FUZZ / f"fuzz_{target}.py"), "--replay", *cases]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_the_daemon_is_fuzzed_with_every_request(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(FUZZ))
    fuzzer, bytes_of = importlib.import_module("fuzz_control"), importlib.import_module("harness")
    rng = random.Random(seed)
    for number, kind in enumerate(get_args(messages.Request)):
        for _ in range(100):
            given = bytes_of.Bytes(bytes([number]) + rng.randbytes(200))
            request = fuzzer.request(given, {})
            assert type(request) is kind
            assert messages.decode_request(messages.frame(request)[4:]) == request
