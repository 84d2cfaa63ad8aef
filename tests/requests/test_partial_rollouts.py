"""Continued rollouts: a worker's samples go back with the request, to the next worker."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from conftest import Spawner, next_request, wait_until

from shmbus import Bus, BusFullError, Consumer, Feeder, Producer
from shmbus.segment.names import companion_name

PROMPT = np.arange(4, dtype=np.int32)


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, capacity="16MiB") as handle:
        yield handle
    assert not os.path.exists("/dev/shm" + companion_name("partial", bus_name))


def offer(bus: Bus, groups: int = 1, size: int = 1) -> None:
    with Feeder(bus.name) as feeder:
        for number in range(groups):
            feeder.request(f"q{number}", group_size=size, prompt=PROMPT)


def sampled(count: int, version: int = 0) -> dict[str, Any]:
    tokens = np.concatenate([PROMPT, np.arange(count)]).astype(np.int32)
    return {
        "tokens": tokens,
        "loss_mask": np.arange(len(tokens)) >= len(PROMPT),
        "logprobs": -np.arange(len(tokens), dtype=np.float32),
        "token_versions": np.full(len(tokens), version, np.int64),
    }


def test_the_next_worker_goes_on_and_the_answer_has_the_span_of_versions(
    bus: Bus, producer: Producer
) -> None:
    offer(bus)
    with Consumer(bus.name) as consumer, Producer(bus.name) as other:
        request = next_request(producer)
        assert (request.so_far, request.state, request.releases) == (None, None, 0)
        assert producer.requests.release(request, sampled(3, 4), state={"env": [1, 2]})
        again = next_request(other)
        so_far = again.so_far
        assert so_far is not None
        assert so_far["tokens"].tolist() == [0, 1, 2, 3, 0, 1, 2]
        assert (again.state, again.releases) == ({"env": [1, 2]}, 1)
        whole = sampled(6, 7)
        whole["token_versions"][: len(so_far["tokens"])] = so_far["token_versions"]
        assert other.requests.answer(again, score=1.0, **whole)
        (group,) = consumer.take(1, 10)
        assert group[0]["token_versions"].tolist() == [4] * 7 + [7] * 3
        assert (group[0].policy_version, group[0].newest_policy_version) == (4, 7)
        group.ack()


def test_an_answer_of_rows_has_the_span_of_all_of_them(bus: Bus, producer: Producer) -> None:
    offer(bus)
    with Consumer(bus.name) as consumer:
        request = next_request(producer)
        context = {**sampled(2, 0), "loss_mask": np.zeros(len(PROMPT) + 2, bool)}
        assert producer.requests.answer(
            request, score=1.0, rows=[sampled(3, 5), context, sampled(1, 9)]
        )
        (group,) = consumer.take(1, 10)
        assert (group[0].policy_version, group[0].newest_policy_version) == (5, 9)
        group.ack()


def test_prompt_tokens_do_not_age_a_sample(bus: Bus, producer: Producer) -> None:
    offer(bus)
    with Consumer(bus.name) as consumer:
        request = next_request(producer)
        given = sampled(2, 5)
        given["token_versions"][:4] = 0
        producer.requests.answer(request, **given)
        (group,) = consumer.take(1, 10)
        assert (group[0].policy_version, group[0].newest_policy_version) == (5, 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": [0, 1, 9, 3, 5]}, r"field 'tokens': expected it to begin with the 4 elements"),
        ({"tokens": [0, 1]}, r"field 'tokens': expected it to begin with .* got 2 of them"),
        ({"logprobs": [0.0]}, r"field 'logprobs': expected 6 elements, one per token, got 1"),
    ],
)
def test_what_does_not_go_on_from_the_prompt_is_named(
    bus: Bus, producer: Producer, change: dict[str, Any], message: str
) -> None:
    offer(bus)
    request = next_request(producer)
    given = {"tokens": sampled(2)["tokens"], **change}
    with pytest.raises(ValueError, match=f"release: group 'q0', sample 0: {message}"):
        producer.requests.release(request, given)
    with pytest.raises(TypeError, match="so_far: expected a mapping with tokens, got dict"):
        producer.requests.release(request, {"logprobs": [1.0]})
    assert producer.requests.is_wanted(request)


def test_filler_and_tensors_without_a_numpy_dtype_go_on(bus: Bus, producer: Producer) -> None:
    torch = pytest.importorskip("torch")

    def given(count: int) -> dict[str, Any]:
        fields = sampled(count)
        fields["logprobs"][: len(PROMPT)] = np.nan
        hidden = torch.arange(len(fields["tokens"]) * 1.0).bfloat16()
        return {**fields, "hidden": hidden.requires_grad_()}

    offer(bus)
    for count in (3, 5):
        assert producer.requests.release(next_request(producer), given(count))
    again = next_request(producer)
    assert again.so_far is not None
    with pytest.raises(ValueError, match=r"'logprobs': expected .* got another at 4"):
        producer.requests.answer(again, **{**given(6), "logprobs": np.full(10, np.nan)})
    assert producer.requests.answer(again, **given(6))


def test_an_answer_that_does_not_begin_with_what_was_sampled_is_named(
    bus: Bus, producer: Producer
) -> None:
    offer(bus)
    with Consumer(bus.name) as consumer:
        request = next_request(producer)
        producer.requests.release(request, sampled(3))
        again = next_request(producer)
        assert again.so_far is not None
        wrong = sampled(5)
        wrong["logprobs"][5] = 1
        with pytest.raises(
            ValueError,
            match=r"answer: group 'q0', sample 0: field 'logprobs': expected it to begin with the "
            r"7 elements that the request has, got another at 5; go on from request\.so_far",
        ):
            producer.requests.answer(again, **wrong)
        without = sampled(5)
        del without["token_versions"]
        with pytest.raises(ValueError, match=r"field 'token_versions': expected .* got none"):
            producer.requests.answer(again, **without)
        again.so_far = None
        assert producer.requests.answer(again, **wrong)
        assert len(consumer.take(1, 10)) == 1


def test_it_starts_anew_after_so_many_releases_or_when_it_is_too_old(
    bus: Bus, producer: Producer
) -> None:
    offer(bus)
    with Consumer(bus.name) as consumer:
        for turn in range(3):
            request = next_request(producer)
            assert request.releases == turn
            producer.requests.release(request, sampled(turn + 1, 3), max_releases=2, max_lag=4)
        request = next_request(producer)
        assert request.so_far is None
        producer.requests.release(request, sampled(1, 3), max_lag=4)
        consumer.policy_version = 7
        request = next_request(producer)
        assert request.so_far is not None
        newer = sampled(3, 7)
        newer["token_versions"][: len(PROMPT) + 1] = 3  # the oldest token counts
        producer.requests.release(request, newer, max_lag=4)
        consumer.policy_version = 8
        request = next_request(producer)
        assert request.so_far is None


def test_another_round_of_a_prompt_and_a_failed_sample_get_none_of_it(
    bus: Bus, producer: Producer
) -> None:
    with Consumer(bus.name, sample_retries=1, retry_backoff=(0.01, 0.02)) as consumer:
        offer(bus)
        request = next_request(producer)
        producer.requests.release(request, sampled(3))
        request = next_request(producer)
        assert request.so_far is not None
        producer.requests.fail(request, "its environment broke")
        assert consumer.take(1, 0.2) == []
        request = next_request(producer)
        assert (request.attempt, request.so_far) == (1, None)
        producer.requests.release(request, sampled(3))
        request = next_request(producer)
        producer.requests.answer(request, **sampled(4))  # without a look
        (group,) = consumer.take(1, 10)
        group.ack()
        offer(bus)
        request = next_request(producer)
        assert request.so_far is None


def test_there_is_a_bound_and_a_damaged_file_costs_no_more_than_what_it_has(
    bus: Bus, producer: Producer
) -> None:
    offer(bus, 2)
    path = "/dev/shm" + companion_name("partial", bus.name)
    request = next_request(producer)
    with pytest.raises(BusFullError, match=r"room for .* bytes of a partial rollout, got .* of"):
        producer.requests.release(request, sampled(bus.capacity // 64))
    assert producer.requests.is_wanted(request)
    producer.requests.release(request, sampled(2))
    with open(path, "r+b") as file:
        file.seek(20)
        file.write(b"damage")
    request = next_request(producer)
    assert request.so_far is None
    producer.requests.release(request, sampled(2))
    request = next_request(producer)
    assert request.so_far is not None


# A token behind the prompt is its place; its logprob tells the version of its sampling.
WORKER = """
import os, random, signal, sys
import numpy as np, shmbus
rng = random.Random(int(sys.argv[2]))
with shmbus.Producer(sys.argv[1]) as producer:
    print("ready", flush=True)
    while True:
        request = producer.requests.next(0.2)
        if request is None:
            if os.path.exists(sys.argv[3]):
                break
            continue
        prompt = request["prompt"]
        found = request.so_far or {
            "tokens": prompt, "logprobs": np.zeros(len(prompt), np.float32),
            "loss_mask": np.zeros(len(prompt), np.uint8),
            "token_versions": np.zeros(len(prompt), np.int64),
        }
        while len(found["tokens"]) < 12:
            at, version = len(found["tokens"]), producer.policy_version
            found = {
                "tokens": np.append(found["tokens"], np.int32(at)),
                "logprobs": np.append(found["logprobs"], np.float32(-version)),
                "loss_mask": np.append(found["loss_mask"], np.uint8(1)),
                "token_versions": np.append(found["token_versions"], np.int64(version)),
            }
            chance = rng.random()
            if chance < 0.01:
                os.kill(os.getpid(), signal.SIGKILL)
            if chance < 0.2:
                producer.requests.release(request, found)
                break
        else:
            producer.requests.answer(request, score=1.0, **found)
"""


def test_a_storm_of_releases_and_deaths_keeps_each_token_with_who_sampled_it(
    bus: Bus, spawn: Spawner, seed: int, tmp_path: Any
) -> None:
    groups, size = 30, 4
    offer(bus, groups, size)
    done = tmp_path / "done"
    started = 0

    def start() -> Any:
        nonlocal started
        started += 1
        return spawn.script(WORKER, bus.name, seed + started, done)

    workers = [start() for _ in range(3)]
    taken: dict[str, Any] = {}
    with Consumer(bus.name) as consumer:

        def all_there() -> bool:
            for at, worker in enumerate(workers):
                if not worker.running:
                    assert worker.popen.returncode == -signal.SIGKILL, worker.output()
                    workers[at] = start()
            consumer.policy_version += 1
            for group in consumer.take(8, 0.05):
                assert group.instance_id not in taken
                taken[group.instance_id] = group.copy()
                group.ack()
            return len(taken) == groups

        wait_until(all_there, timeout=90)
        done.touch()
        wait_until(lambda: not any(worker.running for worker in workers), timeout=60)
    released = 0
    for group in taken.values():
        assert len(group) == size
        for t in group:
            assert t["tokens"].tolist() == [0, 1, 2, 3, *range(4, 12)]
            own = t["token_versions"][4:]
            assert (-t["logprobs"][4:]).tolist() == own.tolist()
            assert (np.diff(own) >= 0).all()
            assert (t.policy_version, t.newest_policy_version) == (own.min(), own.max())
            released += int(own.min() < own.max())
    assert released > 0
    assert started > 3


def spanning(version_of: list[int], **more: Any) -> dict[str, Any]:
    """A prompt and tokens sampled by these versions; the prompt's version counts for nothing."""
    versions = np.array([0] * len(PROMPT) + version_of, np.int64)
    return {**sampled(len(version_of)), "token_versions": versions, **more}


def test_versions_that_fit_no_tokens_are_refused_from_who_continues(
    bus: Bus, producer: Producer
) -> None:
    offer(bus)
    request = next_request(producer)
    named = "group 'q0', sample 0: field 'token_versions': expected an integer for each token"
    with pytest.raises(ValueError, match=named):
        producer.requests.release(request, {**sampled(3), "token_versions": np.full(7, np.nan)})
    with pytest.raises(ValueError, match=named):
        producer.requests.answer(request, **{**sampled(3), "token_versions": np.zeros(6, int)})
    assert producer.requests.answer(request, **sampled(3))
