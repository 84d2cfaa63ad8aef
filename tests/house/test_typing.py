"""A type checker finds a wrong keyword, or a wrong value, in each public call."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import shmbus
from trainer_adapter._arguments import ConsumerOptions

ROOT = Path(__file__).resolve().parents[2]

NAMES = """
from typing import cast

import numpy as np
import torch

import shmbus
from trainer_adapter import (
    Batch, ExtraField, FieldNames, OnlineDataHandler, group_advantages, pack,
    varlen_attention,
)
from trainer_adapter.attention import attention_backend, register_with_transformers
from trainer_adapter.balance import balance, by_budget
from trainer_adapter.compat import pad_input, unpad_input
from trainer_adapter.corrections import (
    cispo_loss, gspo_loss, importance_correction, overlong_penalty,
)
from trainer_adapter.losses import aggregate_loss, kl_estimate, policy_loss
from trainer_adapter.microbatch import micro_batches

producer = cast(shmbus.Producer, None)
consumer = cast(shmbus.Consumer, None)
group = cast(shmbus.Group, None)
handler = cast(OnlineDataHandler, None)
batch = cast(Batch, None)
tensor = cast(torch.Tensor, None)
scores = np.zeros(4, np.float32)
"""

# A call with a gap, what is right in it, and what is wrong. A misspelt keyword of `put` that may be
# left out, such as `score`, is the name of an array to a type checker.
CALLS = [
    ('shmbus.Bus.create("b", {})', 'capacity="1MiB"', 'capcity="1MiB"'),
    ('shmbus.Bus.create("b", capacity=1 << 20, {})', "max_producers=2", 'max_producers="2"'),
    ("shmbus.Bus.open({})", '"b"', 'bus="b"'),
    ("shmbus.unlink({})", '"b"', "1"),
    ('shmbus.Producer("b", {})', "checksum=True", "check_sum=True"),
    ('shmbus.Producer("b", {})', 'on_stall="raise"', 'on_stall="rise"'),
    ('producer.put("k", index=0, tokens=scores, {})', "group_size=8", "groupsize=8"),
    ('producer.put("k", group_size=8, index=0, {})', "score=1.0", 'score="high"'),
    ('producer.put("k", group_size=8, index=0, {})', "tokens=[1, 2]", "group_siz=2"),
    ('producer.put("k", group_size=8, index=0, {})', "tokens=tensor", "timout=0.5"),
    ('producer.put("k", group_size=8, index=0, {})', "score=tensor", "tokens=7"),
    ("producer.put({}, group_size=8, index=0)", "17", "1.5"),
    ('pending = producer.aput("k", group_size=8, index=0, {})', "tokens=(1, 2)", "group_siz=2"),
    ('shmbus.Bus.create("b", {})', 'schema={"tokens": "int32", "e": ("u1", ("T", 8))}', "schema=1"),
    ('shmbus.Producer("b", {})', 'schema={"tokens": "int32"}', 'shema={"tokens": "int32"}'),
    ('producer.reserve("k", group_size=1, index=0, fields={})', '{"tokens": 5}', '{"tokens": 0.5}'),
    ('repr(producer.aput("k", index=0, tokens=scores, {}))', "group_size=8", "group_siz=8"),
    ('repr(producer.aput("k", group_size=8, index=0, {}))', "score=1.0", 'score="high"'),
    ("repr(producer.aput_many([], {}))", "timeout=1.0", "time_out=1.0"),
    ('repr(shmbus.Producer.awaited("b", {}))', 'on_stall="raise"', 'onstall="raise"'),
    ('shmbus.Producer("b", {})', "wait=60.0", 'wait="60"'),
    ('shmbus.Consumer("b", {})', "wait=None", "waits=None"),
    ('OnlineDataHandler("b", {})', "wait=60.0", "waiting=60.0"),
    ('shmbus.Bus.ensure("b", {})', 'capacity="1MiB"', 'capcity="1MiB"'),
    ("producer.put_many([], {})", "timeout=1.0", "time_out=1.0"),
    ('producer.reserve("k", group_size=1, index=0, {})', "fields={}", "field={}"),
    ('producer.fail("k", group_size=1, index=0, {})', 'reason="x"', 'raeson="x"'),
    ('shmbus.Consumer("b", {})', "group_timeout=1.0", "group_time_out=1.0"),
    ('shmbus.Consumer("b", {})', 'on_timeout="drop"', 'on_timeout="discard"'),
    ("consumer.take({})", "max_groups=4", "groups=4"),
    ("repr(consumer.atake({}))", "max_groups=4", "groups=4"),
    ("consumer.take_shard(groups=1, {})", "only_full=True", "full_only=True"),
    ("consumer.ack({})", "group", "batch"),
    ("consumer.ack({})", "group", "group.copy()"),
    ("len(group{}.scores)", "", "[0]"),
    ("group.copy()[0]{}", '["tokens"]', ".tokens"),
    ("group[0].{}()", "copy", "clone"),
    ('OnlineDataHandler("b", {})', "tokens_per_batch=9", "token_per_batch=9"),
    ('OnlineDataHandler("b", {})', 'layout="padded"', 'layout="ragged"'),
    ('OnlineDataHandler("b", {})', "max_policy_lag=4", "max_lag=4"),
    ('OnlineDataHandler("b", {})', 'on_timeout="drop"', 'on_timeout="discard"'),
    ('OnlineDataHandler("b", {})', "on_stall=print", "on_stall=1"),
    ('OnlineDataHandler("b", {})', 'advantages="grpo"', 'advantags="grpo"'),
    ('OnlineDataHandler("b", {})', 'extra_fields={"x": "token"}', 'extra_fields={"x": "tokn"}'),
    ('OnlineDataHandler("b", {})', "on_metrics=print", "on_metric=print"),
    ('OnlineDataHandler("b", {})', "keep_group=lambda group: len(group) > 1", "keep_group=1"),
    ("handler.iter({})", "timeout=1.0", 'timeout="1"'),
    ("handler.metrics({})", 'prefix="a/"', "prefix=1"),
    ('batch.to("cuda", {})', "non_blocking=True", "nonblocking=True"),
    ('ExtraField(kind="token", {})', "fill=0", "fil=0"),
    ("importance_correction(tensor, tensor, tensor, {})", 'mode="mask"', 'mode="cut"'),
    ("gspo_loss(tensor, tensor, tensor, tensor, {})", "clip_low=0.1", "clip=0.1"),
    ("cispo_loss(tensor, tensor, tensor, tensor, {})", "high=5.0", "epsilon_high=5.0"),
    ("overlong_penalty([1], longest=9, {})", "buffer=3", 'buffer="3"'),
    ("consumer.drop(group, {})", 'reason="filtered"', "reson=1"),
    ("handler.next_batch({})", "timeout=1.0", "time_out=1.0"),
    ("handler.ack({})", "batch", "group"),
    ("pack(group, {})", 'advantages="rloo"', 'advantage="rloo"'),
    ("pack(group, {})", 'truncated="mask"', 'truncated="hide"'),
    ("pack(group, fields=FieldNames({}))", 'tokens="ids"', 'token="ids"'),
    ("group_advantages(scores, sizes=[4], {})", 'kind="grpo"', 'kind="ppo"'),
    ("group_advantages(scores, {})", "sizes=[4]", "size=[4]"),
    ("micro_batches(batch, {})", "max_tokens=9", "max_token=9"),
    ("balance([1], 1, {})", "fill_all=False", "fill=False"),
    ("by_budget([1], {})", "budget=1", 'budget="1"'),
    ("policy_loss(tensor, tensor, tensor, tensor, {})", "denominator=1.0", "denom=1.0"),
    ("kl_estimate(tensor, tensor, tensor, {})", 'kind="k3"', 'kind="k4"'),
    ("aggregate_loss(tensor, tensor, {})", 'normalisation="token"', 'normalize="token"'),
    (
        "varlen_attention(tensor, tensor, tensor, tensor, tensor, 1, 1, {})",
        "window_size=(-1, 0)",
        "window=(-1, 0)",
    ),
    ("attention_backend(tensor, tensor, 1, 1, {})", 'backend="sdpa"', 'backend="math"'),
    ("register_with_transformers({})", 'backend="sdpa"', 'back_end="sdpa"'),
    ("unpad_input({}, tensor)", "tensor", "scores"),
    ("pad_input(tensor, tensor, 1, {})", "seqlen=1", "length=1"),
]


def errors_of_mypy(source: Path) -> tuple[set[int], str]:
    """Lines with errors, and what was said."""
    # With the cache of the checkout: `make check` has left the types of torch there, or finds them.
    result = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir", ROOT / ".mypy_cache", source],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    found = {int(line) for line in re.findall(r"calls\.py:(\d+): error", result.stdout)}
    return found, result.stdout + result.stderr


def errors_of_pyright(source: Path) -> tuple[set[int], str]:
    """Lines with errors, and what was said."""
    result = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, source],
        capture_output=True,
        text=True,
        cwd=source.parent,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"},
    )
    found = {int(line) for line in re.findall(r"calls\.py:(\d+):\d+ - error", result.stdout)}
    return found, result.stdout + result.stderr


# A cold cache: they read what torch's types need.
@pytest.mark.slow
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_type_checker_finds_a_mistake_in_each_public_call(checker: str, tmp_path: Path) -> None:
    pytest.importorskip(checker)
    lines = NAMES.splitlines()
    first = len(lines) + 1
    lines += [call.format(argument) for call, *arguments in CALLS for argument in arguments]
    source = tmp_path / "calls.py"
    source.write_text("\n".join(lines) + "\n")
    found, said = {"mypy": errors_of_mypy, "pyright": errors_of_pyright}[checker](source)
    assert found, said
    right = [lines[n - 1] for n in sorted(found) if n < first or (n - first) % 2 == 0]
    assert not right, f"right, but refused: {right}\n{said}"
    wrong = [lines[n - 1] for n in range(first + 1, len(lines) + 1, 2) if n not in found]
    assert not wrong, f"wrong, but not found: {wrong}"


def test_the_handler_takes_each_option_of_a_consumer() -> None:
    taken = inspect.signature(shmbus.Consumer).parameters.keys()
    assert ConsumerOptions.__annotations__.keys() == taken - {"name", "rank", "world_size"}
