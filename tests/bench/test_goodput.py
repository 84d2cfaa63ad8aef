"""Goodput under faults: the scenario, the auditor in every adapter, a short run with deaths.

A contender that is not installed here is skipped by name. No time is asserted.
"""

import importlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, wait_until

from bench.contest.run import versions
from bench.goodput import run as goodput
from bench.goodput.adapters import ADAPTERS, About
from bench.goodput.books import Book, audit, merged, numbers_of, write_checkpoint
from bench.goodput.scenario import KINDS, Scenario
from bench.processes import MeasurementError, descendants
from bench.row import Row

ROOT = Path(__file__).resolve().parents[2]
PATH = {"PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}
DEADLINE_S = 280.0
pytestmark = pytest.mark.timeout(DEADLINE_S + 20)
#: Adapters that start a cluster, or import a trainer.
HEAVY = ("shmbus_relay", "ray_queue", "transfer_queue", "trl")


def installed(name: str) -> str:
    """Skip the test if the contender is missing here; return the name."""
    try:
        versions(goodput.about(name))
    except MeasurementError as error:
        pytest.skip(f"{name}: {error}")
    return name


@pytest.fixture
def part_of(spawn: Spawner, tmp_path: Path) -> Any:
    def part(name: str, *options: object) -> tuple[Row, Path]:
        output, parts = tmp_path / "figures.json", tmp_path / "parts"
        arguments = ["--tiny", "--contender", installed(name), "--parts", parts, *options]
        spawn.module("bench.goodput", *arguments, "--output", output, env=PATH).finish(DEADLINE_S)
        (row,) = json.loads(output.read_text())["rows"]
        return Row.from_json(row), parts / f"{name}-0"

    return part


# --- the auditor


@pytest.mark.parametrize(
    ("handed", "ended", "trained", "fates"),
    [
        ([0, 10, 20], [0, 10, 20], [(0, 10), (10, 10), (20, 10)], {"once": 30}),
        ([0, 10, 20], [0, 10, 20], [(0, 10), (20, 10)], {"once": 20, "lost": 10}),
        ([0, 10, 20], [0, 10, 20], [(0, 20), (20, 10), (5, 10)], {"once": 20, "twice": 10}),
        ([0], [0, 10], [(0, 10)], {"once": 10, "held": 10, "cut": 10}),
        ([], [0, 10, 20], [(0, 30)], {"once": 30}),
        ([0, 10, 20], [0, 10, 20], [(0, 20), (-1, 10)], {"once": 20, "lost": 10, "torn": 10}),
    ],
    ids=["whole", "lost", "twice", "held-and-cut", "not-written-down", "torn"],
)
def test_each_token_has_one_fate(
    tmp_path: Path,
    handed: list[int],
    ended: list[int],
    trained: list[tuple[int, int]],
    fates: dict[str, int],
) -> None:
    for name, firsts in (("begun", [0, 10, 20]), ("ended", ended), ("handed", handed)):
        book = Book(tmp_path, name)
        for first in firsts:
            book.note(first, 10)
        book.close()
    write_checkpoint(tmp_path, None, trained)
    found = audit(tmp_path)._asdict()
    names = ("cut", "held", "once", "twice", "lost", "torn")
    assert {name: found[name] for name in names if found[name]} == fates
    assert found["generated"] == 30


def test_an_answer_with_a_hole_has_no_numbers_and_adjacent_answers_are_one_range() -> None:
    assert numbers_of(np.arange(7, 12)) == (7, 5)
    assert numbers_of(np.array([7, 8, 10])) == (-1, 3)
    assert numbers_of(np.array([])) == (-1, 0)
    assert merged([(5, 5), (0, 5), (12, 3), (13, 2), (-1, 4)]) == [
        (-1, 4),
        (0, 10),
        (12, 3),
        (13, 2),
    ]


@pytest.mark.parametrize("fault", ["loss", "double"])
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n in HEAVY)) for n in ADAPTERS]
)
def test_the_auditor_finds_a_planted_fault_in_every_adapter(
    name: str, fault: str, part_of: Any
) -> None:
    row, place = part_of(name, "--plant", fault)
    first, count = json.loads((place / "planted").read_text())
    (found,) = row.figures["parts"]
    wanted = {"lost": count, "twice": 0} if fault == "loss" else {"lost": 0, "twice": count}
    assert {key: found[key] for key in wanted} == wanted
    assert found["lost_answers"] == ([[first, count]] if fault == "loss" else [])


# --- runs


@pytest.mark.parametrize("name", ["shmbus_embedded", "shmbus_daemon"])
def test_shmbus_trains_every_token_once_whatever_is_killed(name: str, part_of: Any) -> None:
    row, _ = part_of(name)
    (found,) = row.figures["parts"]
    killed = {"worker", "trainer", "engine"} | ({"daemon"} if name.endswith("daemon") else set())
    assert set(found["kills"]) == set(found["recovered_s"]) == killed
    assert row.value == 1.0 and row.met and not found["by_hand"] and not found["stopped"], found


def test_a_kept_part_is_not_measured_again(part_of: Any) -> None:
    first, place = part_of("mp_queue", "--plant", "loss")
    (place / "log").unlink()
    again, _ = part_of("mp_queue", "--plant", "loss", "--resume")
    assert again.figures["parts"] == first.figures["parts"] and not (place / "log").exists()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mp_queue-0/part", ["--resume", "--contender", "mp_queue"]),
        ("soak/pieces", ["--soak", "1"]),
    ],
)
def test_an_unreadable_part_is_named(name: str, options: list[str], tmp_path: Path) -> None:
    damaged = tmp_path / name
    damaged.parent.mkdir()
    damaged.touch()
    given = goodput.parser().parse_args(["--tiny", *options, "--parts", str(tmp_path)])
    with pytest.raises(MeasurementError, match=str(damaged)):
        goodput.measure(given)


def test_a_part_that_cannot_be_kept_leaves_the_one_before(tmp_path: Path) -> None:
    goodput.keep(tmp_path / "part", [1])
    (tmp_path / "part.new").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left"):
        goodput.keep(tmp_path / "part", [1, 2])
    assert goodput.kept(tmp_path / "part") == [1]


def test_a_soak_goes_on_from_its_pieces_and_ends_in_order_when_interrupted(
    spawn: Spawner, tmp_path: Path
) -> None:
    arguments = ["--tiny", "--soak", 1000, "--every", 0.3, "--parts", tmp_path]
    child = spawn.module("bench.goodput", *arguments, env=PATH)
    progress = tmp_path / "soak" / "progress"
    wait_until(lambda: progress.exists() and len(progress.read_text().splitlines()) > 3)
    child.popen.send_signal(signal.SIGINT)
    assert child.wait() == 128 + signal.SIGINT
    assert descendants(child.pid) == []
    output = tmp_path / "figures.json"
    arguments[2] = 8
    spawn.module("bench.goodput", *arguments, "--output", output, env=PATH).finish(DEADLINE_S)
    (row,) = json.loads(output.read_text())["rows"]
    assert row["value"] == 1.0 and sum(row["figures"]["pieces"][-1]["kills"].values()) >= 1


# --- bad input


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "expected JSON"),
        ("[]", "expected an object, got []"),
        ('{"wrokers": 2}', "unknown wrokers; expected some of workers"),
        ('{"workers": "two"}', "workers: expected int"),
        ('{"workers": 0}', "workers: expected int from"),
        ('{"kills": ["printer"]}', "unknown ['printer']"),
        ('{"kills": "worker"}', "kills: expected a list"),
        ('{"seeds": [0.5]}', "seeds: expected whole numbers"),
        ('{"seeds": []}', "seeds: expected whole numbers"),
        ('{"plant": "both"}', "plant: expected one of"),
    ],
)
def test_an_unknown_word_of_a_scenario_is_named(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "scenario.json"
    path.write_text(text)
    with pytest.raises(SystemExit) as refused:
        goodput.main(["--scenario", str(path)])
    said = capsys.readouterr().err
    assert refused.value.code == 2 and says in said and str(path) in said


def test_the_default_scenario_is_that_of_the_file_and_kills_each_kind_in_each_round() -> None:
    assert Scenario.read(goodput.DEFAULT) == Scenario()
    plan = [kind for _, kind in Scenario(rounds=3).schedule(7, ("worker", "daemon"))]
    assert sorted(plan) == ["daemon"] * 3 + ["worker"] * 3
    assert Scenario().schedule(1, KINDS) == Scenario().schedule(1, KINDS)


def test_a_missing_contender_and_another_version_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(goodput, "about", lambda _: About(
        title="t", packages=("no-such-package",), fairness="f",
    ))  # fmt: skip
    options = goodput.parser().parse_args(["--contender", "mp_queue", "--parts", str(tmp_path)])
    (row,) = goodput.measure(options)
    assert "no-such-package" in row.skipped
    assert goodput.other_versions({"packages": {"ray": "1.0", "numpy": "1"}}) == (
        "ray 1.0 in place of 2.60.0"
    )


def test_a_full_disk_ends_a_run_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "begun").symlink_to("/dev/full")
    with pytest.raises(MeasurementError, match="No space left on device: free space"):
        goodput.ran("mp_queue", Scenario(rounds=0), tmp_path, 0)


@pytest.mark.parametrize("name", ADAPTERS)
def test_every_adapter_has_its_parts_and_says_what_it_does_not_promise(name: str) -> None:
    found = importlib.import_module(f"bench.goodput.adapters.{name}")
    ends = ["link", "train", *(["work"] if found.ABOUT.workers else [])]
    assert all(callable(getattr(found, end)) for end in ends)
    assert found.ABOUT.packages and found.ABOUT.fairness and found.ABOUT.title
    source = (ROOT / "bench" / "goodput" / "adapters" / f"{name}.py").read_text()
    assert len(source.splitlines()) <= 150


def test_a_closed_loop_without_deaths_trains_every_token(spawn: Spawner, tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    arguments = ["--tiny", "--contender", "shmbus_daemon", "--output", output]
    spawn.module("bench.loop", *arguments, env=PATH).finish(DEADLINE_S)
    (row,) = (Row.from_json(each) for each in json.loads(output.read_text())["rows"])
    (part,) = row.figures["parts"]
    assert part["goodput"] == 1.0 and not part["kills"]
    assert row.values[0] == part["once"] / part["lived_s"] > 0
