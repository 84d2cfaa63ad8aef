"""verifiers' own agent through the recorder, by its base URL alone: trained tokens are sampled."""

import asyncio
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import verifiers.v1 as vf

import shmbus
from shmbus.recorder.server import serving
from shmbus.recorder.settings import Settings

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "recorder"))
from stub_engine import StubEngine, serving_stub
from threaded_server import in_thread

pytestmark = pytest.mark.timeout(300)
SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
KEY = "TEST_SESSION_KEY"
UV = str(Path(sys.executable).parent)


class Talk(vf.Task):
    @vf.reward
    async def turns(self, trace: vf.Trace) -> float:
        return float(sum(node.sampled for node in trace.nodes))


@pytest.fixture
def engine(seed: int) -> Iterator[StubEngine]:
    with in_thread(lambda: serving_stub(StubEngine(seed), 0)) as engine:
        yield engine


@pytest.fixture
def bus(bus_name: str, engine: StubEngine) -> Iterator[str]:
    with ExitStack() as stack:
        stack.enter_context(shmbus.Bus.create(bus_name, "4MiB", schema=SCHEMA))
        settings = Settings(bus=bus_name, engines=(engine.url,), port=0)
        stack.enter_context(in_thread(lambda: serving(settings)))
        yield bus_name


async def rollout(bus: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two turns of the harness `null`, in a program of its own, as verifiers starts it."""
    async with shmbus.Producer(bus) as producer:
        request = await producer.requests.anext(30.0)
        async with producer.session(request, wait=30.0) as session:
            monkeypatch.setenv(KEY, session.api_key)
            monkeypatch.setenv("PATH", os.pathsep.join([UV, os.environ["PATH"]]))
            client = vf.EvalClientConfig(base_url=session.base_url, api_key_var=KEY)
            agent = vf.Agent(
                vf.AgentConfig(
                    harness={"id": "null"}, runtime={"type": "subprocess"}, model="m", client=client
                )
            )
            async with agent.interaction(Talk(vf.TaskData(idx=0, prompt=None))) as talk:
                await talk.turn(request.meta["question"])
                await talk.turn("go on")
            assert talk.trace.ok, talk.trace.errors
            await session.afinish(talk.trace.reward)


def test_an_agent_of_verifiers_becomes_a_worker_by_its_base_url(
    bus: str, engine: StubEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    with shmbus.Consumer(bus) as consumer:
        consumer.request("q1", group_size=1, meta={"question": "what is it?"})
        asyncio.run(rollout(bus, monkeypatch))
        [group] = consumer.take(1, 10.0)
        [sample] = group.copy()
        group.ack()
    assert sample.score == 2.0
    assert sample.meta["turns"] == 2
    trained = [row["loss_mask"] == 1 for row in sample.rows]
    rows = list(zip(sample.rows, trained, strict=True))
    assert [i for row, mask in rows for i in row["tokens"][mask]] == [
        i for answer in engine.record for i in answer.output
    ]
    assert [x for row, mask in rows for x in row["logprobs"][mask]] == pytest.approx(
        [x for answer in engine.record for x in answer.logprobs]
    )
