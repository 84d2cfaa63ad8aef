"""Batches of the kernel in Triton's interpreter: ``interpreted_kernel.py BUS SEED``."""

import copy
import pickle
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from test_extra_fields import FIELDS, OPTIONAL, put, put_long, put_optional, random_sample
from test_gpu import assert_same, put_random

from shmbus import Consumer, Producer
from trainer_adapter import Batch, pack
from trainer_adapter.batches.finite import SampleError
from trainer_adapter.batches.pack import HostPacker
from trainer_adapter.gpu import memory
from trainer_adapter.gpu.gather import begin_gather

device = torch.device("cpu")
#: Values that no batch takes, by field.
WRONG = {
    "loss_mask": (2, 0.5, np.nan), "logprobs": (np.nan, np.inf, 1), "advantages": (np.nan, np.inf)
}  # fmt: skip


def gathered(groups: Any, layout: Any = "packed", **options: Any) -> Batch:
    return begin_gather(HostPacker(**options).plan(groups), device, layout=layout).finish()


def look_first(groups: Any) -> None:
    """Any first look at a batch, before its tensors exist."""
    want = pack(groups)
    for look in (
        lambda batch: batch.to("cpu"),
        lambda batch: pickle.loads(pickle.dumps(batch)),
        lambda batch: SimpleNamespace(**batch.asdict()),
        copy.copy,
    ):
        batch = gathered(groups)
        assert batch.num_tokens == want.num_tokens and batch.lengths == want.lengths
        assert batch.facts.samples.tolist() == want.facts.samples.tolist()
        seen = look(batch)
        seen.groups = want.groups  # left out of a pickle, and of a dict
        assert_same(seen, want)
    assert not hasattr(gathered(groups), "no_such_tensor")


def batches(name: str, seed: int) -> None:
    """Batches of all layouts and advantages, however they are looked at first; and refusals."""
    with Producer(name) as producer, Consumer(name) as consumer:
        for round, longest in enumerate((60, 5000, 1)):
            if round == 1:
                memory.STAGING_BYTES = 1
            put_random(producer, seed + round, 3, longest)
            groups = consumer.take(64, 10)
            assert len(groups) == 3
            for options in (
                {},
                {"truncated": "mask"},
                {"layout": "padded", "advantages": "rloo"},
                {"advantages": "batch"},
                {"advantages": lambda scores: scores * 2},
                {"advantages": lambda scores, group: scores + group.lengths},
            ):
                assert_same(gathered(groups, **options), pack(groups, **options))
            if round == 0:
                look_first(groups)
            consumer.ack(groups)
        for field, values in WRONG.items():
            for wrong in values:
                good = {"tokens": np.arange(9), "logprobs": np.zeros(9), "advantages": np.zeros(9)}
                producer.put("good", group_size=1, index=0, **good)
                bad = np.zeros(3000, np.float32)
                bad[2500:] = wrong
                producer.put(
                    "bad",
                    group_size=1,
                    index=0,
                    **{"tokens": np.arange(3000), "logprobs": np.zeros(3000), field: bad},
                )
                groups = consumer.take(64, 10)
                messages = []
                for attempt in (gathered, pack):
                    try:
                        attempt(groups)
                    except SampleError as error:
                        messages.append((str(error), error.sample))
                assert len(set(messages)) == 1 and len(messages) == 2, messages
                assert "'bad'[0]" in messages[0][0] and "token 2500" in messages[0][0], messages
                consumer.ack(groups)


def same(groups: Any, **options: Any) -> None:
    got = gathered(groups, **options)
    want = pack(groups, **options)
    assert (got.extra_kinds, list(got.extra)) == (want.extra_kinds, list(want.extra))
    for name, right in want.extra.items():
        mine = got.extra[name]
        if isinstance(right, list):
            assert mine == right, name
        else:
            assert mine.dtype == right.dtype and torch.equal(mine, right), name
    for name, right in want.extra_offsets.items():
        assert torch.equal(got.extra_offsets[name], right), name
    for known in ("scores", "policy_versions", "newest_policy_versions", "lengths", "group_sizes"):
        mine, right = getattr(got.facts, known), getattr(want.facts, known)
        assert np.allclose(mine, right), (known, mine, right)


def fields(name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with Producer(name) as producer, Consumer(name) as consumer:
        for number in range(4):
            put(
                producer,
                f"k{number}",
                [random_sample(rng, int(rng.integers(0, 30))) for _ in "abc"],
            )
        groups = consumer.take(64, 10)
        for layout in ("packed", "padded"):
            same(groups, extra_fields=FIELDS, layout=layout)
        dtypes = ["u1", "i2", "f4", "f8"]
        put_long(producer, rng, dtypes)
        same(consumer.take(1, 10), extra_fields=dict.fromkeys(dtypes, "token"))
        put_optional(producer)
        for group in consumer.take(2, 10):
            same([group], extra_fields=OPTIONAL)


if __name__ == "__main__":
    for part in (batches, fields):
        part(sys.argv[1], int(sys.argv[2]))
        print(part.__name__, "equal", flush=True)
