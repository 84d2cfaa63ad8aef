"""The contenders: every way to move a trajectory that is measured, one module each.

A module of this package can be imported where its contender is not installed: its packages are
imported by its ends. `bench.contenders.base` says what a module has to have.
"""

import importlib
from types import ModuleType
from typing import Final

from bench.contenders.base import Contender

__all__ = ["MODULES", "contenders", "module"]

#: In the order of the table. The first one is what the others are compared with.
MODULES: Final = (
    "shmbus_embedded",
    "shmbus_daemon",
    "iceoryx2",
    "faster_fifo",
    "zmq_ipc",
    "mp_queue",
    "ray_objects",
    "transfer_queue",
    "atropos",
)


def contenders() -> dict[str, Contender]:
    """Describe all of them, by name."""
    found = [importlib.import_module(f"{__name__}.{name}").CONTENDER for name in MODULES]
    return {contender.name: contender for contender in found}


def module(name: str) -> ModuleType:
    """Return the module of a contender, by its name."""
    for candidate in MODULES:
        found = importlib.import_module(f"{__name__}.{candidate}")
        if found.CONTENDER.name == name:
            return found
    raise KeyError(f"there is no contender {name!r}; there are {sorted(contenders())}")
