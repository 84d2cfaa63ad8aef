"""A type checker finds a wrong keyword, or a wrong value, in each public call."""

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmbus
from trainer_adapter._arguments import ConsumerOptions

CALLS = Path(__file__).parents[1] / "client" / "typed_calls.py"


@pytest.mark.slow
def test_pyright_finds_each_mistake_that_mypy_finds_in_public_calls(tmp_path: Path) -> None:
    pytest.importorskip("pyright")
    # Without the ignores, by which `make check` asks mypy; a comparison in vain is mypy's alone.
    lines = CALLS.read_text().splitlines()
    wrong = {
        number
        for number, line in enumerate(lines, 1)
        if "# type: ignore" in line and "comparison-overlap" not in line
    }
    source = tmp_path / "calls.py"
    source.write_text("\n".join(line.partition("  # type: ignore")[0] for line in lines))
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, source],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(CALLS.parents[2]),
            "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1",
        },
    )
    found = {int(line) for line in re.findall(r"calls\.py:(\d+):\d+ - error", result.stdout)}
    assert len(wrong) > 90, "the mistakes were not read"
    assert found == wrong, result.stdout + result.stderr


def test_the_handler_takes_each_option_of_a_consumer() -> None:
    taken = inspect.signature(shmbus.Consumer).parameters.keys()
    assert ConsumerOptions.__annotations__.keys() == taken - {"name", "rank", "world_size"}
