"""A pytest plugin: atroposlib's own tests start a gateway in place of their server.

Invariant: a run without any response of the gateway fails.
"""

import os
import secrets
import subprocess
import sys
from typing import Any

import pytest
import requests

import shmbus

THEIR_SERVER = "atroposlib.cli.run_api"

_started: list[str] = []
_ours = 0
_others: list[str] = []
_popen = subprocess.Popen
_request = requests.Session.request


class GatewayPopen(_popen):  # type: ignore[type-arg,misc]
    """Starts `shmbus gateway` instead of their server, on the same address."""

    def __init__(self, argv: Any, *rest: Any, **options: Any) -> None:
        if isinstance(argv, list) and THEIR_SERVER in argv:
            host, port = (argv[argv.index(flag) + 1] for flag in ("--host", "--port"))
            bus = f"peers-{os.getpid()}-{secrets.token_hex(4)}"
            _started.append(bus)
            argv = [sys.executable, "-m", "shmbus", "gateway", bus, "--create", "64MiB"]
            argv += ["--http", f"{host}:{port}"]
            options |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        super().__init__(argv, *rest, **options)


def request(session: requests.Session, method: str, url: str, **options: Any) -> Any:
    global _ours
    response = _request(session, method, url, **options)
    if response.headers.get("Server", "").startswith("shmbus/"):
        _ours += 1
    else:
        _others.append(f"{method} {url}")
    return response


def pytest_configure() -> None:
    subprocess.Popen = GatewayPopen  # type: ignore[misc]
    requests.Session.request = request  # type: ignore[method-assign]


def pytest_sessionfinish(session: pytest.Session) -> None:
    for bus in _started:
        for path in (f"/dev/shm/shmbus.{bus}", f"/dev/shm/shmbus-gateway.{bus}"):
            if os.path.exists(path):
                os.unlink(path)
    if session.exitstatus == pytest.ExitCode.OK and (_others or not _ours or not _started):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.line(
        f"gateways started: {len(_started)}; responses of shmbus {shmbus.__version__}: {_ours}; "
        f"of other servers: {len(_others)} {_others[:3]}"
    )
