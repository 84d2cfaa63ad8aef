"""A server whose process is this one's: started anew with each checkpoint, watched, and ended.

`EngineFleet.reload` drives it like any other server: what pauses others ends this one, and what has
others read a checkpoint starts it with that.

Invariant: the server ends with its owner's process, also after SIGKILL (`shmbus._process_group`).

Source: mode ``none`` of Atropos' example trainer, which starts vLLM anew with each checkpoint.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from shmbus._programs import program
from shmbus.engines.errors import EngineError
from shmbus.engines.server import HttpServer, PauseMode, checked_timeout

#: What stands in a command line for the checkpoint's directory.
CHECKPOINT: Final = "{checkpoint}"
#: Seconds between two questions whether it answers.
ASK_S: Final = 0.2


class ManagedServer(HttpServer):
    """A server that is started anew with each checkpoint; requests in flight end with its process.

    Parameters
    ----------
    command : sequence of str
        Its command line, with ``{checkpoint}`` where the directory of a checkpoint belongs, such as
        ``["vllm", "serve", "{checkpoint}", "--port", "8000"]``.
    url : str
        Where it answers then.
    checkpoint : path
        The first checkpoint, such as ``/ckpt/run1/latest``, a publisher's newest. The engine finds
        the files beside the weights there, such as ``config.json``, which `WeightPublisher` does
        not write.
    health : str
        A path that it answers with 200 once it serves.
    environment : mapping of str to str, optional
        Beside this process's.
    start_timeout : float
        Seconds that it may take to serve.
    headers : mapping of str to str, optional
        Sent with each request.

    Raises
    ------
    TypeError, ValueError
        The command has no ``{checkpoint}``, or another argument is invalid.

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
        if isinstance(command, str) or any(not isinstance(word, str) for word in command):
            raise TypeError(f"command: expected a list of words, got {command!r}")
        if not any(CHECKPOINT in word for word in command):
            raise ValueError(f"command: expected {CHECKPOINT} where the checkpoint's path belongs")
        self._command = [*command]
        self._checkpoint = str(checkpoint)
        self._health = health
        self._environment = dict(environment or {})
        self._start_timeout = checked_timeout(start_timeout)
        self._process: subprocess.Popen[bytes] | None = None
        self._ours = -1

    @property
    def running(self) -> bool:
        """Whether its process lives."""
        return self._process is not None and self._process.poll() is None

    async def start(self) -> None:
        """Start it with its last checkpoint unless it runs; EngineError where it does not serve."""
        if not self.running:
            self._begin()
        deadline = time.monotonic() + self._start_timeout
        while not await self._answers():
            if not self.running or time.monotonic() >= deadline:
                code = None if self._process is None else self._process.poll()
                said = f"it ended with status {code}" if code is not None else "it does not answer"
                await self.end()
                raise EngineError(
                    self.address, "start", None, said,
                    f"started with {self._checkpoint}: look at what it printed",
                )  # fmt: skip
            await asyncio.sleep(ASK_S)

    async def end(self) -> None:
        """End it, and wait; nothing where it does not run."""
        process, self._process = self._process, None
        if self._ours >= 0:
            os.close(self._ours)  # which the process above it notices
            self._ours = -1
        if process is not None:
            await asyncio.to_thread(process.wait)

    def _begin(self) -> None:
        if self._ours >= 0:
            os.close(self._ours)
        theirs, self._ours = os.pipe()
        words = [word.replace(CHECKPOINT, self._checkpoint) for word in self._command]
        try:
            self._process = subprocess.Popen(
                program("shmbus._process_group", str(theirs), *words),
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs],
            )
        finally:
            os.close(theirs)

    async def _answers(self) -> bool:
        try:
            status, _ = await self.call("start", "GET", self._health, ASK_S * 10, advice="")
        except EngineError:
            return False
        return status == 200

    # -- as the fleet sees it ----------------------------------------------------------------------

    async def ranks(self, timeout: float) -> int:
        """Return 1: it takes no weights while it runs, so none of its processes has a row."""
        del timeout
        return 1

    async def prepare(self, bus: str, timeout: float) -> bool:
        """Refuse: it takes checkpoints only."""
        raise self._refused()

    async def attach(self, bus: str, timeout: float) -> bool:
        """Refuse: it takes checkpoints only."""
        raise self._refused()

    async def load(self, version: int, clear_cache: bool, timeout: float) -> None:
        """Refuse: it takes checkpoints only."""
        raise self._refused()

    def _refused(self) -> EngineError:
        return EngineError(
            self.address, "update", None, "a managed server takes weights when it starts",
            "publish with carrier='checkpoint', and call EngineFleet.reload",
        )  # fmt: skip

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """End it."""
        await self.end()

    async def reload(self, path: str, version: int, clear_cache: bool, timeout: float) -> None:
        """Start it with a checkpoint, and wait until it serves."""
        await self.end()
        self._checkpoint = path
        await self.start()

    async def settle(self, loading: bool, timeout: float) -> bool:
        """Return False: nothing is left open."""
        return False

    async def resume(self, timeout: float) -> None:
        """Start it with what it had last, where it does not run."""
        await self.start()

    async def paused(self, timeout: float) -> bool:
        """Whether it does not serve."""
        return not (self.running and await self._answers())

    async def __aenter__(self) -> ManagedServer:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        await self.end()
