"""The cases that fuzzing the Python decoders kept, run again; `make check-fuzz` has those in C."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FUZZ = Path(__file__).parent / "fuzz"


def test_every_kept_case_of_the_decoders_ends_as_promised() -> None:
    cases = sorted(map(str, (FUZZ / "corpus" / "decoders").iterdir()))
    assert len(cases) >= 10
    argv = [sys.executable, str(FUZZ / "fuzz_decoders.py"), "--replay", *cases]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr
