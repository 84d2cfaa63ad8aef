"""`shmbus serve --web`: the page beside the daemon, in a process of its own."""

import importlib.metadata
import os
import re
import signal
from collections.abc import Callable

import pytest
from conftest import Daemon, wait_until
from operators import children_of, cli, is_gone
from pages import Web

pytestmark = pytest.mark.skipif(
    "web" not in {e.name for e in importlib.metadata.entry_points(group="shmbus.commands")},
    reason="this environment was made before the command: install the project again",
)


def page_of(served: Daemon) -> Web:
    pattern = r"http://127\.0\.0\.1:(\d+)/\?token=(\S+)"
    found = wait_until(lambda: re.findall(pattern, served.child.output()), what="the page")
    page = Web.__new__(Web)
    page.port, page.token = int(found[-1][0]), found[-1][1]
    return page


def test_page_and_daemon_end_together(daemon: Callable[..., Daemon], bus_name: str) -> None:
    served = daemon("--capacity", "1MiB", "--web", "0")
    page = page_of(served)
    assert next(page.pictures())["state"] == "live"
    [process] = children_of(served.child.pid)
    served.kill()
    wait_until(lambda: is_gone(process), what="the page's end")


def test_a_dead_page_returns_with_its_token(daemon: Callable[..., Daemon], bus_name: str) -> None:
    served = daemon("--capacity", "1MiB", "--web", "0")
    first = page_of(served)
    [process] = children_of(served.child.pid)
    os.kill(process, signal.SIGKILL)
    wait_until(lambda: page_of(served).port != first.port, what="another page")
    second = page_of(served)
    assert second.token == first.token
    assert next(second.pictures())["state"] == "live"
    served.stop()


def test_a_port_that_is_none_is_a_usage_error(bus_name: str) -> None:
    done = cli("serve", bus_name, "--web", "70000")
    assert done.status == 2
    assert "expected 0 to 65535" in done.err
