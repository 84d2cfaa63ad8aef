"""An exception at any step of the handler loses no group, and the same call can be made again."""

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner

HERE = Path(__file__).parent


def run(spawn: Spawner, script: str, *arguments: object) -> dict[str, Any]:
    said = spawn.file(HERE / script, *arguments).finish(timeout=200)
    report: dict[str, Any] = json.loads(said.splitlines()[-1])
    return report


#: Of all events the suite interrupts one in so many, from a seed's on; an offer has most.
STEP = 4
OFFER_STEP = 9

#: What each test runs; `make interrupts` has all of it, and more often.
OPERATIONS = [
    "next-stale",
    "ack",
    "give-back",
    "state",
    "load",
    "attach",
    "next-twice-prefetch",
    "ack-prefetch",
    "close-prefetch",
    "served-give-back",
    "rank-ack",
    "rank-next-twice-prefetch",
    "rank-close",
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_an_exception_at_some_steps_of_the_handler_loses_nothing(
    bus_name: str, operation: str, seed: int, spawn: Spawner
) -> None:
    part = ("--from", 1 + seed % STEP, "--step", STEP)
    report = run(spawn, "handler.py", bus_name, operation, *part)
    assert report["faults"] == []
    assert report[operation] > 5


def test_an_exception_at_some_steps_of_an_offer_offers_each_prompt_once(
    bus_name: str, seed: int, spawn: Spawner
) -> None:
    part = ("--from", 1 + seed % OFFER_STEP, "--step", OFFER_STEP)
    report = run(spawn, "handler.py", bus_name, "offer", *part)
    assert report["faults"] == []
    assert report["offer"] > 20
