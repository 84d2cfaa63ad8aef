"""The names of other stacks that adapters use, and what is said where they are not there.

Invariants:

- A stack is imported when a name of it is needed, never before.
- What fails is an ImportError that names the missing names, the installed versions and the tested
  ones; the cause is chained to it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: The variable that names the bus, where a stack's configuration has no place for it.
BUS_VARIABLE: Final = "SHMBUS_BUS"


@dataclass(frozen=True)
class Stack:
    """A stack as an adapter knows it."""

    name: str
    #: The versions that the tests ran with, by distribution.
    tested: Mapping[str, str]
    #: What pip is told to install.
    install: str

    def versions(self) -> str:
        """Return the installed versions beside the tested ones, for messages."""
        found = []
        for name, tested in self.tested.items():
            try:
                found.append(f"{name} {importlib.metadata.version(name)} (tested: {tested})")
            except importlib.metadata.PackageNotFoundError:
                found.append(f"no {name} (tested: {tested})")
        return ", ".join(found)

    def needed(self, module: str, *names: str) -> tuple[Any, ...]:
        """Import names of the stack."""
        cause: Exception | None = None
        try:
            found = importlib.import_module(module)
            missing = ", ".join(name for name in names if not hasattr(found, name))
            if not missing:
                return tuple(getattr(found, name) for name in names)
            reason = f"it has no {missing}"
        except ModuleNotFoundError as error:
            cause, reason = error, f"the module {error.name} is not there"
        except (ImportError, SyntaxError) as error:
            # A SyntaxError is the stack's answer to a Python that is too old for it.
            cause, reason = error, f"it does not import ({type(error).__name__}: {error})"
        raise ImportError(
            f"the {self.name} adapter needs {', '.join(names)} of {module}, and {reason}: "
            f"{self.versions()}; install {self.install}",
            name=module,
        ) from cause
