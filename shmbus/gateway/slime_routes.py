"""The routes of slime's rollout buffer, over the same bus.

``/start_rollout`` runs a generator's code in the server there. This gateway runs nobody's code, and
says so.
"""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from aiohttp import web

from shmbus.gateway.answers import json_answer
from shmbus.gateway.gateway import Gateway
from shmbus.gateway.group_json import decode_object, unprocessable
from shmbus.http.access import Refusal
from shmbus.peers import slime


class SlimeRoutes:
    """The routes of one gateway."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.routes = {
            ("POST", "/buffer/write"): self.write,
            ("POST", "/get_rollout_data"): self.rollout_data,
            ("POST", "/start_rollout"): self.start_rollout,
        }

    async def write(self, request: web.BaseRequest) -> web.StreamResponse:
        """Put a sample."""
        gateway = self._gateway
        async with gateway.body(request) as (raw, deadline_s):
            item = decode_object(raw)
            version = gateway.puts.producer.policy_version
            try:
                sample = slime.sample_of(item, policy_version=version)
            except ValueError as error:
                raise unprocessable(str(error)) from error
            body = await gateway.put(request, raw, deadline_s, [[sample]])
        content = {
            "success": True,
            "message": "Data has been successfully written to buffer",
            "data": {"data": [item], "meta_info": "write to buffer"},
        }
        return await gateway.answer_put(request, await json_answer(request, content), body)

    async def rollout_data(self, request: web.BaseRequest) -> web.StreamResponse:
        """Give all groups that have enough samples; a call acknowledges what the last one gave."""
        gateway = self._gateway
        await gateway.batch_queue.attach()
        await gateway.batch_queue.drain()
        summary = gateway.batch_queue.samples.summary()
        batch = await gateway.batch_queue.next_samples()
        if batch is None:
            content: dict[str, Any] = {
                "success": False,
                "message": "No data available to read",
                "data": {"data": [], "meta_info": summary if summary["num_groups"] else {}},
            }
            return await json_answer(request, content)
        deliveries = gateway.batch_queue.sample_batches
        try:
            items = [part.item for part in batch.parts]
            content = {
                "success": True,
                "message": f"Successfully read {len(items)} items",
                "data": {"data": items, "meta_info": {**summary, "finished_groups": []}},
            }
            response = await json_answer(request, content)
        except BaseException:
            gateway.batch_queue.lost(deliveries, batch)
            raise
        return await gateway.answer_batch(request, response, deliveries, batch)

    async def start_rollout(self, request: web.BaseRequest) -> web.StreamResponse:
        """Say that generators are processes of their own here."""
        raise Refusal(
            HTTPStatus.NOT_IMPLEMENTED,
            "/start_rollout: this gateway runs no generator's code; start the generator as a "
            "process of its own, let it POST /buffer/write here, and say how many samples a group "
            "has by `shmbus gateway --group-size`",
            close=True,
        )
