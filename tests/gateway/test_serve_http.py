"""`shmbus serve --http`: the gateway beside the daemon lives and ends with it."""

import os
import re
import signal
from pathlib import Path
from typing import Any

from conftest import Daemon, segments_named, wait_until
from gateways import Gateway
from http_requests import scored
from operators import children_of, is_gone


def gateway_of_daemon(served: Daemon) -> Gateway:
    pattern = r"serving bus=\S+ http=http://127.0.0.1:(\d+)"
    found = Gateway.__new__(Gateway)
    found.name = served.name

    def port() -> int:
        ports = re.findall(pattern, served.child.output())
        return int(ports[-1]) if ports else 0

    found.port = wait_until(port, what="the gateway to serve")
    return found


def test_groups_travel_through_both_and_an_orderly_end_leaves_no_file(daemon: Any) -> None:
    served = daemon("--capacity", "8MiB", "--http", "127.0.0.1:0", "--unlink-on-exit")
    gateway = gateway_of_daemon(served)
    gateway.register(batch_size=2)
    assert gateway.post("/scored_data", scored([1], [2])).status == 200
    assert wait_until(gateway.batch, what="the batch")[0]["tokens"] == [[1], [2]]
    [process] = children_of(served.child.pid)
    served.stop()
    assert is_gone(process) and segments_named(served.name) == []


def test_a_gateway_that_was_killed_is_started_again(daemon: Any) -> None:
    served = daemon("--capacity", "8MiB", "--http", "127.0.0.1:0")
    gateway = gateway_of_daemon(served)
    gateway.register(batch_size=2)
    [process] = children_of(served.child.pid)
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: served.child.output().count(" http=http://") == 2, what="a second gateway")
    again = gateway_of_daemon(served)
    assert again.get("/info").json()["batch_size"] == 2
    assert "status -9; it is started again" in served.child.output()


def test_a_gateway_ends_with_a_daemon_that_was_killed(daemon: Any) -> None:
    served = daemon("--capacity", "8MiB", "--http", "127.0.0.1:0")
    gateway_of_daemon(served)
    [process] = children_of(served.child.pid)
    served.kill()
    wait_until(lambda: is_gone(process), what="the gateway's end")


def test_the_token_is_passed_on(daemon: Any, tmp_path: Path) -> None:
    (tmp_path / "token").write_text("secret")
    served = daemon(
        "--capacity", "8MiB", "--http", "127.0.0.1:0", "--http-token-file", tmp_path / "token"
    )
    gateway = gateway_of_daemon(served)
    assert gateway.get("/info").status == 401
    assert gateway.get("/info", Authorization="Bearer secret").status == 200
