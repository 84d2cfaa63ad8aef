"""Counted work of a child program: system calls, which tests compare instead of times."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from conftest import Spawner

#: Begins each counted program: `locks()` counts the file locks asked for since the last call,
#: `woken()` the waiters woken by rings of bells.
_BEGIN = """
import ctypes, functools, json, resource, sys
from contextlib import ExitStack
import shmbus
def _since(counted):
    found, counted.value = counted.value, 0
    return found
locks, woken = (
    functools.partial(_since, ctypes.c_long.in_dll(ctypes.CDLL(None), name))
    for name in ("counted_locks", "counted_woken")
)
"""


def count(spawn: Spawner, directory: Path, text: str, *args: object) -> Any:
    """Run a program under the counter; return what the program prints last, as JSON."""
    library = directory / "counted_calls.so"
    cc = os.environ.get("CC", "cc").split()
    source = Path(__file__).with_suffix(".c")
    subprocess.run([*cc, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    child = spawn.script(_BEGIN + text, *args, env={"LD_PRELOAD": str(library)}, fresh=True)
    return json.loads(child.finish().splitlines()[-1])
