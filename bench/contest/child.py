"""One contender, measured in an interpreter of its own: ``python -m bench.contest.child NAME``.

stdin: JSON, ``requests`` and ``share_s``: what to answer, and within how many seconds. The file
named last on the command line gets a JSON list of answers, one for each request, as they come: an
answer that failed says so, and the next request goes on; one that takes longer than its ``limit_s``
fails. A request that would begin after the share is over has no turn, and its answer says that.
What the contender's libraries print is nobody's concern.

Invariant: no process that this one or its descendants started outlives it, also those that made
themselves daemons.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from multiprocessing import resource_tracker
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from bench.contenders import module as module_of
from bench.contest import latency, moving, survival, usage
from bench.failures import MeasurementError
from bench.workload import Timed, Workload

__all__ = ["NO_TURN", "answer", "main"]

#: prctl: processes whose parent has ended become children of this one, not of init.
PR_SET_CHILD_SUBREAPER: Final = 36
#: Seconds that processes which are left over get to end by themselves.
END_S: Final = 5.0
POLL_S: Final = 0.05
#: Begins what is said of a request that came too late to be answered.
NO_TURN: Final = "no turn, since the contender's share of the run was over"


def main(argv: Sequence[str]) -> int:
    """Answer all requests of stdin."""
    name, output = argv
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    given = json.load(sys.stdin)
    requests, share_s = given["requests"], given["share_s"]
    began = time.monotonic()
    contender = module_of(name)
    answers: list[dict[str, Any]] = []
    try:
        with contextlib.ExitStack() as stack:
            if requests and hasattr(contender, "host"):
                stack.enter_context(contender.host())
            for request in requests:
                if time.monotonic() - began > share_s:
                    answers.append({"failed": f"{NO_TURN}: {share_s:.0f} s"})
                else:
                    answers.append(_answer_or_say_why(contender, request))
                _write(Path(output), answers)
    finally:
        _end_all()
    _write(Path(output), answers)
    return 0


def answer(contender: ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    """Carry out one request: its ``what`` names it, the rest are its parameters."""
    what = request["what"]
    name = contender.__name__
    if what in ("throughput", "watched", "packed"):
        return _moved(contender, what, Workload(**request["workload"]))
    if what == "latency":
        parameters = {key: value for key, value in request.items() if key != "what"}
        return dataclasses.asdict(latency.measure(name, **parameters))
    if what == "survival":
        return survival.measure(name, request["kills"], request["stopped_s"]).as_json()
    raise ValueError(f"unknown request {what!r}")


def _moved(contender: ModuleType, what: str, workload: Workload) -> dict[str, Any]:
    timed: Timed
    if what == "watched":
        timed = moving.measure(contender.__name__, workload, watch=True)
    elif what == "throughput" and hasattr(contender, "measure"):
        timed = contender.measure(workload)
    elif what == "throughput":
        timed = moving.measure(contender.__name__, workload)
    elif hasattr(contender, "measure_packed"):
        timed = contender.measure_packed(workload)
    else:
        timed = moving.measure(contender.__name__, workload, pack=True)
    return {
        **dataclasses.asdict(timed),
        "rate": timed.rate,
        "cpu_s": timed.cpu_s,
        "tokens_moved": workload.total_tokens,
        "bytes_each": workload.bytes_each,
    }


def _answer_or_say_why(contender: ModuleType, request: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    request = dict(request)
    limit_s = request.pop("limit_s", None)
    # Whatever a contender raises is a result of this benchmark, and goes into the report.
    try:
        with _limited(limit_s):
            result = answer(contender, request)
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}"}
    return {**result, "took_s": time.monotonic() - began}


@contextlib.contextmanager
def _limited(limit_s: float | None) -> Iterator[None]:
    """Raise in the main thread, wherever it is, when these seconds are over; None: never."""

    def over(*_: object) -> None:
        raise MeasurementError(f"not done within {limit_s:.0f} s")

    if limit_s is None:
        yield
        return
    before = signal.signal(signal.SIGALRM, over)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _write(path: Path, answers: list[dict[str, Any]]) -> None:
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(answers))
    whole.replace(path)


def _end_all() -> None:
    """End what is left of this process's descendants, each by its pid, and reap it."""
    # multiprocessing's own process ignores SIGTERM; it ends, and removes what was left behind, once
    # nobody can tell it anything more.
    tracker: Any = resource_tracker._resource_tracker
    deadline = time.monotonic() + END_S
    asked: set[int] = set()
    while pids := [pid for pid in usage.descendants(os.getpid()) if pid != tracker._pid]:
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
