"""Arguments of `shmbus.relay.start` and of the command: refused before a cluster is looked for."""

import socket
from importlib.util import find_spec
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from refusals import CHOICE, POLICIES, SECONDS, let_through, of_type, of_value

import shmbus.relay
from shmbus.cli import main

# Found, not imported: half a second for every process that collects this.
pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed")


@pytest.mark.parametrize(
    ("source", "trainers", "error"),
    [
        (None, ["t"], TypeError), (5, ["t"], TypeError), (b"run1", ["t"], TypeError),
        ([5], ["t"], TypeError), ([None], ["t"], TypeError), ({"run1"}, ["t"], TypeError),
        ([], ["t"], ValueError), ("", ["t"], ValueError), ("a/b", ["t"], ValueError),
        ("run1@", ["t"], ValueError), ("@rollout", ["t"], ValueError),
        ("x" * 300, ["t"], ValueError),
        ("run1", None, TypeError), ("run1", "t", TypeError), ("run1", [b"t"], TypeError),
        ("run1", [], ValueError), ("run1", [""], ValueError),
    ],
)  # fmt: skip
def test_what_names_no_bus_is_refused(source: Any, trainers: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="expected"):
        shmbus.relay.start(source, trainers, address="nowhere:1")


OPTIONS = POLICIES | {
    "release": CHOICE + of_type(None), "retries": of_type("retries"), "address": of_type(5),
    "weights": of_type(1), "keep": of_type(5, True) + of_value(""), "keep_sync": SECONDS,
}  # fmt: skip


@pytest.mark.parametrize("name", OPTIONS)
def test_a_wrong_option_is_refused_by_its_name(name: str) -> None:
    def start(**given: Any) -> None:
        shmbus.relay.start("run1", ["t"], **{"address": "nowhere:1", **given})

    assert let_through(start, name, OPTIONS[name]) == []


def test_options_may_be_numbers_of_numpy_and_without_end() -> None:
    import msgspec

    from shmbus.relay.host import make_policy
    from shmbus.stash.stash import StashPolicy

    made = make_policy(
        {
            "group_timeout": np.float32(3), "max_policy_lag": np.int64(4), "sample_retries": 2**70,
            "retry_timeout": float("inf"), "retry_backoff": [1, np.float32(2)],
            "skip_zero_variance": np.True_,
        }
    )  # fmt: skip
    assert (made.group_timeout_s, made.max_policy_lag, made.skip_zero_variance) == (3.0, 4, True)
    assert msgspec.json.decode(msgspec.json.encode(made), type=StashPolicy) == made


@pytest.mark.parametrize(
    "words",
    [
        ["", "--trainer", "t"], ["a/b", "--trainer", "t"], ["run1@", "--trainer", "t"],
        ["run1", "--trainer", ""], ["run1", "--trainer", "t", "--group-timeout", "-1"],
        ["run1", "--trainer", "t", "--group-timeout", "nan"],
        ["run1", "--trainer", "t", "--retry-timeout", "x"],
        ["run1", "--trainer", "t", "--sample-retries", "-1"],
        ["run1", "--trainer", "t", "--max-policy-lag", "1.5"],
        ["run1", "--trainer", "t", "--status"],
    ],
)  # fmt: skip
def test_an_unknown_word_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["relay", *words])
    assert ended.value.code == 2
    assert "usage: shmbus relay" in capsys.readouterr().err


@pytest.mark.parametrize("call", ["describe", "ledgers", "status"])
def test_a_time_for_answers_is_refused_by_its_name(call: str) -> None:
    from shmbus.relay.on_ray import Relay

    wrong = SECONDS + of_type(None) + of_value(0)
    assert let_through(getattr(Relay("run1", []), call), "timeout", wrong) == []


@pytest.mark.parametrize("address", ["head", "head:", "127.0.0.1:1", "127.0.0.1:99999"])
def test_an_address_without_a_cluster_is_named(
    address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["relay", "run1", "--status", "--ray", address]) == 1
    said = capsys.readouterr().err
    assert repr(address) in said and "--ray" in said


def test_a_cluster_that_refuses_names_its_token(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("ray.init", Mock(side_effect=ConnectionError("Failed to connect")))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        assert main(["relay", "run1", "--status", "--ray", address]) == 1
    assert "RAY_AUTH_MODE=token" in capsys.readouterr().err
