"""An exception at any instant leaves every promise standing: injected everywhere, and real signals.

The scripts of this folder run in separate processes, and report the fault after each interrupt.
Operations, counts and seeds as arguments allow a longer look.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Spawner

HERE = Path(__file__).parent

#: Of a served consumer's events the suite interrupts every so manieth, from a seed's on.
STEP = 4

Reports = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def reports(spawn: Spawner) -> Reports:
    def run(script: str, *arguments: object) -> list[dict[str, Any]]:
        said = spawn.file(HERE / script, *arguments).finish(timeout=240)
        # Beside its log.
        return [json.loads(line) for line in said.splitlines() if line.startswith("{")]

    return run


def test_an_exception_at_any_step_of_an_embedded_consumer_costs_nothing(
    bus_name: str, reports: Reports
) -> None:
    (report,) = reports("embedded.py", bus_name)
    assert report["injections"] > 200
    assert report["faults"] == []


@pytest.mark.timeout(240)
def test_an_exception_at_some_steps_of_a_served_consumer_costs_nothing(
    bus_name: str, seed: int, reports: Reports
) -> None:
    # `make interrupts` runs every step, and the remaining operations over the same lines.
    short = "take poll ack ack-list give-back with stats version close rank-step rank-attach"
    doubted = "doubted-ack doubted-give-back"
    part = ("--from", 1 + seed % STEP, "--step", STEP)
    (report,) = reports("served.py", bus_name, *f"{short} {doubted}".split(), *part)
    assert report["injections"] > 1000 // STEP
    assert report["faults"] == []


def test_the_sweep_ends_when_it_has_raised_enough_and_counts_by_path(
    bus_name: str, seed: int, reports: Reports
) -> None:
    print(f"seed {seed}")
    embedded, whole = reports("sweep.py", bus_name, 1000, seed, "embedded")
    assert embedded["faults"] == [] and embedded["rounds"] >= 2
    assert whole["injections"] == embedded["injections"] >= 1000


#: Exceptions of each signal, by mode. The remaining modes go through the same lines; `make
#: interrupts` runs every mode.
SIGNALS = {"embedded": 20, "ranks": 20, "take": 20, "prefetch": 20, "prefetch-ranks": 10}


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", SIGNALS)
def test_a_consumer_that_gets_signals_at_random_instants_loses_and_doubles_nothing(
    bus_name: str, seed: int, mode: str, reports: Reports
) -> None:
    print(f"seed {seed}")
    count = SIGNALS[mode]
    (report,) = reports("signals.py", bus_name, count, seed, mode)
    assert report["faults"] == []
    assert (report["KeyboardInterrupt"], report["Alarm"]) == (count, count)


#: Operations with every step in `make interrupts`, and the remaining operations. An offer has more.
OFFER_STEP = 9
HANDLED = [
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
    "offer",
]


@pytest.mark.timeout(240)
@pytest.mark.parametrize("operation", HANDLED)
def test_an_exception_at_some_steps_of_the_handler_loses_and_doubles_nothing(
    bus_name: str, operation: str, seed: int, reports: Reports
) -> None:
    pytest.importorskip("torch")
    step = OFFER_STEP if operation == "offer" else STEP
    (report,) = reports(
        "handler.py", bus_name, operation, "--from", 1 + seed % step, "--step", step
    )
    assert report["faults"] == []
    assert report[operation] > (20 if operation == "offer" else 5)
