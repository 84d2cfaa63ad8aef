"""Atropos: the API server of atroposlib over HTTP, which forgets a batch once handed out."""

import contextlib
import http.client
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.contenders.atropos import Client
from bench.goodput.adapters import About, End, Link, fixed_port, served
from bench.goodput.party import Stub
from bench.goodput.scenario import Scenario
from bench.processes import MeasurementError

__all__ = ["ABOUT", "link", "train", "work"]

ABOUT: Final = About(
    title="Atropos server, REST", packages=("atroposlib", "fastapi", "uvicorn"),
    environment="atropos",
    fairness="a batch is a group; parties connect and register again by themselves, as its "
    "environments do; the server keeps all in memory and promises nothing after a death",
)  # fmt: skip
POLL_S: Final = 0.02
#: Errors of a dead server, and of a server without the registration.
AWAY: Final = (OSError, http.client.HTTPException, MeasurementError)


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Run the server."""
    port = fixed_port()
    argv = [sys.executable, "-m", "uvicorn", "atroposlib.api:app", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--log-level", "warning", "--no-access-log"]

    def ready() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    with served(argv, root / "server.log", ready) as server:
        yield Link(port, {"transport": server.again})


def work(address: Any, stub: Stub) -> None:
    """Post groups."""
    about = {
        "max_token_length": stub.scenario.tokens_longest, "desired_name": "goodput",
        "weight": 1.0, "group_size": stub.scenario.group_size,
    }  # fmt: skip
    client, env_id = None, None
    for _, answers in stub.groups():
        while not stub.over:
            try:
                client = client or Client(address)
                if env_id is None:
                    env_id = client.post("/register-env", about)["env_id"]
                while client.get("/status")["queue_size"] >= stub.scenario.ahead_groups:
                    time.sleep(POLL_S)
                client.post("/scored_data", {
                    "env_id": env_id,
                    "tokens": [tokens.tolist() for tokens in answers],
                    "masks": [[1] * len(tokens) for tokens in answers],
                    "scores": [float(n) for n in range(len(answers))],
                })  # fmt: skip
                stub.handed(*answers)
                break
            except (*AWAY, KeyError):
                client, env_id = None, None
                time.sleep(POLL_S)


class _End(End):
    def __init__(self, port: int, scenario: Scenario) -> None:
        self._port, self._scenario = port, scenario
        self._client: Client | None = None

    def _registered(self) -> Client:
        client = Client(self._port)
        client.post("/register", {
            "wandb_group": "goodput", "wandb_project": "goodput",
            "batch_size": self._scenario.group_size,
            "max_token_len": self._scenario.tokens_longest, "checkpoint_dir": "",
            "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 1 << 30,
        })  # fmt: skip
        return client

    def take(self, timeout_s: float) -> list[NDArray[Any]]:
        """Ask for a batch until one comes."""
        limit = time.monotonic() + timeout_s
        while time.monotonic() < limit:
            try:
                self._client = self._client or self._registered()
                if batch := self._client.get("/batch")["batch"]:
                    return [np.array(row, np.int32) for group in batch for row in group["tokens"]]
            except AWAY:
                self._client = None
            time.sleep(POLL_S)
        return []


@contextlib.contextmanager
def train(address: Any, stub: Stub, state: Any) -> Iterator[_End]:
    """Register a trainer."""
    yield _End(address, stub.scenario)
