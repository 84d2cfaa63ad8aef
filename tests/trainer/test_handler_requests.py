"""Prompts offered by the trainer, and what a checkpoint says of them."""

import json
import multiprocessing
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, next_request, train_next, wait_until

import shmbus
from shmbus import Bus, Producer
from trainer_adapter import OnlineDataHandler

TOKENS = np.arange(8, dtype=np.int32)


def sample_all(producer: Producer) -> list[str]:
    seen = set()
    while (request := producer.requests.next(0)) is not None:
        seen.add(request.instance_id)
        producer.requests.answer(
            request,
            score=float(request.index),
            tokens=np.concatenate([request["prompt"], TOKENS]),
            loss_mask=np.ones(8 + request["prompt"].size, np.uint8),
            logprobs=np.zeros(8 + request["prompt"].size, np.float32),
        )
    return sorted(seen)


def test_a_checkpoint_offers_again_exactly_what_was_not_trained(bus_name: str) -> None:
    with (
        Bus.create(bus_name, "4MiB"),
        Producer(bus_name) as producer,
        OnlineDataHandler(bus_name, groups_per_batch=2) as handler,
    ):
        for number in range(6):
            handler.request(f"q{number}", group_size=2, prompt=np.arange(number, dtype=np.int32))
        sample_all(producer)
        handler.ack(handler.next_batch(10))
        second = handler.next_batch(10)  # yielded counts as trained
        state = json.loads(json.dumps(handler.state_dict()))
        assert [each["instance_id"] for each in state["requests"]["open"]] == ["q4", "q5"]
        handler.ack(second)
        handler.load_state_dict(state)
        assert producer.requests.next(0) is None, "they are on this bus still"
    with (
        Bus.create(bus_name, "4MiB"),
        Producer(bus_name) as producer,
        OnlineDataHandler(bus_name, groups_per_batch=2) as handler,
    ):
        handler.load_state_dict(state)
        assert sample_all(producer) == ["q4", "q5"]
        assert sorted(train_next(handler)) == ["q4", "q5"]
        assert handler.state_dict()["requests"]["open"] == []
        assert handler.stats().requests.balanced


@pytest.mark.parametrize("by_a_feeder", [True, False])
@pytest.mark.parametrize("ends_first", [True, False])
def test_a_trained_prompt_that_is_open_still_is_no_later_offer_of_the_same_prompt(
    daemon: Callable[..., Daemon], bus_name: str, by_a_feeder: bool, ends_first: bool
) -> None:
    daemon("--capacity", "4MiB")
    offer: dict[str, Any] = {"group_size": 2, "prompt": np.arange(3, dtype=np.int32)}

    def requests_of(handler: OnlineDataHandler) -> tuple[list[str], list[list[Any]]]:
        saved = handler.state_dict()["requests"]
        return [each["instance_id"] for each in saved["open"]], saved["trained"]

    with (
        Producer(bus_name) as producer,
        shmbus.Feeder(bus_name) as feeder,
        OnlineDataHandler(bus_name, groups_per_batch=1) as earlier,
        OnlineDataHandler(bus_name, groups_per_batch=1) as later,
    ):
        earlier.request("q", **offer)
        sample_all(producer)
        trained = earlier.next_batch(10)  # yielded counts as trained
        later.load_state_dict(json.loads(json.dumps(earlier.state_dict())))
        restored = later.restored_requests
        assert restored is not None
        assert (restored.trained, restored.beyond) == ([("q", None, "train")], [])
        assert requests_of(later) == ([], [["q", None, "train"]])
        if not ends_first:
            assert (feeder if by_a_feeder else later).request("q", **offer) == 2
            assert requests_of(later) == (["q"], [["q", None, "train"]])
        before = later._consumer.open_requests()
        earlier.ack(trained)
        wait_until(lambda: later._consumer.open_requests() == before[1:])
        if ends_first:
            assert (feeder if by_a_feeder else later).request("q", **offer) == 2
        assert requests_of(later) == (["q"], [])
        assert sample_all(producer) == ["q"]


def test_a_handler_whose_bus_has_no_requests_saves_none(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        state = handler.state_dict()
        assert "requests" not in state
        handler.load_state_dict(state)
        with pytest.raises(ValueError, match="requests state"):
            handler.load_state_dict({**state, "requests": {"version": 7}})
        with pytest.raises(shmbus.BusFullError):
            while True:
                handler.request("q", group_size=2, prompt=np.zeros(3000), timeout=0)


@pytest.mark.parametrize("reported", [False, True])
def test_a_prompt_that_is_offered_again_after_a_checkpoint_is_made_again_and_once(
    bus: Bus, producer: Producer, reported: bool
) -> None:
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, sample_retries=1, retry_backoff=(0, 0)
    ) as handler:
        state = handler.state_dict()
        handler.request("q", group_size=2, round=0, prompt=TOKENS)
        sample_all(producer)
        handler.ack(handler.next_batch(10))
        handler.load_state_dict(state)
        assert handler.request("q", group_size=2, round=0, prompt=TOKENS) > 0
        if reported:
            # Its first record is a failure, no late one of the previous group.
            request = next_request(producer)
            producer.requests.fail(request, "out of memory")
            with pytest.raises(TimeoutError):
                handler.next_batch(0)  # reads the ring
            again = producer.requests.next(5)
            while again is not None and again.attempt == 0:
                producer.requests.answer(
                    again, tokens=TOKENS, loss_mask=[1] * 8, logprobs=[0.0] * 8
                )
                again = producer.requests.next(5)
            assert again is not None and again.index == request.index
            producer.requests.answer(again, tokens=TOKENS, loss_mask=[1] * 8, logprobs=[0.0] * 8)
        sample_all(producer)
        handler.ack(handler.next_batch(10))
        producer.put("q", group_size=2, index=0, round=0, tokens=TOKENS, logprobs=[0.0] * 8)
        with pytest.raises(TimeoutError, match="1 surplus"):
            handler.next_batch(0.2)
        ledger = handler.stats()
        assert ledger.balanced and ledger.acknowledged == 4 and ledger.requests.open == 0


def test_a_prompt_offered_twice_at_once_is_one_group(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        for _ in range(2):
            handler.request("q", group_size=2, round=0, prompt=TOKENS)
        for request in producer.requests.next_many(2, timeout=5):
            producer.requests.answer(request, tokens=TOKENS, loss_mask=[1] * 8, logprobs=[0.0] * 8)
        handler.ack(handler.next_batch(10))
        sample_all(producer)
        with pytest.raises(TimeoutError, match="surplus"):
            handler.next_batch(0.2)


def test_prompts_that_a_separate_feeder_must_offer_again_are_said(
    bus_name: str, tmp_path: Path, daemon: Callable[..., Daemon], caplog: pytest.LogCaptureFixture
) -> None:
    # The trainer dies for good and comes back; feeder, worker and daemon live on.
    daemon("--capacity", "4MiB")
    path = tmp_path / "checkpoint.json"
    with Producer(bus_name) as producer, shmbus.Feeder(bus_name) as feeder:
        names = {feeder.request(f"q{n}", group_size=2, round=0, prompt=TOKENS): n for n in range(2)}
        sample_all(producer)
        ended = multiprocessing.get_context("fork").Process(
            target=train_ahead, args=(bus_name, path)
        )
        ended.start()
        wait_until(path.exists)
        names |= {
            feeder.request(f"q{n}", group_size=2, round=0, prompt=TOKENS): n for n in range(2, 5)
        }
        while ended.is_alive():
            sample_all(producer)
            ended.join(0.01)
        assert ended.exitcode == -signal.SIGKILL
        feeder.request("q5", group_size=2, round=0, prompt=TOKENS)  # beyond, and open
        with OnlineDataHandler(bus_name, groups_per_batch=1) as handler:
            handler.load_state_dict(json.loads(path.read_text()))
            restored = handler.restored_requests
            assert restored is not None and restored.ended == 2
            assert restored.number == 2
            assert [id_ for id_, *_ in restored.beyond] == ["q4", "q5"]
            assert "2 requests that were offered after this checkpoint have ended" in caplog.text
            open_ = {id_ for id_, *_ in restored.beyond}
            for number, n in names.items():
                if number > restored.number and f"q{n}" not in open_:
                    feeder.request(f"q{n}", group_size=2, round=0, prompt=TOKENS)
            sample_all(producer)
            trained = [key for _ in range(4) for key in train_next(handler)]
            assert sorted(trained) == ["q2", "q3", "q4", "q5"]


def train_ahead(name: str, path: Path) -> None:
    with OnlineDataHandler(name, groups_per_batch=1) as handler:
        for number in range(4):
            if number == 2:
                path.with_suffix(".new").write_text(json.dumps(handler.state_dict()))
                path.with_suffix(".new").rename(path)
            handler.ack(handler.next_batch(30))
        handler.stats()  # the daemon knows everything by now
        os.kill(os.getpid(), signal.SIGKILL)


def test_a_handler_offers_lists_by_its_schema(bus: Bus, producer: Producer) -> None:
    schema = {"ids": ("int64", "T"), "image?": ("uint8", (3, None))}
    with OnlineDataHandler(bus.name, prompt_schema=schema) as handler:
        handler.request("q", group_size=1, ids=[1, 2])
        with pytest.raises(TypeError, match=r"^missing the field 'ids'"):
            handler.request("r", group_size=1, image=[[1], [2], [3]])
        assert next_request(producer)["ids"].dtype == np.int64
