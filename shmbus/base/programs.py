"""Start of this project's programs, with the packages of this process.

Invariant: the working directory is never an import path. ``python -m`` puts the working directory
first: a folder there with the name of a package would run instead, regardless of its owner.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

#: Parent folder of this package, in last place: only for a child that finds the package nowhere
#: else.
_ROOT: Final = str(Path(__file__).resolve().parents[2])
#: The first entry of sys.path, an empty text, means the working directory; PYTHONSAFEPATH omits it.
_RUN: Final = (
    "import runpy, sys; sys.path[:] = [*filter(None, sys.path), {root!r}]; "
    "runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
)


def program(module: str, *words: str) -> list[str]:
    """Return the command line of a module, as ``python -m MODULE WORDS``, but for the above."""
    return [sys.executable, "-c", _RUN.format(root=_ROOT, module=module), *words]
