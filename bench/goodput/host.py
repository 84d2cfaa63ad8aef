"""One contender's run, in the contender's environment: ``python -m bench.goodput.host DIRECTORY``.

``DIRECTORY/run`` names adapter, scenario and seed; the result goes to ``DIRECTORY/result``. The
supervisor starts the parties, kills by the schedule, restarts each ended party, and measures the
seconds until the trainer has trained a token generated after the kill. A contender without such a
token in the scenario's patience counts as hung: every process starts anew, a restart by hand.
"""

import contextlib
import ctypes
import importlib
import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any, Final

from bench.goodput import party
from bench.goodput.adapters import fixed_port, kill
from bench.goodput.books import Book, audit
from bench.goodput.scenario import Scenario
from bench.processes import MeasurementError, Role, Started, descendants

__all__ = ["Crew", "kill_tree", "run"]

#: Seconds for a start of all processes: a cluster, and imports of torch.
START_S: Final = 120.0
POLL_S: Final = 0.02
#: Crashes of parties, above which the run ends.
MOST_ENDS: Final = 40
PR_SET_PDEATHSIG: Final = 1
PR_SET_CHILD_SUBREAPER: Final = 36
FULL: Final = "No space left on device"
#: File that ends a run in order.
ENOUGH: Final = "enough"


def kill_tree(pid: int) -> None:
    """Kill a process and all of its descendants, as the end of a container does."""
    for each in (pid, *descendants(pid)):
        kill(each)


class Crew:
    """Transport, engine, workers and trainer of one run."""

    def __init__(self, module: str, scenario: Scenario, root: Path, seed: int) -> None:
        self.module, self.scenario, self.root, self.seed = module, scenario, root, seed
        self.adapter = importlib.import_module(module)
        self.rng = random.Random(seed)
        self.ends: Counter[str] = Counter()
        self.words: list[str] = []
        self.lives = 0
        self.port = fixed_port()
        self.begun = Book(root, "begun")
        self.stack = contextlib.ExitStack()
        self.running: dict[str, Started] = {}

    @property
    def names(self) -> list[str]:
        """Workers and trainer; a contender may have its workers inside the trainer."""
        workers = [f"worker {n}" for n in range(self.scenario.workers)]
        return [*(workers if self.adapter.ABOUT.workers else []), "trainer"]

    def open(self) -> None:
        """Start transport and parties."""
        self.link = self.stack.enter_context(self.adapter.link(self.scenario, self.root))
        self.start("engine")
        for name in self.names:
            self.start(name)

    def close(self) -> None:
        """End parties and transport."""
        for name in list(self.running):
            self.end(name)
        self.stack.close()

    def start(self, name: str) -> None:
        """Start a party."""
        self.lives += 1
        common = (self.root, self.scenario, self.port)
        if name == "engine":
            role = Role(party.engine, (*common, self.seed))
        elif name == "trainer":
            role = Role(party.trainer, (*common, self.module, self.link.address))
        else:
            unique = f"{name.replace(' ', '')}-{self.lives}"
            role = Role(party.worker, (*common, self.module, self.link.address, unique))
        self.running[name] = Started(role, daemon=self.adapter.ABOUT.workers)

    def end(self, name: str) -> None:
        """Kill a party and its descendants."""
        started = self.running.pop(name)
        kill_tree(started.pid)
        started.end()

    def kill(self, kind: str) -> None:
        """Kill a part, and start the part again."""
        if kind in self.link.parts:
            self.link.parts[kind](self.running["trainer"].pid)
            return
        workers = [name for name in self.running if name.startswith("worker")]
        name = self.rng.choice(workers) if kind == "worker" else kind
        self.end(name)
        self.start(name)

    def watch(self) -> None:
        """Restart crashed parties.

        Raises
        ------
        MeasurementError
            Parties crash again and again, or the disk is full.
        """
        for name, started in list(self.running.items()):
            if started.running:
                continue
            why = started.failure().strip()
            if FULL in why:
                raise MeasurementError(f"{self.root}: {FULL}: free space, and run again")
            if name == "trainer" and not why and (self.root / "stop").exists():
                continue
            self.words.append(f"{name}: {(why or 'ended').splitlines()[-1]}"[:300])
            self.ends[name.split()[0]] += 1
            if self.ends.total() > MOST_ENDS:
                raise MeasurementError(f"parties end again and again: {self.words[-1]}")
            self.end(name)
            self.start(name)

    def newest(self) -> dict[str, float]:
        """Return the trainer's newest line of progress."""
        try:
            with open(self.root / "progress", "rb") as file:
                file.seek(max(0, file.seek(0, os.SEEK_END) - 1000))
                line: dict[str, float] = json.loads(file.read().splitlines()[-1])
                return line
        except (OSError, ValueError, IndexError):
            return {"at": 0.0, "newest": -1}

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        """Watch the parties until a condition holds; return False after the time."""
        limit = time.monotonic() + seconds
        while not done():
            if time.monotonic() > limit:
                return False
            self.watch()
            time.sleep(POLL_S)
        return True

    def trains(self, seconds: float, kind: str = "") -> float | None:
        """Kill a part; return the seconds until a token generated since is trained."""
        mark, began = self.begun.end(), time.monotonic()
        if kind:
            self.kill(kind)
        if not self.wait(lambda: self.newest()["newest"] >= mark, seconds):
            return None
        return self.newest()["at"] - began


def run(
    module: str, scenario: Scenario, root: Path, seed: int, seconds: float = 0.0
) -> dict[str, Any]:
    """Run a contender by the scenario, or for some seconds; return the figures."""
    for name in ("stop", "drain", "over", ENOUGH):
        (root / name).unlink(missing_ok=True)
    crew = Crew(module, scenario, root, seed)
    recovered: dict[str, list[float]] = {}
    by_hand: Counter[str] = Counter()
    kills: Counter[str] = Counter()
    used: list[dict[str, int]] = []
    ended = ""
    try:
        crew.open()
        if crew.trains(START_S) is None:
            raise MeasurementError(f"nothing was trained in {START_S:g} s; {crew.words[-3:]}")
        limit = time.monotonic() + seconds
        kinds = (*BASIC, *crew.link.parts)
        rounds = itertools.count(seed) if seconds and scenario.kills else [seed]
        if not scenario.kills:
            crew.wait((root / ENOUGH).exists, seconds)
        for pause_s, kind in itertools.chain.from_iterable(
            scenario.schedule(each, kinds) for each in rounds
        ):
            crew.wait((root / ENOUGH).exists, pause_s)
            if (root / ENOUGH).exists() or (seconds and time.monotonic() > limit):
                break
            kills[kind] += 1
            took = crew.trains(scenario.patience_s + crew.adapter.ABOUT.start_s, kind)
            if took is None:
                by_hand[kind] += 1
                crew.close()
                crew.open()
                if crew.trains(START_S) is None:
                    ended = f"nothing was trained after a kill of the {kind} and a restart of all"
                    break
            else:
                recovered.setdefault(kind, []).append(took)
            if seconds and len(kills) == len([each for each in scenario.kills if each in kinds]):
                used.append(in_use())
        ended = ended or finish(crew)
    finally:
        crew.close()
    last = crew.newest()
    found = audit(root)
    return {
        **found._asdict(), "goodput": found.goodput, "kills": dict(kills),
        "recovered_s": {kind: statistics.median(took) for kind, took in recovered.items()},
        "slowest_s": {kind: max(took) for kind, took in recovered.items()},
        "by_hand": dict(by_hand), "ended_by_themselves": dict(crew.ends),
        "trainer_idle": last.get("waited", 0.0) / max(last.get("lived", 0.0), 1e-9),
        "lived_s": last.get("lived", 0.0), "stopped": ended,
        "words": list(dict.fromkeys(crew.words))[:8], "used": used,
    }  # fmt: skip


def in_use() -> dict[str, int]:
    """Count memory, descriptors, threads and segments of this process and its descendants."""
    used: Counter[str] = Counter()
    pids = (os.getpid(), *descendants(os.getpid()))
    for place in (Path(f"/proc/{pid}") for pid in pids):
        with contextlib.suppress(OSError):  # ended meanwhile
            used["MB"] += int((place / "statm").read_text().split()[1]) >> 8
            used["descriptors"] += len(list((place / "fd").iterdir()))
            used["threads"] += len(list((place / "task").iterdir()))
    mine = f"goodput-{os.getpid()}-"
    used["segments"] = sum(mine in each.name for each in Path("/dev/shm").iterdir())
    return dict(used)


#: Parts of every contender.
BASIC: Final = ("worker", "trainer", "engine")


def finish(crew: Crew) -> str:
    """Let workers end, and the trainer empty the contender; return the name of a hung party."""
    patience_s, hung = crew.scenario.patience_s, ""
    (crew.root / "stop").touch()
    workers = [name for name in crew.running if name.startswith("worker")]
    if not crew.adapter.ABOUT.offers:
        limit = time.monotonic() + patience_s
        for name in workers:
            started = crew.running[name]
            started.join(max(0.1, limit - time.monotonic()))
            if started.running:
                hung = f"{name} did not end"
            crew.end(name)
        (crew.root / "drain").touch()

    def done() -> bool:
        return not crew.running["trainer"].running and not crew.running["trainer"].failure()

    if not crew.wait(done, 2 * patience_s):
        hung = hung or "the trainer did not end"
    (crew.root / "over").touch()
    return hung


def main(directory: str) -> int:
    """Run, and write the result."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    root = Path(directory)
    signal.signal(signal.SIGTERM, lambda *_: (root / ENOUGH).touch())
    asked = json.loads((root / "run").read_text())
    scenario = Scenario.of(asked["scenario"], "scenario")
    try:
        result = run(asked["module"], scenario, root, asked["seed"], asked["seconds"])
    except MeasurementError as error:
        result = {"failed": str(error)}
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}".strip().splitlines()[0]}
    finally:
        # The tracker ends with this process, and removes semaphores that the killed left.
        tracker: Any = resource_tracker._resource_tracker
        for pid in descendants(os.getpid()):
            if pid != tracker._pid:
                kill(pid)
    (root / "result.new").write_text(json.dumps(result))
    (root / "result.new").rename(root / "result")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
