"""The life of a process that serves HTTP: its loop, and what ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Coroutine
from typing import Any

import uvloop

__all__ = ["run", "shown_address", "stop_signals", "wait_for_any"]


def run(main: Coroutine[Any, Any, int]) -> int:
    """Run a server in a loop of its own; returns the process's exit status."""
    loop: Any = uvloop.new_event_loop()
    try:
        found: int = loop.run_until_complete(main)
        return found
    finally:
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()


def stop_signals(parent: socket.socket | None = None) -> asyncio.Event:
    """Return what SIGTERM and SIGINT set, and the end of the process that started this one."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    if parent is not None:
        # Readable at its end.
        loop.add_reader(parent.fileno(), stop.set)
    return stop


async def wait_for_any(*events: asyncio.Event) -> None:
    """Wait until one of them is set."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


def shown_address(host: str, port: int) -> str:
    """Return the address of a server as people and clients write it."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
