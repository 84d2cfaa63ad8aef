"""Stitched calls: a conversation makes a single row; any doubt leaves rendering to the engine."""

import functools
import json
import logging
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from chat_templates import TEMPLATES, rendered
from conftest import wait_until
from recorders import Scene, ask, chat, sent, user
from stub_engine import END, TH, StubEngine, encode
from test_sessions import sampled, trained

import shmbus
from shmbus.cli import main
from shmbus.recorder import server
from shmbus.recorder.engine_api import Reading
from shmbus.recorder.recorder import Recorder
from shmbus.recorder.settings import Settings
from shmbus.recorder.stitch import bridge

pytest_plugins = ["recorder_fixtures"]

TOOL: Any = {"type": "function", "function": {"name": "look", "parameters": {}}}


def use(engine: StubEngine, template: str) -> None:
    engine.template = functools.partial(rendered, TEMPLATES[template])


def result(message: dict[str, Any], text: str = "a wall") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": text}


def shown(engine: StubEngine) -> bool:
    """Return whether the engine's last prompt is the rendering of the last messages."""
    last = engine.record[-1]
    assert engine.template is not None
    return last.prompt == engine.template(last.body, True)


def said(
    session: shmbus.Session, messages: list[dict[str, Any]], stream: bool, **options: Any
) -> dict[str, Any]:
    if not stream:
        return chat(session, messages, **options)
    import openai

    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    ask: dict[str, Any] = {"model": "m", "messages": messages, **options}
    return message_of(client.chat.completions.create(**ask, stream=True))


def message_of(chunks: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                new = {"id": call.id, "type": "function", "function": {"name": "", "arguments": ""}}
                function = calls.setdefault(call.index, new)["function"]
                function["name"] += call.function.name or ""
                function["arguments"] += call.function.arguments or ""
    if calls:
        message["tool_calls"] = list(calls.values())
    return message


def counts(recorder: Recorder) -> dict[str, int]:
    return {how: count for how, count in recorder.calls.stitcher.counts.items() if count}


def assert_one_row(sample: shmbus.Trajectory, engine: StubEngine) -> None:
    """Compare a sample's row with the engine's record: each prompt begins with the row so far."""
    (row,) = sample.rows
    at = 0
    tokens, mask = row["tokens"].tolist(), row["loss_mask"].tolist()
    for one in engine.record:
        assert one.prompt == tokens[: len(one.prompt)]
        assert not any(mask[at : len(one.prompt)])
        at = len(one.prompt) + len(one.output)
        assert all(mask[len(one.prompt) : at])
    assert at == len(tokens)
    assert trained(sample) == sampled(engine.record)


# -- a single row


SAID: list[list[int]] = [
    [*encode("a "), TH],
    encode("<t>hm</t> said \u00e9\u65e5 "),
    encode("{look [1,  2.0]}"),
    encode('<t>so</t>both {look 1}{look "x"}'),
    encode("cut in the middle"),
]


def returned(answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as harnesses do: stripped, without thoughts, with rewritten arguments."""
    back = {"role": "assistant", "content": (answer["content"] or "").strip()}
    if answer.get("tool_calls"):
        back["tool_calls"] = json.loads(json.dumps(answer["tool_calls"]))
        for call in back["tool_calls"]:
            # JavaScript has no 2.0.
            given = json.loads(call["function"]["arguments"], parse_float=lambda x: int(float(x)))
            call["function"]["arguments"] = json.dumps(given)
    return back


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("template", ["chatml", "qwen3", "mistral", "glm"])
def test_a_conversation_of_many_turns_is_one_row(template: str, stream: bool, scene: Scene) -> None:
    use(scene.engine, template)
    with scene.open() as session:
        messages = [user("hello")]
        for turn in range(15):
            scene.engine.script = [SAID[turn % 5]]
            if template == "mistral":
                # Tools stand before the last question: a single question, and only calls.
                scene.engine.script = [SAID[2 + turn % 2]]
            # In this family the next role ends a turn.
            calls = b"{" in bytes(i % 256 for i in np.array(scene.engine.script[0]) - 100)
            scene.engine.end = END if template != "glm" else 4 if calls else 3
            options = {"max_tokens": 8} if turn % 5 == 4 and template != "mistral" else {}
            answer = said(session, messages, stream, tools=[TOOL], **options)
            messages.append(returned(answer))
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": f"wall {turn}"}
                for call in answer.get("tool_calls") or ()
            ] or [user(f"go on {turn}")]
        assert session.finish(1.0)
    (sample,) = scene.taken()
    assert_one_row(sample, scene.engine)
    assert counts(scene.recorder) == {"start": 1, "stitched": 14}
    assert sample.meta["drift"] == 0


def test_two_branches_of_a_turn_share_its_tokens(scene: Scene) -> None:
    use(scene.engine, "qwen3")
    scene.engine.script = [encode(f"<t>hm</t>said {turn}") for turn in range(4)]
    with scene.open() as session:
        talk = [user("hello")]
        talk += [returned(chat(session, talk)), user("go on")]
        for way in ("left", "right"):
            branch = [*talk[:2], user(way)]
            branch += [returned(chat(session, branch)), user("on")]
        chat(session, branch)
        assert session.finish(1.0)
    (sample,) = scene.taken()
    assert sorted(trained(sample)) == sorted(sampled(scene.engine.record))
    first = len(scene.engine.record[0].prompt) + len(scene.engine.record[0].output)
    assert [len(row["tokens"]) > first for row in sample.rows] == [True, True]
    assert sample.rows[1].prefix_length > first
    assert counts(scene.recorder) == {"start": 1, "stitched": 3}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ["messages", "responses"])
def test_every_dialect_is_stitched(path: str, stream: bool, scene: Scene) -> None:
    use(scene.engine, "qwen3")
    scene.engine.script = [SAID[0], "{look }", '<t>hm</t>{look [1, "x"]}', "end"]
    with scene.open() as session:
        for each in DIALECTS[path](session, stream):
            assert each
        assert session.finish(1.0)
    (sample,) = scene.taken()
    assert_one_row(sample, scene.engine)
    assert counts(scene.recorder) == {"start": 1, "stitched": 3}


def messages_agent(session: shmbus.Session, stream: bool) -> Iterator[Any]:
    url = f"{session.base_url}/messages"
    ask_of: Any = {"model": "m", "max_tokens": 50, "stream": stream}
    talk: list[Any] = [user("hello")]
    ask_of |= {"messages": talk, "tools": [{"name": "look", "input_schema": {}}]}
    for _ in range(4):
        if stream:
            blocks = streamed(url, ask_of, session.api_key)
        else:
            blocks = ask(url, ask_of, session.api_key)[1]["content"]
        yield blocks
        kept = [block for block in blocks if block["type"] != "thinking"]
        results = [
            {"type": "tool_result", "tool_use_id": block["id"], "content": "a wall"}
            for block in blocks
            if block["type"] == "tool_use"
        ]
        talk += [{"role": "assistant", "content": kept}, user(results or "go on")]


def streamed(url: str, body: Any, key: str) -> list[dict[str, Any]]:
    with sent(url, body, key, "Connection: close") as raw, raw.makefile("rb") as answer:
        data = [line[6:] for line in answer if line.startswith(b"data: ")]
    blocks: list[dict[str, Any]] = []
    for event in map(json.loads, data):
        if event["type"] == "content_block_start":
            blocks.append(event["content_block"])
        elif event.get("delta", {}).get("type") == "text_delta":
            blocks[-1]["text"] += event["delta"]["text"]
        elif event.get("delta", {}).get("type") == "input_json_delta":
            blocks[-1]["input"] = json.loads(event["delta"]["partial_json"])
    return blocks


def responses_agent(session: shmbus.Session, stream: bool) -> Iterator[Any]:
    import openai

    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
    ask: Any = {"model": "m", "input": "hello", "tools": [{"type": "function", "name": "look"}]}
    for _ in range(4):
        if stream:
            *_, last = client.responses.create(**ask, stream=True)
            answer = last.response
        else:
            answer = client.responses.create(**ask)
        yield answer
        results = [
            {"type": "function_call_output", "call_id": item.call_id, "output": "a wall"}
            for item in answer.output
            if item.type == "function_call"
        ]
        ask |= {"previous_response_id": answer.id, "input": results or "go on"}


DIALECTS: Any = {"messages": messages_agent, "responses": responses_agent}


# -- doubt


def changed(number: int, **new: Any) -> Any:
    return lambda talk: [*talk[:number], {**talk[number], **new}, *talk[number + 1 :]]


IMAGE = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}
LISTEN = {**TOOL, "function": {"name": "listen", "parameters": {}}}


@pytest.mark.parametrize(("change", "options", "how"), [
    (changed(1, content="never said"), {}, "history"),
    (changed(1, reasoning="never thought"), {}, "history"),
    (changed(0, content="hello!"), {}, "history"),
    (changed(0, name="nonce"), {}, "history"),
    (lambda talk: [talk[0], *talk[3:]], {}, "history"),
    (lambda talk: [*talk, {"role": "assistant", "content": "so"}], {}, "history"),
    (lambda talk: [*talk, {"role": "user", "content": [IMAGE]}], {}, "media"),
    (list, {"tools": [LISTEN]}, "options"),
    (list, {"chat_template_kwargs": {"enable_thinking": False}}, "options"),
    (list, {"kv_transfer_params": {"prompt_token_ids": [1, 101]}}, "options"),
    (list, {"response_format": {"type": "json_object"}}, "options"),
])  # fmt: skip
def test_a_changed_call_is_rendered_by_the_engine(
    change: Any, options: dict[str, Any], how: str, scene: Scene
) -> None:
    recorder = scene.start_recorder(scene.engine, train_grammar=True)
    use(scene.engine, "qwen3")
    scene.engine.script = ["<t>hm</t>said", "more", "third"]
    with scene.open() as session:
        talk = [user("hello")]
        for _ in range(2):
            talk += [returned(chat(session, talk, tools=[TOOL])), user("go on")]
        chat(session, change(talk), **{"tools": [TOOL], **options})
        assert session.finish(1.0)
    assert (how == "options" and "kv_transfer_params" in options) or shown(scene.engine)
    assert counts(recorder) == {"start": 1, "stitched": 1, how: 1}
    (sample,) = scene.taken()
    assert sorted(trained(sample)) == sorted(sampled(scene.engine.record))


@pytest.mark.parametrize(
    ("template", "how"),
    [("counted", "template"), ("system_last", "template"), ("plain", "end"),
     ("mistral", "template"), (None, "engine")],
)  # fmt: skip
def test_a_template_without_a_certain_bridge_falls_back_and_is_told_once(
    template: str | None, how: str, scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    if template is not None:
        use(scene.engine, template)
    with (
        caplog.at_level(logging.WARNING, "shmbus.recorder.stitch"),
        scene.open() as session,
    ):
        talk = [user("hello")]
        for _ in range(5):
            scene.engine.script = ["said"]
            talk += [returned(chat(session, talk, tools=[TOOL])), user("go on")]
            assert template is None or shown(scene.engine)
        asked = len(scene.engine.renderings)
        chat(session, talk, tools=[TOOL])
        session.release()
    assert counts(scene.recorder) == {"start": 1, how: 5}
    assert len(caplog.records) == 1
    assert template == "plain" or len(scene.engine.renderings) == asked


def test_an_unusual_end_of_one_answer_leaves_other_conversations_stitched(scene: Scene) -> None:
    use(scene.engine, "chatml")
    with scene.open() as session:
        for number in range(4):
            talk = [user(f"hello {number}")]
            for end in (9, END, END):
                scene.engine.end = end
                talk += [returned(chat(session, talk)), user("go on")]
        assert session.finish(1.0)
    assert counts(scene.recorder) == {"start": 4, "end": 4, "stitched": 4}
    (sample,) = scene.taken()
    assert sorted(trained(sample)) == sorted(sampled(scene.engine.record))


@pytest.mark.parametrize(
    ("options", "counted"), [({}, {"start": 1, "engine": 3}), ({"stitch": False}, {})]
)
def test_rows_of_calls_that_the_engine_renders_are_trained_as_it_answers(
    options: dict[str, bool], counted: dict[str, int], scene: Scene
) -> None:
    use(scene.engine, "qwen3")
    scene.engine.takes_ids = bool(options)
    recorder = scene.start_recorder(scene.engine, **options)
    with scene.open() as session:
        talk = [user("hello")]
        for _ in range(4):
            scene.engine.script = ["<t>hm</t>said"]
            talk += [returned(chat(session, talk)), user("go on")]
            assert shown(scene.engine)
        assert session.finish(1.0)
    (sample,) = scene.taken()
    assert len(sample.rows) == 4
    assert sorted(trained(sample)) == sorted(sampled(scene.engine.record))
    assert bool(scene.engine.renderings) == bool(counted)
    assert counts(recorder) == counted


def test_a_refused_prompt_is_rendered_by_the_engine(scene: Scene) -> None:
    use(scene.engine, "qwen3")
    scene.engine.script, scene.engine.vocabulary = ["\u65e5", "said"], 10_000
    with scene.open() as session:
        talk = [user("hello")]
        talk += [returned(chat(session, talk)), user("go on")]
        assert chat(session, talk)["content"] == "said"
        assert shown(scene.engine)
        session.release()
    assert counts(scene.recorder) == {"start": 1, "refused": 1}


def test_a_refusal_without_stitching_reaches_the_client(scene: Scene) -> None:
    use(scene.engine, "qwen3")
    with scene.open() as session:
        talk = [user("hello")]
        talk += [returned(chat(session, talk)), user("go on")]
        scene.engine.faults = ["refuse", "refuse"]
        body = {"model": "m", "messages": talk}
        status, answer = ask(f"{session.base_url}/chat/completions", body, session.api_key)
        assert (status, answer["error"]["message"]) == (400, "too long")
        session.release()


def test_a_stream_behind_thoughts_comes_at_once(scene: Scene) -> None:
    """The scene.engine's parser takes thoughts in a prompt for the end of the answer's own."""
    use(scene.engine, "qwen3")
    scene.engine.script = ["plain", "<t>hm</t>said", "more"]
    with scene.open() as session:
        talk = [user("hello")]
        for _ in range(3):
            talk += [returned(said(session, talk, True)), user("go on")]
        session.release()
    assert [one.body["stream"] for one in scene.engine.record] == [True, True, False]


def test_kept_answers_count_as_memory_until_the_session_ends(scene: Scene) -> None:
    use(scene.engine, "chatml")
    with scene.open() as session:
        talk = [user("x" * 10_000)]
        for _ in range(3):
            talk += [returned(chat(session, talk)), user("go on")]
        (found,) = scene.recorder.sessions
        # Four bytes a token, each token once.
        assert 40_000 < found.chains.nbytes < 44_000
        assert scene.recorder.sessions.nbytes == found.transcript.nbytes + found.chains.nbytes
        session.release()
    wait_until(lambda: not len(scene.recorder.sessions))
    assert scene.recorder.sessions.nbytes == 0


# -- parts


@pytest.mark.parametrize(("words", "stitches"), [
    ([], True), (["--stitch", "on"], True), (["--stitch", "off"], False),
])  # fmt: skip
def test_the_command_line_turns_stitching_off(
    words: list[str], stitches: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Settings] = []
    monkeypatch.setattr(server, "serve", lambda settings, say: found.append(settings) or 0)
    assert main(["proxy", "run1", "--engine", "http://127.0.0.1:1", *words]) == 0
    assert [settings.stitch for settings in found] == [stitches]


@pytest.mark.parametrize(("end", "behind", "last", "is_closed", "found"), [
    ([2, 9], [2, 9, 1, 5], 2, True, [9, 1, 5]),
    ([2, 9], [2, 9, 1, 5], 7, False, [2, 9, 1, 5]),
    ([2, 9], [2, 9, 1, 5], 2, False, [9, 1, 5]),
    ([9, 2, 9], [9, 2, 9, 1], 2, True, [9, 1]),
    ([], [3, 9, 5], 3, True, [9, 5]),
    ([], [4, 9, 3, 5], 3, True, None),
    ([2, 9], [2, 9, 1, 5], 8, True, None),
])  # fmt: skip
def test_a_bridge_closes_a_turn_exactly_once(
    end: list[int], behind: list[int], last: int, is_closed: bool, found: list[int] | None
) -> None:
    got = bridge(np.array(end, np.int32), np.array(behind, np.int32), last, is_closed)
    assert (None if got is None else got.tolist()) == found


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_each_engine_gets_ids_in_its_own_field(kind: Any) -> None:
    body = Reading({"messages": []}, "/v1/chat/completions", kind, prompt=[1, 2]).body
    field = {
        "vllm": {"kv_transfer_params": {"prompt_token_ids": [1, 2]}},
        "sglang": {"input_ids": [1, 2]},
    }
    assert body.items() >= field[kind].items()
