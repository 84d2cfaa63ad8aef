"""The README's first example is run as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import Spawner

README = Path(__file__).parents[2] / "README.md"


def test_the_ten_lines_of_the_readme_run(spawn: Spawner, bus_name: str) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    output = spawn.script(code.replace('"readme"', repr(bus_name))).finish()
    scores = [0.0, 1.0] * 4
    assert f"gsm8k-17 {scores} {2047 * 1024}" in output
