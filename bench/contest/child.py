"""A contender in an interpreter of its own: ``python -m bench.contest.child NAME FILE``.

stdin: a JSON list of requests. The file receives a JSON list of answers, one by one. A failed
answer names its error, and the next request follows.

Invariant: descendants of this process, daemons included, end before the process.
"""

import contextlib
import ctypes
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from bench.contenders import module as module_of
from bench.contest import moving, survival
from bench.processes import descendants
from bench.workload import Workload

__all__ = ["answer", "main"]

#: prctl: orphans among the descendants become children of this process, instead of init.
PR_SET_CHILD_SUBREAPER: Final = 36
#: Seconds for leftover processes to end by themselves.
END_S: Final = 5.0
POLL_S: Final = 0.05


def main(argv: Sequence[str]) -> int:
    """Answer the requests of stdin."""
    name, output = argv
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    requests = json.load(sys.stdin)
    contender = module_of(name)
    answers: list[dict[str, Any]] = []
    try:
        with contextlib.ExitStack() as stack:
            if hasattr(contender, "host"):
                stack.enter_context(contender.host())
            for request in requests:
                # A contender's exception is a result of the benchmark.
                try:
                    answers.append(answer(contender, request))
                except Exception as error:
                    traceback.print_exc()
                    answers.append({"failed": f"{type(error).__name__}: {error}"})
                whole = Path(output).with_suffix(".part")
                whole.write_text(json.dumps(answers))
                whole.replace(output)
    finally:
        _end_all()
    return 0


def answer(contender: ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out a request by its ``what``; the rest are parameters."""
    what, name = request["what"], contender.__name__
    if what == "rate":
        workload = Workload(trajectories=request["trajectories"], tokens=request["tokens"])
        own = getattr(contender, "measure", None)
        timed = own(workload) if own else moving.measure(name, workload)
        return {"rate": timed.rate}
    if what == "latency":
        return {"p50_us": moving.latency_us(name, request["probes"])}
    if what == "survival":
        return asdict(survival.measure(name, request["kills"]))
    raise ValueError(f"unknown request {what!r}")


def _end_all() -> None:
    """End the remaining descendants of this process by pid, and reap them."""
    # The resource tracker ignores SIGTERM: the tracker removes leftovers and ends after the last
    # writer's end.
    tracker: Any = resource_tracker._resource_tracker
    deadline = time.monotonic() + END_S
    asked: set[int] = set()
    while pids := [pid for pid in descendants(os.getpid()) if pid != tracker._pid]:
        for pid in pids:
            if pid not in asked or time.monotonic() > deadline:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM)
        for pid in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        time.sleep(POLL_S)
    tracker._stop()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
