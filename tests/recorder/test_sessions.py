"""A worker's session: its calls become the rows of one sample, put when it ends."""

from typing import Any

import numpy as np
import pytest
from conftest import wait_until
from recorders import Scene, chat, user
from stub_engine import TH, Sampled, encode

import shmbus

pytest_plugins = ["recorder_fixtures"]


def trained(trajectory: shmbus.Trajectory) -> list[tuple[int, float]]:
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


def test_turns_are_one_row_and_train_each_sampled_token_once(scene: Scene) -> None:
    with scene.open() as session:
        messages = [user("hello")]
        for _ in range(4):
            messages += [chat(session, messages), user("go on")]
        assert session.finish(0.5, meta={"env": "talk"})
    (sample,) = scene.taken()
    (row,) = sample.rows
    last = scene.engine.record[-1]
    dtypes = [row[name].dtype for name in ("tokens", "logprobs", "loss_mask")]
    assert dtypes == [np.int32, np.float32, np.uint8]
    assert row["tokens"].tolist() == last.prompt + last.output
    assert trained(sample) == sampled(scene.engine.record)
    assert int(row["loss_mask"].sum()) == sum(len(one.output) for one in scene.engine.record)
    assert not row["logprobs"][row["loss_mask"] == 0].any()
    assert sample.score == 0.5
    assert sample.meta == {
        "turns": 4, "drift": 0, "finish_reason": "stop", "engine": scene.engine.url, "env": "talk",
    }  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_gets_only_the_fields_it_asked_for(stream: bool, scene: Scene) -> None:
    import openai

    with scene.open() as session:
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
        (one,) = scene.engine.record
        assert encode(text) == one.output[:-1]
        assert one.body["seed"] == 7
        assert one.body["something_of_the_engine"] == [1, {"a": None}]
        session.release()


def test_what_a_client_asks_for_itself_it_gets(scene: Scene) -> None:
    import openai

    with scene.open() as session:
        client = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
        ask: dict[str, Any] = {"model": "m", "messages": [user("hello")], "logprobs": True}
        ask |= {"extra_body": {"return_token_ids": True}}
        answer = client.chat.completions.create(**ask)
        one = scene.engine.record[-1]
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
        one = scene.engine.record[-1]
        extras = [choice.model_extra or {} for chunk in chunks for choice in chunk.choices]
        got = [token for extra in extras for token in extra.get("token_ids") or ()]
        assert got == one.output
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.completion_tokens == len(one.output)
        session.release()


def test_a_history_that_was_rewritten_begins_a_row_and_trains_nothing_twice(scene: Scene) -> None:
    with scene.open() as session:
        first = chat(session, [user("one")])
        chat(session, [user("one"), first, user("two")])
        chat(session, [user("a summary"), user("three")])
        chat(session, [user("one"), first, user("another two")])
        assert session.finish(1.0)
    (sample,) = scene.taken()
    rows = sample.rows
    assert len(rows) == 3
    assert trained(sample) == sampled(scene.engine.record)
    shared = rows[2].prefix_length
    assert shared >= len(scene.engine.record[0].prompt + scene.engine.record[0].output)
    assert rows[2]["tokens"][:shared].tolist() == rows[0]["tokens"][:shared].tolist()
    assert not rows[2]["loss_mask"][:shared].any()
    assert sample.meta["drift"] == 0


def test_text_that_comes_back_as_other_tokens_is_drift_and_is_counted(scene: Scene) -> None:
    scene.engine.script = [[TH, *encode("en")], "<t>hm</t>so", "yes"]
    with scene.open() as session:
        messages = [user("one")]
        for text in ("two", "three", "four"):
            messages += [chat(session, messages), user(text)]
        assert session.finish(1.0)
    (sample,) = scene.taken()
    assert sample.meta["drift"] == 2
    assert len(sample.rows) == 3
    assert trained(sample) == sampled(scene.engine.record)
    assert scene.recorder.sessions.drift == 2


def test_calls_at_once_are_rows_of_one_sample(scene: Scene) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def agent(number: int) -> None:
        messages = [user(f"task {number}")]
        for _ in range(3):
            messages += [chat(session, messages, stream=False), user("more")]

    with scene.open() as session:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(agent, range(8)))
        chat(session, [user("choose")], n=3)
        assert session.finish(1.0)
    (sample,) = scene.taken()
    assert len(sample.rows) == 8 + 3
    assert sorted(trained(sample)) == sorted(sampled(scene.engine.record))


def test_ids_of_zero_are_ids(scene: Scene) -> None:
    with scene.open(0) as session:
        assert (session.request.instance_id, session.request.index) == ("0", 0)
        chat(session, [user("one")])
        assert session.finish(0.0)
    (sample,) = scene.taken()
    assert (sample.instance_id, sample.index, sample.score) == ("0", 0, 0.0)


async def test_an_async_worker_finishes_and_fails_without_blocking(scene: Scene) -> None:
    import openai

    async with scene.open() as session:
        async with openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key) as client:
            await client.chat.completions.create(model="m", messages=[user("x")])  # type: ignore[list-item]
        assert await session.afinish(1.0)
    async with scene.open("other") as session:
        assert not await session.afail("the tool broke")
    assert scene.taken()[0].score == 1.0


def test_the_environment_of_an_agents_process_leads_to_the_session(scene: Scene) -> None:
    with scene.open() as session:
        environ = session.environ
        assert environ["OPENAI_BASE_URL"] == f"{scene.recorder.url}/v1"
        assert environ["ANTHROPIC_BASE_URL"] == scene.recorder.url
        assert environ["OPENAI_API_KEY"] == environ["ANTHROPIC_API_KEY"] == session.api_key
        session.release()


def test_of_several_recorders_the_one_with_the_fewest_sessions_takes_the_next(scene: Scene) -> None:
    from shmbus.segment.recorder_files import read_recorders

    first, second = scene.start_recorder(scene.engine), scene.start_recorder(scene.engine)
    one = scene.open("a")
    wait_until(lambda: sum(note.sessions for note in read_recorders(scene.producer.name)) == 1)
    two = scene.open("b")
    assert {one.base_url, two.base_url} == {f"{first.url}/v1", f"{second.url}/v1"}
    three = scene.open("c", url=f"{second.url}/v1/")
    assert three.base_url == f"{second.url}/v1"
    for session in (one, two, three):
        session.release()


def test_without_a_recorder_the_request_is_given_back(scene: Scene) -> None:
    scene.feeder.request("q", group_size=1)
    request = scene.producer.requests.next(30.0)
    with pytest.raises(shmbus.RecorderUnavailableError, match="shmbus proxy"):
        scene.producer.session(request)
    assert not scene.producer.requests.is_wanted(request)
    with shmbus.Producer(scene.bus.name) as other:
        again = other.requests.next(30.0)
        assert (again.instance_id, again.index) == ("q", 0)
