"""TRL's names that this adapter uses, and what it says where they are not there."""

from __future__ import annotations

import importlib
import importlib.metadata
from typing import Any, Final

__all__ = ["TESTED", "needed", "versions"]

#: What the tests ran with.
TESTED: Final = {"trl": "1.16.0", "transformers": "5.23.0", "accelerate": "1.15.0"}


def versions() -> str:
    """Return the installed versions beside the tested ones, for messages.

    Returns
    -------
    str
    """
    found = []
    for name, tested in TESTED.items():
        try:
            found.append(f"{name} {importlib.metadata.version(name)} (tested: {tested})")
        except importlib.metadata.PackageNotFoundError:
            found.append(f"no {name} (tested: {tested})")
    return ", ".join(found)


def needed(module: str, *names: str) -> tuple[Any, ...]:
    """Import names of the stack.

    Parameters
    ----------
    module : str
        Where they are in the tested version.
    *names : str

    Returns
    -------
    tuple
        What they name, in their order.

    Raises
    ------
    ImportError
        The package is not installed, or its version has other names; says which are missing.
    """
    package = module.partition(".")[0]
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != package:
            raise
        missing = "the package" if error.name == package else f"the module {error.name}"
        raise ImportError(
            f"the TRL adapter needs {', '.join(names)} of {module}, and {missing} is not there: "
            f"{versions()}; install trl=={TESTED['trl']}",
            name=error.name,
        ) from error
    missing = ", ".join(name for name in names if not hasattr(found, name))
    if missing:
        raise ImportError(
            f"the TRL adapter needs {', '.join(names)} of {module}, which has no {missing}: "
            f"{versions()}; install trl=={TESTED['trl']}",
            name=module,
        )
    return tuple(getattr(found, name) for name in names)
