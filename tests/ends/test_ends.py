"""After any end of a life the next lives find everything: nothing lost, nothing doubled.

For each way to end and each party, two lives end in succession; the third life is the test. The
short form runs the parties of a way in one process, with a selection of cells. SHMBUS_TEST_ENDS=all
runs every cell of a room in fresh interpreters.
"""

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import SHM_DIR, Child, Daemon, Spawner, segments_named, wait_until

pytest.importorskip("torch")

from bus_parties import BUS_PARTIES, GROUPS, Party
from cells import HELD, HOLDS, HOWS, LONG, PROGRAMS, WHOS, Cell, cells, why_not
from endings import ENDINGS, LIVES_ON, STATUS, Task
from tensor_parties import TENSOR_PARTIES

from shmbus.inspect import leftovers

HERE = Path(__file__).parent
SCRIPT = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from life import main
main(globals())
"""
PARTIES: dict[str, type[Party]] = {**BUS_PARTIES, **TENSOR_PARTIES}
#: Parties that end in a common process: with torch, and without.
TOGETHER = {
    "daemon": ("leaser",),
    "bus": ("producer", "consumer", "feeder"),
    "torch": ("handler", "prefetch", *TENSOR_PARTIES),
}
ROOMS = TOGETHER if LONG else {"all": tuple(who for whos in TOGETHER.values() for who in whos)}
#: Parties with every cell in the short form; the rest shows every so manieth cell, by the seed.
WHOLE = ("producer", "consumer", "feeder")
SOME = 8
POSSIBLE = [cell for cell in cells() if not why_not(cell)]
RUNS = {
    (how, room): [cell for cell in POSSIBLE if cell.how == how and cell.who in whos]
    for how in HOWS
    for room, whos in ROOMS.items()
}


class Lives:
    """Processes of an end's cells, life after life; the last life runs here."""

    def __init__(
        self, spawn: Spawner, directory: Path, name: str, held: list[Cell], seed: int, fresh: bool
    ) -> None:
        self.how = held[0].how
        self.parties = {cell.who: PARTIES[cell.who](cell.how) for cell in held}
        self.tasks = [
            Task(number, cell.who, cell.held, cell.other, f"{name}.{number}-")
            for number, cell in enumerate(held)
        ]
        self.facts: dict[int, list[dict[str, Any]]] = {task.number: [] for task in self.tasks}
        self._spawn, self._directory = spawn, directory
        self._seed, self._fresh = seed, fresh
        self._children: list[Child] = []
        self._daemons: dict[Task, Daemon] = {}

    def run(self) -> None:
        for task in self.tasks:
            self.parties[task.who].prepare(task)
            if task.who == "leaser":
                self._put(task, [f"group{number}" for number in range(GROUPS)])
                self._daemons[task] = Daemon(self._spawn, task.name, ("--drain-timeout", 0))
        met = [task for task in self.tasks if task not in self._daemons]
        peers = self._peer([task for task in met if task.other != "dead"])
        doomed = self._peer([task for task in met if task.other == "dead"])
        first = self._begin(1)
        (self._directory / "held").touch()
        for peer in (peers, doomed):
            if peer is not None:
                peer.expect("all there")
        (self._directory / "met").touch()
        if doomed is not None:
            doomed.kill()
        if peers is not None:
            peers.expect("closed")
        for task, daemon in self._daemons.items():
            if task.other == "dead":
                daemon.kill()
            elif task.other == "closed":
                daemon.stop()
        if self.how == "again":  # its second life runs in the same process
            self._start_daemons()
            self._end(first, 1)
        else:
            self._end(first, 1)
            self._start_daemons()
            self._press("between")
            self._end(self._begin(2), 2)
        if peers is not None:
            peers.send_signal(signal.SIGTERM)
            peers.finish()
        for peer in (peers, doomed):
            if peer is not None:
                self._read(peer)
        self._press("after")
        self._judge()

    def _start_daemons(self) -> None:
        for task, daemon in self._daemons.items():
            if task.other != "open":
                daemon.start()

    def _start(self, what: str, life: int, tasks: list[Task], fresh: bool) -> Child:
        needs_torch = any(task.who in TOGETHER["torch"] for task in tasks)
        text = SCRIPT + ("import torch\n" if needs_torch else "")
        arguments = (what, self.how, self._seed, self._directory, life, json.dumps(tasks))
        return self._spawn.script(text, *arguments, fresh=fresh)

    def _peer(self, tasks: list[Task]) -> Child | None:
        if not tasks:
            return None
        child = self._start("peer", 0, tasks, False)
        child.expect("there")
        return child

    def _begin(self, life: int) -> Child:
        child = self._start("life", life, self.tasks, self._fresh)
        self._children.append(child)
        child.expect("holds")
        return child

    def _end(self, child: Child, life: int) -> None:
        (self._directory / f"go-on-{life}").touch()
        if self.how.startswith("SIG"):
            child.expect("waits")
            child.send_signal(getattr(signal, self.how))
        if self.how == "exec":
            comm = Path(f"/proc/{child.pid}/comm")
            wait_until(lambda: not child.running or comm.read_text() == "sleep\n")
            assert child.running, child.output()
        elif self.how in LIVES_ON:
            child.expect("gone")
        else:
            assert child.wait() == STATUS[self.how], child.output()
        if self.how == "malloc":
            assert child.output().endswith("\nMemoryError\n"), child.output()
        for bad in ("Exception ignored", "Fatal Python error", "AssertionError"):
            assert bad not in child.output(), child.output()
        self._read(child)

    def _read(self, child: Child) -> None:
        """Keep a child's last words on each cell, for each life."""
        said: dict[tuple[int, int], dict[str, Any]] = {}
        for line in child.output().splitlines():
            if line.startswith('{"cell"'):
                fact = json.loads(line)
                said.setdefault((fact.pop("cell"), fact.pop("life")), {}).update(fact)
        for (number, _), facts in said.items():
            self.facts[number].append(facts)

    def _press(self, label: str) -> None:
        for task in self.tasks:
            self._put(task, self.parties[task.who].press(task, label))

    def _put(self, task: Task, groups: list[str]) -> None:
        self.facts[task.number].append({"put": groups})

    def _judge(self) -> None:
        faults = []

        def check(judge: Callable[[Task], None], task: Task) -> None:
            try:
                judge(task)
            except Exception as error:
                what = f"{task.who}, {task.held}, other side {task.other}"
                faults.append(f"{what}: {type(error).__name__}: {error}")

        # Groups may stay held after a close: takers wait.
        waiting = self.how in ("close", "with")
        early = [task for task in self.tasks if not (waiting and self.parties[task.who].OUTLIVED)]
        for task in early:
            check(self._audit, task)
        self._end_all()
        for task in self.tasks:
            if task not in early:
                check(self._audit, task)
            check(self._nothing_is_left, task)
        assert not faults, f"{self.how}:\n" + "\n".join(faults)

    def _audit(self, task: Task) -> None:
        self.parties[task.who].audit(task, self.facts[task.number])

    def _end_all(self) -> None:
        for child in self._children:
            if child.running:
                child.kill()
        for daemon in self._daemons.values():
            daemon.stop()

    def _nothing_is_left(self, task: Task) -> None:
        """Every file is known to `shmbus gc`, and unused."""
        for path in SHM_DIR.glob(f"shmbus*{task.name}*"):
            kind, name = leftovers._classify(path.name)
            assert name == task.name, f"{path}: nobody knows it"
            found = leftovers._check(str(path), kind, name, path.lstat())
            assert found.verdict == "removable", f"{path}: {found.reason}"


def batches(how: str, room: str, seed: int) -> list[tuple[list[Cell], bool]]:
    """Return groups of cells for a process each, with a flag for fresh interpreters."""
    together = RUNS[how, room]
    if LONG:
        return [(together, True), *(([cell], False) for cell in together)]
    at = [*HOWS].index(how)
    # A daemon serves a single bus: one cell.
    leased = [cell for cell in together if cell.who == "leaser"]
    others = [cell for cell in together if cell.who != "leaser"]
    some = [
        cell
        for number, cell in enumerate(others)
        if cell.who in WHOLE or (number + at + seed) % SOME == 0
    ]
    return [([*leased[at % 9 :][:1], *some], False)]


@pytest.mark.timeout(1200 if LONG else 200)
@pytest.mark.parametrize(("how", "room"), [at for at, found in RUNS.items() if found])
def test_what_a_life_had_is_found_by_the_next_ones(
    how: str, room: str, spawn: Spawner, tmp_path: Path, bus_name: str, seed: int
) -> None:
    try:
        for number, (batch, fresh) in enumerate(batches(how, room, seed)):
            directory = tmp_path / str(number)
            directory.mkdir()
            Lives(spawn, directory, f"{bus_name}.{number}", batch, seed, fresh).run()
            spawn.end_all()
    finally:
        spawn.end_all()
        for path in segments_named(bus_name):
            path.unlink(missing_ok=True)


def test_every_cell_runs_or_has_its_reason() -> None:
    assert set(HOLDS) == set(WHOS) and set(ENDINGS) == set(HOWS)
    assert all(set(each) <= set(HELD) for each in HOLDS.values())
    assert set(HOWS) == {*STATUS, *LIVES_ON}
    ran = {cell for found in RUNS.values() for cell in found}
    missing = [cell for cell in POSSIBLE if cell not in ran and cell.who not in PROGRAMS]
    assert not missing, missing
