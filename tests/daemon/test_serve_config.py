"""Settings of ``shmbus serve``: which source wins, what is refused, and the command line."""

import json
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from conftest import Daemon, Spawner, wait_until
from operators import cli

from shmbus import Bus
from shmbus.daemon.config import ConfigError, Settings, load
from shmbus.daemon.server import notify


def test_flags_win_over_the_environment() -> None:
    environment = {"SHMBUS_GROUP_TIMEOUT": "6", "SHMBUS_MAX_PRODUCERS": "9", "SHMBUS_OTHER": "x"}
    settings = load({"max_producers": "10", "capacity": None}, environment)
    assert settings == Settings(group_timeout=6.0, max_producers=10)


def test_text_becomes_what_the_setting_is() -> None:
    settings = load(
        {"group_timeout": "1.5", "unlink_on_exit": True, "max_stash_bytes": "1MiB"},
        {"SHMBUS_SKIP_ZERO_VARIANCE": "true", "SHMBUS_MAX_POLICY_LAG": "3"},
    )
    assert settings.group_timeout == 1.5 and settings.unlink_on_exit
    assert settings.skip_zero_variance is True and settings.max_policy_lag == 3
    assert settings.policy().max_stash_bytes == 1 << 20


@pytest.mark.parametrize(
    ("flags", "environment", "match"),
    [
        ({"group_timeout": "soon"}, {}, "--group-timeout: group_timeout = 'soon'"),
        ({"on_timeout": "explode"}, {}, "--on-timeout.*expected one of wait, drop, partial"),
        ({"group_timeout": "0"}, {}, "group_timeout: expected more than 0"),
        ({"max_producers": "0"}, {}, "max_producers: expected 1 to 4096, got 0"),
        ({"capacity": "12 parsecs"}, {}, "--capacity: capacity = '12 parsecs': size: expected"),
        ({}, {"SHMBUS_MAX_STASH_BYTES": "5"}, "SHMBUS_MAX_STASH_BYTES.*expected 4096 bytes to"),
        ({}, {"SHMBUS_LOG_FORMAT": "xml"}, "SHMBUS_LOG_FORMAT"),
        ({"schema": "tokens"}, {}, "--schema: .*expected JSON of names to dtypes, got 'tokens'"),
        ({"schema": "[1]"}, {}, "--schema: .*expected names to dtypes"),
        ({"schema": '{"x": "int33"}'}, {}, "--schema: .*schema: x: expected a dtype"),
        ({"schema": '{"x": ["int32"]}'}, {}, "--schema: .*schema: x: expected a dtype or"),
        ({"schema": '{"x": ["int32", [true]]}'}, {}, "--schema: .*expected a size"),
    ],
)
def test_a_wrong_value_names_where_it_comes_from(
    flags: dict[str, str], environment: dict[str, str], match: str
) -> None:
    with pytest.raises(ConfigError, match=match.replace("--", "--?")):
        load(flags, environment)


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("SHMBUS_GRUOP_TIMEOUT", "SHMBUS_GROUP_TIMEOUT"),
        ("SHMBUS_GROUPTIMEOUT", "SHMBUS_GROUP_TIMEOUT"),
        ("SHMBUS_Group_Timeout", "SHMBUS_GROUP_TIMEOUT"),
        ("SHMBUS_MAX_POLICY_LAGS", "SHMBUS_MAX_POLICY_LAG"),
    ],
)
def test_a_variable_that_is_nearly_a_setting_ends_serve_with_status_2_and_makes_no_bus(
    bus_name: str, variable: str, meant: str
) -> None:
    result = cli("serve", bus_name, env={variable: "3"})
    assert result.status == 2
    assert f"{variable}: unknown setting; did you mean {meant}?" in result.err
    assert not Path(f"/dev/shm/shmbus.{bus_name}").exists()


def test_other_variables_with_the_prefix_are_nobodys_error() -> None:
    """Our own for tests and builds, and those that a container platform makes of a service."""
    root = Path(__file__).parents[2]
    sources = [*root.glob("tests/**/*.py"), *root.glob("shmbus*/**/*.[chp]*"), root / "setup.py"]
    ours = {
        name
        for path in sources
        if path.suffix in (".py", ".c", ".h") and path != Path(__file__)
        for name in re.findall(r'env[^\n]*?"(SHMBUS_[A-Z_]+)"', path.read_text())
    }
    services = {
        f"{prefix}_{name}": "x"
        for prefix in ("SHMBUS", "SHMBUS_METRICS")
        for name in ("SERVICE_HOST", "SERVICE_PORT", "PORT_9464_TCP", "PORT_9464_TCP_ADDR")
    }
    settings = {f"SHMBUS_{name.upper()}" for name in Settings.__struct_fields__}
    assert "SHMBUS_TEST_SEED" in ours
    assert load({}, {**services, **dict.fromkeys(ours - settings, "x")}) == Settings()


def test_the_log_is_json_where_it_is_asked_for(spawn: Spawner, bus_name: str) -> None:
    child = spawn.module(
        "shmbus", "serve", bus_name, "--capacity", "1MiB",
        env={"SHMBUS_LOG_FORMAT": "json", "SHMBUS_UNLINK_ON_EXIT": "1"},
    )  # fmt: skip
    wait_until(lambda: '"serving"' in child.output())
    child.send_signal(signal.SIGTERM)
    lines = [json.loads(line) for line in child.finish().splitlines()]
    assert [line["message"] for line in lines] == ["serving", "draining", "stopping"]
    assert lines[0]["bus"] == bus_name and lines[0]["level"] == "info"


def test_systemd_is_told_when_it_serves_and_when_it_stops(
    spawn: Spawner, bus_name: str, tmp_path: Path
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.settimeout(20)
        listener.bind(str(tmp_path / "notify"))
        child = spawn.module(
            "shmbus", "serve", bus_name, "--capacity", "1MiB", "--unlink-on-exit",
            env={"NOTIFY_SOCKET": str(tmp_path / "notify")},
        )  # fmt: skip
        assert listener.recv(100) == b"READY=1"
        child.send_signal(signal.SIGTERM)
        assert listener.recv(100) == b"STOPPING=1"
        child.finish()


def test_without_systemd_nobody_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    assert not notify("READY=1")


SCHEMA = '{"tokens": "int32", "experts": ["uint8", ["T", 48, 8]], "pixels?": ["float32", "..."]}'


def test_a_schema_is_declared_and_one_that_is_there_must_be_the_same(
    daemon: Callable[..., Daemon], bus_name: str, spawn: Spawner
) -> None:
    declared = {
        "tokens": "int32", "experts": ("uint8", ("T", 48, 8)), "pixels?": ("float32", ...)
    }  # fmt: skip
    daemon("--capacity", "4MiB", "--schema", SCHEMA).stop()
    with Bus.ensure(bus_name, schema=declared) as bus:
        assert list(bus.schema or ()) == ["tokens", "experts", "pixels?"]
        daemon("--schema", SCHEMA).stop()  # after a restart
        daemon().stop()
        other = spawn.module("shmbus", "serve", bus_name, "--schema", '{"tokens": "int64"}')
        assert other.wait() == 1
        assert "does not fit: schema: field 'tokens': schema= has int64" in other.output()


def test_a_bus_that_is_there_is_adopted_though_a_new_one_would_not_fit(
    daemon: Callable[..., Daemon], bus_name: str
) -> None:
    room = os.statvfs("/dev/shm")
    with Bus.create(bus_name, "2MiB"):
        daemon("--capacity", 2 * room.f_blocks * room.f_frsize).stop()
