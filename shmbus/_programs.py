"""How a process starts another program of this project: with the packages that it has itself.

Invariant: the working directory is no place to import from. ``python -m`` takes it for the first
one, so a folder there with the name of a package would run instead, whoever made it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

#: Where this package lies. It comes last: a child that finds the package otherwise needs it not.
_ROOT: Final = str(Path(__file__).resolve().parents[1])
#: The first entry of sys.path is the working directory, and empty; with PYTHONSAFEPATH none is.
_RUN: Final = (
    "import runpy, sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


def program(module: str, *words: str) -> list[str]:
    """Return the command line of a module, as ``python -m MODULE WORDS``, but for the above."""
    return [sys.executable, "-c", _RUN.format(root=_ROOT, module=module), *words]
