"""Anthropic's messages and OpenAI's responses as chat completions and back, by example."""

from typing import Any

import msgspec
import pytest

from shmbus.recorder.dialects import DIALECTS
from shmbus.recorder.dialects.base import UnusableCall
from shmbus.recorder.event_stream import EventParser, EventTooLarge

LOOK = {"type": "object", "properties": {"at": {"type": "string"}}}
USAGE = {
    "prompt_tokens": 9, "completion_tokens": 4, "total_tokens": 13,
    "prompt_tokens_details": {"cached_tokens": 5},
}  # fmt: skip


def calls_of(*calls: tuple[str, str, str]) -> list[dict[str, Any]]:
    return [
        {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for id, name, arguments in calls
    ]


def answer(message: dict[str, Any], finish: str = "stop", **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "message": {"role": "assistant", **message}, "finish_reason": finish}
    return {"id": "x", "model": "m", "choices": [{**choice, **more}], "usage": USAGE}


def chunks() -> list[dict[str, Any]]:
    """Make a stream with a thought, words and two calls, as vLLM sends it."""

    def chunk(finish: str | None = None, **delta: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return {"id": "x", "model": "m", "choices": [choice]}

    first, second = calls_of(("c1", "look", '{"at"'), ("c2", "look", "{}"))
    return [
        chunk(role="assistant", content=""),
        chunk(reasoning="hm "),
        chunk(reasoning="so"),
        chunk(content="I "),
        chunk(content="look"),
        chunk(tool_calls=[{"index": 0, **first}]),
        chunk(tool_calls=[{"index": 0, "function": {"arguments": ':"x"}'}}]),
        chunk("tool_calls", tool_calls=[{"index": 1, **second}]),
        {"id": "x", "model": "m", "choices": [], "usage": USAGE},
    ]


def events(dialect: Any) -> list[dict[str, Any]]:
    raw = b"".join(dialect.chunk(chunk, 9) for chunk in chunks()) + dialect.done()
    return [msgspec.json.decode(data) for data in EventParser().feed(raw)]


MESSAGES = {
    "model": "m",
    "max_tokens": 50,
    "system": [{"type": "text", "text": "be brief"}],
    "stop_sequences": ["END"],
    "temperature": 0.5,
    "top_k": 4,
    "something_else": [1],
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "tools": [{"name": "look", "description": "Look.", "input_schema": LOOK}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "messages": [
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look"},
                {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": "c1",
                    "content": [
                        {"type": "text", "text": "a wall"},
                        {"type": "image", "source": {"type": "url", "url": "http://x/y.png"}},
                        {"type": "tool_reference", "tool_name": "look"},
                    ],
                },
                {"type": "text", "text": "and now?"},
            ],
        },
    ],
}


def test_messages_become_the_chat_that_vllm_makes_of_them() -> None:
    assert DIALECTS["/v1/messages"](MESSAGES, {}).call == {
        "model": "m",
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": "hello"},
            {
                "role": "assistant",
                "reasoning": "hm",
                "tool_calls": calls_of(("c1", "look", '{"at":"x"}')),
                "content": "I look",
            },
            {"role": "tool", "tool_call_id": "c1", "content": "a wall"},
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
            },
            {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [{"type": "tool_reference", "name": "look"}],
            },
            {"role": "user", "content": "and now?"},
        ],
        "max_tokens": 50,
        "max_completion_tokens": 50,
        "stop": ["END"],
        "temperature": 0.5,
        "top_k": 4,
        "something_else": [1],
        "thinking_token_budget": 1024,
        "tools": [
            {
                "type": "function",
                "function": {"name": "look", "description": "Look.", "parameters": LOOK},
            }
        ],
        "tool_choice": "required",
        "parallel_tool_calls": False,
    }


@pytest.mark.parametrize(
    ("finish", "more", "reason", "sequence"),
    [
        ("stop", {}, "end_turn", None),
        ("stop", {"stop_reason": "END"}, "stop_sequence", "END"),
        ("stop", {"stop_reason": 7}, "end_turn", None),
        ("length", {"stop_reason": "END"}, "max_tokens", None),
    ],
)
def test_why_a_message_stopped(
    finish: str, more: dict[str, Any], reason: str, sequence: str | None
) -> None:
    found = DIALECTS["/v1/messages"](MESSAGES, {}).answer(
        answer({"content": "yes"}, finish, **more)
    )
    assert (found["stop_reason"], found["stop_sequence"]) == (reason, sequence)


def test_an_answer_becomes_blocks_and_its_usage_counts_the_cache_apart() -> None:
    calls = calls_of(("c1", "look", '{"at":"x"}'), ("c2", "look", "no json"))
    said = {"reasoning": "hm", "content": "I look", "tool_calls": calls}
    found = DIALECTS["/v1/messages"](MESSAGES, {}).answer(answer(said, "tool_calls"))
    assert found["content"] == [
        {"type": "thinking", "thinking": "hm", "signature": ""},
        {"type": "text", "text": "I look"},
        {"type": "tool_use", "id": "c1", "name": "look", "input": {"at": "x"}},
        {"type": "tool_use", "id": "c2", "name": "look", "input": {"arguments": "no json"}},
    ]
    assert found["stop_reason"] == "tool_use"
    assert found["usage"] == {
        "input_tokens": 4, "output_tokens": 4, "cache_read_input_tokens": 5,
    }  # fmt: skip


def test_a_stream_of_blocks_opens_and_closes_each_in_turn() -> None:
    found = events(DIALECTS["/v1/messages"]({**MESSAGES, "stream": True}, {}))
    assert [(each["type"], each.get("index")) for each in found] == [
        ("message_start", None),
        ("content_block_start", 0), ("content_block_delta", 0), ("content_block_delta", 0),
        ("content_block_stop", 0),
        ("content_block_start", 1), ("content_block_delta", 1), ("content_block_delta", 1),
        ("content_block_stop", 1),
        ("content_block_start", 2), ("content_block_delta", 2), ("content_block_delta", 2),
        ("content_block_stop", 2),
        ("content_block_start", 3), ("content_block_delta", 3), ("content_block_stop", 3),
        ("message_delta", None), ("message_stop", None),
    ]  # fmt: skip
    assert found[0]["message"]["usage"]["input_tokens"] == 9
    assert found[9]["content_block"] == {
        "type": "tool_use", "id": "c1", "name": "look", "input": {},
    }  # fmt: skip
    assert "".join(each["delta"]["partial_json"] for each in found[10:12]) == '{"at":"x"}'
    assert found[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    assert found[-2]["usage"]["output_tokens"] == 4


RESPONSES = {
    "model": "m",
    "instructions": "be brief",
    "max_output_tokens": 50,
    "top_p": 0.5,
    "reasoning": {"effort": "low"},
    "text": {"format": {"type": "json_schema", "name": "n", "schema": LOOK, "strict": True}},
    "tools": [
        {"type": "function", "name": "look", "description": "Look.", "parameters": LOOK},
        {"type": "custom", "name": "patch"},
        {"type": "web_search"},
    ],
    "tool_choice": {"type": "function", "name": "look"},
    "input": [
        {"role": "developer", "content": "so"},
        {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look"}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "+a"},
        {"type": "function_call_output", "call_id": "c1", "output": "a wall"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": "done"},
    ],
}


def test_items_become_the_messages_of_a_chat() -> None:
    call = DIALECTS["/v1/responses"](RESPONSES, {}).call
    assert call["messages"] == [
        {"role": "system", "content": "be brief"},
        {"role": "system", "content": "so"},
        {"role": "user", "content": "hello"},
        {
            "role": "assistant",
            "reasoning": "hm",
            "content": "I look",
            "tool_calls": calls_of(("c1", "look", "{}"), ("c2", "patch", '{"input":"+a"}')),
        },
        {"role": "tool", "tool_call_id": "c1", "content": "a wall"},
        {"role": "tool", "tool_call_id": "c2", "content": "done"},
    ]
    assert [tool["function"]["name"] for tool in call["tools"]] == ["look", "patch"]
    assert call["tool_choice"] == {"type": "function", "function": {"name": "look"}}
    assert (call["max_completion_tokens"], call["top_p"]) == (50, 0.5)
    assert call["reasoning_effort"] == "low"
    assert call["response_format"]["json_schema"] == {"name": "n", "schema": LOOK, "strict": True}


def test_an_answer_becomes_items_that_a_later_call_may_name() -> None:
    history: dict[str, list[Any]] = {}
    said = {
        "reasoning": "hm",
        "content": "I look",
        "tool_calls": calls_of(("c1", "look", "{}"), ("c2", "patch", '{"input": "+a"}')),
    }
    found = DIALECTS["/v1/responses"](RESPONSES, history).answer(answer(said, "tool_calls"))
    assert [item["type"] for item in found["output"]] == [
        "reasoning", "message", "function_call", "custom_tool_call",
    ]  # fmt: skip
    assert found["output"][3]["input"] == "+a"
    assert found["usage"]["input_tokens_details"] == {"cached_tokens": 5}
    later = {"model": "m", "input": "go on", "previous_response_id": found["id"]}
    messages = DIALECTS["/v1/responses"](later, history).call["messages"]
    assert [message["role"] for message in messages] == [
        "system", "user", "assistant", "tool", "tool", "assistant", "user",
    ]  # fmt: skip
    assert messages[5]["tool_calls"] == calls_of(
        ("c1", "look", "{}"), ("c2", "patch", '{"input":"+a"}')
    )
    with pytest.raises(UnusableCall, match="previous_response_id"):
        DIALECTS["/v1/responses"]({**later, "previous_response_id": "resp_x"}, history)


def test_a_stream_of_items_numbers_its_events_and_ends_with_the_whole() -> None:
    found = events(DIALECTS["/v1/responses"]({**RESPONSES, "stream": True}, {}))
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    assert [each["type"].removeprefix("response.") for each in found] == [
        "created", "in_progress",
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
        "output_item.added", "content_part.added", "output_text.delta", "output_text.delta",
        "output_text.done", "content_part.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.delta",
        "function_call_arguments.done", "output_item.done",
        "output_item.added", "function_call_arguments.delta", "function_call_arguments.done",
        "output_item.done", "completed",
    ]  # fmt: skip
    output = found[-1]["response"]["output"]
    assert output[1]["content"][0]["text"] == "I look"
    assert output[2]["arguments"] == '{"at":"x"}'
    assert {item["status"] for item in output[1:]} == {"completed"}


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
@pytest.mark.parametrize("body", [
    {}, {"messages": [1], "max_tokens": 1, "input": [1]},
    {"messages": [], "max_tokens": 1, "input": "a", "tools": [1]},
    {"messages": [], "max_tokens": 1, "input": "a", "tools": [{"type": "custom", "name": []}],
     "tool_choice": 1},
])  # fmt: skip
def test_a_body_of_another_form_is_refused(path: str, body: dict[str, Any]) -> None:
    with pytest.raises(UnusableCall, match=r"expected.* got (one without '\w+'$|another form)"):
        DIALECTS[path](body, {})


@pytest.mark.parametrize("block", [
    {"type": "document", "source": {}}, {"type": "tool_result", "content": [{"type": "document"}]},
])  # fmt: skip
def test_a_block_that_no_engine_reads_is_named(block: dict[str, Any]) -> None:
    body = {"max_tokens": 1, "messages": [{"role": "user", "content": [block]}]}
    with pytest.raises(UnusableCall, match="of type 'document'; expected text"):
        DIALECTS["/v1/messages"](body, {})


def test_events_are_cut_out_of_bytes_in_pieces_of_any_size() -> None:
    raw = b': hello\n\ndata: {"a":1}\n\nevent: x\r\ndata: two\r\ndata: lines\r\n\r\ndata:[DONE]\n\n'
    for size in range(1, len(raw)):
        parser = EventParser()
        assert [
            data for at in range(0, len(raw), size) for data in parser.feed(raw[at : at + size])
        ] == [b'{"a":1}', b"two\nlines", b"[DONE]"], size


def test_an_event_without_an_end_is_bounded() -> None:
    parser = EventParser()
    with pytest.raises(EventTooLarge):
        for _ in range(20):
            parser.feed(b"x" * (1 << 20))
