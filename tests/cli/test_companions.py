"""Segments that go with a bus, such as the demo's weights: nothing takes one for a bus."""

import pytest
from operators import cli

import shmbus
from shmbus.segment.names import bus_names, companion_name, parse_companion
from trainer_adapter.demo.worker import WeightsChannel


def test_weights_are_not_listed_as_a_bus_and_gc_names_both_together(bus_name: str) -> None:
    weights = WeightsChannel(bus_name, 4, create=True)
    try:
        assert not [name for name in bus_names() if bus_name in name]
        rows = cli("list", "--json").json()
        assert bus_name not in [row["name"] for row in rows]  # type: ignore[index, union-attr, call-overload]
        with shmbus.Bus.create(bus_name, "1MiB"):
            rows = cli("gc", bus_name, "--json").json()
            assert {row["kind"] for row in rows} == {"segment", "companion"}  # type: ignore[index, union-attr, call-overload]
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
def test_a_companion_with_an_ambiguous_name_is_refused(kind: str, bus: str) -> None:
    with pytest.raises(ValueError, match=r"expected a (kind|name)"):
        companion_name(kind, bus)
