"""The cases that fuzzing in Python kept, run again; `make check-fuzz` has those in C."""

import subprocess
import sys
from pathlib import Path

import pytest

FUZZ = Path(__file__).parents[1] / "fuzz"


@pytest.mark.parametrize("target", ["decoders", "control", "snapshot"])
def test_every_kept_case_ends_as_promised(target: str) -> None:
    cases = sorted(map(str, (FUZZ / "corpus" / target).iterdir()))
    assert len(cases) >= 10
    argv = [sys.executable, str(FUZZ / f"fuzz_{target}.py"), "--replay", *cases]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
