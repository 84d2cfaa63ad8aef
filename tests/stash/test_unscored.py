"""Samples that are put without a score: scored by who takes them, never guessed."""

import asyncio
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Daemon

import shmbus
from shmbus import Consumer, Producer, UnscoredError
from shmbus.inspect.status import read_status
from shmbus.relay.record_reader import RecordReader, reason_of
from shmbus.store import snapshot
from shmbus_ext import _core

TOKENS = np.arange(4, dtype=np.int32)


def put_pair(producer: Producer, key: str = "q") -> None:
    producer.put(key, group_size=2, index=0, score=None, tokens=TOKENS)
    producer.put(key, group_size=2, index=1, score=0.5, tokens=TOKENS)


def test_a_sample_without_a_score_says_so_and_is_no_zero(producer: Producer) -> None:
    put_pair(producer)
    with Consumer(producer.name) as consumer:
        [group] = consumer.take(timeout=10)
        first, second = group
        assert (first.scored, second.scored, second.score) == (False, True, 0.5)
        assert "score=None" in repr(first) and "score=None" in repr(first.copy())
        for read in (lambda: first.score, lambda: group.scores, lambda: first.copy().score):
            with pytest.raises(UnscoredError, match=r"'q'\[0\] of producer \d+: expected a score"):
                read()
        assert first.to_dict()["score"] is None
        kept = pickle.loads(pickle.dumps(group.copy()))
        assert [one.scored for one in kept] == [False, True]
        kept[0].score = 2
        assert kept.scores.tolist() == [2.0, 0.5] and not first.scored
        with pytest.raises(ValueError, match="finite"):
            kept[0].score = math.inf


def test_who_takes_it_scores_it_once_or_again_but_not_over_its_producer(
    producer: Producer,
) -> None:
    put_pair(producer)
    with Consumer(producer.name) as consumer:
        [group] = consumer.take(timeout=10)
        for score in (1, np.float32(0.25), torch.tensor(0.75)):
            group[0].score = score
            assert group[0].score == float(score)
        assert group.scores.tolist() == [0.75, 0.5]
        for wrong, error in ((math.nan, ValueError), ("x", TypeError), (None, TypeError)):
            with pytest.raises(error, match="score: expected"):
                group[0].score = wrong  # type: ignore[assignment]
        with pytest.raises(
            AttributeError, match=r"'q'\[1\]: score: expected one that its producer"
        ):
            group[1].score = 1.0
        with pytest.raises(AttributeError):
            del group[0].score
        assert group.scores.tolist() == [0.75, 0.5]


def test_a_score_lives_as_long_as_the_process_that_gave_it(producer: Producer) -> None:
    put_pair(producer)
    with Consumer(producer.name) as consumer:
        [group] = consumer.take(timeout=10)
        group[0].score = 0.75
        group.give_back()
        [group] = consumer.take(timeout=10)
        assert group[0].score == 0.75
    with Consumer(producer.name) as consumer:
        [group] = consumer.take(timeout=10)
        assert not group[0].scored  # whoever comes after a death scores it anew
        group.ack()
        assert consumer.stats().balanced


def _reserve(producer: Producer, **head: Any) -> None:
    with producer.reserve("q", fields={"tokens": ("int32", 4)}, **head) as slot:
        assert slot.score is None
        slot["tokens"][:] = TOKENS


def _reserve_and_forget(producer: Producer, *, score: None, **head: Any) -> None:
    with producer.reserve("q", fields={"tokens": ("int32", 4)}, **head) as slot:
        slot["tokens"][:] = TOKENS
        slot.score = score


WAYS: dict[str, Callable[..., Any]] = {
    "put": lambda p, **head: p.put("q", tokens=TOKENS, **head),
    "put_many": lambda p, **head: p.put_many([{"instance_id": "q", "tokens": TOKENS, **head}]),
    "put_group": lambda p, **head: p.put_group("q", [{"score": None, "tokens": TOKENS}]),
    "aput": lambda p, **head: asyncio.run(p.aput("q", tokens=TOKENS, **head)),
    "reserve": _reserve,
    "slot.score": _reserve_and_forget,
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_put_takes_none(producer: Producer, way: str) -> None:
    WAYS[way](producer, group_size=1, index=0, score=None)
    with Consumer(producer.name) as consumer:
        [group] = consumer.take(timeout=10)
        assert not group[0].scored and group[0]["tokens"].tolist() == TOKENS.tolist()


def test_nobody_counts_what_is_not_known(producer: Producer) -> None:
    for key in ("a", "b"):
        for index in range(2):
            producer.put(key, group_size=2, index=index, score=None, tokens=TOKENS)
    producer.put("open", group_size=2, index=0, score=None, tokens=TOKENS)
    with Consumer(producer.name, skip_zero_variance=True) as consumer:
        groups = consumer.take(timeout=10)
        assert [group.instance_id for group in groups] == ["a", "b"]  # as it may be unequal yet
        delivered = {each.name: sum(each.buckets) for each in read_status(producer.name).delivered}
        assert delivered["length"] == 4
        assert delivered["score"] == delivered["solved"] == 0


def test_it_is_scored_beside_a_daemon(producer: Producer, daemon: Callable[..., Daemon]) -> None:
    put_pair(producer)
    daemon()
    with Consumer(producer.name) as consumer:
        [group] = consumer.take(timeout=30)
        assert not group[0].scored
        group[0].score = 0.25
        assert group.scores.tolist() == [0.25, 0.5]


def test_a_snapshot_keeps_it_open(producer: Producer, tmp_path: Path) -> None:
    put_pair(producer)
    snapshot.take(producer.name, tmp_path / "snap")
    other = f"{producer.name}.again"
    snapshot.restore(tmp_path / "snap", other)
    try:
        with Consumer(other) as consumer:
            [group] = consumer.take(timeout=10)
            assert [one.scored for one in group] == [False, True]
    finally:
        shmbus.unlink(other)


def test_a_relay_carries_it_as_it_is(producer: Producer) -> None:
    put_pair(producer)
    with RecordReader(producer.name) as reader:
        _, records = reader.poll(10)
        heads = _core.unpack_heads(_core.read_heads(records, reason_of))
        assert math.isnan(heads[0].score) and heads[1].score == 0.5
