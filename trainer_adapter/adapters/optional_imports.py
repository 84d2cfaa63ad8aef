"""Names of foreign stacks used by adapters, and the error for missing names.

Invariants:

- A stack is imported on the first use of a name, never earlier.
- A failure is an ImportError with the missing names, the installed versions and the tested
  versions; the cause is chained.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

#: The variable with the bus's name, for stacks without a place in their configuration.
BUS_VARIABLE: Final = "SHMBUS_BUS"


@dataclass(frozen=True)
class Stack:
    """A stack from the view of an adapter."""

    name: str
    #: The versions used in the tests, by distribution.
    tested: Mapping[str, str]
    #: Requirement for pip.
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
            # A SyntaxError means a Python too old for the stack.
            cause, reason = error, f"it does not import ({type(error).__name__}: {error})"
        raise ImportError(
            f"the {self.name} adapter needs {', '.join(names)} of {module}, and {reason}: "
            f"{self.versions()}; install {self.install}",
            name=module,
        ) from cause
