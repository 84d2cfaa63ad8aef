"""Runs the contest: every contender in an interpreter of its own (``make bench-contenders``)."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from bench.contenders import contenders
from bench.contenders.base import Contender
from bench.levels import Level
from bench.processes import MeasurementError, descendants
from bench.row import Row, skipped

__all__ = ["ENVIRONMENTS", "OURS", "ask", "contest", "interpreter", "versions"]

ROOT: Final = Path(__file__).resolve().parents[2]
#: Environments: name of a requirements file each.
ENVIRONMENTS: Final = ("atropos", "ray")
#: Their folder, unless in the checkout.
VARIABLE: Final = "SHMBUS_CONTENDERS"
#: Reference of the comparison.
OURS: Final = "shmbus"
TOKENS: Final = 2048
#: Trajectories of the slowest run; a run moves a multiple of the unit.
LEAST, UNIT, MOST = 128, 64, 2_000_000
#: Seconds for a contender's answers, clusters included.
DEADLINE_S: Final = 300.0
#: Seconds for a child to end its processes before its own end.
END_S: Final = 20.0
VERSIONS_S: Final = 60.0


def contest(names: Sequence[str], level: Level, say: Callable[[str], None]) -> Iterator[Row]:
    """Measure these contenders beside shmbus: rate, latency and survival of each.

    Runs of a contender alternate with runs of shmbus, to spread a slow minute over both.
    """
    known = contenders()
    alone: dict[str, list[dict[str, Any]]] = {}
    for name in dict.fromkeys([OURS, *names]):
        contender = known[name]
        about: dict[str, Any] = {"copies": contender.copies, "favour": contender.favour}
        try:
            about |= versions(contender)
        except MeasurementError as error:
            yield skipped(f"against-{name}", f"put to views, against {contender.title}", str(error))
            continue
        say(contender.title)
        answers = ask(contender, _requests(contender, level))
        alone[name] = answers
        beside = alone[OURS] if name == OURS else ask(known[OURS], _rates(known[OURS], level))
        yield from _rows(contender, answers, beside, alone[OURS], about)


def _rates(contender: Contender, level: Level) -> list[dict[str, Any]]:
    wanted = min(max(LEAST, level.contest_s * contender.per_second), MOST)
    trajectories = max(1, round(wanted / UNIT)) * UNIT
    request = {"what": "rate", "trajectories": trajectories, "tokens": TOKENS}
    return [request] * level.repetitions


def _requests(contender: Contender, level: Level) -> list[dict[str, Any]]:
    slow = bool(contender.environment)
    return [
        *_rates(contender, level),
        {"what": "latency", "probes": max(10, level.probes // 10) if slow else level.probes},
        {"what": "survival", "kills": max(1, level.kills // 4) if slow else level.kills},
    ]


def _rows(
    contender: Contender,
    answers: list[dict[str, Any]],
    beside: list[dict[str, Any]],
    ours: list[dict[str, Any]],
    about: dict[str, Any],
) -> Iterator[Row]:
    """Make the rows of a contender; a failed row names its reason."""
    name, title = contender.name, contender.title
    rates = [answer for answer in answers if answer["what"] == "rate"]
    pairs = [
        (mine["rate"], theirs["rate"])
        for mine, theirs in zip(beside, rates, strict=False)
        if "rate" in mine and "rate" in theirs
    ]
    what = f"put to views, against {title}"
    if name != OURS and not pairs:
        yield skipped(f"against-{name}", what, rates[0].get("failed", "shmbus failed"))
    elif name != OURS:
        yield Row(
            name=f"against-{name}", title=what, unit="trajectories/s",
            values=tuple(mine for mine, _ in pairs),
            beside=name, beside_values=tuple(theirs for _, theirs in pairs), figures=about,
        )  # fmt: skip
    by_what = {answer["what"]: answer for answer in answers}
    latency, survival = by_what["latency"], by_what["survival"]
    what = f"one way to a sleeping reader, p50, {title}"
    if "failed" in latency:
        yield skipped(f"latency-{name}", what, latency["failed"])
    else:
        own = [one["p50_us"] for one in ours if "p50_us" in one] if name != OURS else []
        yield Row(
            name=f"latency-{name}", title=what, unit="us", values=(latency["p50_us"],),
            beside="shmbus, embedded" if own else "", beside_values=tuple(own),
        )  # fmt: skip
    what = f"kill -9 in mid-write, {title}"
    if "failed" in survival:
        yield skipped(f"survival-{name}", what, survival["failed"])
        return
    stopped = survival["stopped_after"]
    harmed = survival["lost"] + survival["torn"] + survival["doubled"]
    goes_on = f"stopped after kill {stopped}" if stopped else f"went on, {survival['kills']} times"
    yield Row(
        name=f"survival-{name}", title=what, unit="harmed",
        values=(float(harmed + (stopped is not None)),),
        note=f"{goes_on}; {survival['in_send']} within a send", figures=survival,
    )  # fmt: skip


class Installed(Protocol):
    """A contender's environment and distributions."""

    @property
    def environment(self) -> str:
        """Name of the environment; "" for the benchmark's."""

    @property
    def packages(self) -> tuple[str, ...]:
        """Distributions, the contender's own first."""


def interpreter(contender: Installed) -> Path:
    """Return the interpreter for a contender.

    Raises
    ------
    MeasurementError
        Its environment is missing.
    """
    if not contender.environment:
        return Path(sys.executable)
    root = Path(os.environ.get(VARIABLE) or ROOT / ".venv-contenders")
    # Environments of the adapters' tests contain trainers.
    places = {
        root: "bench-contenders",
        ROOT / "build/peers": f"build/peers/{contender.environment}/.made",
    }
    for place in places:
        if (path := place / contender.environment / "bin" / "python").exists():
            return path
    target = places[root if contender.environment in ENVIRONMENTS else ROOT / "build/peers"]
    raise MeasurementError(
        f"its environment {contender.environment!r} is not there; run make {target}"
    )


def versions(contender: Installed) -> dict[str, Any]:
    """Return the versions of a contender's packages, and of its Python.

    Raises
    ------
    MeasurementError
        A requirement is missing; the message names the requirement and the remedy.
    """
    # Read from the environment's metadata, without an import.
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "print(json.dumps({'python': platform.python_version(),"
        " 'packages': {name: m.version(name) for name in sys.argv[1:]}}))"
    )
    result = subprocess.run(
        [interpreter(contender), "-c", code, *contender.packages],
        capture_output=True, text=True, timeout=VERSIONS_S, check=False,
    )  # fmt: skip
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1]
        raise MeasurementError(f"not installed ({last}); pip install 'shmbus[bench-all,train]'")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def ask(
    contender: Contender, requests: list[dict[str, Any]], deadline_s: float = DEADLINE_S
) -> list[dict[str, Any]]:
    """Have a contender answer requests in a process of its own, in order.

    ``failed`` of an answer names the error: an exception, a death, a missed deadline.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if contender.environment:
        # Builds of this interpreter are useless to a different interpreter.
        path = str(ROOT)
    with (
        tempfile.TemporaryDirectory(prefix="shmbus-bench-") as directory,
        tempfile.TemporaryFile() as said,
    ):
        output = Path(directory, "answers.json")
        child = subprocess.Popen(
            [interpreter(contender), "-m", "bench.contest.child", contender.name, output],
            stdin=subprocess.PIPE, stdout=said, stderr=said,
            env={**os.environ, "PYTHONPATH": path},
            # A Ctrl-C addresses the parent, which ends this process in order.
            start_new_session=True,
        )  # fmt: skip
        why = ""
        try:
            child.communicate(json.dumps(requests).encode(), deadline_s)
        except subprocess.TimeoutExpired:
            why = f"not done within {deadline_s:.0f} s"
        finally:
            _end(child)
        answers: list[dict[str, Any]] = json.loads(output.read_text()) if output.exists() else []
        if len(answers) < len(requests):
            said.seek(0)
            last = (said.read().decode(errors="replace").strip() or "nothing").splitlines()[-1]
            why = why or f"exit status {child.returncode}; it said: {last}"
        failed = {"failed": why}
        answers += [failed] * (len(requests) - len(answers))
        return [{**answer, "what": r["what"]} for r, answer in zip(requests, answers, strict=True)]


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child, and by pid its processes, in case the child cannot."""
    if child.poll() is not None:
        return
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
        return
    left = descendants(child.pid)
    child.kill()
    child.wait()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
