"""verifiers' own episodes as samples: rows are its branches, failures stay failures."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doc_pages
import numpy as np
import pytest
import verifiers.v1 as vf
from conftest import wait_until
from verifiers.v1.trace import AgentInfo, Reward, TraceTask
from verifiers.v1.trace import Error as TraceError
from verifiers.v1.types import AssistantMessage, UserMessage

import shmbus
from trainer_adapter.adapters.verifiers import put_episode, sample_of

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with shmbus.Bus.create(bus_name, capacity="1MiB"):
        yield bus_name


def node(parent: int | None, ids: list[int], sampled: int = 0, **more: Any) -> vf.MessageNode:
    """A message of these tokens, of which the last so many were sampled."""
    message = AssistantMessage(content="a") if sampled else UserMessage(content="q")
    return vf.MessageNode(
        parent=parent, message=message, sampled=bool(sampled), token_ids=ids,
        mask=[False] * (len(ids) - sampled) + [True] * sampled,
        **{"logprobs": [-0.5 * (i + 1) for i in range(sampled)], **more},
    )  # fmt: skip


def task() -> TraceTask[Any]:
    return TraceTask(type="Task", data=vf.TaskData(idx=3, prompt="q"), key="gsm8k-3")


def trace(nodes: list[vf.MessageNode], name: str = "agent", **more: Any) -> vf.Trace[Any, Any, Any]:
    rewards = {"right": Reward(score=1.0), "short": Reward(score=0.5, weight=0.5)}
    return vf.Trace(
        task=task(), agent=AgentInfo(config=vf.AgentConfig(), name=name), nodes=nodes,
        **{"rewards": rewards, "metrics": {"turns": 2.0}, "ok": True, **more},
    )  # fmt: skip


def forked() -> list[vf.MessageNode]:
    """A question, its answer, and two ways on from there."""
    return [
        node(None, [10, 11]),
        node(0, [12, 20, 21], sampled=2),
        node(1, [13, 22], sampled=1),
        node(1, [14, 15, 23, 24], sampled=2),
    ]


def episode(*traces: Any, **more: Any) -> vf.Episode[Any, Any, Any]:
    run = vf.TrainRunInfo(
        id="run", work=vf.TrainWorkInfo(step=7, policy=vf.PolicySpan(start=4, end=6))
    )
    return vf.Episode(**{
        "task": task(), "traces": list(traces), "ok": True, "run": run,
        "env": vf.EnvInfo(id="gsm8k"), **more,
    })  # fmt: skip


def take(bus: str, **options: Any) -> Any:
    with shmbus.Consumer(bus, **options) as consumer:
        groups = consumer.take(1, 5.0)
        copies = [group.copy() for group in groups]
        consumer.ack(groups)
        return copies[0] if copies else consumer.stats()


def test_each_branch_is_a_row_with_verifiers_own_numbers(bus: str) -> None:
    made = trace(forked())
    with shmbus.Producer(bus) as producer:
        assert put_episode(producer, episode(made), group_size=1, index=0)
    group = take(bus)
    [sample] = group
    assert group.instance_id == "gsm8k-3" and sample.score == 1.25
    branches = made.branches
    assert len(sample.rows) == len(branches) == 2
    for row, branch in zip(sample.rows, branches, strict=True):
        assert row["tokens"].tolist() == branch.token_ids
        assert row["loss_mask"].tolist() == [int(bit) for bit in branch.sampled_mask]
        assert row["logprobs"].tolist() == branch.logprobs
        assert (row["tokens"].dtype, row["logprobs"].dtype) == (np.int32, np.float32)
    assert [row.prefix_length for row in sample.rows] == [0, 5], "question and answer are shared"
    assert (sample.policy_version, sample.newest_policy_version) == (4, 6)
    assert sample.meta["rewards"] == {"right": 1.0, "short": 0.25}
    assert sample.meta["env"] == "gsm8k" and sample.meta["finish_reason"] == "stop"


def test_a_branch_that_is_not_trained_is_no_row() -> None:
    nodes = forked()
    nodes[3].semantic_parents.append(vf.graph.ParentLink(node=1, type="compaction_attempt"))
    made = trace(nodes)
    assert [branch.trainable for branch in made.branches] == [True, False]
    assert [row["tokens"].tolist() for row in sample_of(made)["rows"]] == [
        [10, 11, 12, 20, 21, 13, 22]
    ]


def test_credit_and_routing_travel_where_every_branch_has_them(bus: str) -> None:
    routing = [np.full((size, 3, 2), size, np.uint8) for size in (2, 3, 2, 4)]
    nodes = forked()
    for each, experts in zip(nodes, routing, strict=True):
        each.routed_experts = experts
        if each.sampled:
            each.advantages = [0.25] * sum(each.mask)
    made = trace(nodes)
    with shmbus.Producer(bus) as producer:
        assert put_episode(producer, episode(made), "q", group_size=1, index=0)
    [sample] = take(bus)
    for row, branch in zip(sample.rows, made.branches, strict=True):
        assert row["advantages"].tolist() == branch.advantages
        assert (row["routed_experts"] == branch.routed_experts).all()
    nodes[3].routed_experts = None
    with pytest.raises(
        ValueError, match=r"routed_experts in each branch or in none, got them in 1"
    ):
        sample_of(trace(nodes))


def test_numbers_that_would_become_others_are_named_and_many_experts_fit() -> None:
    nodes = forked()
    for each in nodes:
        each.routed_experts = np.full((len(each.token_ids), 3, 2), 300, np.int32)
    [row, _] = sample_of(trace(nodes))["rows"]
    assert row["routed_experts"].dtype == np.int16 and (row["routed_experts"] == 300).all()
    for field, value in (
        ("routed_experts", np.full((3, 3, 2), -1)),
        ("advantages", [float("nan")] * 2),
        ("logprobs", [float("-inf")] * 2),
        ("token_ids", [12, 2**40, 21]),
    ):
        nodes = [node(None, [10, 11]), node(0, [12, 20, 21], sampled=2)]
        if field == "routed_experts":
            nodes[0].routed_experts = np.full((2, 3, 2), 1)
        setattr(nodes[1], field, value)
        with pytest.raises(ValueError, match=r"trace '.*expected"):
            sample_of(trace(nodes))


def test_an_answer_to_a_request_goes_to_its_place_and_split(bus: str) -> None:
    with shmbus.Feeder(bus) as feeder, shmbus.Producer(bus) as producer:
        feeder.request("q9", group_size=1, round=5, split="eval", prompt=np.arange(2))
        request = producer.requests.next(timeout=5.0)
        assert request is not None
        with pytest.raises(TypeError, match="group_size is the request's"):
            put_episode(producer, episode(trace(forked())), request=request, group_size=2)
        assert put_episode(producer, episode(trace(forked())), request=request)
    group = take(bus, split="eval")
    assert (group.instance_id, group.round) == ("q9", 5)


def test_the_page_answers_requests(bus: str) -> None:
    class Enough(Exception):
        pass

    answers = iter([episode(trace(forked()))])

    def rollout(request: shmbus.Request) -> Any:
        for each in answers:
            return each
        raise Enough

    with shmbus.Feeder(bus) as feeder:
        for name in ("q1", "q2"):
            feeder.request(name, group_size=1)
        with pytest.raises(Enough):
            doc_pages.run("environments.md", "rollout(request)", bus, rollout=rollout)
    [sample] = take(bus)
    assert sample.score == 1.25 and len(sample.rows) == 2


def test_an_evaluation_says_so(bus: str) -> None:
    with shmbus.Producer(bus) as producer:
        run = vf.EvalRunInfo(id="run")
        put_episode(producer, episode(trace(forked()), run=run), group_size=1, index=0)
    assert take(bus, split="eval").instance_id == "gsm8k-3"


ERROR = TraceError(type="ProviderError", message="no answer")


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (episode(ok=False, errors=[ERROR]), "the episode failed: ProviderError: no answer"),
        (episode(trace(forked(), ok=False, errors=[ERROR])), "the rollout failed: ProviderError"),
        (episode(trace(forked(), rewards={"right": None})), "scoring did not run: right"),
        (episode(trace(forked(), rewards={})), "scoring did not run: no reward"),
        (episode(trace(forked(), rewards={"r": Reward(score=float("nan"))})), "reward nan"),
        (episode(trace([node(None, [1])])), "nothing was sampled"),
        (episode(), "no trace of a trainable agent"),
    ],
)
def test_what_cannot_be_trained_is_reported_and_is_no_reward_of_0(
    made: Any, words: str, bus: str
) -> None:
    with shmbus.Producer(bus) as producer, shmbus.Consumer(bus, sample_retries=1) as consumer:
        assert not put_episode(producer, made, "q", group_size=1, index=0)
        assert consumer.take(1, 0.2) == []
        # The backoff ends while somebody takes.
        [wanted] = wait_until(lambda: consumer.take(1, 0.1) or producer.requests.retries())
        assert words in wanted.reason
        assert put_episode(producer, episode(trace(forked())), "q", group_size=1, index=0)
        assert len(consumer.take(1, 5.0)) == 1


def test_what_is_not_plain_is_an_error_and_nothing_is_put(bus: str) -> None:
    with shmbus.Producer(bus) as producer:
        both = episode(trace(forked(), "solver"), trace(forked(), "judge"))
        with pytest.raises(ValueError, match=r"one trainable trace, got 2 .*\['solver', 'judge'\]"):
            put_episode(producer, both, group_size=1, index=0)
        bare = forked()
        bare[1].logprobs = []
        with pytest.raises(
            ValueError, match="expected 2 logprobs, one for each sampled token, got 0"
        ):
            put_episode(producer, episode(trace(bare)), group_size=1, index=0)
        relayed = [node(None, []), node(0, [], sampled=0, logprobs=[])]
        relayed[1].sampled = True
        with pytest.raises(ValueError, match="expected token ids of what was sampled"):
            put_episode(producer, episode(trace(relayed)), group_size=1, index=0)
        with pytest.raises(
            TypeError, match=r"expected an episode of verifiers\.v1.*verifiers 0\.4"
        ):
            put_episode(producer, SimpleNamespace(traces=[]), group_size=1, index=0)
        with pytest.raises(TypeError, match="expected a request, or group_size"):
            put_episode(producer, episode(trace(forked())), index=0)
        assert producer.stats().committed == 0
        assert put_episode(producer, both, agent="solver", group_size=1, index=0)


def test_the_page_installs_what_the_tests_ran_with() -> None:
    wanted = doc_pages.installs("environments.md", "pip install shmbus verifiers")
    given = (Path(__file__).parent / "requirements.txt").read_text().splitlines()
    assert wanted <= set(given), wanted
