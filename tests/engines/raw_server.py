"""A server with vLLM's routes in the test's process, whose answers may be anything."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from types import TracebackType
from typing import Any

import torch

from shmbus.engines import VllmServer
from shmbus.weights import WeightSubscriber

Instead = Callable[[], list[bytes] | None]

PIECE_S = 0.02


class RawServer:
    """One rank, on a free port of the loopback, for an ``async with`` block."""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix
        self.instead: dict[str, Instead] = {}
        self.pieces = 1
        self.status = "200 OK"
        self.head = ""
        self.paused = False
        self.seen: list[str] = []
        self.model = torch.zeros(1000)
        self.subscriber: WeightSubscriber | None = None
        self._loading: int | None = None
        self._serving: set[asyncio.Task[Any]] = set()

    async def __aenter__(self) -> RawServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{port}{self.prefix}"
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._server.close()
        await self._server.wait_closed()
        await asyncio.gather(*self._serving)
        if self.subscriber is not None:
            self.subscriber.close()

    def server(self) -> VllmServer:
        return VllmServer(self.url)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._serving.add(task)
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            sizes = [line for line in head.lower().split("\r\n") if line.startswith("content-len")]
            body = await reader.readexactly(int(sizes[0].split(":")[1])) if sizes else b""
            self.head = head
            path = head.split(" ")[1].split("?")[0].removeprefix(self.prefix)
            self.seen.append(path)
            said = self.instead[path]() if path in self.instead else None
            if said is None:
                answer = await asyncio.to_thread(self._answer, path, json.loads(body or b"{}"))
                whole = json.dumps(answer).encode()
                step = -(-len(whole) // self.pieces)
                said = [whole[at : at + step] for at in range(0, len(whole), step)]
            length = sum(map(len, said))
            writer.write(f"HTTP/1.1 {self.status}\r\nContent-Length: {length}\r\n\r\n".encode())
            for piece in said:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(PIECE_S)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._serving.discard(task)
            writer.close()

    def _answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/get_world_size":
            return {"world_size": 1}
        if path == "/init_weight_transfer_engine":
            info = body["init_info"]
            if self.subscriber is None:
                self.subscriber = WeightSubscriber(info["bus"], label=f"{info['server']} rank 0")
            self.subscriber.latest(timeout=10).close()
        elif path in ("/pause", "/resume"):
            self.paused = path == "/pause"
            return {"status": f"{path[1:].removesuffix('e')}ed"}
        elif path == "/update_weights":
            self._loading = body["update_info"]["version"]
        elif path == "/finish_weight_update" and self._loading is not None:
            assert self.subscriber is not None
            with self.subscriber.at(self._loading) as weights:
                weights.load_into({"value": self.model})
            self._loading = None
        return {"is_paused": self.paused}
