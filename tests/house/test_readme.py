"""The README's first example is run as it stands, and its figures are those of the kept run."""

import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
from conftest import Spawner, ends_of

import shmbus
from shmbus.cli import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
TEXT = README.read_text()
FIELDS = {"tokens": np.int32, "logprobs": np.float32, "loss_mask": np.uint8}


def test_the_ten_lines_of_the_readme_run(spawn: Spawner, bus_name: str) -> None:
    code = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[0]
    assert len([line for line in code.splitlines() if line and "import" not in line]) <= 10
    output = spawn.script(code.replace('"readme"', repr(bus_name))).finish()
    scores = [0.0, 1.0] * 4
    assert f"gsm8k-17 {scores} {2047 * 1024}" in output


def test_the_comparison_has_the_kept_figures() -> None:
    kept = json.loads((ROOT / "bench" / "results" / "two-cores.json").read_text())["rows"]
    rows = {row["beside"]: row for row in kept if row["name"].startswith("against-")}
    names = ("ray", "TransferQueue", "multiprocessing.Queue")
    rates = [rows["ray"]["value"]]
    rates += [statistics.median(rows[name]["beside_values"]) for name in names]
    (shown,) = re.findall(r"^\| trajectories a second \|(.*)\|$", README.read_text(), re.MULTILINE)
    assert [cell.strip() for cell in shown.split("|")][:4] == [f"{rate:,.0f}" for rate in rates]


def test_the_first_block_shows_how_to_run_and_how_to_test() -> None:
    first = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)[0]
    commands = [line.partition("#")[0].strip() for line in first.splitlines()]
    assert {"make demo", "make test"} <= set(commands)
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert {command.split()[1] for command in commands if command} <= set(targets)


def test_each_command_of_the_readme_exists() -> None:
    text = README.read_text()
    named = set(re.findall(r"\bshmbus ([a-z]+) run1", text))
    listed = re.search(r"# and ([a-z, ]+) \.\.\.", text)
    assert listed is not None
    named |= set(listed[1].split(", "))
    for name in sorted(named):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0, name


def test_the_error_of_the_readme_is_a_full_buses_own(bus_name: str) -> None:
    fields = {name: np.zeros(2048, kind) for name, kind in FIELDS.items()}
    bus = shmbus.Bus.create(bus_name, "1MiB")
    with ends_of(bus, label="train.py@node3") as (producer, consumer):
        with pytest.raises(shmbus.BusFullError) as full:
            for number in range(100):
                index = number % 8
                producer.put(f"q{number // 8}", group_size=8, index=index, timeout=0.1, **fields)
                groups = consumer.take(timeout=0) if number < 48 else []
                assert not groups or len(groups[0]) == 8

        def shape(text: str) -> str:
            return re.sub(r"\d+(\.\d+)?", "0", " ".join(text.split()))

        shown = re.findall(
            r"```text\nshmbus\.errors\.BusFullError: (.*?) \.\.\.\n```", TEXT, re.DOTALL
        )
        said = str(full.value).replace(bus_name, "run1")
        assert shape(said).startswith(shape(shown[0])), said
