"""Restarts of a demo's server and workers: a death of either costs time, and no sample."""

from __future__ import annotations

import asyncio
import subprocess
import threading
import time
from collections.abc import Callable
from typing import Final

import shmbus
from shmbus.engines import EngineFleet, ManagedServer
from shmbus.weights import WeightPublisher

#: Seconds between two looks at the processes.
LOOK_S: Final = 1.0
#: Seconds for the end of a server with a dead process.
END_S: Final = 15.0


class Supervisor:
    """Starts and restarts processes; a restarted server gets the newest weights first."""

    def __init__(
        self,
        server: ManagedServer,
        fleet: EngineFleet,
        publisher: WeightPublisher,
        start_workers: Callable[[], subprocess.Popen[bytes]],
        *,
        turns: bool = False,
    ) -> None:
        self._server, self._fleet, self._publisher = server, fleet, publisher
        #: True if the server sleeps while the trainer trains.
        self._turns = turns
        self._start_workers = start_workers
        self._workers = start_workers()
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._watch = threading.Thread(target=self._look, daemon=True)

    def sleep(self) -> None:
        """Free a server's GPU memory for the trainer, in turns; a dead server has none."""
        with self._lock:
            if self._turns and self._server.running:
                self._fleet.sleep_sync()

    def update(self, version: int) -> None:
        """Bring a version to the server, after a restart if the server died."""
        send = self._fleet.wake_sync if self._turns else self._fleet.update_sync
        with self._lock:
            try:
                send(self._publisher, version)
            except shmbus.ShmbusError:
                end_s = time.monotonic() + END_S  # its other processes may outlive the dead one
                while self._server.running:
                    if time.monotonic() > end_s:
                        raise
                    time.sleep(0.1)
                self._restart_server()
                send(self._publisher, version)

    def _look(self) -> None:
        while not self._over.wait(LOOK_S):
            if self._workers.poll() is not None:
                print("the workers' process ended, and starts again", flush=True)
                self._workers = self._start_workers()
            with self._lock:
                if self._server.running:
                    continue
                try:
                    self._restart_server()
                    if not self._over.is_set():
                        asyncio.run(self._fleet.catch_up())
                except shmbus.ShmbusError as error:
                    print(f"the server does not start again: {error}", flush=True)

    def _restart_server(self) -> None:
        print("the server ended, and starts again", flush=True)
        asyncio.run(self._start_until_over())

    async def _start_until_over(self) -> None:
        start = asyncio.ensure_future(self._server.start())
        while not self._over.is_set():
            done, _ = await asyncio.wait([start], timeout=LOOK_S)
            if done:
                return start.result()
        start.cancel()  # a start takes minutes, and the run ends now

    def __enter__(self) -> Supervisor:
        self._watch.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._watch.join()
        self._workers.communicate()
