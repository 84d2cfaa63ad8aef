"""One contender, measured in an interpreter of its own: ``python -m bench.contest.child NAME``.

stdin: a JSON list of requests. The file named last on the command line gets a JSON list of answers,
one for each request, as they come: an answer that failed says so, and the next request goes on.
What the contender's libraries print is of no concern.

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
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from bench.contenders import module as module_of
from bench.contest import latency, moving, survival, usage
from bench.workload import Timed, Workload

__all__ = ["answer", "main"]

#: prctl: processes whose parent has ended become children of this one, not of init.
PR_SET_CHILD_SUBREAPER: Final = 36
#: Seconds that processes which are left over get to end by themselves.
END_S: Final = 5.0
POLL_S: Final = 0.05


def main(argv: Sequence[str]) -> int:
    """Answer all requests of stdin."""
    name, output = argv
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    requests = json.load(sys.stdin)
    contender = module_of(name)
    answers: list[dict[str, Any]] = []
    try:
        with contextlib.ExitStack() as stack:
            if requests and hasattr(contender, "host"):
                stack.enter_context(contender.host())
            for request in requests:
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
        return survival.measure(name, request["kills"]).as_json()
    raise ValueError(f"unknown request {what!r}")


def _moved(contender: ModuleType, what: str, workload: Workload) -> dict[str, Any]:
    timed: Timed
    if what == "watched":
        timed = moving.measure(contender.__name__, workload, watch=True)
    elif what == "throughput":
        timed = contender.measure(workload)
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
    # Whatever a contender raises is a result of this benchmark, and goes into the report.
    try:
        result = answer(contender, request)
    except Exception as error:
        traceback.print_exc()
        result = {"failed": f"{type(error).__name__}: {error}"}
    return {**result, "took_s": time.monotonic() - began}


def _write(path: Path, answers: list[dict[str, Any]]) -> None:
    whole = path.with_suffix(".part")
    whole.write_text(json.dumps(answers))
    whole.replace(path)


def _end_all() -> None:
    """End what is left of this process's descendants, each by its pid, and reap it."""
    deadline = time.monotonic() + END_S
    asked: set[int] = set()
    while pids := usage.descendants(os.getpid()):
        for pid in pids:
            if pid not in asked or time.monotonic() > deadline:
                asked.add(pid)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(POLL_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
