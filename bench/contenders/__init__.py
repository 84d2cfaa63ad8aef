"""Contenders: a module for each measured way to move a trajectory.

Each module imports without its contender's packages; only the ends import them.
`bench.contenders.base` specifies the contents of a module.
"""

import importlib
from types import ModuleType
from typing import Final

from bench.contenders.base import Contender

__all__ = ["MODULES", "contenders", "module"]

#: In the order of the table; the first contender is the reference.
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
    """Describe every contender, by name."""
    found = [importlib.import_module(f"{__name__}.{name}").CONTENDER for name in MODULES]
    return {contender.name: contender for contender in found}


def module(name: str) -> ModuleType:
    """Return the module of a contender by name."""
    for candidate in MODULES:
        found = importlib.import_module(f"{__name__}.{candidate}")
        if found.CONTENDER.name == name:
            return found
    raise KeyError(f"there is no contender {name!r}; there are {sorted(contenders())}")
