"""Atropos: the unmodified API server of atroposlib, over HTTP on the loopback interface."""

import contextlib
import http.client
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from bench.contenders.base import Contender, Received, Receiver, Sender, free_port, started
from bench.processes import STALL_S, MeasurementError
from bench.workload import Source, Workload

__all__ = ["CONTENDER", "POLL_S", "Client", "link", "receiver", "sender", "server"]

CONTENDER: Final = Contender(
    name="atropos",
    title="Atropos server, REST",
    packages=("atroposlib", "fastapi", "uvicorn", "pydantic", "msgspec"),
    environment="atropos",
    per_second=110.0,
    copies=10,
    copied="into lists, into JSON, into the socket, out of it, out of JSON, and the same back",
    favour="connections that stay open, msgspec for JSON at both ends, no gzip, no access log; a "
    "batch is as small as a group, and asked for every millisecond",
    ordered=False,
)

#: Seconds between two looks for a batch: the server sends no notice.
POLL_S: Final = 0.001


class Client:
    """JSON over one connection."""

    def __init__(self, port: int) -> None:
        import msgspec

        self._json = msgspec.json
        self._connection = http.client.HTTPConnection("127.0.0.1", port, timeout=STALL_S)

    def get(self, path: str) -> Any:
        """Return the answer of a route."""
        return self._ask("GET", path, None)

    def post(self, path: str, content: Any) -> Any:
        """Send the content as JSON, and return the answer."""
        return self._ask("POST", path, self._json.encode(content))

    def _ask(self, method: str, path: str, body: bytes | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        self._connection.request(method, path, body, headers)
        response = self._connection.getresponse()
        answer = response.read()
        if response.status != http.client.OK:
            raise MeasurementError(f"{method} {path}: {response.status} {answer[:200]!r}")
        return self._json.decode(answer)


def _answers(port: int) -> bool:
    try:
        Client(port).get("/")
    except (OSError, http.client.HTTPException):
        return False
    return True


@contextlib.contextmanager
def server(python: str, batch: int, longest: int) -> Iterator[int]:
    """Run the server, and register a trainer with batches of so many sequences."""
    port = free_port()
    argv = [python, "-m", "uvicorn", "atroposlib.api:app", "--host", "127.0.0.1"]
    argv += ["--port", str(port), "--log-level", "warning", "--no-access-log"]
    with started(argv, lambda: _answers(port)):
        trainer = Client(port)
        trainer.post(
            "/register",
            {
                "wandb_group": "bench", "wandb_project": "bench",
                "batch_size": batch, "max_token_len": longest,
                "checkpoint_dir": "", "save_checkpoint_interval": 0,
                "starting_step": 0, "num_steps": 1 << 30,
            },
        )  # fmt: skip
        # The server refuses environments until the trainer asks for a batch.
        trainer.get("/batch")
        yield port


@contextlib.contextmanager
def link(workload: Workload) -> Iterator[int]:
    """Run the server in this environment; a batch is a group."""
    with server(sys.executable, workload.group_size, workload.tokens) as port:
        yield port


class _Sender(Sender):
    def __init__(self, port: int, workload: Workload) -> None:
        self._client = Client(port)
        self._group_size = workload.group_size
        # The server mixes the prompts of an environment when forced to form groups itself.
        self._open: dict[str, dict[int, Source]] = {}
        self._env_id = self._client.post(
            "/register-env",
            {"max_token_length": workload.tokens, "desired_name": "bench", "weight": 1.0,
             "group_size": workload.group_size},
        )["env_id"]  # fmt: skip

    def send(self, instance_id: str, index: int, source: Source) -> None:
        group = self._open.setdefault(instance_id, {})
        group[index] = source
        if len(group) < self._group_size:
            return
        del self._open[instance_id]
        sources = [group[i] for i in range(self._group_size)]
        count = len(sources)
        content = {
            "env_id": self._env_id,
            "tokens": [tokens.tolist() for tokens, _, _ in sources],
            "masks": [mask.tolist() for _, mask, _ in sources],
            "scores": [1.0] * count,
            "inference_logprobs": [logprobs.tolist() for _, _, logprobs in sources],
            "group_overrides": {"instance_id": instance_id},
        }
        self._client.post("/scored_data", content)


class _Receiver(Receiver):
    # The server forgets a delivered batch.
    def __init__(self, port: int, workload: Workload) -> None:
        self._client = Client(port)

    def receive(self, timeout_s: float | None) -> Sequence[Received]:
        deadline = time.monotonic() + (STALL_S if timeout_s is None else timeout_s)
        while not (batch := self._client.get("/batch")["batch"]):
            if time.monotonic() >= deadline:
                return ()
            time.sleep(POLL_S)
        return [one for group in batch for one in self._group(group)]

    def _group(self, group: Any) -> Iterator[Received]:
        instance_id = group["group_overrides"]["instance_id"]
        columns = (group["tokens"], group["masks"], group["inference_logprobs"])
        for index, (tokens, mask, logprobs) in enumerate(zip(*columns, strict=True)):
            arrays = (
                np.array(tokens, np.int32),
                np.array(mask, np.uint8),
                np.array(logprobs, np.float32),
            )
            yield instance_id, index, arrays


@contextlib.contextmanager
def sender(address: int, workload: Workload, number: int) -> Iterator[_Sender]:
    """Send from this process."""
    yield _Sender(address, workload)


@contextlib.contextmanager
def receiver(address: int, workload: Workload) -> Iterator[_Receiver]:
    """Receive in this process."""
    yield _Receiver(address, workload)
