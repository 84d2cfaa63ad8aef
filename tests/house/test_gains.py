"""The form of docs/gains.md counts with the figures that are kept, and counts right."""

import json
import re
import shutil
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.row import number

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "bench/results"


def measured(file: str, unit: str) -> set[str]:
    rows = json.loads((RESULTS / file).read_text())["rows"]
    of = [row for row in rows if row["unit"] == unit]
    values = [row[key] for row in of for key in ("values", "beside_values") if row[key]]
    return {number(statistics.median(each)) for each in values}


@pytest.fixture(scope="module")
def said() -> Any:
    node = shutil.which("node")
    if node is None:
        pytest.skip("needs node, which reads the page's script")
    run = {"samples": 1000, "tokens": 2048, "payload": 9, "step": 10, "model": 5, "link": 0}
    script = f"""
        const form = require({json.dumps(str(ROOT / "docs/gains.js"))}), run = {json.dumps(run)};
        const there = [form.plan(run), form.plan({{...run, link: 0.01}})];
        console.log(JSON.stringify({{...form, there}}));
    """
    return json.loads(subprocess.check_output([node, "-e", script], timeout=60))


def test_its_rates_are_those_of_the_kept_runs(said: Any) -> None:
    kept = measured("two-cores.json", "trajectories/s")
    assert set(map(number, said["TRAJECTORIES"].values())) <= kept
    kept = measured("weights-cpu.json", "GB/s") | measured("weights-h200.json", "GB/s")
    assert {number(rate) for pair in said["WEIGHTS"].values() for rate in pair} <= kept


def test_seconds_are_bytes_by_rate_and_a_link_bounds_them(said: Any) -> None:
    here, far = said["there"]
    ways = dict((name, seconds) for name, seconds, _ in here["ways"])
    assert ways["Atropos, REST"] == pytest.approx(1000 / 182)
    assert here["weights"][2][1] == pytest.approx(5 / 12.1 + 5 / 11.8)
    assert here["weights"][2][2] == pytest.approx((5 / 12.1 + 5 / 11.8) / 10)
    assert here["bytes"] == 1000 * 2048 * 9
    assert "less than 1 %" in here["verdict"]
    assert {seconds for _, seconds, _ in far["ways"]} > {1000 * 2048 * 9 / 1e7}


def test_kept_figures_name_no_place_of_a_machine() -> None:
    assert not {
        path.name: places
        for path in RESULTS.glob("*.json")
        if (places := re.findall(r'"(?:/[\w.-]+){2,}"', path.read_text()))
    }
