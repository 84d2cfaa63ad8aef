"""Ways to end a life: each as a function of a process that holds something of every cell.

Invariant: only the `Held` of each cell refers to a party's handles, and after `bind` the script's
own names; so the chosen end is the end that comes.
"""

import asyncio
import contextlib
import gc
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

#: Exit statuses of a life without a remaining process.
STATUS = {
    "raise": 1,
    "raise-in-with": 1,
    "end": 0,
    "sys.exit": 3,
    "os._exit": 4,
    "teardown": 0,
    "fork, sys.exit": -signal.SIGKILL,
    "fork, os._exit": -signal.SIGKILL,
    "fork, del": -signal.SIGKILL,
    "SIGTERM": -signal.SIGTERM,
    "SIGINT": -signal.SIGINT,
    "SIGKILL": -signal.SIGKILL,
    "malloc": 1,
    "loader, 0": 0,
    "loader, 1": -signal.SIGKILL,
    "cancel": 0,
    "again": 0,
}
#: Ends whose process still exists when the next life begins.
LIVES_ON = ("close", "with", "del", "cycle", "exec")

#: Calls of each cell with failing memory, and the highest failing allocation.
FAILING_CALLS, ALLOCATIONS = 24, 90


class Unforeseen(Exception):
    """An exception without a handler."""


class Task(NamedTuple):
    number: int
    who: str
    held: str
    other: str
    name: str
    life: int = 1

    def say(self, **facts: Any) -> None:
        """Tell the test the facts for later lives; the last word of a life on a name counts."""
        line = json.dumps({"cell": self.number, "life": self.life, **facts})
        os.write(1, f"{line}\n".encode())  # whole, despite further threads


class Held:
    """A process's part of a cell: its party, the opened handle, and more."""

    def __init__(self, party: Any, task: Task, handle: Any, things: list[Any]) -> None:
        self.party = party
        self.task = task
        self.handle = handle
        self.things = things

    def touch(self) -> None:
        self.party.touch(self)

    def wait(self) -> None:
        self.party.wait(self)


def prefetching() -> int:
    return sum(thread.name == "shmbus-prefetch" for thread in threading.enumerate())


def await_threads(others: int = 0) -> None:
    """Wait for prefetching threads: a working thread keeps its handler in a cycle."""
    while prefetching() > others:
        gc.collect()
        time.sleep(0.02)


def live_on() -> NoReturn:
    await_threads()
    print("gone", flush=True)
    while True:
        signal.pause()


def references(lives: list[Held], rng: random.Random) -> list[list[Any]]:
    """Return every held object in a list by itself, in any order; empties `lives`."""
    found = []
    for held in lives:
        found += [[held.handle], *([each] for each in held.things)]
        del held.handle, held.things
    lives.clear()
    rng.shuffle(found)
    return found


def bind(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    """Bind the script's own names to every held object, in any order."""
    for number, each in enumerate(references(lives, rng)):
        scope[f"name_{number}"] = each.pop()


def close(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    for held in rng.sample(lives, len(lives)):
        held.handle.close()
    live_on()


def leave_block(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    with contextlib.ExitStack() as stack:
        for held in rng.sample(lives, len(lives)):
            stack.enter_context(held.handle)
    live_on()


def fail(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    raise Unforeseen("of the script")


def fail_in_block(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    with contextlib.ExitStack() as stack:
        for held in rng.sample(lives, len(lives)):
            stack.enter_context(held.handle)
        raise Unforeseen("of a block")


def end_script(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    bind(lives, scope, rng)


def leave(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    sys.exit(3)


def leave_at_once(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    os._exit(4)


def drop(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    drop_all(lives, rng)
    live_on()


def drop_all(lives: list[Held], rng: random.Random) -> None:
    found = references(lives, rng)
    while found:
        found.pop()
        if rng.random() < 0.2:
            gc.collect()
    gc.collect()


def drop_cycle(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    cycle: list[Any] = [each.pop() for each in references(lives, rng)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    live_on()


def end_under_threads(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    for held in lives:
        began = threading.Event()

        def work(held: Held = held, began: threading.Event = began) -> None:
            began.set()
            held.wait()

        threading.Thread(target=work, daemon=True).start()
        began.wait()
    time.sleep(0.02)  # most are in their calls by then; the rest ends as well
    for number, held in enumerate(lives):
        for at, each in enumerate([held.handle, *held.things]):
            scope[f"name_{number}_{at}"] = each


def fork(end: Callable[[list[Held], random.Random], None]) -> Callable[..., None]:
    def work(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
        child = os.fork()
        if not child:
            signal.alarm(60)
            end(lives, rng)
            os._exit(0)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status == 0, f"the child ended with {status}"
        for held in lives:
            held.touch()
        die()

    return work


def die() -> None:
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def be_signalled(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    print("waits", flush=True)
    rng.choice(lives).wait()


def lack_memory(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    import _testcapi

    for held in lives:
        for _ in range(FAILING_CALLS):
            call = held.party.call_for(held)
            at = rng.randrange(ALLOCATIONS)
            # One failure: without any memory the interpreter loops in raising MemoryError.
            _testcapi.set_nomemory(at, at + 1)
            try:
                done = call()
            except AssertionError:
                raise
            except Exception:
                pass  # MemoryError, in the words of torch, NumPy and the interpreter
            else:
                _testcapi.remove_mem_hooks()
                held.party.was_called(held, done)
            finally:
                _testcapi.remove_mem_hooks()
    raise MemoryError


def become_another(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    print("becomes another", flush=True)
    os.execv("/bin/sleep", ["sleep", "600"])


def load(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    from torch.utils.data import DataLoader

    for held in lives:
        batches = iter(DataLoader(held.handle, batch_size=None))
        held.things += [next(batches), batches]
    bind(lives, scope, rng)


def load_by_workers(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    from torch.utils.data import DataLoader, _utils

    # Seconds of torch's wait for the end of a failed worker, each time in vain.
    _utils.MP_STATUS_CHECK_INTERVAL = 0.2
    # One of each party, for the whole of its output.
    for held in {held.task.who: held for held in lives}.values():
        loader = DataLoader(held.handle, batch_size=None, num_workers=1)
        try:
            next(iter(loader))
        except RuntimeError as error:
            assert "num_workers=0" in str(error), error
        else:
            raise AssertionError("a worker of a DataLoader got a batch")
        del loader
        gc.collect()  # otherwise the next worker inherits this end
        held.touch()
    die()


def cancel(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    async def work(held: Held) -> None:
        task = asyncio.create_task(held.party.await_something(held))
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            await asyncio.sleep(0.01)
        task.cancel()
        try:
            await task
        except asyncio.CancelledError:
            return
        raise AssertionError("it was not cancelled")

    for held in lives:
        asyncio.run(work(held))
    bind(lives, scope, rng)


def run_again(lives: list[Held], scope: dict[str, Any], rng: random.Random) -> None:
    """Run a notebook's cell again: bind each name anew beside the living old object."""
    from shmbus import errors

    while lives:
        party, task = lives[0].party, lives[0].task
        bind([lives.pop(0)], scope, rng)
        try:
            new = party.live(task._replace(life=2))
        except errors.ShmbusError as error:
            # A single reader, publisher or side at a time: the message names this process.
            assert party.ALONE and str(os.getpid()) in str(error), error
            new = None
        if new is None:
            others = prefetching() - (task.who == "prefetch")
            for name in [name for name in scope if name.startswith("name_")]:
                del scope[name]
            gc.collect()
            await_threads(others)
            new = party.live(task._replace(life=2))
        else:
            assert not party.ALONE, f"there are two of {party} now"
        bind([new], scope, rng)
        scope |= {
            f"second_{task.number}_{n}": scope.pop(n) for n in [*scope] if n.startswith("name_")
        }


ENDINGS: dict[str, Callable[[list[Held], dict[str, Any], random.Random], None]] = {
    "close": close,
    "with": leave_block,
    "raise": fail,
    "raise-in-with": fail_in_block,
    "end": end_script,
    "sys.exit": leave,
    "os._exit": leave_at_once,
    "del": drop,
    "cycle": drop_cycle,
    "teardown": end_under_threads,
    "fork, sys.exit": fork(lambda lives, rng: sys.exit(0)),
    "fork, os._exit": fork(lambda lives, rng: os._exit(0)),
    "fork, del": fork(drop_all),
    "SIGTERM": be_signalled,
    "SIGINT": be_signalled,
    "SIGKILL": be_signalled,
    "malloc": lack_memory,
    "exec": become_another,
    "loader, 0": load,
    "loader, 1": load_by_workers,
    "cancel": cancel,
    "again": run_again,
}
