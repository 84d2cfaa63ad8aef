"""Judges and annotators that do not answer: each wait ends, each group ends, the others go on."""

import asyncio
import threading
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from conftest import keys_of, train_next, wait_until

import shmbus
from shmbus import Bus, Consumer, Producer
from trainer_adapter import OnlineDataHandler
from trainer_adapter.handler import group_calls

SIZE = 2
STUCK = "stuck"


def put(producer: Producer, key: str, split: str = "train") -> None:
    for index in range(SIZE):
        tokens = np.array([index + 1, 7], np.int32)
        producer.put(key, group_size=SIZE, index=index, score=None, tokens=tokens, split=split)


class Helper:
    """Answers all groups but one, in one of four forms."""

    def __init__(self, form: str) -> None:
        self.calls: Counter[str] = Counter()
        self.over = threading.Event()
        self.answers_at = 10**9
        if "async" in form:
            given: Any = self.later
        else:
            given = self.now
        kind = "annotate_group" if "annotate" in form else "score_group"
        self._annotates = kind == "annotate_group"
        self.options: dict[str, Any] = {kind: given}
        if self._annotates:
            self.options["score_group"] = lambda group: [1.0, 2.0]

    def answer(self, group: shmbus.Group) -> Any:
        if self._annotates:
            return {"value": [np.ones(2, np.float32)] * SIZE}
        return [1.0, 2.0]

    def stuck(self, group: shmbus.Group) -> bool:
        self.calls[group.instance_id] += 1
        return group.instance_id == STUCK and self.calls[STUCK] < self.answers_at

    def now(self, group: shmbus.Group) -> Any:
        if self.stuck(group):
            self.over.wait(60)
        return self.answer(group)

    async def later(self, group: shmbus.Group) -> Any:
        if self.stuck(group):
            await asyncio.sleep(3600)
        return self.answer(group)


FORMS = ["score", "async score", "annotate", "async annotate"]


def poll(handler: OnlineDataHandler) -> str:
    with pytest.raises(TimeoutError) as caught:
        handler.next_batch(0.2)
    return str(caught.value)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_a_wait_in_time_calls_once(bus: Bus, producer: Producer, form: str, prefetch: int) -> None:
    helper = Helper(form)
    put(producer, STUCK)
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, prefetch=prefetch, **helper.options
    ) as handler:
        wait_until(lambda: poll(handler) and helper.calls)
        kind = "annotate_group" if "annotate" in form else "score_group"
        for _ in range(2):
            assert f": {kind}: group '{STUCK}' has waited" in poll(handler)
        assert helper.calls == {STUCK: 1}
        threading.Timer(0.1, helper.over.set).start()
        if "async" not in form:
            assert len(handler.next_batch().groups) == 1
            assert helper.calls == {STUCK: 1}
    with Consumer(bus.name) as consumer:
        assert len(consumer.take(timeout=10)) == 1 and consumer.stats().balanced


@pytest.mark.parametrize("form", ["score", "async score"])
def test_an_evaluation_ends_in_time_and_goes_on(bus: Bus, producer: Producer, form: str) -> None:
    helper = Helper(form)
    for key in (STUCK, "a") if "async" in form else (STUCK,):
        put(producer, key, split="eval")
    with OnlineDataHandler(bus.name, groups_per_batch=1, **helper.options) as handler:
        assert handler.evaluate(2, timeout=0.5)["eval/groups"] == ("async" in form)
        assert handler.take("eval", timeout=0) == [] and helper.calls[STUCK] == 1
        helper.over.set()
        if "async" not in form:
            assert handler.evaluate(1, timeout=30)["eval/groups"] == helper.calls[STUCK] == 1


@pytest.mark.parametrize("form", ["async score", "async annotate"])
def test_an_unanswered_group_delays_no_other(bus: Bus, producer: Producer, form: str) -> None:
    helper = Helper(form)
    for key in ("a", STUCK, "b"):
        put(producer, key)
    with OnlineDataHandler(bus.name, groups_per_batch=2, **helper.options) as handler:
        assert train_next(handler) == ["a", "b"]
        put(producer, "c")
        put(producer, "d")
        assert keys_of(handler.next_batch(30)) == ["c", "d"]
        assert helper.calls[STUCK] == 1


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("form", FORMS)
def test_calls_are_limited(bus: Bus, producer: Producer, form: str, prefetch: int) -> None:
    helper = Helper(form)
    put(producer, STUCK)
    put(producer, "a")
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, prefetch=prefetch, call_timeout=0.1, **helper.options
    ) as handler:
        assert train_next(handler) == ["a"]
        while not handler.stats().dropped:
            with pytest.raises(TimeoutError):
                handler.next_batch(0.1)
        assert handler.stats().dropped == {"filtered": SIZE}
        assert helper.calls[STUCK] == (group_calls.CALL_ATTEMPTS if "async" in form else 1)
    helper.over.set()


def test_a_second_helper_may_answer_what_the_first_did_not(bus: Bus, producer: Producer) -> None:
    helper = Helper("async score")
    helper.answers_at = 2
    put(producer, STUCK)
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, call_timeout=0.1, **helper.options
    ) as handler:
        assert len(handler.next_batch().groups) == 1
        assert helper.calls[STUCK] == 2


@pytest.mark.parametrize("form", ["score", "async score"])
def test_a_judge_may_name_groups_without_helper(bus: Bus, producer: Producer, form: str) -> None:
    def refuses(group: shmbus.Group) -> list[float]:
        if group.instance_id == STUCK:
            raise shmbus.UnservedGroupError("too long for the reward model")
        return [1.0, 2.0]

    async def refuses_later(group: shmbus.Group) -> list[float]:
        return refuses(group)

    put(producer, STUCK)
    put(producer, "a")
    judge: Any = refuses_later if "async" in form else refuses
    with OnlineDataHandler(bus.name, groups_per_batch=1, score_group=judge) as handler:
        assert [group.instance_id for group in handler.next_batch(30).groups] == ["a"]
        assert handler.stats().dropped == {"filtered": SIZE}


def test_a_call_that_lasts_is_reported_once_a_minute(
    bus: Bus, producer: Producer, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    now = [1000.0]
    monkeypatch.setattr(group_calls, "REPORT_S", 60.0)
    real = time.monotonic
    began = real()
    monkeypatch.setattr(
        group_calls.time, "monotonic", lambda: now[0] + real() - began, raising=False
    )
    helper = Helper("async score")
    put(producer, STUCK)
    with OnlineDataHandler(bus.name, groups_per_batch=1, **helper.options) as handler:
        for passed in (0, 61, 0, 0, 61):
            now[0] += passed
            with pytest.raises(TimeoutError):
                handler.next_batch(0.05)
    reports = [one for one in caplog.records if one.name == group_calls.logger.name]
    assert len(reports) == 2 and all(STUCK in one.getMessage() for one in reports)
