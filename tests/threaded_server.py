"""A server of this process, in a loop and a thread of its own."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def in_thread(serve: Callable[[], Any]) -> Iterator[Any]:
    """Have a server, an async context manager, in a loop and a thread of its own."""
    ready: Any = threading.Event()
    found: dict[str, Any] = {}

    async def main() -> None:
        stop = asyncio.Event()
        try:
            async with serve() as value:
                found["value"] = value
                found["stop"] = lambda: loop.call_soon_threadsafe(stop.set)
                ready.set()
                await stop.wait()
        except BaseException as error:
            found["error"] = error
            ready.set()

    def work() -> None:
        loop.run_until_complete(main())
        loop.run_until_complete(loop.shutdown_default_executor())
        loop.close()

    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert ready.wait(60)
    if "error" in found:
        thread.join()
        raise found["error"]
    try:
        yield found["value"]
    finally:
        found["stop"]()
        thread.join(60)
        assert not thread.is_alive()
        assert "error" not in found, found["error"]
