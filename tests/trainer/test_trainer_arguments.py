"""Wrong arguments of the trainer's side: refused by name, before anything is taken or trained."""

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import RUN_PREFIX
from refusals import refused

from shmbus import Bus, Consumer, Producer
from trainer_adapter import ExtraField, OnlineDataHandler, pack
from trainer_adapter.batches.pack import HostPacker
from trainer_adapter.compat import pad_input, unpad_input
from trainer_adapter.corrections import importance_correction
from trainer_adapter.gpu.packer import GpuPacker
from trainer_adapter.losses import kl_estimate, policy_loss
from trainer_adapter.microbatch import micro_batches

Call = Callable[[Any], object]
ROW, MASK = torch.zeros(4), torch.ones(4, dtype=torch.bool)
HIDDEN, TWO = torch.zeros(2, 3, 4), torch.zeros(2, 4)
INDICES = torch.zeros(2, dtype=torch.int64)


def handler(**options: Any) -> Call:
    return lambda g: OnlineDataHandler(g.bus.name, **options).close()


def asked(verb: str, *given: Any, **more: Any) -> Call:
    return lambda g: getattr(g.handler, verb)(*given, **more)


def packed(**options: Any) -> Call:
    return lambda g: pack(g.group, **options)


def cut(**options: Any) -> Call:
    return lambda g: micro_batches(g.batch, **options)


def loss(**changes: Any) -> Call:
    names = ("logprobs", "old_logprobs", "advantages")
    whole = {**dict.fromkeys(names, ROW), "loss_mask": MASK, **changes}
    return lambda g: policy_loss(**whole)


def state(**changes: Any) -> Call:
    return lambda g: g.handler.load_state_dict({**g.handler.state_dict(), **changes})


STATE = {"version": 1, "step": -1, "policy_version": 0, "bus_created_unix_ns": 1, "trained": []}
BORDERS = {"normalisation": "sequence"}
REFUSED: list[tuple[Call, str]] = [
    (packed(layout="ragged"), "ValueError: layout: expected .*'ragged'"),
    (packed(truncated="cut"), "ValueError: truncated: expected .*'cut'"),
    (packed(advantages="ppo"), "ValueError: advantages: expected .*'ppo'"),
    (packed(device="cuda:99"), "ValueError: device: expected .*'cuda:99'"),
    (lambda g: g.batch.to(torch.bfloat16), "TypeError: device: expected .*got dtype"),
    (packed(fields={}), "TypeError: fields: expected FieldNames, got dict"),
    (lambda g: pack([]), "ValueError: at least one group, got none"),
    (handler(world_size=2, truncated="drop"), "ValueError: truncated: .*several ranks, got 'drop'"),
    (handler(extra_fields={"x": "tokn"}), "ValueError: did you mean 'token'"),
    (handler(extra_fields={"x": 3}), "TypeError: expected a kind or an ExtraField, got 3"),
    *(
        (handler(extra_fields={"x": ExtraField(**options)}), said)
        for options, said in (
            ({"kind": "token", "fill": 0}, "ValueError: expected a dtype beside fill"),
            ({"kind": "token", "fill": -1, "dtype": "uint8"}, "ValueError: it would become 255"),
            ({"kind": "token", "dtype": "flot32"}, "ValueError: one of torch's"),
            (
                {"kind": "token", "fill": 300, "dtype": "int8"},
                "ValueError: fits torch.int8, got",
            ),
            ({"kind": "meta", "dtype": "int64"}, "ValueError: no dtype and no shape"),
            ({"kind": "token", "shape": (-1,)}, "TypeError: a tuple of sizes"),
        )
    ),
    *(
        (make(pack_threads=given), said)
        for make in (handler, lambda **options: lambda g: HostPacker(**options))
        for given, said in (
            (0, "ValueError: pack_threads: expected 1 to 64, got 0"),
            (65, "ValueError: got 65"),
            (True, "TypeError: pack_threads: expected an int, got bool"),
            ("2", "TypeError: got str"),
        )
    ),
    (asked("next_batch", -1), "ValueError: timeout: expected .*seconds,? or None"),
    (asked("next_batch", math.nan), "ValueError: timeout: expected .*seconds,? or None"),
    (asked("next_batch", "soon"), "TypeError: timeout: expected .*seconds,? or None"),
    (asked("iter", timeout="10"), "TypeError: timeout: expected seconds or None, got str"),
    (asked("ack", []), "TypeError: expected a Batch, got list"),
    (asked("give_back", []), "TypeError: expected a Batch, got list"),
    (asked("evaluate", 0), "ValueError: ^groups: expected 1 or more, got 0"),
    (asked("evaluate", "all"), "TypeError: ^groups: expected an int, got str"),
    (asked("evaluate", torch.ones(2)), "TypeError: groups: expected an int, got Tensor"),
    (asked("evaluate", 1, timeout="soon"), "TypeError: timeout: expected seconds or None, got str"),
    (asked("take", "train"), "ValueError: ^split: expected another than 'train'"),
    (asked("evaluate", 1, split=None), "TypeError: split: expected a str, got NoneType"),
    (asked("take", 3), "TypeError: ^split: expected"),
    (asked("offer", {"q": [1]}), "TypeError: iterable of dicts.*got one dict.*items"),
    (asked("offer", "text"), "TypeError: got one str"),
    (asked("offer", 7), "TypeError: prompts: expected an iterable, or a data set.*got int"),
    (asked("offer", [], ahead=0), "ValueError: ahead: expected 1 or more, got 0"),
    (asked("offer", [], group_size=0), "ValueError: group_size: expected 1 or more, got 0"),
    *(
        (asked("load_state_dict", given), "ValueError: state_dict: expected")
        for given in (None, {}, {"version": 99}, {"version": 1}, {**STATE, "step": "x"}, "s", STATE)
    ),
    *(
        (state(step=step), "ValueError: state_dict: expected what state_dict")
        for step in (math.inf, math.nan, torch.tensor(1 + 2j), None, "x")
    ),
    (cut(), "ValueError: expected one of max_tokens and count"),
    (cut(max_tokens=5, count=2), "ValueError: expected one of max_tokens and count"),
    (cut(max_tokens=3), "ValueError: max_tokens: expected at least 4.*got"),
    (cut(max_tokens=64.0), "TypeError: max_tokens: expected an int, got float"),
    (cut(count=3), "ValueError: count: expected at most 2.*got 3"),
    (cut(count=0), "ValueError: count: expected 1 or more, got 0"),
    (loss(loss_mask=torch.ones(4)), "TypeError: loss_mask: expected torch.bool"),
    (loss(loss_mask=[True] * 4), "TypeError: loss_mask: expected a torch.Tensor, got list"),
    (loss(old_logprobs=[0.0]), "TypeError: old_logprobs: expected a torch.Tensor, got list"),
    (loss(logprobs=ROW.long()), "TypeError: logprobs: expected a floating"),
    (loss(old_logprobs=torch.zeros(3)), "ValueError: old_logprobs: expected .T. or .S, L."),
    (loss(weights=torch.zeros(4, 1)), "ValueError: weights: expected"),
    (loss(**BORDERS), "ValueError: cu_seqlens: expected the borders"),
    (loss(**BORDERS, cu_seqlens=ROW), "TypeError: expected an int32 or int64 .*float32"),
    (loss(**BORDERS, cu_seqlens=INDICES[None]), "ValueError: shape .sequences . 1., got .1, 2."),
    (loss(normalisation="constant"), "ValueError: denominator: expected a number"),
    (lambda g: importance_correction(ROW, ROW, MASK, low=3.0), "ValueError: low <= high, got 2.0"),
    *(
        (call, "ValueError: logprobs: expected .*, got None.*FieldNames")
        for call in (
            lambda g: importance_correction(ROW, None, MASK),
            lambda g: policy_loss(ROW, None, ROW, MASK),
            lambda g: kl_estimate(ROW, None, MASK),
        )
    ),
    (lambda g: unpad_input(HIDDEN, torch.ones(2, 3)), "TypeError: expected bool or integers, got"),
    (lambda g: unpad_input(HIDDEN, MASK), r"ValueError: got \(4,\)"),
    (
        lambda g: unpad_input(HIDDEN, torch.ones(2, 4, dtype=torch.bool)),
        r"ValueError: = \(2, 3\) as in hidden, got \(2, 4\)",
    ),
    (lambda g: unpad_input([1.0], MASK), "TypeError: hidden: expected a torch.Tensor, got list"),  # type: ignore[arg-type]
    (lambda g: unpad_input(HIDDEN, None), "TypeError: attention_mask: .*Tensor, got NoneType"),  # type: ignore[arg-type]
    (
        lambda g: unpad_input(HIDDEN, torch.ones(2, 3, dtype=torch.int64), 1),  # type: ignore[arg-type]
        "TypeError: unused_mask: expected a torch.Tensor, got int",
    ),
    (lambda g: pad_input(TWO, TWO[:, 0], 2, 3), "TypeError: indices: expected int64, got torch.f"),
    (lambda g: pad_input(TWO, INDICES[:1], 2, 3), "ValueError: an index per row of hidden"),
    (lambda g: pad_input(TWO, INDICES + 99, 2, 3), "IndexError: out of range|out of bounds"),
    (lambda g: pad_input(TWO, [0], 2, 3), "TypeError: indices: expected a torch.Tensor, got list"),  # type: ignore[arg-type]
    (lambda g: pad_input(TWO, INDICES, 2.0, 3), "TypeError: batch: expected an int, got float"),  # type: ignore[arg-type]
    (lambda g: pad_input(TWO, INDICES, 2, -3), "ValueError: seqlen: expected 0 or more, got -3"),
    (lambda g: GpuPacker("cpu"), "ValueError: device: expected a CUDA device, got cpu"),
    (
        lambda g: GpuPacker("cuda", transport="rdma"),  # type: ignore[arg-type]
        r"ValueError: transport: expected 'auto'.*got 'rdma'",
    ),
]


@pytest.fixture(scope="module")
def given() -> Iterator[SimpleNamespace]:
    names = [f"{RUN_PREFIX}arguments-{letter}" for letter in "abc"]
    with (
        Bus.create(names[0], "1MiB") as bus,
        Bus.create(names[1], "1MiB"),
        Producer(names[1]) as producer,
        Consumer(names[1]) as consumer,
        Bus.create(names[2], "1MiB"),
        OnlineDataHandler(names[2], groups_per_batch=1) as asked,
    ):
        for index in range(2):
            producer.put("g", group_size=2, index=index, score=index, tokens=np.arange(4))
        (group,) = consumer.take(timeout=10)
        yield SimpleNamespace(bus=bus, handler=asked, group=group, batch=pack(group))


@pytest.mark.parametrize(("call", "said"), REFUSED)
def test_a_wrong_argument_is_named_and_costs_nothing(call: Call, said: str, given: Any) -> None:
    before = given.handler.state_dict()
    refused(said, call, given)
    assert given.handler.state_dict() == before
    # Nobody became the bus's consumer, and the group is leased still.
    with Consumer(given.bus.name):
        pass
    assert pack(given.group).instance_ids == ["g", "g"]
