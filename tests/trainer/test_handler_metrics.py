"""Figures of a handler for a logger: against NumPy, since the last call, and to callbacks."""

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Daemon, train_next, wait_until
from numpy_batches import put_random
from prometheus_client import generate_latest
from torch.utils.data import DataLoader

import shmbus
from shmbus import Bus, Producer
from shmbus.daemon.metrics import BusCollector
from shmbus.data.status_types import MismatchStatus
from shmbus.inspect.status import read_status
from shmbus.inspect.text import status_text
from trainer_adapter import LogprobMismatch, OnlineDataHandler
from trainer_adapter.handler.metrics import KINDS, PENDING_BATCHES

ROOT = Path(__file__).resolve().parents[2]


def put(producer: Producer, key: str, scores: list[float], **more: Any) -> None:
    for index, score in enumerate(scores):
        given = {"tokens": np.arange(3 + index), "meta": {"finish_reason": "stop"}, **more}
        producer.put(
            key, group_size=len(scores), index=index, score=score, timeout=10, policy_version=index,
            **given,
        )  # fmt: skip


def test_metrics_are_those_of_the_batches_since_the_last_call(bus: Bus, producer: Producer) -> None:
    scores = [[1.0, 0.0, 4.0], [2.0, 2.0], [-1.0, 0.5, 0.25], [1e6, 1e6 + 1]]
    for number, group in enumerate(scores):
        put(producer, f"k{number}", group)
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        handler.set_policy_version(5)
        nothing = handler.metrics()
        assert nothing["batches"] == 0 and "reward/mean" not in nothing
        for _ in range(2):
            handler.ack(handler.next_batch(10))
        found = handler.metrics()
        flat = np.concatenate(scores)
        versions = np.concatenate([np.arange(len(group)) for group in scores])
        lengths = versions + 3
        want = {
            "step": 2, "policy_version": 5, "batches": 2,
            "reward/mean": flat.mean(), "reward/std": flat.std(),
            "reward/min": -1.0, "reward/max": 1e6 + 1,
            "lag/mean": (5 - versions).mean(), "lag/max": 5,
            "length/mean": lengths.mean(), "length/min": 3, "length/max": 5,
            "batch/tokens": lengths.sum() / 2, "batch/sequences": 5, "batch/groups": 2,
            "batch/fill": 1.0, "share/truncated": 0.0, "share/zero_variance": 0.25,
            "drops/total": 0, "drops/malformed": 0, "bus/producers": 1, "bus/groups_open": 0,
        }  # fmt: skip
        assert {name: found[name] for name in want} == pytest.approx(want)
        assert found["time/pack_s"] > 0 and found["rate/tokens_per_s"] > 0
        assert all(type(value) is float for value in found.values())
        assert json.loads(json.dumps(found)) == found
        assert handler.metrics("rollout/")["rollout/batches"] == 0


def test_batches_that_nobody_asked_about_are_added_up(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        scores = []
        for number in range(2 * PENDING_BATCHES + 5):
            scores += [float(number), 0.5 * number]
            put(producer, f"k{number}", scores[-2:])
            handler.ack(handler.next_batch(10))
        found = handler.metrics()
        assert found["batches"] == 2 * PENDING_BATCHES + 5
        got = [found[f"reward/{name}"] for name in ("mean", "std", "min", "max")]
        want = np.array(scores)
        assert got == pytest.approx([want.mean(), want.std(), want.min(), want.max()])
        assert found["share/zero_variance"] == pytest.approx(1 / found["batches"])


def test_drops_are_counted_by_reason_since_the_last_call(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, malformed="drop", skip_zero_variance=True
    ) as handler:
        for number in range(3):
            put(producer, f"good{number}", [0.0, 1.0])
            put(producer, f"bad{number}", [0.0, 1.0], tokens=np.zeros(2))
            put(producer, f"level{number}", [1.0, 1.0, 1.0])
        handler.ack(handler.next_batch(10))
        wait_until(lambda: handler.stats().in_ring == 0 or handler.next_batch(0.1))
        found = handler.metrics()
        dropped = handler.stats().dropped
        assert {reason: found[f"drops/{reason}"] for reason in dropped} == dropped
        assert found["drops/total"] == sum(dropped.values()) > 0
        assert handler.metrics()["drops/total"] == 0


def test_truncated_samples_are_counted_from_the_first_call_on(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        handler.metrics()
        put(producer, "a", [0.0, 1.0], meta={"finish_reason": {"type": "length"}})
        put(producer, "b", [0.0, 1.0], meta={"length": 9, "finish_reason": "stop"})
        for _ in range(2):
            handler.ack(handler.next_batch(10))
        assert handler.metrics()["share/truncated"] == 0.5


def test_the_page_has_every_name(bus: Bus, producer: Producer) -> None:
    page = (ROOT / "docs" / "trainer.md").read_text()
    rows = page.partition("## Metrics")[2].partition("\n## ")[0]
    named = set(re.findall(r"^\| `([^`]+)`", rows, re.MULTILINE))
    put(producer, "a", [1.0, 3.0])
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        handler.next_batch(10)
        handler.note_mismatch(LogprobMismatch(*torch.ones(7)))
        found = handler.metrics()
    reasons = {name for name in found if name.startswith("drops/")} - {"drops/total"}
    assert set(found) - reasons | {"drops/REASON"} == named
    assert {name.partition("/")[0] for name in found if "/" in name} == set(KINDS)


def test_noted_differences_are_averaged_for_the_logger_and_the_newest_is_seen_beside_the_bus(
    daemon: Callable[..., Daemon], bus_name: str
) -> None:
    daemon("--capacity", "4MiB")

    def seen() -> MismatchStatus | None:
        return read_status(bus_name, walk=False).mismatch

    split = LogprobMismatch(*torch.tensor([0.1, 0.5, 0.01, 0.25, 0.02, 0.06, 0.75]))
    later = LogprobMismatch(*torch.tensor([0.3, 0.7, torch.inf, 0.125, *[torch.nan] * 3]))
    with (
        OnlineDataHandler(bus_name, groups_per_batch=1) as handler,
        OnlineDataHandler(bus_name, groups_per_batch=1, split="eval") as other,
        Producer(bus_name) as producer,
    ):
        assert seen() is None
        handler.set_policy_version(7)
        handler.note_mismatch(split, engine=torch.bfloat16, trainer="float32")
        handler.note_mismatch(later, engine=torch.bfloat16, trainer="float32")
        other.note_mismatch(later)
        put(producer, "a", [1.0, 3.0])
        handler.next_batch(10)
        want = {
            "mean": 0.2, "p99": 0.6, "k3": 0.01, "clipped": 0.1875,
            "policy_change": 0.02, "precision_gap": 0.06, "gap_share": 0.75,
        }  # fmt: skip
        found = handler.metrics()
        got = {name[9:]: value for name, value in found.items() if name.startswith("mismatch/")}
        assert got == pytest.approx(want)
        assert "mismatch/mean" not in handler.metrics()
        newest = seen()
        assert newest is not None
        assert (newest.policy_version, newest.engine, newest.trainer) == (7, "bfloat16", "float32")
        newest_figures = {name: getattr(newest, name) for name in want}
        assert newest_figures == pytest.approx({**want, "mean": 0.3, "p99": 0.7, "clipped": 0.125})
        text = generate_latest(BusCollector(bus_name)).decode()
        assert f'shmbus_logprob_share{{bus="{bus_name}",kind="gap_share"}} 0.75' in text
        shown = (
            "logprobs of engine and trainer differ by 0.3000 a token, 75% of that by rounding; 12%"
        )
        assert shown in status_text(read_status(bus_name))
        device = SimpleNamespace(query=lambda: False, synchronize=lambda: None)
        handler._metrics._copied = device  # still computes
        handler.note_mismatch(split)
        assert seen() == newest
        assert handler.metrics()["mismatch/mean"] == pytest.approx(0.1)
        assert seen() != newest
        with pytest.raises(TypeError, match="got dict"):
            handler.note_mismatch({"mean": 0.1})  # type: ignore[arg-type]
        with pytest.raises(TimeoutError) as caught:
            handler.next_batch(0.3)
        assert "rounding" not in str(caught.value)
    assert seen() is None
    with pytest.raises(shmbus.BusClosedError):
        handler.note_mismatch(split)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_useless_groups_are_counted(bus: Bus, producer: Producer, prefetch: int) -> None:
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, prefetch=prefetch, skip_zero_variance=True
    ) as handler:
        assert handler.refill == 0
        put(producer, "level", [1.0, 1.0, 1.0, 1.0])
        put(producer, "long", [1.0, 0.0, 0.0])
        assert train_next(handler) == ["long"]
        assert handler.stats().dropped == {"zero_variance": 4}
        assert handler.refill == producer.groups_dropped == 1
        assert handler.metrics()["refill/groups"] == 1
        assert handler.metrics()["refill/groups"] == 0


def test_an_iteration_may_follow_a_timed_out_one(bus: Bus, producer: Producer) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        put(producer, "a", [1.0])
        got = []
        with pytest.raises(TimeoutError, match=r"no batch within 0\.05 s"):
            for batch in handler.iter(timeout=0.05):
                got += batch.instance_ids
                handler.ack(batch)
        put(producer, "b", [1.0])
        for batch in handler.iter(timeout=10):
            got += batch.instance_ids
            handler.ack(batch)
            if got[-1] == "b":
                handler.close()
        assert got == ["a", "b"]


def test_a_loader_that_would_collate_is_refused_before_a_batch_is_taken(
    bus: Bus, producer: Producer, caplog: pytest.LogCaptureFixture
) -> None:
    put(producer, "a", [1.0])
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        with pytest.raises(TypeError, match=r"pass DataLoader\(handler, batch_size=None\)"):
            next(iter(DataLoader(handler)))
        assert handler.step == 0
        with caplog.at_level(logging.WARNING):
            batch = next(iter(DataLoader(handler, batch_size=None)))
        handler.ack(batch)
        assert handler.stats().acknowledged == 1
        put(producer, "b", [1.0])
        own = DataLoader(handler, batch_size=1, collate_fn=lambda items: items[0])
        assert next(iter(own)).instance_ids == ["b"]


def test_figures_survive_an_interrupted_count(bus: Bus, producer: Producer, seed: int) -> None:
    groups = put_random(producer, seed, 3)
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        for _ in groups:
            handler.ack(handler.next_batch(10))
        # As an exception between noting a batch and counting its samples leaves it.
        handler._metrics._meter._pending_samples -= 1
        found = handler.metrics()
        scores = [s["score"] for group in groups.values() for s in group]
        assert found["batches"] == 3
        assert found["reward/mean"] == pytest.approx(np.mean(scores))
