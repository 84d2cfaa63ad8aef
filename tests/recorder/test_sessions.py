"""A worker's session: its calls become the rows of one sample, put when it ends."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from recorders import chat, user
from stub_engine import TH, Sampled, StubEngine, encode

import shmbus
from shmbus.recorder.recorder import Recorder

pytest_plugins = ["recorder_fixtures"]


def taken(consumer: shmbus.Consumer, timeout: float = 30.0) -> list[shmbus.Trajectory]:
    (group,) = consumer.take(1, timeout=timeout)
    found = list(group)
    return found


def trained(trajectory: shmbus.Trajectory) -> list[tuple[int, float]]:
    """What is trained of a sample: tokens with their logprobs, row by row."""
    return [
        (int(token), float(logprob))
        for row in trajectory.rows
        for token, logprob, mask in zip(
            row["tokens"], row["logprobs"], row["loss_mask"], strict=True
        )
        if mask
    ]


def sampled(record: list[Sampled]) -> list[tuple[int, float]]:
    return [pair for one in record for pair in zip(one.output, one.logprobs, strict=True)]


def open_session(
    producer: shmbus.Producer, feeder: shmbus.Feeder, instance_id: str | int = "q", **options: Any
) -> shmbus.Session:
    feeder.request(instance_id, group_size=1, meta={"ask": "hello"})
    return producer.session(producer.requests.next(30.0), **options)


def test_turns_of_a_conversation_are_one_row_and_every_sampled_token_is_trained_once(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    with open_session(producer, feeder) as session:
        messages = [user("hello")]
        for _ in range(4):
            messages += [chat(session, messages), user("go on")]
        assert session.finish(0.5, meta={"env": "talk"})
    (sample,) = taken(consumer)
    (row,) = sample.rows
    last = engine.record[-1]
    assert row["tokens"].tolist() == last.prompt + last.output
    assert trained(sample) == sampled(engine.record)
    assert int(row["loss_mask"].sum()) == sum(len(one.output) for one in engine.record)
    assert not row["logprobs"][row["loss_mask"] == 0].any()
    assert sample.score == 0.5
    assert sample.meta == {
        "turns": 4, "drift": 0, "finish_reason": "stop", "engine": engine.url, "env": "talk",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gets_what_it_asked_for_and_nothing_of_the_recorders(
    stream: bool, recorder: Recorder, engine: StubEngine, producer: shmbus.Producer,
    feeder: shmbus.Feeder,
) -> None:  # fmt: skip
    import openai

    with open_session(producer, feeder) as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        ask: dict[str, Any] = {"model": "m", "messages": [user("hello")], "seed": 7}
        ask |= {"extra_body": {"something_of_the_engine": [1, {"a": None}]}}
        if stream:
            chunks = list(client.chat.completions.create(**ask, stream=True))
            assert all(chunk.choices and chunk.usage is None for chunk in chunks)
            assert all(choice.logprobs is None for chunk in chunks for choice in chunk.choices)
            assert all("token_ids" not in str(c.model_extra) or c.choices for c in chunks)
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            extras = [c.choices[0].model_extra or {} for c in chunks]
        else:
            answer = client.chat.completions.create(**ask)
            assert answer.choices[0].logprobs is None
            text = answer.choices[0].message.content or ""
            extras = [answer.choices[0].model_extra or {}, answer.model_extra or {}]
        assert not any(extra.get("token_ids") or extra.get("prompt_token_ids") for extra in extras)
        (one,) = engine.record
        assert encode(text) == one.output[:-1]
        assert one.body["seed"] == 7
        assert one.body["something_of_the_engine"] == [1, {"a": None}]
        session.release()


def test_what_a_client_asks_for_itself_it_gets(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder
) -> None:
    import openai

    with open_session(producer, feeder) as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        ask: dict[str, Any] = {"model": "m", "messages": [user("hello")], "logprobs": True}
        ask |= {"extra_body": {"return_token_ids": True}}
        answer = client.chat.completions.create(**ask)
        one = engine.record[-1]
        assert answer.choices[0].logprobs is not None
        assert [each.logprob for each in answer.choices[0].logprobs.content or ()] == one.logprobs
        assert answer.choices[0].logprobs.content[0].token == chr(one.output[0] - 100)  # type: ignore[index]
        assert answer.choices[0].model_extra["token_ids"] == one.output  # type: ignore[index]
        assert answer.model_extra["prompt_token_ids"] == one.prompt  # type: ignore[index]
        chunks = list(
            client.chat.completions.create(
                **ask, stream=True, stream_options={"include_usage": True}
            )
        )
        one = engine.record[-1]
        extras = [choice.model_extra or {} for chunk in chunks for choice in chunk.choices]
        got = [token for extra in extras for token in extra.get("token_ids") or ()]
        assert got == one.output
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(one.output)
        session.release()


def test_a_history_that_was_rewritten_begins_a_row_and_trains_nothing_twice(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    with open_session(producer, feeder) as session:
        first = chat(session, [user("one")])
        chat(session, [user("one"), first, user("two")])
        chat(session, [user("a summary"), user("three")])
        chat(session, [user("one"), first, user("another two")])
        assert session.finish(1.0)
    (sample,) = taken(consumer)
    rows = sample.rows
    assert len(rows) == 3
    assert trained(sample) == sampled(engine.record)
    # A fork: what came before it is context there, and was trained in the first row.
    shared = rows[2].prefix_length
    assert shared >= len(engine.record[0].prompt + engine.record[0].output)
    assert rows[2]["tokens"][:shared].tolist() == rows[0]["tokens"][:shared].tolist()
    assert not rows[2]["loss_mask"][:shared].any()
    assert sample.meta["drift"] == 0


def test_text_that_comes_back_as_other_tokens_is_drift_and_is_counted(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    engine.script = [[TH, *encode("en")], "<t>hm</t>so", "yes"]
    with open_session(producer, feeder) as session:
        messages = [user("one")]
        for text in ("two", "three", "four"):
            messages += [chat(session, messages), user(text)]
        assert session.finish(1.0)
    (sample,) = taken(consumer)
    # The tokenizer splits "th", and the template drops what was thought.
    assert sample.meta["drift"] == 2
    assert len(sample.rows) == 3
    assert trained(sample) == sampled(engine.record)
    assert recorder.sessions.drift == 2


def test_calls_at_once_are_rows_of_one_sample(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    from concurrent.futures import ThreadPoolExecutor

    def agent(number: int) -> None:
        messages = [user(f"task {number}")]
        for _ in range(3):
            messages += [chat(session, messages, stream=False), user("more")]

    with open_session(producer, feeder) as session:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(agent, range(8)))
        chat(session, [user("choose")], n=3)
        assert session.finish(1.0)
    (sample,) = taken(consumer)
    assert len(sample.rows) == 8 + 3
    assert sorted(trained(sample)) == sorted(sampled(engine.record))


def test_a_version_that_changes_between_two_calls_is_in_the_sample(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    consumer.policy_version = 3
    with open_session(producer, feeder) as session:
        chat(session, [user("one")])
        consumer.policy_version = 5
        chat(session, [user("two")])
        assert session.finish(1.0)
    (sample,) = taken(consumer)
    assert (sample.policy_version, sample.newest_policy_version) == (3, 5)


def test_ids_of_zero_are_ids(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    with open_session(producer, feeder, 0) as session:
        assert (session.request.instance_id, session.request.index) == ("0", 0)
        chat(session, [user("one")])
        assert session.finish(0.0)
    (sample,) = taken(consumer)
    assert (sample.instance_id, sample.index, sample.score) == ("0", 0, 0.0)


async def test_an_async_worker_finishes_and_fails_without_blocking(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    import openai

    async with open_session(producer, feeder) as session:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            await client.chat.completions.create(model="m", messages=[user("x")])  # type: ignore[list-item]
        assert await session.afinish(1.0)
    async with open_session(producer, feeder, "other") as session:
        assert not await session.afail("the tool broke")
    assert taken(consumer)[0].score == 1.0


def test_the_environment_of_an_agents_process_leads_to_the_session(
    recorder: Recorder, producer: shmbus.Producer, feeder: shmbus.Feeder
) -> None:
    with open_session(producer, feeder) as session:
        environ = session.environ
        assert environ["OPENAI_BASE_URL"] == f"{recorder.url}/v1"
        assert environ["ANTHROPIC_BASE_URL"] == recorder.url
        assert environ["OPENAI_API_KEY"] == environ["ANTHROPIC_API_KEY"] == session.api_key
        session.release()


def test_of_several_recorders_the_one_with_the_fewest_sessions_takes_the_next(
    start_recorder: Any, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
) -> None:  # fmt: skip
    from shmbus.segment.recorder_files import read_recorders

    first, second = start_recorder(engine), start_recorder(engine)
    one = open_session(producer, feeder, "a")
    wait_until(lambda: sum(note.sessions for note in read_recorders(producer.name)) == 1)
    two = open_session(producer, feeder, "b")
    assert {one.base_url, two.base_url} == {f"{first.url}/v1", f"{second.url}/v1"}
    three = open_session(producer, feeder, "c", url=f"{second.url}/v1/")
    assert three.base_url == f"{second.url}/v1"
    for session in (one, two, three):
        session.release()


def test_without_a_recorder_the_request_is_given_back(
    bus: shmbus.Bus, producer: shmbus.Producer, feeder: shmbus.Feeder
) -> None:
    feeder.request("q", group_size=1)
    request = producer.requests.next(30.0)
    with pytest.raises(shmbus.RecorderUnavailableError, match="shmbus proxy"):
        producer.session(request)
    assert not producer.requests.is_wanted(request)
    with shmbus.Producer(bus.name) as other:
        again = other.requests.next(30.0)
        assert (again.instance_id, again.index) == ("q", 0)


def test_rows_are_views_that_numpy_owns(
    recorder: Recorder, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    with open_session(producer, feeder) as session:
        chat(session, [user("one")])
        assert session.finish(None)
    (sample,) = taken(consumer)
    (row,) = sample.rows
    assert {name: row[name].dtype for name in row} == {
        "tokens": np.int32, "logprobs": np.float32, "loss_mask": np.uint8,
    }  # fmt: skip


def test_sixty_turns_with_dropped_thoughts_are_scored_and_kept_once(
    start_recorder: Any, engine: StubEngine, producer: shmbus.Producer, feeder: shmbus.Feeder,
    consumer: shmbus.Consumer,
) -> None:  # fmt: skip
    recorder = start_recorder(engine, tokens=4000)
    with open_session(producer, feeder) as session:
        messages = [user("begin")]
        for number in range(60):
            engine.script = [f"<t>thought {number}</t>answer {number}"]
            said = chat(session, messages)
            messages += [{"role": "assistant", "content": said["content"]}, user("result " * 2)]
        (held,) = recorder.sessions
        last = engine.record[-1]
        context = len(last.prompt) + len(last.output)
        assert held.nbytes == recorder.sessions.nbytes <= 2 * 9 * context
        assert session.finish(1.0)
    (sample,) = taken(consumer)
    wholes = [row["tokens"].tolist() for row in sample.rows]
    assert wholes == [one.prompt + one.output for one in engine.record]
    trained = [row["tokens"][row["loss_mask"] == 1].tolist() for row in sample.rows]
    assert trained == [one.output for one in engine.record]
