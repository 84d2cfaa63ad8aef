"""Counted work of a child program: system calls, which tests compare instead of times."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

from conftest import Spawner

__all__ = ["count"]

#: Begins each counted program: `locks()` counts the file locks asked for since the last call.
_BEGIN = """
import ctypes, json, resource, sys
from contextlib import ExitStack
import shmbus
_counted = ctypes.c_long.in_dll(ctypes.CDLL(None), "counted_locks")
def locks():
    found, _counted.value = _counted.value, 0
    return found
"""


def count(spawn: Spawner, directory: Path, text: str, *args: object) -> Any:
    """Run a program under the counter; return what the program prints last, as JSON."""
    library = directory / "counted_locks.so"
    cc = os.environ.get("CC", "cc").split()
    source = Path(__file__).with_name("counted_locks.c")
    subprocess.run([*cc, "-shared", "-fPIC", "-O2", "-o", library, source, "-ldl"], check=True)
    child = spawn.script(_BEGIN + text, *args, env={"LD_PRELOAD": str(library)}, fresh=True)
    return json.loads(child.finish().splitlines()[-1])
