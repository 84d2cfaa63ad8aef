"""Real clients before a real vLLM; SHMBUS_TEST_SESSIONS=300 is the long form."""

import json
import os
import random
import subprocess
import threading
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import anthropic
import openai
import pytest
from agent_fixtures import Engine, Proxy, post
from engine_log import check

import shmbus

pytest_plugins = ["agent_fixtures"]

SESSIONS = int(os.environ.get("SHMBUS_TEST_SESSIONS", "24"))
AT_ONCE = 6
TURNS = 4
#: Has vLLM take what is said for content, and not for thoughts.
CONTENT = {"chat_template_kwargs": {"enable_thinking": False}}
SCHEMA = {
    "type": "object", "properties": {"place": {"type": "string", "enum": ["a", "b", "c"]}},
    "required": ["place"], "additionalProperties": False,
}  # fmt: skip
FUNCTION = {"name": "look", "description": "Look.", "parameters": SCHEMA, "strict": True}
TOOL: Any = {"type": "function", "function": FUNCTION}

Agent = Callable[[shmbus.Session, random.Random], object]


def message_of(chunks: Any) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for chunk in chunks:
        for choice in chunk.choices:
            message["content"] += choice.delta.content or ""
            for call in choice.delta.tool_calls or ():
                calls = message.setdefault("tool_calls", [])
                if call.index == len(calls):
                    function = {"name": call.function.name, "arguments": ""}
                    calls.append({"id": call.id, "type": "function", "function": function})
                calls[call.index]["function"]["arguments"] += call.function.arguments or ""
    return message


def chat_agent(session: shmbus.Session, rng: random.Random) -> None:
    """Chat completions, streamed and not, with tools, forks, and an answer of two."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = [{"role": "user", "content": f"go {rng.random()}"}]
    for turn in range(TURNS):
        ask: dict[str, Any] = {"model": "m", "messages": messages, "extra_body": CONTENT}
        # No seed: a chunked prefill with one ends vLLM's CPU worker ("does not use offset").
        ask |= {"max_tokens": rng.randrange(1, 24), "temperature": 1.0}
        tooled = turn == 1
        if tooled:
            ask |= {"tools": [TOOL], "tool_choice": "required", "max_tokens": 200}
        if rng.random() < 0.5:
            answer = message_of(client.chat.completions.create(**ask, stream=True))
        else:
            found = client.chat.completions.create(**ask).choices[0].message
            answer = found.model_dump(exclude_none=True)
        messages.append(answer)
        for call in answer.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a wall"})
        messages.append({"role": "user", "content": f"on {turn}"})
    fork = [*messages[:2], {"role": "user", "content": "another way"}]
    client.chat.completions.create(model="m", messages=fork, n=2, max_tokens=8, extra_body=CONTENT)
    # Of this session alone: else two sessions may have the same answer, and nobody knows whose.
    summary = [{"role": "user", "content": f"what was: little {rng.random()}"}]
    client.chat.completions.create(
        model="m", messages=summary, max_tokens=8, extra_body=CONTENT  # type: ignore[arg-type]
    )  # fmt: skip


def thinking_agent(session: shmbus.Session, rng: random.Random) -> None:
    """Chat completions whose thoughts the template drops."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = [{"role": "user", "content": f"think {rng.random()}"}]
    for turn in range(3):
        ask: Any = {"model": "m", "messages": messages, "max_tokens": 12, "stream": turn == 1}
        if turn == 1:
            pieces = [c.choices[0].delta for c in client.chat.completions.create(**ask)]
            thought = "".join(getattr(piece, "reasoning", None) or "" for piece in pieces)
            messages.append({"role": "assistant", "content": "", "reasoning": thought})
        else:
            answer = client.chat.completions.create(**ask).choices[0].message
            messages.append(answer.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": "go on"})


def completions_agent(session: shmbus.Session, rng: random.Random) -> None:
    """Completions of text, of token ids, and of several prompts."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    text = f"once {rng.random()} "
    for turn in range(3):
        ask: Any = {"model": "m", "prompt": text, "max_tokens": 10, "temperature": 1.0}
        if turn == 1:
            chunks = client.completions.create(**ask, stream=True)
            found = "".join(chunk.choices[0].text for chunk in chunks)
        else:
            found = client.completions.create(**ask).choices[0].text
        text += found
    ids = [rng.randrange(10, 90) for _ in range(5)]
    client.completions.create(model="m", prompt=ids, max_tokens=5)
    client.completions.create(model="m", prompt=[f"x{text}", f"y{text}"], max_tokens=5, n=2)


def messages_agent(session: shmbus.Session, rng: random.Random) -> None:
    """Anthropic's messages, streamed and not, with a tool and with thoughts."""
    client = anthropic.Anthropic(base_url=session.base_url, api_key=session.api_key)
    messages: list[Any] = [{"role": "user", "content": f"hi {rng.random()}"}]
    tool: Any = {"name": "look", "description": "Look.", "input_schema": SCHEMA, "strict": True}
    for turn in range(TURNS):
        ask: dict[str, Any] = {"model": "m", "messages": messages, "max_tokens": 200}
        ask |= {"system": [{"type": "text", "text": "be brief"}], "extra_body": CONTENT}
        if turn == 1:
            ask |= {"tools": [tool], "tool_choice": {"type": "tool", "name": "look"}}
        else:
            ask["max_tokens"] = rng.randrange(1, 24)
        if turn == 2:
            ask["extra_body"] = {}
        if rng.random() < 0.5:
            with client.messages.stream(**ask) as stream:
                answer = stream.get_final_message()
        else:
            answer = client.messages.create(**ask)
        assert answer.usage.output_tokens > 0
        assert answer.usage.input_tokens > 0
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        messages.append({"role": "assistant", "content": blocks})
        content = [{"type": "text", "text": "x"}]
        results = [
            {"type": "tool_result", "tool_use_id": block.id, "content": content}
            for block in answer.content
            if block.type == "tool_use"
        ]
        messages.append({"role": "user", "content": [*results, {"type": "text", "text": "on"}]})


def responses_agent(session: shmbus.Session, rng: random.Random) -> None:
    """OpenAI's responses, by whole inputs and by the id of the last."""
    client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key)
    items: list[Any] = [{"role": "user", "content": f"hello {rng.random()}"}]
    tool: Any = {"type": "function", **FUNCTION}
    last = None
    for turn in range(TURNS):
        ask: dict[str, Any] = {"model": "m", "extra_body": CONTENT, "instructions": "be brief"}
        if turn == 1:
            ask |= {"max_output_tokens": 200, "tools": [tool], "tool_choice": "required"}
        else:
            ask["max_output_tokens"] = rng.randrange(16, 30)
        ask |= {"input": items} if turn < 3 else {"input": "on", "previous_response_id": last}
        if rng.random() < 0.5:
            *_, last_event = client.responses.create(**ask, stream=True)
            answer = last_event.response
        else:
            answer = client.responses.create(**ask)
        last = answer.id
        items += [
            item.model_dump(exclude_none=True, exclude={"parsed_arguments"})
            for item in answer.output
        ]
        for item in answer.output:
            if item.type == "function_call":
                items.append(
                    {"type": "function_call_output", "call_id": item.call_id, "output": "x"}
                )
        items.append({"role": "user", "content": f"and {turn}"})


def litellm_agent(session: shmbus.Session, rng: random.Random) -> None:
    """LiteLLM, as an OpenAI server and as Anthropic's."""
    import litellm

    messages: list[Any] = [{"role": "user", "content": f"yes {rng.random()}"}]
    for model, base in (
        ("openai/m", session.base_url),
        ("anthropic/m", session.environ["ANTHROPIC_BASE_URL"]),
    ):
        for stream in (False, True):
            answer: Any = litellm.completion(
                model=model, api_base=base, api_key=session.api_key, messages=messages,
                max_tokens=8, stream=stream,
            )  # fmt: skip
            if stream:
                answer = litellm.stream_chunk_builder(list(answer))
            assert answer.usage.completion_tokens > 0
            messages += [
                {"role": "assistant", "content": answer.choices[0].message.content or "nothing"},
                {"role": "user", "content": "more"},
            ]


def record(bus: str, agent: Agent, count: int, group_size: int = 2) -> list[shmbus.Trajectory]:
    """Have an agent make groups, many sessions at once; return copies of the samples."""
    errors: list[BaseException] = []
    with (
        shmbus.Consumer(bus) as consumer,
        shmbus.Producer(bus) as producer,
        shmbus.Feeder(bus) as feeder,
    ):

        def offer() -> None:  # as many as there is room for, while others are taken
            for number in range(count // group_size):
                feeder.request(f"q{number}", group_size=group_size)

        def work() -> None:
            try:
                while (request := producer.requests.next(timeout=0.5)) is not None:
                    with producer.session(request, wait=30.0) as session:
                        agent(session, random.Random(str(session.request)))
                        assert session.finish(1.0), session.why
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=each) for each in (offer, *[work] * AT_ONCE)]
        for thread in threads:
            thread.start()
        samples = []
        while any(thread.is_alive() for thread in threads) or len(samples) < count:
            for group in consumer.take(8, timeout=0.5):
                samples += list(group.copy())
                group.ack()
            if errors:
                break
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return samples


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "agent",
    [chat_agent, thinking_agent, completions_agent, messages_agent, responses_agent, litellm_agent],
)
def test_every_trained_token_is_in_the_engines_own_record_bit_for_bit(
    agent: Agent, bus: shmbus.Bus, engine: Engine, proxy: Proxy
) -> None:
    engine.log.since_last()
    samples = record(bus.name, agent, SESSIONS)
    assert len(samples) == SESSIONS // 2 * 2
    tokens = check(samples, engine.log)
    drift = sum(sample.meta["drift"] for sample in samples)
    rows = sum(len(sample.rows) for sample in samples)
    print(f"{agent.__name__}: {len(samples)} sessions, {rows} rows, {tokens} tokens, drift {drift}")
    assert proxy.metrics()["shmbus_recorder_drift_total"] == drift
    if agent is chat_agent:
        assert drift, "pairs of letters must come back as one token now and then"


@pytest.mark.timeout(1800)
def test_parallel_sub_agents_are_recorded(bus: shmbus.Bus, engine: Engine, proxy: Proxy) -> None:
    def agent(session: shmbus.Session, rng: random.Random) -> None:
        with ThreadPoolExecutor(4) as pool:
            seeds = [rng.random() for _ in range(4)]
            for each in [pool.submit(chat_agent, session, random.Random(seed)) for seed in seeds]:
                each.result()

    engine.log.since_last()
    samples = record(bus.name, agent, 6)
    assert check(samples, engine.log, in_order=False)


@pytest.mark.timeout(600)
def test_a_pause_is_invisible_to_clients(bus: shmbus.Bus, engine: Engine, proxy: Proxy) -> None:
    tokens = 1500
    pauses = []

    def agent(session: shmbus.Session, rng: random.Random) -> None:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        ask: Any = {"model": "m", "messages": [{"role": "user", "content": "at length"}]}
        ask |= {"max_tokens": tokens, "extra_body": {"ignore_eos": True, **CONTENT}}
        said = 0
        for number, chunk in enumerate(client.chat.completions.create(**ask, stream=True)):
            said += len(chunk.choices)
            if number == 20:
                post(f"{engine.url}/pause?mode=keep&clear_cache=false", {})
                with urllib.request.urlopen(f"{engine.url}/is_paused", timeout=60) as answer:
                    pauses.append(json.loads(answer.read()))
                post(f"{engine.url}/resume", {})
        assert said > 20

    engine.log.since_last()
    samples = record(bus.name, agent, 2)
    assert check(samples, engine.log) == 2 * tokens
    assert {"is_paused": True} in pauses


@pytest.mark.timeout(600)
def test_a_curl_harness_scores_and_fails(bus: shmbus.Bus, engine: Engine, proxy: Proxy) -> None:
    script = r"""
    set -eu
    field() { sed -n "s/.*\"$1\":\"\([^\"]*\)\".*/\1/p"; }
    opened=$(curl -sf "$1/sessions" -d '{"timeout": 30}')
    key=$(printf %s "$opened" | field api_key)
    base=$(printf %s "$opened" | field base_url)
    for turn in 1 2; do
        curl -sf "$base/chat/completions" -H "Authorization: Bearer $key" \
            -H 'Content-Type: application/json' \
            -d '{"model": "m", "max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}' \
            > /dev/null
    done
    curl -sf "$1/session/score" -H "Authorization: Bearer $key" -d '{"score": 0.25}'
    opened=$(curl -sf "$1/sessions" -d '{"timeout": 30}')
    keyed=$(printf %s "$opened" | field url_with_key)
    curl -sf "${keyed%/v1}/session/fail" -d '{"reason": "the tool broke"}'
    """
    engine.log.since_last()
    with shmbus.Consumer(bus.name) as consumer, shmbus.Feeder(bus.name) as feeder:
        feeder.request("q", group_size=1, meta={"ask": "hi"})
        feeder.request("p", group_size=1)
        done = subprocess.run(
            ["bash", "-c", script, "curl", proxy.url],
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        assert done.stdout == '{"put":true}{"failed":true}', done
        (group,) = consumer.take(1, timeout=60.0)
        samples = list(group.copy())
        group.ack()
    assert samples[0].score == 0.25
    assert check(samples, engine.log)
