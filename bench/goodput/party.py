"""The parties of a run, each a process: the engine, a worker, the trainer.

The engine is a stub that answers ``POST /v1/completions`` as vLLM does: the ids of an answer are
the numbers of its tokens.
"""

import asyncio
import http.client
import importlib
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.goodput.books import Book, merged, numbers_of, read_checkpoint, write_checkpoint
from bench.goodput.scenario import Scenario

__all__ = ["Stub", "engine", "trainer", "worker"]

#: Seconds of one wait of the trainer, and of silence after which a contender counts as empty.
TAKE_S: Final = 0.2
QUIET_S: Final = 3.0
RETRY_S: Final = 0.05
ANSWER_S: Final = 60.0


def engine(root: Path, scenario: Scenario, port: int, seed: int) -> None:
    """Generate answers, each in the time of its length, until killed."""
    begun, ended = Book(root, "begun"), Book(root, "ended")
    rng = random.Random(f"{seed} {begun.end()}")
    broken: asyncio.Future[None]

    async def generate() -> dict[str, Any]:
        drawn = scenario.tokens_median * rng.lognormvariate(0, scenario.tokens_sigma)
        first, count = begun.end(), min(max(1, int(drawn)), scenario.tokens_longest)
        begun.note(first, count)
        await asyncio.sleep(count / scenario.tokens_per_s)
        ended.note(first, count)
        ids = list(range(first, first + count))
        return {"choices": [{"token_ids": ids, "logprobs": {"token_logprobs": [-1.0] * count}}]}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                size = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
                await reader.readexactly(size)
                body = json.dumps(await generate()).encode()
                writer.write(
                    b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
                    b"Content-Length: %d\r\n\r\n" % len(body) + body
                )
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        except OSError as error:  # of the books: the engine ends
            broken.set_exception(error)
        finally:
            writer.close()

    async def run() -> None:
        nonlocal broken
        broken = asyncio.get_running_loop().create_future()
        async with await asyncio.start_server(serve, "127.0.0.1", port):
            await broken

    asyncio.run(run())


class Stub:
    """A worker's engine client, book of delivered answers, and sight of the run's end."""

    def __init__(self, root: Path, scenario: Scenario, port: int, name: str) -> None:
        self.root, self.scenario, self.port, self.name = root, scenario, port, name
        self._handed = Book(root, "handed")
        self._connection: http.client.HTTPConnection | None = None

    @property
    def stopping(self) -> bool:
        """Whether workers shall end."""
        return (self.root / "stop").exists()

    @property
    def over(self) -> bool:
        """Whether the trainer ended."""
        return (self.root / "over").exists()

    def answer(self) -> NDArray[np.int32]:
        """Return the tokens of an answer; retry after a death of the engine."""
        while True:
            try:
                if self._connection is None:
                    self._connection = http.client.HTTPConnection(
                        "127.0.0.1", self.port, timeout=ANSWER_S
                    )
                self._connection.request("POST", "/v1/completions", b"{}")
                choice = json.loads(self._connection.getresponse().read())["choices"][0]
                return np.array(choice["token_ids"], np.int32)
            except (OSError, http.client.HTTPException):
                if self.over:
                    raise
                self._connection = None
                time.sleep(RETRY_S)

    def groups(self) -> Iterator[tuple[str, list[NDArray[np.int32]]]]:
        """Make groups until the end, for contenders without prompts from the trainer."""
        number = 0
        while not self.stopping:
            yield (
                f"{self.name}-{number}",
                [self.answer() for _ in range(self.scenario.group_size)],
            )
            number += 1

    def handed(self, *answers: NDArray[Any]) -> None:
        """Record delivered answers."""
        for tokens in answers:
            self._handed.note(*numbers_of(tokens))


def worker(root: Path, scenario: Scenario, port: int, module: str, address: Any, name: str) -> None:
    """Hand answers to a contender."""
    importlib.import_module(module).work(address, Stub(root, scenario, port, name))


def trainer(root: Path, scenario: Scenario, port: int, module: str, address: Any) -> None:
    """Train from the checkpoint until the contender is empty."""
    state, trained = read_checkpoint(root)
    stub = Stub(root, scenario, port, "trainer")
    plant: Callable[[list[Any]], list[Any]] = planting(root, scenario.plant)
    born, waited, steps, newest = time.monotonic(), 0.0, 0, -1
    with (
        importlib.import_module(module).train(address, stub, state) as end,
        open(root / "progress", "a") as progress,
    ):
        pending: list[NDArray[Any]] = []
        heard, finished = time.monotonic(), False
        while not finished:
            began = time.monotonic()
            try:
                got = plant(end.take(TAKE_S))
            except EOFError:
                got, finished = [], True
            waited += time.monotonic() - began
            heard = time.monotonic() if got else heard
            emptied = (root / "drain").exists() and time.monotonic() - heard > QUIET_S
            finished = finished or emptied
            pending += got
            if len(pending) < scenario.step_samples and not (finished and pending):
                continue
            time.sleep(scenario.step_s)
            read = [numbers_of(tokens) for tokens in pending]
            trained = merged([*trained, *read])
            newest = max(newest, *(first for first, _ in read))
            steps, pending = steps + 1, []
            if steps % scenario.save_every == 0 or finished:
                write_checkpoint(root, end.state(), trained)
                end.saved()
            now = time.monotonic()
            line = {"at": now, "newest": newest, "waited": waited, "lived": now - born}
            progress.write(json.dumps(line) + "\n")
            progress.flush()
        write_checkpoint(root, end.state(), trained)
        end.saved()


def planting(root: Path, fault: str) -> Callable[[list[Any]], list[Any]]:
    """Return the auditor's own check: lose or double the first answer of the second delivery."""
    seen = 0

    def plant(got: list[Any]) -> list[Any]:
        nonlocal seen
        seen += bool(got)
        if not fault or not got or seen != 2 or (root / "planted").exists():
            return got
        (root / "planted").write_text(json.dumps(numbers_of(got[0])))
        return got[1:] if fault == "loss" else [*got, np.array(got[0])]

    return plant
