"""OnlineDataHandler: budgets, malformed groups, ends of batches, resuming and closing."""

import copy
import json
import random
import re
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from conftest import keys_of, wait_until
from numpy_batches import PER_TOKEN, Sample, assert_batch, put, put_random, sample

import shmbus
from shmbus import Bus, Producer
from trainer_adapter import OnlineDataHandler, pack


@pytest.mark.parametrize("budget", [29, 60, 200, 100_000])
def test_batches_hold_whole_groups(bus: Bus, producer: Producer, seed: int, budget: int) -> None:
    groups = put_random(producer, seed, 60, longest=30)
    sizes = {key: sum(len(s["tokens"]) for s in group) for key, group in groups.items()}
    want: list[list[str]] = [[]]
    for key, size in sizes.items():
        if want[-1] and sum(sizes[k] for k in want[-1]) + size > budget:
            want.append([])
        want[-1].append(key)
    with OnlineDataHandler(bus.name, tokens_per_batch=budget, max_wait=0.05) as handler:
        got = []
        for step in range(len(want)):
            batch = handler.next_batch(10)
            assert batch.step == step
            assert_batch(batch, groups)
            got.append(keys_of(batch))
            handler.ack(batch)
        assert got == want
        assert handler.stats().acknowledged == sum(map(len, groups.values()))


def test_a_group_count_is_exact_unless_time_is_up(bus: Bus, producer: Producer, seed: int) -> None:
    groups = put_random(producer, seed, 7)
    with OnlineDataHandler(bus.name, groups_per_batch=3, max_wait=0.1) as handler:
        batches = [handler.next_batch(timeout) for timeout in (0, 0, 10)]
        assert [len(batch.groups) for batch in batches] == [3, 3, 1]
        assert [key for batch in batches for key in keys_of(batch)] == list(groups)
    with OnlineDataHandler(bus.name, groups_per_batch=8) as handler, ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(handler.next_batch)
        time.sleep(0.1)
        assert not waiting.done()
        put(producer, "last", groups["k0"])
        assert len(waiting.result(30).groups) == 8


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_timeout_says_what_is_missing(bus: Bus, producer: Producer, prefetch: int) -> None:
    producer.put("a", group_size=2, index=0, tokens=np.arange(3))
    with OnlineDataHandler(bus.name, prefetch=prefetch, max_wait=0.05) as handler:
        with pytest.raises(TimeoutError, match="within 0 s"):
            handler.next_batch(0)
        wait_until(lambda: prefetch == 0 or handler.stats().stashed == 1)
        with pytest.raises(TimeoutError) as caught:
            handler.next_batch(0.05)
        for words in (
            "0.05 s",
            repr(bus.name),
            "1 incomplete group with 1 trajectory",
            "1 producer ",
        ):
            assert words in str(caught.value)
        producer.put("a", group_size=2, index=1, tokens=np.arange(3))
        assert handler.next_batch(10).instance_ids == ["a", "a"]


MALFORMED: dict[str, tuple[Sample, str]] = {
    "no tokens": (
        {"loss_mask": np.ones(3)},
        r"'tokens'.*got none among \('loss_mask',\); .*fields=",
    ),
    "float tokens": ({"tokens": np.ones(3)}, "'tokens'.*integer.*got float64"),
    "text tokens": ({"tokens": np.array(["a"])}, "'tokens'.*integer.*U1"),
    "2-D tokens": ({"tokens": np.ones((3, 1), int)}, "'tokens'.*one dimension.*2"),
    "0-D tokens": ({"tokens": np.array(5)}, "'tokens'.*one dimension.*0"),
    "big-endian tokens": ({"tokens": np.ones(3, ">i4")}, "'tokens'.*integer.*>i4"),
    "tokens beyond int64": (
        {"tokens": np.array([1, 2**63], np.uint64)},
        r"'tokens'.*ids below 2\*\*63.*got 9223372036854775808 at token 1",
    ),
    "short mask": (
        {"tokens": np.arange(3), "loss_mask": np.ones(2)},
        "'loss_mask'.*got 2, tokens has 3",
    ),
    "2-D mask": ({"tokens": np.arange(3), "loss_mask": np.ones((3, 1))}, "'loss_mask'.*one dim"),
    "complex mask": ({"tokens": np.arange(3), "loss_mask": np.ones(3, "F")}, "'loss_mask'.*numer"),
    "long logprobs": ({"tokens": np.arange(3), "logprobs": np.ones(4)}, "'logprobs'.*tokens.*4"),
    "int logprobs": ({"tokens": np.arange(3), "logprobs": np.ones(3, int)}, "'logprobs'.*float32"),
    "half logprobs": ({"tokens": np.arange(3), "logprobs": np.ones(3, "e")}, "'logprobs'.*float32"),
    "no advantages": (
        {"tokens": np.arange(3), "advantages": np.ones(0)},
        "'advantages'.*tokens.*0",
    ),
    "a field that its sibling has": ({"tokens": np.arange(3)}, r"'loss_mask'.*\[0\].*has it"),
}


@pytest.mark.parametrize("mode", ["raise", "drop"])
@pytest.mark.parametrize("kind", MALFORMED)
def test_a_malformed_group_is_dropped_and_hurts_no_other(
    bus: Bus, producer: Producer, mode: Any, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, match = MALFORMED[kind]
    good = sample(np.random.default_rng(6), 4)
    put(producer, "before", [good])
    put(producer, "bad", [good, bad])
    put(producer, "after", [good])
    with OnlineDataHandler(bus.name, groups_per_batch=1, malformed=mode, max_wait=0.05) as handler:
        seen = []
        for _ in range(3 if mode == "raise" else 2):
            try:
                batch = handler.next_batch(10)
            except ValueError as error:
                assert mode == "raise"
                seen.append(str(error))
            else:
                seen.append(keys_of(batch)[0])
                handler.ack(batch)
        messages = [text for text in seen if text not in ("before", "after")]
        assert [text for text in seen if text in ("before", "after")] == ["before", "after"]
        assert len(messages) == (mode == "raise")
        for text in [*messages, caplog.text]:
            assert re.search(match, text.replace("\n", " ")), text
        ledger = handler.stats()
        assert (ledger.dropped, ledger.acknowledged, ledger.balanced) == ({"malformed": 2}, 2, True)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_error_in_a_callback_loses_no_group(bus: Bus, producer: Producer, prefetch: int) -> None:
    calls = 0

    def moody(scores: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise RuntimeError("not today")
        return scores

    groups = put_random(producer, 7, 3)
    with OnlineDataHandler(
        bus.name, groups_per_batch=3, advantages=moody, prefetch=prefetch
    ) as handler:
        with pytest.raises(RuntimeError, match="not today"):
            handler.next_batch(10)
        assert_batch(handler.next_batch(10), groups, "none")


def test_an_ack_frees_the_batchs_space_once(bus: Bus, producer: Producer) -> None:
    sizes: Any = dict(groups_per_batch=np.int32(1), prefetch=np.int8(1), pack_threads=np.int64(1))
    with OnlineDataHandler(bus.name, **sizes) as handler:
        big = {"tokens": np.zeros(100_000, np.int32)}
        for _ in range(30):
            put(producer, "a", [big, big])
            handler.ack(handler.next_batch(10))
        assert (handler.stats().acknowledged, handler.stats().leased) == (60, 0)
        put(producer, "a", [big])
        batch = handler.next_batch(10)
        with pytest.raises(shmbus.ProtocolError, match="copy without groups"):
            handler.ack(copy.copy(batch))
        handler.ack(batch)
        for end in (handler.ack, handler.give_back):
            with pytest.raises(shmbus.ProtocolError, match=f"batch {batch.step}: it was ack"):
                end(batch)
        put(producer, "other", [big])
        with pytest.raises(shmbus.ProtocolError, match="batch -1"):
            handler.ack(pack(handler.next_batch(10).groups))


@pytest.mark.parametrize(("per_batch", "prefetch"), [(1, 0), (2, 0), (5, 0), (2, 2)])
def test_a_nacked_batch_comes_next(
    bus: Bus, producer: Producer, seed: int, per_batch: int, prefetch: int
) -> None:
    groups = put_random(producer, seed, 10)
    with OnlineDataHandler(bus.name, groups_per_batch=per_batch, prefetch=prefetch) as handler:
        first, second = handler.next_batch(10), handler.next_batch(10)
        if handler._prefetcher is not None:
            wait_until(lambda: handler._prefetcher.ready == prefetch)
        handler.give_back(second)
        handler.give_back(first)
        again = handler.next_batch(10)
        assert keys_of(again) == keys_of(first) == list(groups)[:per_batch]
        assert_batch(again, groups)
        handler.ack(again)
        assert keys_of(handler.next_batch(10)) == keys_of(second)
        assert handler.stats().balanced


def test_tensors_of_a_batch_never_change(bus: Bus, producer: Producer, seed: int) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        kept: list[tuple[torch.Tensor, torch.Tensor]] = []
        rng = random.Random(seed)
        for number in range(40):
            put_random(producer, seed + number, 2)
            batch = handler.next_batch(10)
            tensor = getattr(batch, rng.choice(PER_TOKEN))[:5]
            kept.append((tensor, tensor.clone()))
            handler.ack(batch)
            del batch
            if rng.random() < 0.5:
                kept.pop(rng.randrange(len(kept)))
        handler.close()
        assert kept
        assert all(torch.equal(tensor, same) for tensor, same in kept)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("acks", ["none", "some", "all"])
def test_after_a_restart_nothing_is_trained_twice_and_nothing_is_skipped(
    bus: Bus, producer: Producer, seed: int, acks: str, prefetch: int
) -> None:
    rng = random.Random(seed)
    groups = put_random(producer, seed, 60)
    trained: list[str] = []
    state: Any = None
    while len(trained) < len(groups):
        with OnlineDataHandler(
            bus.name, groups_per_batch=4, max_wait=0.02, prefetch=prefetch
        ) as handler:
            if state is not None:
                handler.load_state_dict(state)
                assert handler.step == state["step"]
            out = []
            for _ in range(rng.randrange(1, 6)):
                if len(trained) == len(groups):
                    break
                out.append(handler.next_batch(10))
                assert_batch(out[-1], groups)
                trained += keys_of(out[-1])
            handler.set_policy_version(len(trained))
            state = json.loads(json.dumps(handler.state_dict()))
            for batch in out:
                if acks == "all" or (acks == "some" and rng.random() < 0.5):
                    handler.ack(batch)
    assert sorted(trained) == sorted(groups)
    with OnlineDataHandler(bus.name, groups_per_batch=1, max_wait=0.02) as handler:
        handler.load_state_dict(state)
        assert producer.policy_version == len(groups)
        with pytest.raises(TimeoutError):
            handler.next_batch(0.1)
        assert handler.stats().acknowledged == sum(map(len, groups.values()))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_checkpoint_loaded_again_repeats(bus: Bus, producer: Producer, prefetch: int) -> None:
    keys = list(put_random(producer, 5, 5))
    with OnlineDataHandler(bus.name, groups_per_batch=1, prefetch=prefetch) as handler:
        before = handler.next_batch(10)
        state = handler.state_dict()
        handler.ack([handler.next_batch(10) for _ in range(3)][1])
        handler.load_state_dict(state)
        handler.ack(before)
        for step, key in enumerate([keys[1], *keys[3:]], 1):
            batch = handler.next_batch(10)
            assert (batch.step, keys_of(batch)) == (step, [key])
            handler.ack(batch)
        assert handler.stats().leased == 0


def test_the_state_of_another_bus_filters_nothing(bus_name: str) -> None:
    state: Any = None
    for _ in range(2):
        with Bus.create(bus_name, capacity="1MiB"), Producer(bus_name) as producer:
            groups = put_random(producer, 9, 2)
            with OnlineDataHandler(bus_name, groups_per_batch=2) as handler:
                if state is not None:
                    handler.load_state_dict(state)
                assert_batch(handler.next_batch(10), groups)
                state = handler.state_dict()
