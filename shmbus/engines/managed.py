"""A server in a child process: restarted with every checkpoint, watched, and ended.

`EngineFleet.reload` drives it like any server: a pause ends the process, and a reload starts a new
process with the checkpoint.

Invariant: the server ends with its owner's process, also after SIGKILL
(`shmbus.base.process_group`).

Source: mode ``none`` of Atropos' example trainer, which restarts vLLM with every checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from shmbus.base.arguments import check_path, check_text
from shmbus.base.programs import program
from shmbus.engines.engine_server import HttpServer, PauseMode, checked_texts, checked_timeout
from shmbus.engines.results import EngineError

#: Placeholder of the checkpoint's directory in a command line.
CHECKPOINT: Final = "{checkpoint}"
#: Seconds between two health checks.
ASK_S: Final = 0.2


class ManagedServer(HttpServer):
    """A server restarted with each checkpoint; requests in flight end with its process.

    Parameters
    ----------
    command : sequence of str
        Command line, with ``{checkpoint}`` in place of the checkpoint's directory, for example
        ``["vllm", "serve", "{checkpoint}", "--port", "8000"]``.
    url : str
        Address of the started server.
    checkpoint : path
        The first checkpoint, for example ``/ckpt/run1/latest``, a publisher's newest. The directory
        must contain the engine's further files, for example ``config.json``: `WeightPublisher` does
        not write them.
    health : str
        Path that answers 200 once the server is ready.
    environment : mapping of str to str, optional
        Added to this process's.
    start_timeout : float
        Seconds allowed for the start.
    headers : mapping of str to str, optional
        Sent with each request.

    Raises
    ------
    TypeError, ValueError
        The command lacks ``{checkpoint}``, or another argument is invalid.

    Examples
    --------
    >>> server = ManagedServer(command, url="http://127.0.0.1:8000", checkpoint="/ckpt/base")
    >>> async with server:
    ...     fleet = EngineFleet([server], bus="run1", mode="abort")
    ...     await fleet.reload("/ckpt/run1")  # after every n-th step
    """

    kind: str = "managed"
    modes: tuple[PauseMode, ...] = ("abort",)
    answers_in_step: bool = True

    def __init__(
        self,
        command: Sequence[str],
        *,
        url: str,
        checkpoint: Path | str,
        health: str = "/health",
        environment: Mapping[str, str] | None = None,
        start_timeout: float = 600.0,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(url, headers=headers)
        listed = isinstance(command, (list, tuple))
        if not listed or any(not isinstance(word, str) for word in command):
            raise TypeError(f"command: expected a list of words, got {command!r}")
        if not any(CHECKPOINT in word for word in command):
            raise ValueError(f"command: expected {CHECKPOINT} where the checkpoint's path belongs")
        check_path("checkpoint", checkpoint)
        check_text("health", health)
        if not health.startswith("/"):
            raise ValueError(f"health: expected a path such as '/health', got {health!r}")
        self._command = [*command]
        self._checkpoint = str(checkpoint)
        self._health = health
        self._environment = checked_texts("environment", environment)
        self._start_timeout = checked_timeout(start_timeout)
        self._process: subprocess.Popen[bytes] | None = None
        self._ours = -1

    @property
    def running(self) -> bool:
        """Return whether the server's process lives."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start the server with its last checkpoint, unless running; EngineError on failure."""
        # An answer of a stranger at the URL says nothing about the new process.
        stranger = not self.running and await self._answers()
        if not self.running:
            self._begin()
        deadline = time.monotonic() + self._start_timeout
        while True:
            answers = await self._answers()
            stranger = stranger and answers
            if answers and not stranger and self.running:
                return
            if not self.running or time.monotonic() >= deadline:
                await self._fail(answers)
            await asyncio.sleep(ASK_S)

    async def _fail(self, answers: bool) -> NoReturn:
        """End the server, and raise EngineError with the state of the process and of the URL."""
        process = self._process
        assert process is not None
        code = process.poll()
        said = f"process {process.pid} " + (
            f"ended with status {code}" if code is not None else "does not answer"
        )
        said += f"; another server answers at {self.address}" if answers else ""
        await self.end()
        raise EngineError(
            self.address, "start", None, said,
            f"started {shlex.join(self._words())}: look at the command's output"
            + (", and end the other server or choose another port" if answers else ""),
        )  # fmt: skip

    async def end(self) -> None:
        """End the server, and wait; do nothing without a process."""
        process, self._process = self._process, None
        if self._ours >= 0:
            os.close(self._ours)  # noticed by the supervising process
            self._ours = -1
        if process is not None:
            await asyncio.to_thread(process.wait)

    def _begin(self) -> None:
        if self._ours >= 0:
            os.close(self._ours)
        theirs, self._ours = os.pipe()
        try:
            self._process = subprocess.Popen(
                program("shmbus.base.process_group", str(theirs), *self._words()),
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)

    def _words(self) -> list[str]:
        return [word.replace(CHECKPOINT, self._checkpoint) for word in self._command]

    async def _answers(self) -> bool:
        try:
            status, _ = await self.call("start", "GET", self._health, ASK_S * 10, advice="")
        except EngineError:
            return False
        return status == 200

    # -- the fleet's interface ---------------------------------------------------------------------

    async def ranks(self, timeout: float) -> int:
        """Return 1: a running process takes no weights and owns no row."""
        del timeout
        return 1

    async def load(self, *arguments: object) -> NoReturn:
        """Refuse, as the fleet expects: this server takes checkpoints only."""
        raise EngineError(
            self.address, "update", None, "a managed server takes weights when it starts",
            "publish with carrier='checkpoint', and call EngineFleet.reload",
        )  # fmt: skip

    prepare = attach = load

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """End it."""
        await self.end()

    async def reload(self, path: str, version: int, clear_cache: bool, timeout: float) -> None:
        """Start the server with a checkpoint, and wait until it serves."""
        await self.end()
        self._checkpoint = path
        await self.start()

    async def settle(self, loading: bool, timeout: float) -> bool:
        """Return False: no step stays open."""
        return False

    async def resume(self, timeout: float) -> None:
        """Start the server with its last checkpoint, unless running."""
        await self.start()

    async def paused(self, timeout: float) -> bool:
        """Return True unless the server answers."""
        return not (self.running and await self._answers())

    async def __aenter__(self) -> ManagedServer:
        try:
            await self.start()
        except BaseException:  # a cancelled start leaves a process behind
            await self.end()
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.end()
