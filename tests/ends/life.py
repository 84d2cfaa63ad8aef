"""Program of a life, and of the other sides: ``main(scope)`` in a script's own names.

Arguments: role ("life" or "peer"), kind of end, a seed, a directory, the life's number, the cells.
A life opens everything, prints "holds", waits for the file "go-on-LIFE", uses its holdings once
more, and ends. A peer prints "there", opens the rest after "held", and closes after "met".
"""

import faulthandler
import json
import os
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

from endings import ENDINGS, Task

#: Seconds of a whole life, and of its wait for its test.
LIFE_S, DEADLINE_S = 100, 110.0


def await_file(path: Path, work: Any = None) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not path.exists():
        assert time.monotonic() < deadline, f"nobody made {path}"
        if work is not None:
            work()
        time.sleep(0.003)


def parties_of(tasks: list[Task], how: str) -> dict[str, Any]:
    from bus_parties import BUS_PARTIES

    kinds = {**BUS_PARTIES}
    if any(task.who not in kinds for task in tasks):
        from tensor_parties import TENSOR_PARTIES

        kinds |= TENSOR_PARTIES
    return {task.who: kinds[task.who](how) for task in tasks}


def main(scope: dict[str, Any]) -> None:
    what, how, seed, directory, life, cells = sys.argv[1:]
    # No thread: a forked child would wait for it.
    faulthandler.register(signal.SIGALRM, chain=True)
    signal.alarm(LIFE_S)
    tasks = [Task(*each)._replace(life=int(life)) for each in json.loads(cells)]
    parties = parties_of(tasks, how)
    if what == "peer":
        be_peer(parties, tasks, Path(directory))
        return
    rng = random.Random(f"{seed} {life}")
    lives = [parties[task.who].live(task) for task in tasks]
    print("holds", flush=True)
    await_file(Path(directory) / f"go-on-{life}")
    for held in lives:
        held.touch()
    # Only `lives` refers to the holdings, and their end is the chosen end.
    held = parties = None  # type: ignore[assignment]
    print("touched", flush=True)
    ENDINGS[how](lives, scope, rng)


def be_peer(parties: dict[str, Any], tasks: list[Task], directory: Path) -> None:
    handles: dict[Task, Any] = {}
    over = []
    signal.signal(signal.SIGTERM, lambda *_: over.append(True))

    def meet(later: bool) -> None:
        for task in tasks:
            if later == parties[task.who].MEETS_LATER:
                handles[task] = parties[task.who].meet(task)

    def attend() -> None:
        for task, handle in handles.items():
            parties[task.who].attend(handle)

    meet(False)
    print("there", flush=True)
    await_file(directory / "held", attend)
    meet(True)
    print("all there", flush=True)
    await_file(directory / "met", attend)
    for task in [task for task in tasks if task.other == "closed"]:
        handles.pop(task).close()
    print("closed", flush=True)
    while not over:
        attend()
        time.sleep(0.003)
    for handle in handles.values():
        handle.close()
    print("done", flush=True)
    os._exit(0)  # everything is closed, and torch ends slowly
