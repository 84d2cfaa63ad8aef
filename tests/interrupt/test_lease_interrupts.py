"""An exception at any step of the end of a `with` block leaves no version of a pool leased."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from injection import Injected, Injection

from shmbus.pool import PoolReader, read_pool
from shmbus.pool.pool_file import pool_path
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber

Lease = Callable[[], AbstractContextManager[object]]


@pytest.fixture
def published(bus_name: str) -> Iterator[str]:
    with WeightPublisher(bus_name, ModuleSource(torch.nn.Linear(2, 2)), carrier="shm") as publisher:
        publisher.publish(version=1)
        yield bus_name
    Path(pool_path(bus_name, "weights")).unlink(missing_ok=True)


def holders(bus: str) -> list[str]:
    return [who for slot in read_pool(bus, "weights").slots for who in slot.held_by]


def faults(bus: str, lease: Lease, *, fails: bool) -> tuple[int, list[str]]:
    """Interrupt each step of a block's end; return the count, and steps with a leftover lease."""
    found = []
    for at in range(1, 1000):
        injection = Injection(at, __file__)
        kept = lease()
        try:
            with kept:
                assert holders(bus) != []
                injection.__enter__()
                if fails:
                    raise KeyError
        except (Injected, KeyError) as error:
            end: BaseException | None = error  # kept with its traceback, as in a notebook
        else:
            end = None
        finally:
            injection.__exit__(None, None, None)
        if not injection.raised:
            return at - 1, found
        assert isinstance(end, Injected)
        if holders(bus):
            found.append(injection.where)
            kept.__exit__(None, None, None)
    raise AssertionError("more steps than a block's end has")


@pytest.mark.parametrize("fails", [False, True])
def test_a_block_that_is_interrupted_at_its_end_lets_go_of_its_version(
    published: str, fails: bool
) -> None:
    with PoolReader(published, "weights") as reader:
        steps, found = faults(published, reader.latest, fails=fails)
        assert (steps > 0, found) == (True, [])
    with WeightSubscriber(published) as subscriber:

        def viewed() -> AbstractContextManager[object]:
            weights = subscriber.latest(timeout=30.0)
            assert weights["weight"].shape == (2, 2)
            return weights

        steps, found = faults(published, viewed, fails=fails)
        assert (steps > 3, found) == (True, [])
