"""However a life ends, the next ones find everything: nothing lost, nothing doubled.

For each way to end and each party, two lives end so, one after the other, each with something of
every cell in its hands; the third life is the test. Between them all free space is written over.
SHMBUS_TEST_ENDS=all runs each cell in processes of its own, by fresh interpreters too.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from conftest import SHM_DIR, Child, Spawner, segments_named, wait_until

pytest.importorskip("torch")

from bus_parties import BUS_PARTIES, Party
from cells import HELD, HOLDS, HOWS, OTHERS, PROGRAMS, WHOS, Cell, cells, why_not
from endings import ENDINGS, LIVES_ON, STATUS, Task
from tensor_parties import TENSOR_PARTIES

from shmbus.inspect import leftovers

LONG = os.environ.get("SHMBUS_TEST_ENDS") == "all"
HERE = Path(__file__).parent
SCRIPT = f"""
import sys
sys.path.insert(0, {str(HERE)!r})
from life import main
main(globals())
"""
PARTIES: dict[str, type[Party]] = {**BUS_PARTIES, **TENSOR_PARTIES}
TORCH = ("handler", "prefetch", *TENSOR_PARTIES)
POSSIBLE = [cell for cell in cells() if not why_not(cell)]
#: What runs together: all cells of an end and a party.
PAIRS = list(dict.fromkeys((cell.how, cell.who) for cell in POSSIBLE if cell.who in PARTIES))


class Lives:
    """The processes of some cells of one end and one party, one life after the other."""

    def __init__(
        self, spawn: Spawner, directory: Path, name: str, held: list[Cell], seed: int, fresh: bool
    ) -> None:
        self.how, self.who = held[0].how, held[0].who
        self.party = PARTIES[self.who]()
        self.tasks = [
            Task(number, cell.held, cell.other, f"{name}.{number}")
            for number, cell in enumerate(held)
        ]
        self.facts: dict[int, list[dict[str, Any]]] = {task.number: [] for task in self.tasks}
        self._spawn, self._directory = spawn, directory
        self._seed, self._fresh = seed, fresh
        self._children: list[Child] = []

    def run(self) -> None:
        """Live all lives but the last, and judge."""
        for task in self.tasks:
            self.party.prepare(task)
        others = [task for task in self.tasks if task.other != "dead"]
        peers = self._peer(others)
        doomed = self._peer([task for task in self.tasks if task.other == "dead"])
        first = self._begin(1)
        (self._directory / "met").touch()
        if doomed is not None:
            doomed.kill()
        if peers is not None:
            peers.expect("closed")
        self._end(first, 1)
        if self.how != "again":
            self._press("between")
            self._end(self._begin(2), 2)
        for peer in (peers, doomed):
            if peer is not None:
                if peer.running:
                    peer.send_signal(signal.SIGTERM)
                    peer.finish()
                self._read(peer)
        self._press("after")
        self._judge()

    def _start(self, what: str, life: int, tasks: list[Task], fresh: bool) -> Child:
        text = SCRIPT + ("import torch\n" if self.who in TORCH else "")
        arguments = (what, self.who, self.how, self._seed, self._directory, life)
        return self._spawn.script(text, *arguments, json.dumps(tasks), fresh=fresh)

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
        for bad in ("Exception ignored", "Fatal Python error", "AssertionError"):
            assert bad not in child.output(), child.output()
        self._read(child)

    def _read(self, child: Child) -> None:
        """Keep the last word of a child on each cell."""
        said: dict[int, dict[str, Any]] = {}
        for line in child.output().splitlines():
            if line.startswith('{"cell"'):
                fact = json.loads(line)
                said.setdefault(fact.pop("cell"), {}).update(fact)
        for number, facts in said.items():
            self.facts[number].append(facts)

    def _press(self, label: str) -> None:
        for task in self.tasks:
            self.facts[task.number].append({"put": self.party.press(task, label)})

    def _judge(self) -> None:
        faults = []
        for task in self.tasks:
            try:
                self.party.audit(task, self.facts[task.number])
                for child in self._children:
                    if child.running and self.how != "exec":
                        child.kill()
                self._nothing_is_left(task)
            except Exception as error:
                faults.append(f"{task.held}, other side {task.other}: {type(error).__name__}: {error}")
        assert not faults, f"{self.how}, {self.who}:\n" + "\n".join(faults)

    def _nothing_is_left(self, task: Task) -> None:
        """Every file is known to `shmbus gc`, and used by nobody."""
        for path in SHM_DIR.glob(f"shmbus*{task.name}*"):
            kind, name = leftovers._classify(path.name)
            assert name == task.name, f"{path}: nobody knows it"
            found = leftovers._check(str(path), kind, name, path.lstat())
            assert found.verdict == "removable", f"{path}: {found.reason}"


def batches(how: str, who: str) -> list[list[Cell]]:
    """Cells that run in one process each time: all of a pair, or one by one."""
    found = [cell for cell in POSSIBLE if (cell.how, cell.who) == (how, who)]
    return [found] if not LONG else [found, *([cell] for cell in found)]


@pytest.mark.timeout(1200 if LONG else 120)
@pytest.mark.parametrize(("how", "who"), PAIRS)
def test_what_a_life_had_is_found_by_the_next_ones(
    how: str, who: str, spawn: Spawner, tmp_path: Path, bus_name: str, seed: int
) -> None:
    try:
        for number, (batch, fresh) in enumerate(
            itertools.product(batches(how, who), (False, True) if LONG else (False,))
        ):
            directory = tmp_path / str(number)
            directory.mkdir()
            Lives(spawn, directory, f"{bus_name}.{number}", batch, seed, fresh).run()
    finally:
        spawn.end_all()
        for path in segments_named(bus_name):
            path.unlink(missing_ok=True)


def test_every_cell_runs_or_has_its_reason() -> None:
    assert set(HOLDS) == set(WHOS) and set(ENDINGS) == set(HOWS)
    assert all(set(each) <= set(HELD) for each in HOLDS.values())
    assert set(HOWS) == {*STATUS, *LIVES_ON}
    ran = {(how, who) for how, who in PAIRS}
    unnamed = [
        cell
        for cell in cells()
        if bool(why_not(cell)) == ((cell.how, cell.who) in ran or cell.who in PROGRAMS)
        and not why_not(cell)
    ]
    assert not unnamed, unnamed
    assert len(cells()) == len(HOWS) * len(WHOS) * len(HELD) * len(OTHERS)
    print(Counter(bool(why_not(cell)) for cell in cells()))
