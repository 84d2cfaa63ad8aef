"""Goodput of every contender under the same deaths: ``python -m bench.goodput``.

Goodput: tokens trained exactly once, divided by tokens delivered to the contender. A scenario
(``--scenario FILE``) names workers, lengths, trainer, and deaths by seed. ``--parts`` keeps a part
of each run; ``--resume`` measures missing parts alone. ``--plant loss`` or ``double`` checks the
auditor: the trainer's end loses or doubles one answer. ``--soak SECONDS`` runs shmbus through its
daemon with a kill each ``--every`` seconds, and continues earlier pieces of ``--parts``.
"""

import argparse
import contextlib
import dataclasses
import importlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench import program
from bench.contest.run import interpreter, versions
from bench.goodput.adapters import ADAPTERS, About
from bench.goodput.books import audit
from bench.goodput.host import FULL, START_S, kill_tree
from bench.goodput.scenario import DEFAULT, Scenario
from bench.processes import MeasurementError
from bench.row import Row, skipped

__all__ = ["main", "measure", "parser"]

ROOT: Final = Path(__file__).resolve().parents[2]
PARTS: Final = ROOT / "build" / "goodput"
#: A short form: one round, one seed, no pause.
TINY: Final[dict[str, Any]] = {
    "rounds": 1, "seeds": (0,), "every_s": 0.3, "step_s": 0.01, "save_every": 2,
}  # fmt: skip
#: Growth allowed in a soak from the first half of its looks to the second. The highest look of each
#: half counts, since a young process uses less.
MAY_GROW: Final = {"MB": 64, "descriptors": 8, "threads": 4, "segments": 1}
SOAKED: Final = "shmbus_daemon"
END_S: Final = 60.0
#: Keys of a part that count tokens.
COUNTS: Final = ("generated", "cut", "held", "once", "twice", "lost", "torn")
Found = dict[str, Any]


def about(name: str) -> About:
    """Return a contender's description."""
    found: About = importlib.import_module(f"bench.goodput.adapters.{name}").ABOUT
    return found


def ran(name: str, scenario: Scenario, root: Path, seed: int, seconds: float = 0.0) -> Found:
    """Run a contender once, in its environment; return the figures."""
    root.mkdir(parents=True, exist_ok=True)
    asked: Found = {
        "module": f"bench.goodput.adapters.{name}", "scenario": dataclasses.asdict(scenario),
        "seed": seed, "seconds": seconds,
    }  # fmt: skip
    (root / "result").unlink(missing_ok=True)
    (root / "run").write_text(json.dumps(asked))
    kills = len(scenario.schedule(seed, scenario.kills))
    patience_s = scenario.patience_s + about(name).start_s + START_S
    deadline_s = seconds + 3 * START_S + kills * (2 * scenario.every_s + patience_s)
    with open(root / "log", "ab") as log:
        host = subprocess.Popen(
            [interpreter(about(name)), "-m", "bench.goodput.host", root],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TRL_EXPERIMENTAL_SILENCE": "1"},
        )  # fmt: skip
    try:
        host.wait(deadline_s)
    except subprocess.TimeoutExpired:
        pass
    except BaseException:
        # Ctrl-C: the host ends the run in order, and a later soak continues.
        host.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            host.wait(END_S)
        raise
    finally:
        if host.poll() is None:
            kill_tree(host.pid)
            host.wait()
    if (root / "result").exists():
        result: Found = json.loads((root / "result").read_text())
        if FULL in result.get("failed", ""):
            raise MeasurementError(result["failed"])
        return result
    log_end = (root / "log").read_text(errors="replace")[-3000:]
    if FULL in log_end:
        raise MeasurementError(f"{root}: {FULL}: free space, and run again")
    last = (log_end.splitlines() or ["the host ended"])[-1]
    why = f"not done in {deadline_s:g} s" if host.returncode < 0 else last
    if not (root / "begun").exists():
        return {"failed": why}
    found = audit(root)
    return {**found._asdict(), "goodput": found.goodput, "stopped": f"hung: {why}"}


def keep(path: Path, value: object) -> None:
    """Write JSON, whole or not at all: a death or a full disk loses no earlier part."""
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(value))
    new.replace(path)


def kept(path: Path) -> Any:
    """Read kept JSON; None for a missing file."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise MeasurementError(f"{path}: expected JSON, got {error}; remove the file") from error


def part(name: str, scenario: Scenario, seed: int, options: argparse.Namespace) -> Found:
    """Return a part: kept, or measured now."""
    place: Path = options.parts / f"{name}-{seed}"
    plan = dataclasses.asdict(scenario)
    found: Found | None = kept(place / "part") if options.resume else None
    if found and found["scenario"] == json.loads(json.dumps(plan)) and "failed" not in found:
        return found
    shutil.rmtree(place, ignore_errors=True)
    began = time.monotonic()
    found = {**ran(name, scenario, place, seed), "scenario": plan, "seed": seed}
    found["seconds"] = round(time.monotonic() - began, 1)
    keep(place / "part", found)
    return found


def row_of(name: str, parts: list[Found], installed: Found) -> Row:
    """Make a contender's row of all seeds."""
    whole = [each for each in parts if "failed" not in each]
    description = about(name)
    if not whole:
        return skipped(f"goodput-{name}", description.title, parts[0]["failed"])
    sums = {key: sum(each[key] for each in whole) for key in COUNTS}

    def merged(key: str) -> dict[str, list[float]]:
        found: dict[str, list[float]] = {}
        for each in whole:
            for kind, value in each.get(key, {}).items():
                found.setdefault(kind, []).append(value)
        return found

    recovered = {kind: statistics.median(values) for kind, values in merged("recovered_s").items()}
    by_hand = {kind: sum(values) for kind, values in merged("by_hand").items()}
    stopped = [each["stopped"] for each in whole if each["stopped"]]
    idle = statistics.median(each.get("trainer_idle", 0.0) for each in whole)
    note = (
        f"{sum(sum(values) for values in merged('kills').values()):g} kills; lost "
        f"{sums['lost'] + sums['torn']:,} tokens, twice {sums['twice']:,}; cut with worker or "
        f"engine {sums['cut'] + sums['held']:,}; trainer idle {idle:.0%}; recovered in "
        f"{', '.join(f'{kind} {s:.1f}' for kind, s in recovered.items())} s; by hand "
        f"{', '.join(f'{kind} {n:g}' for kind, n in by_hand.items()) or 'nothing'}"
        + (f"; ended early: {stopped[0]}" if stopped else "")
    )
    return Row(
        name=f"goodput-{name}", title=description.title,
        values=tuple(each["goodput"] for each in whole), note=note,
        figures={
            "sums": sums, "fairness": description.fairness, "installed": installed, "parts": parts
        },
    )  # fmt: skip


def other_versions(installed: Found) -> str:
    """Name packages of another version than the pinned version; "" for none."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {
        name: pin for name, _, pin in (line.partition("==") for line in lines) if ";" not in pin
    }
    return ", ".join(
        f"{name} {version} in place of {pins[name]}"
        for name, version in installed["packages"].items()
        if name in pins and version.partition("+")[0] != pins[name]
    )


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure the chosen contenders, or soak."""
    scenario = options.scenario
    if options.tiny:
        scenario = dataclasses.replace(scenario, **TINY)
    if options.repetitions:
        scenario = dataclasses.replace(scenario, seeds=tuple(range(options.repetitions)))
    if options.plant:
        scenario = dataclasses.replace(scenario, plant=options.plant, rounds=0)
    options.parts.mkdir(parents=True, exist_ok=True)
    if options.soak:
        return [soak(scenario, options)]
    rows = []
    for name in options.contender or ADAPTERS:
        try:
            installed = versions(about(name))
        except MeasurementError as error:
            rows.append(skipped(f"goodput-{name}", about(name).title, str(error)))
            continue
        if other := other_versions(installed):
            print(f"NOTE: {name} has {other}", file=sys.stderr)
        parts = []
        for seed in scenario.seeds:
            parts.append(part(name, scenario, seed, options))
            short = {key: parts[-1].get(key) for key in ("goodput", "lost", "twice", "failed")}
            print(f"{name}, seed {seed}: {short}", file=sys.stderr, flush=True)
        rows.append(row_of(name, parts, installed))
    return rows


def soak(scenario: Scenario, options: argparse.Namespace) -> Row:
    """Run a piece of a soak, and audit all pieces."""
    place = options.parts / "soak"
    scenario = dataclasses.replace(scenario, every_s=options.every)
    pieces = place / "pieces"
    done: list[Found] = kept(pieces) or []
    found = ran(SOAKED, scenario, place, len(done), options.soak)
    if "failed" in found:
        raise MeasurementError(found["failed"])
    done.append({"seconds": options.soak, **found})
    keep(pieces, done)
    used = found["used"]
    half = len(used) // 2
    for what, limit in MAY_GROW.items() if half else ():
        first, last = (max(each[what] for each in some) for some in (used[:half], used[half:]))
        if last > first + limit:
            raise MeasurementError(f"{what} grew from {first} to {last}, by more than {limit}")
    kills = sum(sum(each["kills"].values()) for each in done)
    if found["lost"] or found["twice"] or found["torn"] or found["stopped"]:
        keys = ("once", "lost", "twice", "torn", "stopped", "kills", "by_hand", "slowest_s")
        short = {key: found[key] for key in keys}
        raise MeasurementError(f"the soak failed: {short}; a restart by hand removes the bus")
    return Row(
        name="goodput-soak", values=(found["goodput"],),
        title=f"soak of {sum(each['seconds'] for each in done):g} s in {len(done)} pieces",
        note=f"{kills} kills; {found['once']:,} tokens once, 0 twice, 0 lost; "
        + (f"nothing grew in {len(used)} looks" if half else "too short to see growth"),
        figures={"pieces": done},
    )  # fmt: skip


def scenario_of(text: str) -> Scenario:
    """Read a scenario, as argparse's ``type``."""
    try:
        return Scenario.read(Path(text))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parser() -> argparse.ArgumentParser:
    """Make the parser of the options."""
    made = program.parser_of("goodput", __doc__)
    made.add_argument(
        "--scenario", type=scenario_of, default=str(DEFAULT), metavar="FILE", help="JSON"
    )
    made.add_argument(
        "--contender", action="append", choices=ADAPTERS, metavar="NAME", default=[],
        help=f"may be repeated: {', '.join(ADAPTERS)}",
    )  # fmt: skip
    made.add_argument("--parts", type=Path, default=PARTS, help="folder of kept parts")
    made.add_argument("--resume", action="store_true", help="keep the parts that are there")
    made.add_argument("--plant", choices=("loss", "double"), default="", help="check the auditor")
    made.add_argument("--soak", type=program.at_least_one, metavar="SECONDS", help="shmbus alone")
    made.add_argument("--every", type=float, default=10.0, help="seconds between kills of a soak")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    return program.run("goodput", parser(), measure, argv)
