"""The trajectory API of Atropos 0.4.0: routes, answers and sensible statuses, and their server.

Refusals have FastAPI's form. docs/gateway.md lists the differences from atroposlib's server.
"""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import logging
import socket
import time
from collections.abc import AsyncIterator
from functools import partial
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

from shmbus.gateway import settings
from shmbus.gateway import settings as limits
from shmbus.gateway.bodies import small_body
from shmbus.gateway.gateway import Gateway
from shmbus.gateway.group_json import ScoredGroup, decode, decode_groups, unprocessable
from shmbus.gateway.idempotent_put import Samples, key_of
from shmbus.gateway.registry import NewEnvironment, Registration
from shmbus.gateway.settings import Settings
from shmbus.http.access import Access, Refusal, Route
from shmbus.http.app import App, encode, json_answer, run
from shmbus.http.server import connection_of
from shmbus.peers import atropos


class _EnvironmentNumber(msgspec.Struct):
    env_id: int


#: The answer of ``/latest_example`` before the first group.
_NO_EXAMPLE: dict[str, list[Any]] = {
    key: []
    for key in (
        "tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params",
        "inference_logprobs", "messages", "images",
    )
}  # fmt: skip


class _Sample:
    """A record as `shmbus.peers.atropos.group_of` reads a trajectory."""

    def __init__(self, record: dict[str, Any]) -> None:
        self._record = record
        self.meta = record.get("meta")
        self.score = record["score"]

    def __contains__(self, name: str) -> bool:
        return name in self._record

    def __getitem__(self, name: str) -> Any:
        return self._record[name]


class _Example(list[_Sample]):
    """Records converted to a group on read."""

    @property
    def trajectories(self) -> list[_Sample]:
        return list(self)


def samples_of(group: ScoredGroup, policy_version: int) -> Samples:
    """Return a decoded group as samples to put."""
    try:
        fields = msgspec.structs.asdict(group)
        return atropos.samples_of(fields, policy_version=policy_version, typed=True)
    except ValueError as error:
        raise unprocessable(str(error)) from error


async def _gzipped(request: web.BaseRequest, body: bytes) -> web.Response:
    """Return an answer of JSON, compressed if large, for clients that accept gzip."""
    answer = json_answer(body)
    if len(body) >= settings.COMPRESS_FROM:
        answer.headers["Vary"] = "Accept-Encoding"
        if "gzip" in request.headers.get("Accept-Encoding", "").lower():
            # The least level: a loopback outruns any compression.
            answer.body = await asyncio.to_thread(gzip.compress, body, 1)
            answer.headers["Content-Encoding"] = "gzip"
    return answer


class AtroposRoutes:
    """The routes of a gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.routes = {
            ("GET", "/"): Route(self.root, reads=True),
            ("POST", "/register"): Route(self.register),
            ("POST", "/register-env"): Route(self.register_env),
            ("POST", "/disconnect-env"): Route(self.disconnect_env),
            ("GET", "/wandb_info"): Route(self.wandb_info, reads=True),
            ("GET", "/info"): Route(self.info, reads=True),
            ("GET", "/batch"): Route(self.batch),
            ("GET", "/latest_example"): Route(self.latest_example, reads=True),
            ("POST", "/scored_data"): Route(self.scored_data),
            ("POST", "/scored_data_list"): Route(self.scored_data_list),
            ("GET", "/status"): Route(self.status, reads=True, polled=True),
            ("GET", "/status-env"): Route(self.status_env, polled=True),
            ("GET", "/reset_data"): Route(self.reset_data),
        }

    async def root(self, request: web.BaseRequest) -> web.StreamResponse:
        """Identify the API."""
        return json_answer({"message": "AtroposLib API"})

    # -- registrations --------------------------------------------------------------------------

    async def register(self, request: web.BaseRequest) -> web.StreamResponse:
        """Register a trainer; a restarted trainer gets its unacknowledged groups again."""
        gateway = self._gateway
        registration = decode(await small_body(request), Registration)
        again = gateway.batch_queue.answered
        answer = gateway.registry.register(registration, again=again)
        if registration.reads_bus:
            await gateway.batch_queue.detach()
        else:
            try:
                await gateway.batch_queue.attach()
            except Refusal as refusal:
                if refusal.status != HTTPStatus.CONFLICT:
                    raise
                # The trainer's own process reads the bus: its environments may begin.
                registration.reads_bus = gateway.registry.state.started = True
        if again:
            gateway.batch_queue.restarted()
        gateway.store()
        return json_answer(answer)

    async def register_env(self, request: web.BaseRequest) -> web.StreamResponse:
        """Register an environment."""
        new = decode(await small_body(request), NewEnvironment)
        answer = self._gateway.registry.register_env(new)
        self._gateway.store()
        return json_answer(answer)

    async def disconnect_env(self, request: web.BaseRequest) -> web.StreamResponse:
        """Note an environment's end."""
        number = decode(await small_body(request), _EnvironmentNumber)
        answer = self._gateway.registry.disconnect_env(number.env_id)
        self._gateway.store()
        return json_answer(answer)

    async def wandb_info(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the names of the run."""
        return json_answer(self._gateway.registry.wandb_info())

    async def info(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the numbers of the run."""
        return json_answer(self._gateway.registry.info())

    # -- groups in ------------------------------------------------------------------------------

    async def scored_data(self, request: web.BaseRequest) -> web.StreamResponse:
        """Put a group."""
        return await self._post(request, several=False)

    async def scored_data_list(self, request: web.BaseRequest) -> web.StreamResponse:
        """Put several."""
        return await self._post(request, several=True)

    async def _post(self, request: web.BaseRequest, *, several: bool) -> web.StreamResponse:
        gateway, connection = self._gateway, connection_of(request)
        deadline_s = time.monotonic() + gateway.settings.hold_s
        async with gateway.bodies.large(request, deadline_s) as raw:
            groups = decode_groups(raw, several=several)
            if len(groups) > settings.MAX_GROUPS:
                raise unprocessable(
                    f"body: expected at most {settings.MAX_GROUPS} groups, got {len(groups)}; send "
                    "fewer at once"
                )
            sizes = [(group.env_id, len(group.tokens)) for group in groups]
            version = gateway.puts.producer.policy_version
            samples = [samples_of(group, version) for group in groups]
            del groups
            body = await gateway.puts.put(
                key_of(raw), samples, deadline_s, lambda: connection.alive
            )
            gateway.batch_queue.note_put()
            if samples:
                gateway.latest = samples[-1]
            del samples
        waiting = await self._buffered(sizes)
        answer: dict[str, Any]
        if several:
            answer = {"status": "received", "groups_processed": len(sizes)}
            if waiting:
                answer |= {"buffered": len(waiting), "last_buffer_size": waiting[-1]}
        elif waiting:
            answer = {"status": "buffered", "buffer_size": waiting[-1]}
        else:
            answer = {"status": "received"}
        return await connection.deliver(
            request, json_answer(answer), partial(gateway.puts.settle, body), settings.ANSWER_S
        )

    async def _buffered(self, sizes: list[tuple[int | None, int]]) -> list[int]:
        """Return the number of waiting sequences, by group to complete by its environment."""
        gateway = self._gateway
        uneven = []
        for env_id, size in sizes:
            expected = gateway.registry.group_size(env_id)
            if env_id is not None and expected is not None and size != expected:
                uneven.append(env_id)
        if not uneven or not gateway.batch_queue.attached:
            return []
        await gateway.batch_queue.drain()
        return [gateway.batch_queue.queue.buffered(env_id) for env_id in uneven]

    # -- groups out -----------------------------------------------------------------------------

    async def batch(self, request: web.BaseRequest) -> web.StreamResponse:
        """Give a trainer its next batch."""
        gateway = self._gateway
        registry = gateway.registry
        if not registry.registered:
            text = "Trainer not registered. Call /register first."
            return json_answer({"status": "error", "message": text, "batch": []})
        if registry.reads_bus:
            raise Refusal(
                HTTPStatus.CONFLICT,
                f"/batch: the trainer of bus {gateway.bus.name!r} reads it itself; register again "
                "to take batches from here, after that process has ended",
            )
        await gateway.batch_queue.attach()
        if not registry.state.started:
            registry.state.started = True
            gateway.store()
        found = await gateway.batch_queue.next_batch()
        if found is None:
            return json_answer({"batch": None})
        batch, texts = found
        try:
            content = b'{"batch":[' + b",".join(texts) + b"]}"
            del found, texts
            response = await _gzipped(request, content)
            del content
        except BaseException:
            gateway.batch_queue.settle(batch, False)
            raise
        connection = connection_of(request)
        batch.abort = connection.abort
        note = partial(gateway.batch_queue.settle, batch)
        await connection.deliver(request, response, note, settings.ANSWER_S)
        gateway.batch_queue.given(batch)
        return response

    async def latest_example(self, request: web.BaseRequest) -> web.StreamResponse:
        """Show the last group."""
        latest = self._gateway.latest
        if latest is None:
            return json_answer(_NO_EXAMPLE)
        example: Any = _Example(map(_Sample, latest))
        return await _gzipped(request, encode(atropos.group_of(example)))

    # -- state ----------------------------------------------------------------------------------

    async def status(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer the step, and how many groups wait."""
        gateway = self._gateway
        await gateway.batch_queue.drain()
        answer = {
            "current_step": gateway.registry.state.step,
            "queue_size": gateway.batch_queue.undelivered,
        }
        return json_answer(answer)

    async def status_env(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer an environment with its throttle figures."""
        gateway = self._gateway
        number = decode(await small_body(request), _EnvironmentNumber)
        if gateway.batch_queue.stale:
            await gateway.batch_queue.drain()
        available = gateway.batch_queue.available_to(number.env_id)
        return json_answer(gateway.registry.status_env(number.env_id, available))

    async def reset_data(self, request: web.BaseRequest) -> web.StreamResponse:
        """Discard every group, and forget trainer and environments."""
        gateway = self._gateway
        await gateway.batch_queue.reset()
        gateway.registry.reset()
        gateway.store()
        return web.Response(text="Reset successful")


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
