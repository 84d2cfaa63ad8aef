"""atroposlib's own tests of its API server pass against the gateway, and ran against it."""

import os
import re
import subprocess
import sys
from pathlib import Path

import atroposlib.tests
import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
THEIR_TESTS = Path(next(iter(atroposlib.tests.__path__)))
FILES = ("test_api_compression.py", "test_api_legacy.py", "test_api_messages_handling.py")
COUNT = 36


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_all_of_them_pass_and_were_answered_by_the_gateway(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "swap", "-p", "no:cacheprovider"]
    argv += ["-c", "/dev/null", "--rootdir", str(tmp_path), *(str(THEIR_TESTS / f) for f in FILES)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT)]),
        "HF_HUB_OFFLINE": "1",
    }
    run = subprocess.run(
        argv, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240
    )
    said = run.stdout + run.stderr
    assert run.returncode == 0, said
    assert re.search(rf"\b{COUNT} passed\b", said), said
    proof = re.search(r"started: (\d+); .*: (\d+); of other servers: (\d+)", said)
    assert proof is not None, said
    started, ours, others = map(int, proof.groups())
    assert started == len(FILES)
    assert ours > COUNT
    assert others == 0
