"""Inference servers left paused by a dead trainer: the daemon has them resumed.

The daemon knows neither engines nor HTTP. It reads the trainer's note, and runs the resuming
program in a separate process.

Invariants:

- No program starts while the pausing trainer lives: the trainer holds the note's lock.
- A single program at a time, and a rest after a failure: a broken server is asked rarely.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Final

from shmbus.inspect.processes import servers_left

logger = logging.getLogger(__name__)

#: Seconds between two looks at the note: a pause costs rollouts, a look some microseconds.
CHECK_S: Final = 2.0
#: Seconds of rest after a program that left servers paused.
REST_S: Final = 60.0


class PausedServers:
    """Watches the note of a bus, and runs `resume` after its writer's death."""

    def __init__(self, name: str, resume: Sequence[str]) -> None:
        self._name = name
        self._resume_command = resume
        self._last_look = self._last_failure = float("-inf")
        self._task: asyncio.Task[None] | None = None

    def check(self, now: float) -> None:
        """Check the note, and have the servers resumed after its writer's death."""
        running = self._task is not None and not self._task.done()
        if running or now - self._last_look < CHECK_S or now - self._last_failure < REST_S:
            return
        self._last_look = now
        if servers_left(self._name):
            self._task = asyncio.get_running_loop().create_task(self._resume(now))

    async def _resume(self, now: float) -> None:
        logger.warning(
            "bus %r: a trainer ended while inference servers were paused; they are resumed with "
            "whole weights",
            self._name,
        )
        process = await asyncio.create_subprocess_exec(
            *self._resume_command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            output, _ = await process.communicate()
        except asyncio.CancelledError:
            process.kill()
            await process.wait()
            raise
        said = output.decode("utf-8", "replace").strip().splitlines()
        if process.returncode == 0:
            logger.info("bus %r: %s", self._name, "; ".join(said))
            return
        self._last_failure = now
        logger.error(
            "bus %r: inference servers stay paused: %s; end it by hand: shmbus weights %s --resume",
            self._name,
            said[-1] if said else f"the program ended with {process.returncode}",
            self._name,
        )

    async def close(self) -> None:
        """End the running program."""
        if self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.wait([self._task])
