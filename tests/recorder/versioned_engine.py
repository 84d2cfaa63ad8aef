"""An engine process whose logprobs tell its weights; `POST /load` reads the newest version."""

import asyncio
import sys
from typing import Any

from aiohttp import web
from stub_engine import Sampled, StubEngine, serving_stub

from shmbus.pool import PoolReader

NO_WEIGHTS = -1


def logprob_of(version: int) -> float:
    return -(version + 2) / 8


def version_of(logprob: float) -> int:
    return round(-logprob * 8) - 2


class VersionedEngine(StubEngine):
    def __init__(self, bus: str) -> None:
        super().__init__()
        self.bus, self.version = bus, NO_WEIGHTS
        self.rank: PoolReader | None = None

    def routes(self) -> web.Application:
        app = super().routes()
        app.router.add_post("/load", self.load)
        app.router.add_get("/asked", self.asked)
        return app

    def sample(self, prompt: list[int], body: dict[str, Any]) -> Sampled:
        found = super().sample(prompt, body)
        found.logprobs[:] = [logprob_of(self.version)] * len(found.output)
        return found

    async def load(self, request: web.Request) -> web.Response:
        if self.rank is None:
            self.rank = PoolReader(self.bus, "weights", label=f"{self.url} rank 0", keeps_row=True)
        with self.rank.latest(timeout=10.0) as newest:
            self.version = newest.version
            self.rank.applied(newest)
        return web.json_response({"version": self.version})

    async def asked(self, request: web.Request) -> web.Response:
        return web.json_response({"calls": self.calls})


async def run(port: int, bus: str) -> None:
    async with serving_stub(VersionedEngine(bus), port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2]))
