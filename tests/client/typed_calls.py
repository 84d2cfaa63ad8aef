"""Each public call correctly, and then with a mistake, for type checkers; nothing runs.

Each `type: ignore` is a claim: strict mypy reports an ignore without an error.
"""

from typing import cast

import numpy as np
import torch

import shmbus
from shmbus import Consumer, Group
from trainer_adapter import (
    Batch,
    ExtraField,
    FieldNames,
    OnlineDataHandler,
    group_advantages,
    pack,
    varlen_attention,
)
from trainer_adapter.attention import attention_backend, register_with_transformers
from trainer_adapter.balance import balance, by_budget
from trainer_adapter.compat import pad_input, unpad_input
from trainer_adapter.corrections import importance_correction
from trainer_adapter.losses import aggregate_loss, kl_estimate, policy_loss
from trainer_adapter.microbatch import micro_batches

producer = cast(shmbus.Producer, None)
consumer = cast(shmbus.Consumer, None)
group = cast(shmbus.Group, None)
handler = cast(OnlineDataHandler, None)
batch = cast(Batch, None)
tensor = cast(torch.Tensor, None)
scores = np.zeros(4, np.float32)

# fmt: off
shmbus.Bus.create("b", capacity="1MiB")
shmbus.Bus.create("b", capcity="1MiB")  # type: ignore[call-arg]
shmbus.Bus.create("b", capacity=1 << 20, max_producers=2)
shmbus.Bus.create("b", capacity=1 << 20, max_producers="2")  # type: ignore[arg-type]
shmbus.Bus.open("b")
shmbus.Bus.open(bus="b")  # type: ignore[call-arg]
shmbus.unlink("b")
shmbus.unlink(1)  # type: ignore[arg-type]
shmbus.Producer("b", checksum=True)
shmbus.Producer("b", check_sum=True)  # type: ignore[call-arg]
shmbus.Producer("b", on_stall="raise")
shmbus.Producer("b", on_stall="rise")  # type: ignore[arg-type]
producer.put("k", index=0, tokens=scores, group_size=8)
producer.put("k", index=0, tokens=scores, groupsize=8)  # type: ignore[arg-type, call-arg]
producer.put("k", group_size=8, index=0, score=1.0)
producer.put("k", group_size=8, index=0, score="high")  # type: ignore[arg-type]
producer.put("k", group_size=8, index=0, tokens=[1, 2])
producer.put("k", group_size=8, index=0, group_siz=2)  # type: ignore[arg-type]
producer.put("k", group_size=8, index=0, tokens=tensor)
producer.put("k", group_size=8, index=0, timout=0.5)  # type: ignore[arg-type]
producer.put("k", group_size=8, index=0, score=tensor)
producer.put("k", group_size=8, index=0, tokens=7)  # type: ignore[arg-type]
producer.put(17, group_size=8, index=0)
producer.put(1.5, group_size=8, index=0)  # type: ignore[arg-type]
pending = producer.aput("k", group_size=8, index=0, tokens=(1, 2))
pending = producer.aput("k", group_size=8, index=0, group_siz=2)  # type: ignore[arg-type]
shmbus.Bus.create("b", schema={"tokens": "int32", "e": ("u1", ("T", 8))})
shmbus.Bus.create("b", schema=1)  # type: ignore[arg-type]
shmbus.Producer("b", schema={"tokens": "int32"})
shmbus.Producer("b", shema={"tokens": "int32"})  # type: ignore[call-arg]
producer.reserve("k", group_size=1, index=0, fields={"tokens": 5})
producer.reserve("k", group_size=1, index=0, fields={"tokens": 0.5})  # type: ignore[dict-item]
repr(producer.aput("k", index=0, tokens=scores, group_size=8))
repr(producer.aput("k", index=0, tokens=scores, group_siz=8))  # type: ignore[arg-type, call-arg]
repr(producer.aput("k", group_size=8, index=0, score=1.0))
repr(producer.aput("k", group_size=8, index=0, score="high"))  # type: ignore[arg-type]
repr(producer.aput_many([], timeout=1.0))
repr(producer.aput_many([], time_out=1.0))  # type: ignore[call-arg]
repr(shmbus.Producer.awaited("b", on_stall="raise"))
repr(shmbus.Producer.awaited("b", onstall="raise"))  # type: ignore[call-arg]
shmbus.Producer("b", wait=60.0)
shmbus.Producer("b", wait="60")  # type: ignore[arg-type]
shmbus.Consumer("b", wait=None)
shmbus.Consumer("b", waits=None)  # type: ignore[call-arg]
OnlineDataHandler("b", wait=60.0)
OnlineDataHandler("b", waiting=60.0)  # type: ignore[call-arg]
shmbus.Bus.ensure("b", capacity="1MiB")
shmbus.Bus.ensure("b", capcity="1MiB")  # type: ignore[call-arg]
producer.put_many([], timeout=1.0)
producer.put_many([], time_out=1.0)  # type: ignore[call-arg]
producer.reserve("k", group_size=1, index=0, fields={})
producer.reserve("k", group_size=1, index=0, field={})  # type: ignore[call-arg]
producer.fail("k", group_size=1, index=0, reason="x")
producer.fail("k", group_size=1, index=0, raeson="x")  # type: ignore[call-arg]
shmbus.Consumer("b", group_timeout=1.0)
shmbus.Consumer("b", group_time_out=1.0)  # type: ignore[call-arg]
shmbus.Consumer("b", on_timeout="drop")
shmbus.Consumer("b", on_timeout="discard")  # type: ignore[arg-type]
consumer.take(max_groups=4)
consumer.take(groups=4)  # type: ignore[call-arg]
repr(consumer.atake(max_groups=4))
repr(consumer.atake(groups=4))  # type: ignore[call-arg]
consumer.take_shard(groups=1, only_full=True)
consumer.take_shard(groups=1, full_only=True)  # type: ignore[call-arg]
consumer.ack(group)
consumer.ack(batch)  # type: ignore[arg-type]
consumer.ack(group)
consumer.ack(group.copy())  # type: ignore[arg-type]
len(group.scores)
len(group[0].scores)  # type: ignore[attr-defined]
group.copy()[0]["tokens"]
group.copy()[0].tokens  # type: ignore[attr-defined]  # noqa: B018
group[0].copy()
group[0].clone()  # type: ignore[attr-defined]
OnlineDataHandler("b", tokens_per_batch=9)
OnlineDataHandler("b", token_per_batch=9)  # type: ignore[call-arg]
OnlineDataHandler("b", layout="padded")
OnlineDataHandler("b", layout="ragged")  # type: ignore[arg-type]
OnlineDataHandler("b", max_policy_lag=4)
OnlineDataHandler("b", max_lag=4)  # type: ignore[call-arg]
OnlineDataHandler("b", on_timeout="drop")
OnlineDataHandler("b", on_timeout="discard")  # type: ignore[arg-type]
OnlineDataHandler("b", on_stall=print)
OnlineDataHandler("b", on_stall=1)  # type: ignore[arg-type]
OnlineDataHandler("b", advantages="grpo")
OnlineDataHandler("b", advantags="grpo")  # type: ignore[call-arg]
OnlineDataHandler("b", extra_fields={"x": "token"})
OnlineDataHandler("b", extra_fields={"x": "tokn"})  # type: ignore[dict-item]
OnlineDataHandler("b", on_metric=print)  # type: ignore[call-arg]
handler.iter(timeout=1.0)
handler.iter(timeout="1")  # type: ignore[arg-type]
handler.metrics(prefix="a/")
handler.metrics(prefix=1)  # type: ignore[arg-type]
batch.to("cuda", non_blocking=True)
batch.to("cuda", nonblocking=True)  # type: ignore[call-arg]
ExtraField(kind="token", fill=0)
ExtraField(kind="token", fil=0)  # type: ignore[call-arg]
importance_correction(tensor, tensor, tensor, mode="mask")
importance_correction(tensor, tensor, tensor, mode="cut")  # type: ignore[arg-type]
consumer.drop(group, reason="filtered")
consumer.drop(group, reson=1)  # type: ignore[call-arg]
handler.next_batch(timeout=1.0)
handler.next_batch(time_out=1.0)  # type: ignore[call-arg]
handler.ack(batch)
handler.ack(group)  # type: ignore[arg-type]
pack(group, advantages="rloo")
pack(group, advantage="rloo")  # type: ignore[call-arg]
pack(group, truncated="mask")
pack(group, truncated="hide")  # type: ignore[arg-type]
pack(group, fields=FieldNames(tokens="ids"))
pack(group, fields=FieldNames(token="ids"))  # type: ignore[call-arg]
group_advantages(scores, sizes=[4], kind="grpo")
group_advantages(scores, sizes=[4], kind="ppo")  # type: ignore[call-overload]
group_advantages(scores, sizes=[4])
group_advantages(scores, size=[4])  # type: ignore[call-overload]
micro_batches(batch, max_tokens=9)
micro_batches(batch, max_token=9)  # type: ignore[call-arg]
balance([1], 1)
balance([1], "1")  # type: ignore[arg-type]
by_budget([1], budget=1)
by_budget([1], budget="1")  # type: ignore[arg-type]
policy_loss(tensor, tensor, tensor, tensor, denominator=1.0)
policy_loss(tensor, tensor, tensor, tensor, denom=1.0)  # type: ignore[call-arg]
kl_estimate(tensor, tensor, tensor, kind="k3")
kl_estimate(tensor, tensor, tensor, kind="k4")  # type: ignore[arg-type]
aggregate_loss(tensor, tensor, normalisation="token")
aggregate_loss(tensor, tensor, normalize="token")  # type: ignore[call-arg]
varlen_attention(tensor, tensor, tensor, tensor, tensor, 1, 1, window_size=(-1, 0))
varlen_attention(tensor, tensor, tensor, tensor, tensor, 1, 1, window=(-1, 0))  # type: ignore[call-overload]
attention_backend(tensor, tensor, 1, 1, backend="sdpa")
attention_backend(tensor, tensor, 1, 1, backend="math")  # type: ignore[arg-type]
register_with_transformers(backend="sdpa")
register_with_transformers(back_end="sdpa")  # type: ignore[call-arg]
unpad_input(tensor, tensor)
unpad_input(scores, tensor)  # type: ignore[arg-type]
pad_input(tensor, tensor, 1, seqlen=1)
pad_input(tensor, tensor, 1, length=1)  # type: ignore[call-arg]
# fmt: on


def make_consumers() -> None:
    Consumer("run1", group_timout=5.0)  # type: ignore[call-arg]
    Consumer("run1", group_timeout="5")  # type: ignore[arg-type]
    Consumer("run1", on_timeout="partly")  # type: ignore[arg-type]
    Consumer("run1", duplicate="raise")  # type: ignore[arg-type]
    Consumer("run1", on_overflow="discard")  # type: ignore[arg-type]
    Consumer("run1", on_failure="wait")  # type: ignore[arg-type]
    Consumer("run1", on_stall="warn")  # type: ignore[arg-type]
    Consumer("run1", 60.0)  # type: ignore[call-arg]


def take(consumer: Consumer) -> None:
    consumer.take(max_group=4)  # type: ignore[call-arg]
    consumer.take(64, timeout="1")  # type: ignore[arg-type]
    consumer.take_shard(group=4)  # type: ignore[call-arg]
    consumer.take_shard(4)  # type: ignore[call-arg]
    for group in consumer:
        group.scores_of_all  # type: ignore[attr-defined]  # noqa: B018


def end(consumer: Consumer, group: Group) -> None:
    consumer.ack("q1")  # type: ignore[arg-type]
    consumer.ack(group, all=True)  # type: ignore[call-arg]
    consumer.drop([group.instance_id])  # type: ignore[list-item]
    consumer.give_back([group])  # type: ignore[arg-type]
    consumer.policy_version = "3"  # type: ignore[assignment]
    consumer.stats().acknowleged  # type: ignore[attr-defined]  # noqa: B018
    consumer.close(timeout=1.0)  # type: ignore[call-arg]
    consumer.closed()  # type: ignore[operator]


def read(group: Group) -> None:
    group.ack(True)  # type: ignore[call-arg]
    group.giveback()  # type: ignore[attr-defined]
    group["tokens"]  # type: ignore[call-overload]
    if group.state == "acked":  # type: ignore[comparison-overlap]
        raise AssertionError
    if group.round > 3:  # type: ignore[operator]
        raise AssertionError
    for trajectory in group:
        trajectory.rewrad  # type: ignore[attr-defined]  # noqa: B018
