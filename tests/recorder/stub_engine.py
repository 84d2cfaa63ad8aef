"""An engine that answers as vLLM 0.32, records sampled tokens, and fails to order.

A letter is a token, and 5000 stands for "th", which comes back as two tokens.
"""

import asyncio
import json
import random
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import numpy as np
from aiohttp import web

BEGIN, END, TH, LETTERS = 1, 2, 5000, 100


class Sampled(NamedTuple):
    prompt: list[int]
    output: list[int]
    logprobs: list[float]
    body: dict[str, Any]


def encode(text: str) -> list[int]:
    return [LETTERS + ord(letter) for letter in text]


def decode(ids: list[int]) -> str:
    return "".join("th" if i == TH else chr(i - LETTERS) for i in ids if i >= LETTERS)


def render(messages: list[dict[str, Any]], drop_thoughts: bool = True) -> list[int]:
    """Render a chat as a template does: thoughts of earlier turns are dropped."""
    ids: list[int] = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = "".join(part.get("text", "[image]") for part in content)
        if message.get("reasoning") and not drop_thoughts:
            content = f"<t>{message['reasoning']}</t>{content}"
        for call in message.get("tool_calls") or ():
            content += f"{{{call['function']['name']} {call['function']['arguments']}}}"
        ids += [BEGIN, *encode(message["role"][0]), *encode(content), END]
    return [*ids, BEGIN, *encode("a")]


def damaged(data: bytes, fault: str) -> bytes:
    return data.replace(b"token_id:", b"\xff\xfe") if fault == "no_utf8" else data


class StubEngine:
    def __init__(self, seed: int = 0) -> None:
        self.rng = random.Random(seed)
        self.record: list[Sampled] = []
        self.script: list[str | list[int]] = []
        self.faults: list[str] = []
        self.calls = self.aborted = 0
        self.healthy = True
        self.url = ""
        self.owner = "vllm"
        self.key = ""
        self.token_s = 0.0
        self.gate: asyncio.Event | None = None
        #: Renders a call's messages, and answers `/tokenize`; None for the own template alone.
        self.template: Callable[[dict[str, Any], bool], list[int]] | None = None
        #: True for an engine that takes ids in place of messages.
        self.takes_ids = True
        self.vocabulary = 1 << 21
        #: Id that ends an answer; bodies of `/tokenize`.
        self.end = END
        self.renderings: list[dict[str, Any]] = []
        self.loop: asyncio.AbstractEventLoop
        self.lock = threading.Lock()
        self.log: Any = None

    def routes(self) -> web.Application:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.completions)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_get("/v1/models", self.models)
        app.router.add_get("/health", self.health)
        return app

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.renderings.append(body)
        if self.template is None:
            return web.Response(status=404)
        try:
            ids = self.template(body, body.get("add_generation_prompt", True))
        except Exception as error:
            return web.json_response({"error": {"message": str(error)}}, status=400)
        return web.json_response({"tokens": ids, "count": len(ids), "max_model_len": 1 << 20})

    async def models(self, request: web.Request) -> web.Response:
        if self.key and request.headers.get("Authorization") != f"Bearer {self.key}":
            return web.Response(status=401)
        return web.json_response({"object": "list", "data": [{"id": "m", "owned_by": self.owner}]})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    def sample(self, prompt: list[int], body: dict[str, Any]) -> Sampled:
        with self.lock:
            if self.script:
                said = self.script.pop(0)
                output = [*(encode(said) if isinstance(said, str) else said), self.end]
            else:
                count = self.rng.randint(1, 12)
                output = [self.rng.randrange(LETTERS + 97, LETTERS + 123) for _ in range(count)]
                output.append(self.end)
            most = body.get("max_completion_tokens") or body.get("max_tokens") or 64
            output = output[:most]
            logprobs = [float(np.float32(-self.rng.random() * 5)) for _ in output]
            found = Sampled(list(prompt), output, logprobs, body)
            if self.log is None:
                self.record.append(found)
            else:
                self.log.write(json.dumps(found[:3]) + "\n")
                self.log.flush()
            return found

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        ids = body.pop("input_ids", None) or (body.get("kv_transfer_params") or {}).get(
            "prompt_token_ids"
        )
        if ids is not None and max(ids) >= self.vocabulary:
            return web.json_response({"error": {"message": "out of vocabulary"}}, status=400)
        if ids is None or not self.takes_ids:
            ids = self.template(body, True) if self.template else render(body["messages"])
        return await self.answer(request, body, ids, True)

    async def completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        prompt = body["prompt"]
        return await self.answer(
            request, body, encode(prompt) if isinstance(prompt, str) else prompt, False
        )

    async def answer(
        self, request: web.Request, body: dict[str, Any], prompt: list[int], chat: bool
    ) -> web.StreamResponse:
        self.calls += 1
        fault = self.faults.pop(0) if self.faults else ""
        if fault == "refuse":
            return web.json_response({"error": {"message": "too long"}}, status=400)
        if fault.isdecimal():
            return web.json_response({"error": {"message": "busy"}}, status=int(fault))
        if fault == "die":
            assert request.transport is not None
            request.transport.abort()
            return web.Response()
        if fault == "html":
            return web.Response(text="<html>", content_type="text/html")
        if fault == "nothing":
            return web.json_response({"choices": []})
        if self.gate is not None:
            try:
                await self.gate.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        choices = [self.sample(prompt, body) for _ in range(body.get("n") or 1)]
        send = self.stream if body.get("stream") else self.whole
        return await send(request, body, choices, chat, fault)

    def logprobs_of(
        self, body: dict[str, Any], one: Sampled, part: slice, chat: bool, fault: str
    ) -> Any:
        wanted = body.get("logprobs")
        if fault == "no_logprobs" or wanted is None or wanted is False:
            return None
        ids, values = one.output[part], list(one.logprobs[part])
        if fault == "fewer_logprobs":
            values, ids = values[:-1], ids[:-1]
        if fault == "nan":
            values[-1] = None  # type: ignore[call-overload]
        if fault == "missing":
            values[-1] = -9999.0
        by_id = body.get("return_tokens_as_token_ids")
        names = [f"token_id:{i}" if by_id else decode([i]) for i in ids]
        if fault == "swapped" and by_id:
            names.reverse()
        if not chat:
            return {
                "tokens": names,
                "token_logprobs": values,
                "top_logprobs": [],
                "text_offset": [],
            }
        return {
            "content": [
                {"token": name, "logprob": value, "bytes": None, "top_logprobs": []}
                for name, value in zip(names, values, strict=True)
            ]
        }

    def message_of(self, ids: list[int], body: dict[str, Any]) -> dict[str, Any]:
        text = decode(ids)
        message: dict[str, Any] = {"role": "assistant"}
        if text.startswith("<t>"):
            thought, _, text = text.removeprefix("<t>").partition("</t>")
            message["reasoning"] = thought
        calls = []
        while body.get("tools") and text.endswith("}") and "{" in text:
            text, _, call = text.removesuffix("}").rpartition("{")
            name, _, arguments = call.partition(" ")
            function = {"name": name, "arguments": arguments}
            calls.insert(0, {"id": f"call{len(calls)}", "type": "function", "function": function})
        message["content"] = text or (None if calls else "")
        if calls:
            message["tool_calls"] = calls
        return message

    def usage_of(self, choices: list[Sampled], fault: str) -> dict[str, Any]:
        sampled = sum(len(one.output) for one in choices) + (fault == "usage")
        prompt = len(choices[0].prompt)
        return {
            "prompt_tokens": prompt, "completion_tokens": sampled, "total_tokens": prompt + sampled,
        }  # fmt: skip

    def finish_of(self, one: Sampled, message: dict[str, Any], fault: str) -> str:
        if fault == "abort":
            return "abort"
        if message.get("tool_calls"):
            return "tool_calls"
        return "stop" if one.output[-1:] == [self.end] else "length"

    async def whole(
        self, request: web.Request, body: dict[str, Any], choices: list[Sampled], chat: bool,
        fault: str,
    ) -> web.Response:  # fmt: skip
        with_ids = body.get("return_token_ids") and fault != "no_ids"
        found = []
        for index, one in enumerate(choices):
            message = self.message_of(one.output, body)
            choice: dict[str, Any] = {
                "index": index, "finish_reason": self.finish_of(one, message, fault),
                "stop_reason": None, "token_ids": one.output if with_ids else None,
                "logprobs": self.logprobs_of(body, one, slice(None), chat, fault),
            }  # fmt: skip
            if chat:
                choice["message"] = message
            else:
                choice["text"] = decode(one.output)
                choice["prompt_token_ids"] = one.prompt if with_ids else None
            found.append(choice)
        answer: dict[str, Any] = {
            "id": "x", "created": 1, "model": body["model"], "choices": found,
            "object": "chat.completion" if chat else "text_completion",
            "usage": self.usage_of(choices, fault), "kv_transfer_params": None,
        }  # fmt: skip
        if chat:
            answer["prompt_token_ids"] = choices[0].prompt if with_ids else None
        if fault == "no_tool_id":
            del found[0]["message"]["tool_calls"][0]["id"]
        body_bytes = damaged(json.dumps(answer).encode(), fault)
        return web.Response(body=body_bytes, content_type="application/json")

    async def stream(
        self, request: web.Request, body: dict[str, Any], choices: list[Sampled], chat: bool,
        fault: str,
    ) -> web.StreamResponse:  # fmt: skip
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        #: Of a burst: all events, which go out at once.
        pieces: list[bytes] = []

        async def send(data: Any) -> None:
            text = data if isinstance(data, str) else json.dumps(data)
            piece = damaged(f"data: {text}\n\n".encode(), fault)
            if fault == "burst":
                pieces.append(piece)
            else:
                await response.write(piece)

        try:
            async for chunk in self.chunks(body, choices, chat, fault):
                ends = (
                    [one for one in chunk["choices"] if one["finish_reason"]]
                    if chunk != "die"
                    else ()
                )
                if fault == "error_behind_end" and ends:
                    error = {"error": {"message": "out of memory", "code": 500}}
                    await send(f"{json.dumps(chunk)}\n\ndata: {json.dumps(error)}")
                    return response
                if chunk == "die":
                    assert request.transport is not None
                    request.transport.abort()
                    return response
                await send(chunk)
                await asyncio.sleep(self.token_s)
        except (asyncio.CancelledError, ConnectionResetError):
            self.aborted += 1
            raise
        if pieces:
            await response.write(b"".join(pieces))
        if fault != "no_done":
            await response.write(b"data: [DONE]\n\n")
        return response

    async def chunks(
        self, body: dict[str, Any], choices: list[Sampled], chat: bool, fault: str
    ) -> AsyncIterator[Any]:
        with_ids = body.get("return_token_ids") and fault != "no_ids"
        head = {
            "id": "x", "created": 1, "model": body["model"],
            "object": "chat.completion.chunk" if chat else "text_completion",
        }  # fmt: skip
        if chat:
            for index in range(len(choices)):
                choice = {"index": index, "delta": {"role": "assistant", "content": ""}}
                choice |= {"logprobs": None, "finish_reason": None}
                ids = choices[0].prompt if with_ids else None
                yield {**head, "choices": [choice], "prompt_token_ids": ids}
        for index, one in enumerate(choices):
            deltas = self.deltas(one, body)
            for at, delta in enumerate(deltas):
                if fault == "die_mid" and at == len(deltas) // 2:
                    yield "die"
                    return
                last = at == len(deltas) - 1
                message = self.message_of(one.output, body)
                choice = {
                    "index": index, "finish_reason": None,
                    "logprobs": self.logprobs_of(body, one, slice(at, at + 1), chat, fault),
                    "token_ids": [one.output[at]] if with_ids else None,
                }  # fmt: skip
                if last or (fault == "late" and at == 0):
                    choice |= {"finish_reason": self.finish_of(one, message, fault)}
                    choice |= {"stop_reason": None}
                if chat:
                    choice["delta"] = delta
                else:
                    choice["text"] = decode([one.output[at]])
                    choice["prompt_token_ids"] = one.prompt if with_ids and not at else None
                yield {**head, "choices": [choice]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield {**head, "choices": [], "usage": self.usage_of(choices, fault)}

    def deltas(self, one: Sampled, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Cut a message into a delta a token; most of a tool's call comes with the last one."""
        message = self.message_of(one.output, body)
        found: list[dict[str, Any]] = [{} for _ in one.output]
        thought, content = message.get("reasoning"), message.get("content")
        if thought:
            found[0] = {"reasoning": thought}
        if content:
            found[len(found) // 2] |= {"content": content}
        if message.get("tool_calls"):
            calls = message["tool_calls"]
            heads = [
                {"index": at, **call, "function": {**call["function"], "arguments": ""}}
                for at, call in enumerate(calls)
            ]
            found[-2] |= {"tool_calls": heads[:1]}
            found[-1] |= {
                "tool_calls": [
                    *({"index": 0, "function": {"arguments": calls[0]["function"]["arguments"]}},),
                    *({"index": at, **call} for at, call in enumerate(calls) if at),
                ]
            }
        return found

    def let_go(self) -> None:
        assert self.gate is not None
        self.loop.call_soon_threadsafe(self.gate.set)


@asynccontextmanager
async def serving_stub(engine: StubEngine, port: int = 0) -> AsyncIterator[StubEngine]:
    runner = web.AppRunner(engine.routes(), handler_cancellation=True, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port, backlog=1024)
    await site.start()
    engine.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    engine.loop = asyncio.get_running_loop()
    try:
        yield engine
    finally:
        await runner.cleanup()


async def run(port: int, log: str, seed: int) -> None:
    engine = StubEngine(seed)
    engine.token_s = 0.001
    with open(log, "a") as engine.log:
        async with serving_stub(engine, port):
            await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run(int(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
