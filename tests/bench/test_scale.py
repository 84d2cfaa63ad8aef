"""The scale report: its exponents, and its short form on real buses; no cost is asserted."""

import json
import os
import re
import signal
from pathlib import Path

import pytest
from conftest import Spawner, wait_until

from bench.processes import descendants
from bench.row import Row
from bench.scale import SCALES, exponent

ROOT = Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
DEADLINE_S = 300.0
QUICK = ["ranks", "retries", "prompts", "nodes"]


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 3.0])
def test_an_exponent_is_that_of_the_costs(power: float) -> None:
    sizes = [16, 256, 4096]
    assert exponent(sizes, [7.0 * size**power for size in sizes]) == pytest.approx(power, abs=1e-9)


@pytest.mark.timeout(DEADLINE_S + 20)
@pytest.mark.parametrize(
    "names", [QUICK, pytest.param([n for n in SCALES if n not in QUICK], marks=pytest.mark.slow)]
)
def test_the_short_form_measures_each_row_at_its_sizes(
    names: list[str], spawn: Spawner, tmp_path: Path
) -> None:
    output = tmp_path / "scale.json"
    arguments = [part for name in names for part in ("--only", name)]
    spawn.module("bench.scale", "--quick", "--output", output, *arguments, env=PATH).finish(
        DEADLINE_S
    )
    rows = [Row.from_json(row) for row in json.loads(output.read_text())["rows"]]
    assert [row.name for row in rows] == [f"scale-{name}" for name in names]
    for name, row in zip(names, rows, strict=True):
        assert not row.skipped and row.value is not None
        assert tuple(row.figures["sizes"]) == SCALES[name].quick
        (costs,) = row.figures["us"]
        assert len(costs) == len(SCALES[name].quick) and min(costs) >= 0


@pytest.mark.parametrize("row", ["workers", "subscribers"])
def test_an_interrupted_report_leaves_no_segment(row: str, spawn: Spawner) -> None:
    child = spawn.module("bench.scale", "--quick", "--only", row, "--repetitions", 99, env=PATH)

    measuring: set[int] = set()

    def segments() -> list[str]:
        measuring.update(descendants(child.pid))
        pids = "|".join(map(str, measuring))
        return [name for name in os.listdir("/dev/shm") if re.search(f"scale-({pids})$", name)]

    wait_until(segments)
    child.popen.send_signal(signal.SIGINT)
    assert child.wait() == 128 + signal.SIGINT
    assert segments() == []
