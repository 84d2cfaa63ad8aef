"""A gateway as a process of its own, and a client of raw sockets."""

import re
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from conftest import RUN_PREFIX, Child, Spawner, wait_until
from http_answers import Answer, read_answer
from http_requests import request_bytes

#: Runs the command without the entry point, which an environment may lack that was made before.
RUN = """
import argparse, sys
exec(sys.argv.pop(1))
from shmbus.gateway import command
parser = argparse.ArgumentParser()
command.add_parser(parser.add_subparsers())
arguments = parser.parse_args(["gateway", *sys.argv[1:]])
sys.exit(arguments.run(arguments))
"""
TIMEOUT_S = 60.0
SERVING = re.compile(r'http(?:=|": ")http://[^ "]*:(\d+)')

REGISTRATION = {
    "wandb_group": "group", "wandb_project": "project", "batch_size": 4, "max_token_len": 512,
    "checkpoint_dir": "/checkpoints", "save_checkpoint_interval": 10, "starting_step": 0,
    "num_steps": 100,
}  # fmt: skip
ENVIRONMENT = {"max_token_length": 512, "desired_name": "math", "weight": 1.0, "group_size": 2}


class Gateway:
    def __init__(
        self, spawner: Spawner, name: str, options: tuple[object, ...], fault: str = ""
    ) -> None:
        self.name = name
        self.port = 0
        self._spawner = spawner
        self._options = options
        self.child = self.start(fault)

    def start(self, fault: str = "") -> Child:
        """Start the gateway with `fault`, and wait for its service; the port stays."""
        self.child = self._spawner.script(
            RUN, fault, self.name, "--http", f"127.0.0.1:{self.port}", *self._options
        )
        found = wait_until(
            lambda: SERVING.search(self.child.output()) or (not self.child.running and "ended"),
            what=f"the gateway of {self.name} to serve",
        )
        if isinstance(found, str):
            raise AssertionError(f"the gateway ended:\n{self.child.output()}")
        self.port = int(found[1])
        return self.child

    def kill(self) -> None:
        self.child.kill()

    def restart(self, fault: str = "") -> None:
        self.kill()
        self.start(fault)

    def stop(self) -> str:
        self.child.send_signal(signal.SIGTERM)
        return self.child.finish()

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)

    def get(self, path: str, content: Any = None, **headers: str) -> Answer:
        return self.ask("GET", path, content, **headers)

    def post(self, path: str, content: Any, **headers: str) -> Answer:
        return self.ask("POST", path, content, **headers)

    def ask(self, method: str, path: str, content: Any = None, **headers: str) -> Answer:
        with self.connect() as connection:
            connection.sendall(request_bytes(method, path, content, **headers))
            return read_answer(connection, has_body=method != "HEAD")

    def register(self, **changes: Any) -> None:
        assert self.post("/register", {**REGISTRATION, **changes}).status == 200
        assert self.get("/batch").status == 200

    def register_env(self, **changes: Any) -> int:
        answer = self.post("/register-env", {**ENVIRONMENT, **changes}).json()
        assert answer["status"] == "success", answer
        return int(answer["env_id"])

    def batch(self) -> Any:
        return self.get("/batch").json()["batch"]

    def metric(self, name: str, **labels: str) -> float:
        """A number of its metrics; 0 before it has one."""
        wanted = "".join(f',{label}="{value}"' for label, value in labels.items())
        pattern = rf'^shmbus_gateway_{name}\{{bus="{self.name}"{wanted}\}} (\S+)$'
        found = re.search(pattern, self.get("/metrics").body.decode(), re.M)
        return float(found[1]) if found else 0.0

    def peak_kib(self) -> int:
        """The most memory that its process had at a time."""
        status = Path(f"/proc/{self.child.pid}/status").read_text()
        (found,) = re.findall(r"VmHWM:\s+(\d+) kB", status)
        return int(found)


@contextmanager
def serving(directory: Path, label: str, *options: object, fault: str = "") -> Iterator[Gateway]:
    """A gateway that several tests use one after the other."""
    spawner = Spawner(directory)
    name = f"{RUN_PREFIX}{label}"
    try:
        gateway = Gateway(spawner, name, options, fault)
        yield gateway
    finally:
        spawner.end_all()
        for path in (f"/dev/shm/shmbus.{name}", f"/dev/shm/shmbus-gateway.{name}"):
            Path(path).unlink(missing_ok=True)
    assert "Traceback" not in gateway.child.output(), gateway.child.output()
