"""What the tests of a relay's parties are given: buses of two sources and of a trainer."""

from collections.abc import Iterator

import pytest
from relay.local import have_splits

import shmbus


@pytest.fixture
def buses(bus_name: str) -> Iterator[dict[str, str]]:
    names = {"a": f"{bus_name}.a", "b": f"{bus_name}.b", "t": f"{bus_name}.t"}
    for name in names.values():
        shmbus.Bus.create(name, "4MiB").close()
    yield names
    for name in names.values():
        shmbus.unlink(name)


@pytest.fixture
def unlike(buses: dict[str, str]) -> dict[str, str]:
    """Buses of which each has another number for the same split."""
    have_splits(buses["a"], "warmup", "eval")
    have_splits(buses["b"], "eval", "warmup")
    have_splits(buses["t"], "test", "other", "eval")
    return buses
