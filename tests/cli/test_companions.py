"""Segments that go with a bus, such as the demo's weights: nothing takes one for a bus."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Spawner
from operators import cli

import shmbus
from shmbus.segment.names import bus_names, companion_name, parse_companion
from trainer_adapter.demo.worker import WeightsChannel

TRAINER = """
import sys, time
from trainer_adapter.demo.worker import WeightsChannel
channel = WeightsChannel(sys.argv[1], 4, create=True)
print("ready", flush=True)
time.sleep(600)
"""


def path_of(bus: str) -> Path:
    return Path("/dev/shm") / companion_name("weights", bus)[1:]


def found(name: str) -> list[dict[str, Any]]:
    """The rows of one bus in ``shmbus gc --json``."""
    rows = cli("gc", name, "--json").json()
    assert isinstance(rows, list)
    return rows


def test_weights_and_a_bus_called_like_them_do_not_meet(bus_name: str) -> None:
    weights = WeightsChannel(bus_name, 4, create=True)
    try:
        with shmbus.Bus.create(f"{bus_name}.weights", "1MiB"):
            weights.publish(np.ones(4, np.float32), 3)
            reader = WeightsChannel(bus_name, 4)
            found = reader.newest()
            assert found is not None and found[0] == 3 and (found[1] == 1).all()
            reader.close()
    finally:
        weights.close()
    assert not path_of(bus_name).exists()


def test_weights_are_not_listed_as_a_bus(bus_name: str) -> None:
    weights = WeightsChannel(bus_name, 4, create=True)
    try:
        assert not [name for name in bus_names() if bus_name in name]
        rows = cli("list", "--json").json()
        assert bus_name not in [row["name"] for row in rows]  # type: ignore[index, union-attr, call-overload]
    finally:
        weights.close()


def test_gc_removes_weights_only_when_nobody_alive_uses_them(bus_name: str, spawn: Spawner) -> None:
    trainer = spawn.script(TRAINER, bus_name)
    trainer.expect("ready")
    (row,) = found(bus_name)
    assert (row["kind"], row["verdict"], row["name"]) == ("companion", "in_use", bus_name)
    assert "nothing to remove" in cli("gc", bus_name, "--yes").out
    reader = WeightsChannel(bus_name, 4)
    trainer.kill()
    assert found(bus_name)[0]["verdict"] == "in_use"
    reader.close()
    (row,) = found(bus_name)
    assert row["verdict"] == "removable" and row["path"] == str(path_of(bus_name))
    assert cli("gc", bus_name).status == 0 and path_of(bus_name).exists()
    assert "removed 1 file" in cli("gc", bus_name, "--yes").out
    assert not path_of(bus_name).exists()


def test_gc_names_a_bus_and_its_weights_together(bus_name: str) -> None:
    weights = WeightsChannel(bus_name, 4, create=True)
    try:
        with shmbus.Bus.create(bus_name, "1MiB"):
            assert {row["kind"] for row in found(bus_name)} == {"segment", "companion"}
    finally:
        weights.close()


@pytest.mark.parametrize("bus", ["run1", "x.weights", "weights.x", "a b", "x" * 200])
def test_a_companion_is_called_after_kind_and_bus(bus: str) -> None:
    name = companion_name("weights", bus)
    assert name == f"/shmbus-weights.{bus}" and len(name) < 255
    assert parse_companion(name[1:]) == ("weights", bus)
    assert parse_companion(f"shmbus.{bus}") is None
    assert parse_companion(f"shmbus-{bus}.sock") is None


@pytest.mark.parametrize(("kind", "bus"), [("weights", "x.sock"), ("we.ights", "x"), ("", "x")])
def test_a_companion_that_would_be_called_like_something_else_is_refused(
    kind: str, bus: str
) -> None:
    with pytest.raises(ValueError, match="choose another name"):
        companion_name(kind, bus)
