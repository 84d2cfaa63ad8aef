"""The page's table of models follows from their sizes and from a rate that was measured."""

import json
import re
import statistics
from pathlib import Path

ROOT = Path(__file__).parents[2]

PARAMETERS = {
    "Qwen3-0.6B": 0.596e9, "Qwen3-4B": 4.02e9, "Qwen3-8B": 8.19e9, "Qwen3-30B-A3B": 30.53e9,
    "Qwen3-32B": 32.76e9, "Qwen3-235B-A22B": 235.09e9,
}  # fmt: skip


def test_the_table_of_models_is_what_the_measured_rate_gives() -> None:
    page = (ROOT / "docs/weights.md").read_text()
    rows = json.loads((ROOT / "bench/results/weights-h200.json").read_text())["rows"]
    values = next(row["values"] for row in rows if row["name"] == "weights-cuda-from-host")
    rate = statistics.median(values) * 1e9
    assert f"{rate / 1e9:.1f} GB/s, what one H200 loads" in page
    table = page.partition("<!-- sizes -->")[2].partition("<!-- sizes: end -->")[0]
    found = dict(re.findall(r"^\| (Qwen\S+) \| (.+) \|$", table, re.MULTILINE))
    assert found.keys() == PARAMETERS.keys()
    for model, count in PARAMETERS.items():
        size = 2 * count
        seconds = [f"{size / ranks / rate:.2f}" for ranks in (1, 2, 4, 8)]
        wanted = [f"{size / 1e9:.1f} GB", f"{2 * size / 1e9:.1f} GB", *seconds]
        assert found[model].split(" | ") == wanted, model
