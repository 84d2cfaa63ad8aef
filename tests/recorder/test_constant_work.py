"""Work on a chunk of a stream is proportional to the chunk, counted in copies."""

import asyncio
import gc
import json
import sys
import threading
from typing import Any

import msgspec
import pytest
from recorders import Scene, call, sent, user

from shmbus.recorder import event_stream
from shmbus.recorder.calls import _Call
from shmbus.recorder.dialects import DIALECTS
from shmbus.recorder.engine_api import CHAT, Reading, decode_answer
from shmbus.recorder.event_stream import EventParser
from shmbus.recorder.transcript import Span

pytest_plugins = ["recorder_fixtures"]

TOKENS = 2000
ASK = {"model": "m", "messages": [], "stream": True}


class Work:
    copied = 0


class Ids(list[int]):
    """Ids of a chunk: counts the lists copied for an append."""

    def __radd__(self, before: list[int]) -> list[int]:
        Work.copied += len(before)
        return [*before, *self]


class Text(str):
    """A piece of a text: counts the texts copied for an append."""

    def __radd__(self, before: str) -> str:
        Work.copied += len(before)
        return f"{before}{self}"


class Piece(bytes):
    def __radd__(self, before: bytes) -> bytes:
        Work.copied += len(before)
        return before.__add__(self)


def chunk(token: int, delta: dict[str, Any], last: bool) -> dict[str, Any]:
    return {
        "choices": [
            {
                "index": 0, "delta": delta, "finish_reason": "stop" if last else None,
                "token_ids": Ids([token]),
                "logprobs": {"content": [{"token": f"token_id:{token}", "logprob": -1.0}]},
            }
        ]
    }  # fmt: skip


def delta_of(kind: str, number: int) -> dict[str, Any]:
    if kind != "tool":
        return {kind: Text("ab")}
    call = {"index": 0, "function": {"name": None if number else "f", "arguments": Text("ab")}}
    return {"tool_calls": [call]}


@pytest.mark.parametrize("kind", ["content", "reasoning", "tool"])
@pytest.mark.parametrize("path", sorted(DIALECTS.keys() - {"/v1/completions"}))
def test_chunks_cost_no_more_later(kind: str, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library's encoder takes no counting text.
    monkeypatch.setattr(event_stream, "_encode", lambda data: json.dumps(data).encode())
    body: dict[str, Any] = {"model": "m", "messages": [], "input": "x", "max_tokens": 9}
    dialect = DIALECTS[path]({**body, "stream": True}, {})
    reading = Reading(ASK, CHAT, "vllm")
    reading.read({"choices": [], "prompt_token_ids": [1]})
    Work.copied, blocks = 0, sys.getallocatedblocks()
    for number in range(TOKENS):
        read = reading.read(chunk(number, delta_of(kind, number), number == TOKENS - 1))
        dialect.chunk(read or {"choices": []}, 1)
    assert sys.getallocatedblocks() - blocks < TOKENS / 4  # no piece waits for the end
    end = dialect.done()
    assert Work.copied < 20 * TOKENS
    (turn,) = reading.turns(Span(0, 0))
    assert turn.output.tolist() == list(range(TOKENS))
    if path == "/v1/responses":
        assert end.count(b"ab" * TOKENS) >= 2


def test_a_burst_of_a_stream_starves_nobody(monkeypatch: pytest.MonkeyPatch, scene: Scene) -> None:
    turns = [0]
    take = _Call._take_chunk

    def counted(self: _Call, raw: bytes) -> bytes:
        if turns[-1] == 0:
            asyncio.get_running_loop().call_soon(turns.append, 0)
        turns[-1] += 1
        return take(self, raw)

    monkeypatch.setattr(_Call, "_take_chunk", counted)
    session = scene.open()
    scene.engine.script, scene.engine.faults = ["a" * 600], ["burst"]
    body = {"model": "m", "messages": [], "stream": True, "max_tokens": 700}
    with sent(f"{session.base_url}/chat/completions", body, session.api_key) as raw:
        found = b""
        while b"[DONE]" not in found[-100:]:
            found += raw.recv(1 << 16)
    assert sum(turns) > 600
    assert max(turns) < 200
    session.release()


@pytest.mark.parametrize("chats", [False, True])
def test_a_whole_answer_makes_no_tracked_object_for_a_token(chats: bool) -> None:
    ids = list(range(TOKENS))
    names = [f"token_id:{token}" for token in ids]
    content = [{"token": name, "logprob": -1.0, "bytes": [1], "top_logprobs": []} for name in names]
    text = {"tokens": names, "token_logprobs": [-1.0] * TOKENS, "top_logprobs": []}
    choice: dict[str, Any] = {
        "index": 0, "message": {"content": "x"}, "text": "x", "finish_reason": "stop",
        "token_ids": ids, "logprobs": {"content": content} if chats else text,
        "prompt_token_ids": [1],
    }  # fmt: skip
    raw = json.dumps({"choices": [choice]}).encode()
    wanted = {"model": "m", "messages": [], "prompt": "x", "logprobs": 1}
    reading = Reading(wanted, CHAT if chats else "/v1/completions", "vllm")
    gc.collect()
    gc.disable()
    try:
        before = gc.get_count()[0]
        read = reading.read(decode_answer(raw))
        tracked = gc.get_count()[0] - before
    finally:
        gc.enable()
    assert tracked < 100
    assert msgspec.json.decode(msgspec.json.encode(read))["choices"][0]["logprobs"] == (
        {"content": content} if chats else text
    )
    (turn,) = reading.turns(Span(0, 0))
    assert (turn.output.tolist(), set(turn.logprobs.tolist())) == (ids, {-1.0})


def test_a_long_whole_answer_is_read_beside_the_event_loop(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers: list[str] = []
    read = Reading.read

    def noted(self: Reading, answer: dict[str, Any]) -> dict[str, Any] | None:
        readers.append(threading.current_thread().name)
        return read(self, answer)

    monkeypatch.setattr(Reading, "read", noted)
    session = scene.open()
    for count in (10, 10_000):
        scene.engine.script = ["a" * count]
        body = {"model": "m", "messages": [user("x")], "max_tokens": 20_000}
        assert call(session, body)[0] == 200
    loop, other = readers
    assert loop != other
    session.release()


def test_an_event_in_many_pieces_is_copied_once() -> None:
    parser = EventParser()
    data = b"data: " + json.dumps({"prompt_token_ids": list(range(TOKENS))}).encode() + b"\r\n\r\n"
    Work.copied = 0
    found = [one for at in range(len(data)) for one in parser.feed(Piece(data[at : at + 1]))]
    assert found == [data[6:-4]]
    assert Work.copied < 20 * len(data)
