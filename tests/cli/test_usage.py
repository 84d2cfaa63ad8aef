"""Wrong settings at the command line: a message with the next step, its status, nothing made."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import segments_named, wait_until
from operators import cli, usage

from shmbus import Bus, Consumer, errors
from shmbus.segment import creation
from shmbus.segment.names import shm_path

HOST_PORT = "expected HOST:PORT, such as 127.0.0.1:8000"
SIZE = "expected a number with KiB, MiB, GiB or TiB"
NAME = "bus name: expected 1 to 200 bytes without '/'"
LISTEN = ("--http", "127.0.0.1:0")
WRONG: list[tuple[str, tuple[str, ...], str]] = [
    ("serve", ("--max-producers", "0"), "max_producers: expected 1 to 4096, got 0"),
    ("serve", ("--max-producers", "4097"), "max_producers: expected 1 to 4096, got 4097"),
    *(
        (command, ("--http", address), HOST_PORT)
        for command in ("serve", "gateway")
        for address in ("127.0.0.1", "[::1]:70000", "localhost:\u0663", "127.0.0.1:99999")
    ),
    ("serve", ("--http-token-file", "/none/such"), "http_token_file: expected a file that may be"),
    ("gateway", ("--create", "lots", *LISTEN), SIZE),
    ("gateway", ("--create", "99999TiB", *LISTEN), "capacity: expected"),
    ("pause", ("--reason", "x" * 120), "expected at most 119 bytes, got 120"),
    ("restore", ("--capacity", "lots"), SIZE),
    *(
        ("weights", ("--verify", "--share", share), "expected a share between 0 and 1")
        for share in ("0", "1", "nan", "half")
    ),
    ("weights", ("--verify", "--resume"), "not allowed with argument"),
    ("status", ("--ray", "run1"), "--ray: expected HOST:PORT"),
    ("serve", ("--capacity", "1MiB", "--max-producers", "4096"), "at most max_producers=255"),
    ("serve", ("--max-policy-lag", "9" * 25), "max_policy_lag: expected 0 to 9223372036854775807"),
    ("serve", ("--sample-retries", "9" * 25), "sample_retries: expected 0 to 9223372036854775807"),
    ("serve", ("--http", "http://127.0.0.1:0"), HOST_PORT),
    ("serve", ("--metrics-port", "0", "--metrics-host", ""), "metrics_host: expected"),
    ("serve", ("--restore", ""), "restore: expected a value"),
    ("serve", ("--metrics-host", "::1"), "--metrics-host: expected with --metrics-port"),
    ("serve", ("--http-token-file", "/dev/null"), "--http-token-file: expected with --http"),
    ("serve", ("--on-overflow", "drop"), "--on-overflow: expected with --max-stash-bytes"),
    ("gateway", ("--http", "http://127.0.0.1:0"), HOST_PORT),
    ("gateway", ("--token-file", "", *LISTEN), "--token-file: expected a path"),
    ("metrics", ("--host", ""), "got nothing"),
    *(
        ("proxy", ("--engine", f"http://{engine}"), "expected an address such as http://")
        for engine in ("h:99999", "h:x", "[::1", "a b:80", "\udcff:80", "h:80/v1?x=1")
    ),
    ("proxy", ("--engine", "http://h", "--routed-experts", "0x8"), "expected the layers and"),
    ("pause", ("--reason", "\udcff"), "expected text in UTF-8"),
    ("snapshot", ("",), "expected a path, got ''"),
    ("trace", ("-o", ""), "expected a path, got ''"),
    ("top", ("--interval", "1e300"), "--interval: expected seconds, 0.1 or more, with an end"),
    ("events", ("--group", ""), "--group: expected text in UTF-8"),
    ("events", ("--group", "\udcff"), "--group: expected text in UTF-8"),
    ("events", ("--group", "g", "--split", ""), "--split: expected text in UTF-8"),
    ("events", ("--group", "g", "--round", "-5"), "--round: expected 0 to"),
    ("events", ("--group", "g", "--round", "9" * 25), "--round: expected 0 to"),
    ("events", ("--group", "g", "--follow"), "--follow: expected without --group"),
    ("events", ("--group", "g", "--limit", "3"), "--limit: expected without --group"),
    ("events", ("--round", "0"), "--round: expected with --group"),
    ("events", ("--split", "eval"), "--split: expected with --group"),
    ("weights", ("--share", "0.5"), "--share: expected with --verify"),
    ("weights", ("--verify", "--kind", "x"), "--kind: expected without --verify"),
    ("weights", ("--resume", "--json"), "--json: expected without --resume"),
    *(
        ("relay", (action, *option), f"{option[0]}: expected with --trainer")
        for action in ("--status", "--stop")
        for option in (("--weights",), ("--release", "put"), ("--max-policy-lag", "0"))
    ),
    ("relay", ("--stop", "--json"), "--json: expected with --status"),
    ("relay", ("--forget", ""), "--forget: expected text in UTF-8"),
    ("relay", ("--trainer", "t", "--keep-sync", "0"), "--keep-sync: expected with --keep"),
    ("relay", ("--trainer", "t", "--ray", ""), "--ray: expected text in UTF-8"),
    ("weights", ("--resume", "--server", "http://[::1]:80"), "--server: expected with --verify"),
    *(
        ("weights", ("--kind", kind), "expected a kind of lower-case letters")
        for kind in ("", "a/b", "Weights")
    ),
]


@pytest.mark.parametrize(("command", "options", "said"), WRONG)
def test_a_wrong_option_is_a_usage_error_before_anything_is_made(
    bus_name: str, command: str, options: tuple[str, ...], said: str
) -> None:
    ended = usage(command, bus_name, *options)
    assert (ended.status, said in ended.err, segments_named(bus_name)) == (2, True, []), ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("line", "env", "said"),
    [
        (("pause", "a/b"), {}, NAME),
        (("resume", "a/b"), {}, NAME),
        (("gateway", "a/b", *LISTEN), {}, NAME),
        (("bench", "--capacity", "lots"), {}, SIZE),
        (("bench", "--tiny", "--full"), {}, "--full: not allowed with argument --tiny"),
        (("web", "--host", ""), {}, "got nothing"),
        (("web",), {"SHMBUS_WEB_TOKEN": "\u00e9" * 20}, "ASCII letters and digits"),
        (("list", "--jsn"), {}, "unrecognized arguments"),
        (("demo", "--group-size", "1"), {}, "expected 2 to 1024, got 1"),
        (("demo", "--turns"), {}, "--turns needs --engine vllm and --model FOLDER"),
        (("demo", "--workers", "x"), {}, "expected 1 to 1000, got x"),
        (("demo", "--workers", "9" * 20), {}, "--workers: expected 1 to 1000"),
        (("demo", "--seed", "-1"), {}, "--seed: expected 0 to"),
        (("demo", "--output", ""), {}, "--output: expected a folder"),
        (("colocate", "--stop", "--train", "0.5"), {}, "--train: expected without --stop"),
    ],
)
def test_a_wrong_word_is_refused(line: tuple[str, ...], env: dict[str, str], said: str) -> None:
    ended = cli(*line, env=env)
    assert (ended.status, said in ended.err) == (2, True), ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("word", "meant"),
    [("stats", "status"), ("Status", "status"), ("snapshoot", "snapshot"), ("ls", "list"),
     ("unlink", "rm"), ("delete", "rm"), ("clean", "gc"), ("serv", "serve"), ("doktor", "doctor"),
     ("xyzzy", "")],
)  # fmt: skip
def test_a_mistyped_command_is_named_with_the_command_that_was_meant(word: str, meant: str) -> None:
    ended = usage(word, "run1")
    hint = f"did you mean {meant!r}? " if meant else ""
    assert (ended.status, ended.out) == (2, "")
    assert f"there is no command {word!r}; {hint}expected one of serve, status," in ended.err


@pytest.mark.parametrize("columns", [60, 140])
def test_help_is_as_wide_as_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = cli("status", "--help").out.split("\n\n")
    described, examples = shown[1], shown[-1]
    assert described.startswith("Shows the ledger")
    assert columns / 2 < max(map(len, described.splitlines())) <= columns
    assert "\n  shmbus status run1\n" in examples


def test_a_command_line_without_a_command_shows_the_commands() -> None:
    ended = cli()
    assert ended.status == 2
    assert "show where every trajectory of a bus is" in ended.err
    assert ended.out == ""


@pytest.mark.parametrize(
    ("command", "create", "option", "host"),
    [
        ("serve", "--capacity", "--metrics-port", ""),
        ("gateway", "--create", "--http", "127.0.0.1:"),
    ],
)
def test_a_port_in_use_leaves_no_bus_behind(
    bus_name: str, command: str, create: str, option: str, host: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        line = (command, bus_name, create, "64KiB", option, f"{host}{taken.getsockname()[1]}")
        if host:  # a name that cannot be encoded for a look-up
            assert "cannot listen at xxxx" in cli(*line[:-1], f"{'x' * 70}:0").err
        ended = cli(*line)
        assert (ended.status, "choose another" in ended.err) == (1, True)
        assert segments_named(bus_name) == []
        with Bus.create(bus_name, "64KiB"):
            assert cli(*line).status == 1
            assert segments_named(bus_name) != []


def test_a_token_that_no_client_can_send_is_refused(bus_name: str, tmp_path: Path) -> None:
    file = tmp_path / "token"
    listen = ("gateway", bus_name, "--http", "127.0.0.1:0")
    with Bus.create(bus_name, "64KiB"):
        for token in (b" \n", b"two\nlines", b"\xff"):
            file.write_bytes(token)
            ended = cli(*listen, "--token-file", str(file))
            assert ended.status == 1
            assert "expected a token of ASCII letters" in ended.err
        assert "--token-file: cannot read" in cli(*listen, "--token-file", str(tmp_path)).err
        ended = cli(*listen, env={"SHMBUS_GATEWAY_TOKEN": " "})
        assert ended.status == 1
        assert "SHMBUS_GATEWAY_TOKEN: expected a token" in ended.err


def test_a_snapshot_that_has_no_place_says_so(bus_name: str, tmp_path: Path) -> None:
    with Bus.create(bus_name, "64KiB"):
        ended = cli("snapshot", bus_name, str(tmp_path / "missing" / "snapshot"))
    assert ended.status == 1
    assert "choose a directory in one that is there" in ended.err
    assert list(tmp_path.iterdir()) == []


def test_a_daemon_starts_over_where_a_creator_was_killed(bus_name: str) -> None:
    with open(shm_path(bus_name), "xb"):
        os.chmod(shm_path(bus_name), 0o600)  # as shm_open leaves it, before a lock
    command = [sys.executable, "-m", "shmbus.cli", "serve", bus_name, "--capacity", "64KiB"]
    with subprocess.Popen([*command, "--unlink-on-exit"], stderr=subprocess.PIPE) as daemon:
        try:
            wait_until(lambda: _serves(bus_name), what="the daemon serves")
        finally:
            daemon.send_signal(signal.SIGTERM)
            _, said = daemon.communicate(timeout=60)
    assert daemon.returncode == 0, said
    assert b"removed what a creator that died had left" in said
    assert segments_named(bus_name) == []


def _serves(name: str) -> bool:
    try:
        with Consumer(name, daemon=True) as consumer:
            return consumer.stats().balanced
    except errors.ShmbusError:
        return False


def test_what_a_living_creator_holds_is_left_alone(bus_name: str) -> None:
    with Bus.create(bus_name, "64KiB"):
        assert not creation.remove_unfinished(bus_name)
        with open(shm_path(bus_name), "r+b") as file:
            magic = file.read(8)
            file.seek(0)
            file.write(bytes(8))
            file.flush()
            assert not creation.remove_unfinished(bus_name)  # by the lock of the handle above
            file.seek(0)
            file.write(magic)
    assert segments_named(bus_name) == []


@pytest.mark.parametrize("command", ["status", "list", "inspect", "gc"])
def test_closed_output_ends_a_command_as_usual(bus_name: str, command: str) -> None:
    """As by ``>&-`` in a shell, or under a supervisor that gives no descriptors."""
    names = [] if command == "list" else [bus_name]
    with Bus.create(bus_name, "64KiB"):
        ended = subprocess.run(
            ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "shmbus", command, *names],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert (ended.returncode, ended.stderr) == (0, "")
