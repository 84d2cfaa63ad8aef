"""Samples of a recorder in the batches of OnlineDataHandler: they are what the engine sampled."""

from collections.abc import Iterator
from typing import Any

import pytest
from http_harness import Row, Sample, log_of, playing, recording

import shmbus

pytest_plugins = ["recorder_fixtures"]

pytest.importorskip("torch")

SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}


@pytest.fixture(params=[None, SCHEMA], ids=["without schema", "with schema"])
def bus(request: pytest.FixtureRequest, bus_name: str) -> Iterator[shmbus.Bus]:
    with shmbus.Bus.create(bus_name, "4MiB", schema=request.param) as bus:
        yield bus


def test_a_batch_has_what_the_engine_sampled(bus: shmbus.Bus, seed: int) -> None:
    from trainer_adapter import OnlineDataHandler

    prompts: Any = ({"instance_id": f"q{number}"} for number in range(4))

    def newer() -> None:
        bus.policy_version += 1

    with (
        recording(bus.name, seed) as (engine, url),
        OnlineDataHandler(bus.name, groups_per_batch=2) as handler,
        playing(url, rewritten=True, between=newer),
    ):
        handler.offer(prompts, group_size=3)
        for _ in range(2):
            batch = handler.next_batch(60.0)
            log = log_of(engine)
            told: list[tuple[Row, Sample]] = []
            for group in batch.groups:
                samples = [log[f"{group.instance_id}[{index}]"] for index in range(3)]
                told += [(row, sample) for sample in samples for row in sample.rows]
            assert len(told) == 8, "a history that was rewritten is a row more"
            assert batch.lengths == [len(row.tokens) for row, _ in told]
            assert batch.tokens.tolist() == [i for row, _ in told for i in row.tokens]
            assert batch.loss_mask.tolist() == [bit for row, _ in told for bit in row.mask]
            assert batch.logprobs is not None
            assert batch.logprobs.tolist() == [x for row, _ in told for x in row.logprobs]
            assert batch.scores.tolist() == [sample.score for _, sample in told]
            assert batch.policy_versions.tolist() == [sample.versions[0] for _, sample in told]
            newest = [sample.versions[1] for _, sample in told]
            assert batch.newest_policy_versions.tolist() == newest
            handler.ack(batch)
