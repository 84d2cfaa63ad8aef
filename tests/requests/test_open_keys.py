"""Which requests are open, as their count and their keys: a look costs what has changed."""

import os
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
from conftest import SHM_DIR, ends_of, next_request
from counted_work import instructions

from shmbus import Bus, Consumer, Producer
from shmbus.inspect.segment_file import SegmentFile
from shmbus_ext import _core
from trainer_adapter.handler.planner import BatchPlanner
from trainer_adapter.handler.prompts import PromptOffers

PROMPT = np.arange(3, dtype=np.int32)
OFFERED: dict[str, Any] = {"group_size": 1, "prompt": PROMPT, "timeout": 10}
#: Offset of a chunk's first count in its first row; state of an ended row.
BEGUN, ENDED = 96, 3


def test_keys_and_counts_follow_what_is_offered_and_ends(bus_name: str, seed: int) -> None:
    rng = random.Random(seed)
    open_: list[tuple[str, int | None, str]] = []
    with ends_of(Bus.create(bus_name, "8MiB")) as (producer, consumer):
        for round_ in range(200):
            if rng.random() < 0.6:
                key = (f"q{rng.randrange(5)}", rng.choice([round_, None]), "train")
                consumer.request(key[0], group_size=1, round=key[1], prompt=PROMPT, timeout=10)
                open_.append(key)
            elif (request := producer.requests.next(timeout=0)) is not None:
                producer.requests.answer(request, tokens=PROMPT)
                (group,) = consumer.take(1, timeout=10)
                consumer.ack([group])
                open_.remove((request.instance_id, request.round, "train"))
            if rng.random() < 0.3:
                less = Counter(rng.choices([("q0", None, "train"), ("q1", 3, "train")], k=3))
                assert consumer.open_requests() == open_
                assert consumer.count_open_requests() == len(open_)
                assert consumer.count_open_requests("eval", without=less) == 0
                left = (Counter(open_) - less).total()
                assert consumer.count_open_requests(without=less) == left


def test_a_look_at_900_open_requests_costs_a_look_at_100(
    bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = []
    with Bus.create(bus_name, "64MiB") as bus, Consumer(bus_name) as consumer:
        numbers = bytes(8 * _core.request_row_count(bus._segment))
        for count in (100, 900):
            while len(consumer.open_requests()) < count:
                before, _ = _core.request_changes(bus._segment, b"", numbers)
                consumer.request("q", group_size=1, prompt=PROMPT, timeout=10)
            after, changed = _core.request_changes(bus._segment, before, numbers)
            chunks = zip(memoryview(before).cast("Q"), memoryview(after).cast("Q"), strict=True)
            assert sum(old != new for old, new in chunks) == 1
            assert len(changed) <= len(numbers) // len(after)
            # Only changes need the thread that no signal handler interrupts.
            with monkeypatch.context() as patch:
                patch.setattr(_core, "uninterrupted", None)
                costs.append(instructions(consumer.count_open_requests))
            assert consumer.count_open_requests() == count
    assert costs[1] <= 1.1 * costs[0]


def test_a_change_whose_process_died_before_its_second_count_is_seen(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Consumer(bus_name) as consumer:
        consumer.request("q", group_size=1, prompt=PROMPT)
        assert consumer.count_open_requests() == 1
        with SegmentFile(bus_name) as segment:
            row, _ = segment.tables["rows"]
        with open(SHM_DIR / f"shmbus.{bus_name}", "r+b") as file:
            for at, value in ((row + BEGUN, 2), (row, 1 << 2 | ENDED)):
                os.pwrite(file.fileno(), value.to_bytes(8, "little"), at)
        assert consumer.count_open_requests() == 0


def test_each_prompt_of_an_earlier_life_is_passed_over_at_a_constant_cost(bus_name: str) -> None:
    costs = []
    with Bus.create(bus_name, "8MiB"), Consumer(bus_name) as consumer:
        for count in (50, 1_000):
            offers = PromptOffers(
                consumer, BatchPlanner(None, 1, None), rank=0, world_size=1, split="train",
                prompt_schema=None,
            )  # fmt: skip
            keys = [(f"q{number}", None, "train") for number in range(count)]
            offers.restore_requests({**consumer.state_dict(), "ahead": keys}, here=True)

            def pass_over(offers: PromptOffers = offers, count: int = count) -> None:
                for number in range(count):
                    assert offers.request(f"q{number}", None, None, **OFFERED) == 0

            costs.append(instructions(pass_over) / count)
            assert consumer.count_open_requests() == 0
            assert offers.request("q0", None, None, **OFFERED) != 0
            (request,) = consumer.open_requests()
            assert request == ("q0", None, "train")
            with Producer(bus_name) as producer:
                handed = next_request(producer, timeout=0)
                producer.requests.answer(handed, tokens=PROMPT)
            consumer.ack(consumer.take(1, timeout=10))
    assert costs[1] <= 1.1 * costs[0]
