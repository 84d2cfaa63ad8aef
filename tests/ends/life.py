"""The program of a life, and of the other sides: ``main(scope)`` in a script's own names.

Arguments: what it is ("life" or "peer"), who, how, a seed, a directory, which life, and the cells.
A life opens and says "holds", waits for the file "gone-on" of its directory, uses what it has once
more, and ends. A peer says "there", closes what is to be closed once "met" is there, and all of it
at SIGTERM.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from endings import ENDINGS, Task

__all__ = ["main"]

DEADLINE_S = 120.0


def await_file(path: Path, work: Any = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody made {path}"
        if work is not None:
            work()
        time.sleep(0.003)


def party_of(who: str) -> Any:
    """Make a party; torch is imported for who needs it."""
    if who in ("publisher", "subscriber", "sender", "receiver"):
        from tensor_parties import TENSOR_PARTIES

        return TENSOR_PARTIES[who]()
    from bus_parties import BUS_PARTIES

    return BUS_PARTIES[who]()


def main(scope: dict[str, Any]) -> None:
    what, who, how, seed, directory, life, cells = sys.argv[1:]
    tasks = [Task(*each) for each in json.loads(cells)]
    party = party_of(who)
    if what == "peer":
        be_peer(party, tasks, Path(directory))
        return
    rng = random.Random(f"{seed} {life}")
    lives = [party.live(task, int(life)) for task in tasks]
    print("holds", flush=True)
    await_file(Path(directory) / f"go-on-{life}")
    for held in lives:
        held.touch()
    # Nothing but `lives` refers to what is held, and its end is the one that was asked for.
    held = party = None
    print("touched", flush=True)
    ENDINGS[how](lives, scope, rng)


def be_peer(party: Any, tasks: list[Task], directory: Path) -> None:
    handles = {task: party.meet(task) for task in tasks}
    over = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(True))
    print("there", flush=True)

    def attend() -> None:
        for handle in handles.values():
            party.attend(handle)

    await_file(directory / "met", attend)
    for task in [task for task in tasks if task.other == "closed"]:
        handles.pop(task).close()
    print("closed", flush=True)
    deadline = time.monotonic() + 3 * DEADLINE_S
    while not over and time.monotonic() < deadline:
        attend()
        time.sleep(0.003)
    for handle in handles.values():
        handle.close()
    print(f"pid {os.getpid()} is done", flush=True)
