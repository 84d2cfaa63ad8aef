"""What the tests of a relay's parties are given: buses of two sources and of a trainer."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from relay.local import have_splits

import shmbus


@contextmanager
def made_buses(bus_name: str, **capacities: str) -> Iterator[dict[str, str]]:
    names = {each: f"{bus_name}.{each}" for each in capacities}
    for name, capacity in zip(names.values(), capacities.values(), strict=True):
        shmbus.Bus.create(name, capacity).close()
    yield names
    for name in names.values():
        shmbus.unlink(name)


@pytest.fixture
def buses(bus_name: str) -> Iterator[dict[str, str]]:
    with made_buses(bus_name, a="4MiB", b="4MiB", t="4MiB") as names:
        yield names


@pytest.fixture
def small(bus_name: str) -> Iterator[dict[str, str]]:
    """Buses of a source and of a trainer, whose bus is the smaller."""
    with made_buses(bus_name, a="4MiB", t="1MiB") as names:
        yield names


@pytest.fixture
def unlike(buses: dict[str, str]) -> dict[str, str]:
    """Buses of which each has another number for the same split."""
    have_splits(buses["a"], "warmup", "eval")
    have_splits(buses["b"], "eval", "warmup")
    have_splits(buses["t"], "test", "other", "eval")
    return buses
