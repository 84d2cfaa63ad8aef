"""Which interpreter runs which contender, and the process that does.

Most contenders run in the environment that the benchmark runs in. Some need packages that would
change it for everyone (an old version of this, a hundred of that): ``make bench-contenders`` makes
an environment of its own for each of those, below ``.venv-contenders``.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from bench.contenders.base import Contender
from bench.contest import usage
from bench.failures import MeasurementError

__all__ = ["ENVIRONMENTS", "ROOT", "ask", "environments_root", "interpreter", "versions"]

ROOT: Final = Path(__file__).resolve().parents[2]
#: The environments that there are: names of files with what they need.
ENVIRONMENTS: Final = ("atropos", "ray")
#: Where they are, if not in the checkout.
VARIABLE: Final = "SHMBUS_CONTENDERS"
#: Seconds that a child gets to end what it started before it is ended itself.
END_S: Final = 20.0
#: Seconds to say versions.
VERSIONS_S: Final = 60.0


def environments_root() -> Path:
    """Return the directory that holds the environments."""
    return Path(os.environ.get(VARIABLE) or ROOT / ".venv-contenders")


def interpreter(contender: Contender) -> Path:
    """Return the interpreter that runs a contender.

    Raises
    ------
    MeasurementError
        Its environment has not been made.
    """
    if not contender.environment:
        return Path(sys.executable)
    path = environments_root() / contender.environment / "bin" / "python"
    if not path.exists():
        raise MeasurementError(
            f"its environment {contender.environment!r} is not there; run make bench-contenders"
        )
    return path


def versions(contender: Contender) -> dict[str, Any]:
    """Return the versions of a contender's packages, and of the Python that runs it.

    Raises
    ------
    MeasurementError
        Something that it needs is not there; the message says what, and what to do.
    """
    missing = [program for program in contender.programs if shutil.which(program) is None]
    if missing:
        raise MeasurementError(f"there is no {', '.join(missing)} on this machine")
    # Asked of the environment without importing anything in it.
    code = (
        "import importlib.metadata as m, json, platform, sys\n"
        "print(json.dumps({'python': platform.python_version(),"
        " 'packages': {name: m.version(name) for name in sys.argv[1:]}}))"
    )
    result = subprocess.run(
        [interpreter(contender), "-c", code, *contender.packages],
        capture_output=True,
        text=True,
        timeout=VERSIONS_S,
        check=False,
    )
    if result.returncode:
        last = result.stderr.strip().splitlines()[-1]
        raise MeasurementError(f"not installed ({last}); pip install 'shmbus[bench-all,train]'")
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer


def ask(
    contender: Contender, requests: list[dict[str, Any]], share_s: float, patience_s: float
) -> list[dict[str, Any]]:
    """Let a contender answer requests in a process of its own.

    After `share_s` it begins no further one, and after `patience_s` more it is ended. An answer
    that has ``failed`` says why. Where the process came to no end, or died, its last answer says
    that, and the rest are missing.
    """
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    if contender.environment:
        # What another interpreter has built is of no use to this one.
        path = str(ROOT)
    with (
        tempfile.TemporaryDirectory(prefix="shmbus-bench-") as directory,
        tempfile.TemporaryFile() as said,
    ):
        output = Path(directory, "answers.json")
        child = subprocess.Popen(
            [interpreter(contender), "-m", "bench.contest.child", contender.name, output],
            stdin=subprocess.PIPE,
            stdout=said,
            stderr=said,
            env={**os.environ, "PYTHONPATH": path},
            # A Ctrl-C is for the parent, which ends this one in order.
            start_new_session=True,
        )
        why = ""
        try:
            given = json.dumps({"requests": requests, "share_s": share_s})
            child.communicate(given.encode(), share_s + patience_s)
        except subprocess.TimeoutExpired:
            why = f"not done within {share_s + patience_s:.0f} s"
        finally:
            _end(child)
        answers: list[dict[str, Any]] = []
        if output.exists():
            answers = json.loads(output.read_text())
        if len(answers) < len(requests):
            said.seek(0)
            text = said.read().decode(errors="replace").strip()
            last = text.splitlines()[-1] if text else "nothing"
            why = why or f"exit status {child.returncode}; it said: {last}"
            answers.append({"failed": why})
        return answers


def _end(child: subprocess.Popen[bytes]) -> None:
    """End a child, and by pid what it started, if it cannot do that itself any more."""
    if child.poll() is not None:
        return
    child.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        child.wait(END_S)
        return
    left = usage.descendants(child.pid)
    child.kill()
    child.wait()
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
