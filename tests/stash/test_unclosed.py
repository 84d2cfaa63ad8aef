"""A Consumer that reads the ring itself and goes without close(): what it had not ended is kept."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from conftest import Spawner

from shmbus import Bus, Consumer, Producer

GROUPS = 12
SIZE = 2
#: A record fills most of an extent, so that what is freed wrongly is overwritten at once.
ITEMS = 12_000

#: How a consumer's process may end; `consumer` holds six groups of `groups`.
ENDINGS = {
    "end of script": "",
    "exception": "raise RuntimeError('a bug of the trainer')",
    "sys.exit": "sys.exit(3)",
    "deleted": "del groups, consumer\ngc.collect()",
    "deleted before its groups": "del consumer\ngc.collect()\ndel groups\ngc.collect()",
    "views deleted last": (
        "views = [t['x'] for g in groups for t in g]\n"
        "del groups, consumer\ngc.collect()\ndel views\ngc.collect()"
    ),
    "views deleted first": (
        "views = [t['x'] for g in groups for t in g]\ndel views\ngc.collect()\n"
        "del groups, consumer\ngc.collect()"
    ),
    "in a cycle": (
        "class Trainer: pass\ntrainer = Trainer()\ntrainer.me = trainer\n"
        "trainer.groups, trainer.consumer = groups, consumer\n"
        "del groups, consumer, trainer\ngc.collect()"
    ),
    "in a module's cycle": (
        "class Trainer: pass\ntrainer = Trainer()\ntrainer.me = trainer\n"
        "trainer.consumer, trainer.groups = consumer, groups\nsys.keep = trainer"
    ),
}

CONSUMER = """
import gc, sys
from shmbus import Consumer

consumer = Consumer(sys.argv[1], daemon=False)
groups = consumer.take(6, 30)
assert len(groups) == 6, groups
print("taken", flush=True)
"""


def put_groups(bus: Bus, first: int, count: int = GROUPS) -> None:
    with Producer(bus.name) as producer:
        for number in range(first, first + count):
            for index in range(SIZE):
                producer.put(
                    f"g{number}",
                    group_size=SIZE,
                    index=index,
                    x=np.full(ITEMS, number, np.int32),
                    timeout=30,
                )


def read_all(bus: Bus) -> Counter[str]:
    """Every group that is delivered, each with what was put in it; the ledger balances."""
    found: Counter[str] = Counter()
    with Consumer(bus.name, daemon=False) as consumer:
        while groups := consumer.take(64, 0.2):
            for group in groups:
                number = int(group.instance_id[1:])
                assert all((sample["x"] == number).all() for sample in group), group
                found[group.instance_id] += 1
                group.ack()
        ledger = consumer.stats()
    assert ledger.balanced and not any(ledger.dropped.values()), ledger
    return found


@pytest.mark.parametrize("ending", ENDINGS.values(), ids=list(ENDINGS))
def test_what_an_unclosed_consumer_held_is_delivered_again(
    bus: Bus, spawn: Spawner, ending: str
) -> None:
    put_groups(bus, 0)
    child = spawn.script(CONSUMER + ending, bus.name)
    child.wait()
    assert "taken" in child.output()
    put_groups(bus, GROUPS, GROUPS // 2)  # overwrites what was freed
    assert read_all(bus) == {f"g{number}": 1 for number in range(GROUPS + GROUPS // 2)}
