"""Wrong settings at the command line: a message with the next step, its status, nothing made."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from conftest import segments_named
from operators import cli

from shmbus import Bus


@pytest.mark.parametrize("value", ["0", "4097"])
def test_a_number_of_producers_that_no_bus_has_is_a_usage_error(bus_name: str, value: str) -> None:
    ended = cli("serve", bus_name, "--max-producers", value)
    assert ended.status == 2
    assert f"max_producers: expected 1 to 4096, got {value}" in ended.err
    assert "Traceback" not in ended.err
    assert segments_named(bus_name) == []


def test_a_port_in_use_leaves_no_bus_behind(bus_name: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        ended = cli("serve", bus_name, "--capacity", "64KiB", "--metrics-port", port)
    assert ended.status == 1
    assert "choose another port" in ended.err
    assert segments_named(bus_name) == []


def test_a_pause_with_too_long_a_reason_is_a_usage_error(bus_name: str) -> None:
    with Bus.create(bus_name, "64KiB") as bus:
        ended = cli("pause", bus_name, "--reason", "x" * 120)
        assert bus.paused is None
    assert ended.status == 2
    assert "expected at most 119 bytes, got 120" in ended.err


def test_a_snapshot_that_has_no_place_says_so(bus_name: str, tmp_path: Path) -> None:
    with Bus.create(bus_name, "64KiB"):
        ended = cli("snapshot", bus_name, str(tmp_path / "missing" / "snapshot"))
    assert ended.status == 1
    assert "choose a directory in one that is there" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_capacity_that_is_no_size_is_a_usage_error(tmp_path: Path) -> None:
    ended = cli("restore", str(tmp_path), "--capacity", "lots")
    assert ended.status == 2
    assert "expected a number with KiB, MiB, GiB or TiB" in ended.err
