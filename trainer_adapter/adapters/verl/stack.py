"""verl's names that this adapter uses, and what it says where they are not there."""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

__all__ = ["BUS_VARIABLE", "TESTED", "needed"]

#: What the tests ran with.
TESTED: Final = "verl 0.9.1 with its extra verl-core"
#: The variable that names the bus, where verl's configuration has no place for it.
BUS_VARIABLE: Final = "SHMBUS_BUS"


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
    try:
        found = importlib.import_module(module)
        missing = [name for name in names if not hasattr(found, name)]
    except ModuleNotFoundError as error:
        missing = [f"the module {error.name}"]
    if not missing:
        return tuple(getattr(found, name) for name in names)
    try:
        installed = f"verl {version('verl')}"
    except PackageNotFoundError:
        installed = "no verl"
    raise ImportError(
        f"the verl adapter needs {', '.join(names)} of {module}, and {', '.join(missing)} is not "
        f"there: {installed} (tested: {TESTED}); install verl[verl-core]==0.9.1",
        name=module,
    )
