"""The gateway's HTTP server: routes, refusals in FastAPI's form, and life."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

from aiohttp import web

from shmbus.gateway import settings as limits
from shmbus.gateway.atropos_routes import AtroposRoutes
from shmbus.gateway.gateway import Gateway
from shmbus.gateway.settings import Settings
from shmbus.http.access import Access, Refusal
from shmbus.http.app import App, json_answer, run

logger = logging.getLogger(__name__)


def _refused(refusal: Refusal, message: str) -> web.Response:
    detail: Any = message
    if refusal.status == HTTPStatus.UNPROCESSABLE_ENTITY:
        detail = [{"type": "value_error", "loc": ["body"], "msg": message}]
    return json_answer({"detail": detail}, refusal.status)


@contextlib.asynccontextmanager
async def serving(settings: Settings) -> AsyncIterator[Gateway]:
    """Serve in the block."""
    gateway = Gateway(settings)
    app = App(
        "gateway",
        settings.bus,
        Access("gateway", settings.host, settings.token),
        AtroposRoutes(gateway).routes,
        _refused,
        health=gateway.health,
        counts=gateway.counts,
        max_connections=limits.MAX_CONNECTIONS,
        idle_s=limits.IDLE_S,
    )
    async with app.serving(gateway, settings.host, settings.port):
        yield gateway


def serve(settings: Settings, parent: socket.socket | None = None) -> int:
    """Serve until SIGTERM, SIGINT, or the parent's end; return 1 after the bus's removal."""

    def say(url: str) -> None:
        logger.info("serving", extra={"bus": settings.bus, "http": url})

    return run(lambda: serving(settings), say, parent)
