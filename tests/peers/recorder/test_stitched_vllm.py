"""Stitched conversations before a real vLLM: one row, and every trained token in the engine's log.

The model is a random one; a call brings its own chat template. ``SHMBUS_TEST_TURNS=200`` is the
long form.
"""

import json
import os
import random
import urllib.request
from typing import Any

import pytest
from agent_fixtures import Engine, Proxy, opened, post
from engine_log import check
from test_clients import record

import shmbus

pytest_plugins = ["agent_fixtures"]

TURNS = int(os.environ.get("SHMBUS_TEST_TURNS", "60"))
TOOL: Any = {
    "type": "function",
    "function": {"name": "look", "parameters": {"properties": {"a": {"type": "string"}}}},
}
_CALLS = """\
{%- for call in message.tool_calls or [] %}<tool_call>
{{ {"name": call.function.name, "arguments": call.function.arguments} | tojson }}
</tool_call>{% endfor -%}"""
_TOOLS = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_BEGIN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
#: Styles of model families: earlier thoughts dropped, results as a user's words; tools in the first
#: question; thoughts opened by the prompt, and turns without a line between.
TEMPLATES = {
    "qwen3": _TOOLS
    + """\
{%- for message in messages %}
{%- if message.role == "tool" %}<|im_start|>user
<tool_response>{{ message.content }}</tool_response><|im_end|>
{% elif message.role == "assistant" %}<|im_start|>assistant
{% if loop.last %}<think>{{ message.reasoning_content or "" }}</think>{% endif -%}
{{ message.content or "" }}"""
    + _CALLS
    + """<|im_end|>
{% else %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif %}{% endfor -%}"""
    + _BEGIN,
    "llama": """\
{%- for message in messages %}<|im_start|>{{ message.role }}

{% if loop.first and tools %}{{ tools | tojson }}

{% endif %}{{ (message.content or "") | trim }}"""
    + _CALLS
    + "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\n{% endif %}",
    "r1": """\
{%- for message in messages %}<|im_start|>{{ message.role[0] }}
{{- message.content or "" }}"""
    + _CALLS
    + "<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>a<think>{% endif %}",
}


#: Forms of an answer with one call, or with two.
_CALL = (
    r"<tool_call>\n\{\"name\": \"look\", \"arguments\": \{\"a\": +\"[a-z]{1,9}\"\}\}\n</tool_call>"
)
FORMS = [{"regex": _CALL}, {"regex": f"{_CALL}\n{_CALL}"}]


def answer_of(url: str, body: dict[str, Any], key: str) -> dict[str, Any]:
    """Return message, end and usage of an answer, whole or put together from its stream."""
    if not body["stream"]:
        whole = post(url, body, key)
        return {**whole["choices"][0], "usage": whole["usage"]}
    message: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "reasoning": "",
        "tool_calls": [],
    }
    found: dict[str, Any] = {"message": message}
    calls = message["tool_calls"]
    body = {**body, "stream_options": {"include_usage": True}}
    with opened(url, body, key) as answer:
        for line in answer:
            chunk = json.loads(line[6:]) if line.startswith(b"data: {") else {"choices": []}
            found["usage"] = chunk.get("usage") or found.get("usage")
            for choice in chunk["choices"]:
                delta = choice["delta"]
                for name in ("content", "reasoning"):
                    message[name] += delta.get(name) or ""
                for call in delta.get("tool_calls") or ():
                    if call["index"] == len(calls):
                        calls.append({**call, "function": {"name": "", "arguments": ""}})
                    for name in ("name", "arguments"):
                        text = call["function"].get(name) or ""
                        calls[call["index"]]["function"][name] += text
                found["finish_reason"] = choice["finish_reason"] or found.get("finish_reason")
    return found


def essence(answer: dict[str, Any]) -> Any:
    """Return an answer without ids, and without the forms of absence."""
    message = answer["message"]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = message.get("content") or "", message.get("reasoning") or "", calls
    tokens = [answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion")]
    return said, answer["finish_reason"], tokens


def returned(message: dict[str, Any]) -> dict[str, Any]:
    """Return an answer as harnesses do: stripped, without thoughts, with rewritten arguments."""
    back = {"role": "assistant", "content": (message.get("content") or "").strip()}
    if message.get("tool_calls"):
        back["tool_calls"] = [
            {"id": call["id"], "type": "function", "function": {
                "name": call["function"]["name"],
                "arguments": json.dumps(json.loads(call["function"]["arguments"])),
            }}
            for call in message["tool_calls"]
        ]  # fmt: skip
    return back


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("template", TEMPLATES)
def test_a_long_conversation_is_one_row_of_the_engines_own_tokens(
    template: str, bus: shmbus.Bus, engine: Engine, proxy: Proxy
) -> None:
    thinks = template == "qwen3"
    fixed: dict[str, Any] = {"model": "m", "chat_template": TEMPLATES[template], "tools": [TOOL]}
    # A random model repeats itself at 1, and then meets no stop string.
    fixed["temperature"] = 2.0
    if not thinks:
        fixed["chat_template_kwargs"] = {"enable_thinking": False}
    kinds: set[Any] = set()

    def agent(session: shmbus.Session, rng: random.Random) -> None:
        url = f"{session.base_url}/chat/completions"
        talk: list[Any] = [{"role": "user", "content": f"begin {rng.random()}"}]
        for turn in range(TURNS):
            body = {
                **fixed,
                "messages": talk,
                "max_tokens": rng.randrange(1, 24),
                "stream": turn % 2 > 0,
            }
            if turn % 3 == 1:
                body |= {"stop": ["a", "e", "o", "1"]}
            if turn % 5 == 2 and not thinks:
                body |= {"structured_outputs": rng.choice(FORMS), "max_tokens": 200, "stop": None}
            if turn % 10 == 9:
                body["temperature"] = 0.0
            answer = answer_of(url, body, session.api_key)
            if turn % 10 == 9:
                prompt = list(engine.log.last().prompt)
                body["kv_transfer_params"] = {"prompt_token_ids": prompt}
                own = answer_of(f"{engine.url}/v1/chat/completions", body, "")
                engine.log.forget_last()
                assert essence(own) == essence(answer)
            message = answer["message"]
            kinds.add((answer["finish_reason"], len(message.get("tool_calls") or ())))
            talk.append(returned(message))
            talk += [
                {"role": "tool", "tool_call_id": call["id"], "content": "a wall"}
                for call in message.get("tool_calls") or ()
            ]
            if talk[-1]["role"] == "assistant" or rng.random() < 0.3:
                talk.append({"role": "user", "content": f" on {turn} \u00e9\u65e5 "})

    engine.log.since_last()
    (sample,) = record(bus.name, agent, 1, group_size=1)
    assert check([sample], engine.log)
    assert len(sample.rows) == 1
    assert sample.meta["turns"] == TURNS
    assert {("length", 0), ("stop", 0)} <= kinds
    assert thinks or {("tool_calls", 1), ("tool_calls", 2)} <= kinds
    with urllib.request.urlopen(f"{proxy.url}/metrics", timeout=30) as found:
        lines = [line for line in found.read().decode().splitlines() if "prompts_total{" in line]
    hows = {line.partition('how="')[2].partition('"')[0]: line.split()[-1] for line in lines}
    assert hows == {"start": "1", "stitched": str(TURNS - 1)}
