"""What a newcomer meets first: short reprs, the present line, a DataLoader, a missing torch."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
from torch.utils.data import DataLoader

from shmbus import Bus, Producer
from trainer_adapter import OnlineDataHandler, pack


def put(producer: Producer, key: str) -> None:
    for index in range(2):
        producer.put(key, group_size=2, index=index, score=index, tokens=np.arange(6))


def test_handler_and_batch_say_what_they_are_in_one_line(bus: Bus, producer: Producer) -> None:
    put(producer, "a")
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        assert repr(handler) == f"<OnlineDataHandler {bus.name!r} step 0>"
        batch = handler.next_batch(timeout=10)
        words = "1 group, 2 sequences, 12 tokens, packed on cpu, without logprobs"
        assert repr(batch) == f"<Batch step 0: {words}>"
        assert repr(pack(batch.groups)) == f"<Batch: {words}>"
        assert repr(handler) == f"<OnlineDataHandler {bus.name!r} step 1 1 out>"
        handler.ack(batch)
    assert repr(handler) == f"<OnlineDataHandler {bus.name!r} step 1 closed>"


def test_the_progress_line_is_the_present_one_without_output_too(
    bus: Bus, producer: Producer
) -> None:
    put(producer, "a")
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        assert handler.progress.line == "no batch yet"
        handler.ack(handler.next_batch(timeout=10))
        assert handler.progress.line.startswith("step 0: 1 group, 2 sequences, 12 tokens")
        assert "lag 0.0" in handler.progress.line
        handler.set_policy_version(3)
        assert "lag 3.0" in handler.progress.line
        last = handler.progress.line
    assert handler.progress.line == last


def test_a_data_loader_that_collates_is_refused_before_a_batch_is_taken(
    bus: Bus, producer: Producer
) -> None:
    put(producer, "a")
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        with pytest.raises(TypeError, match=r"DataLoader\(handler, batch_size=None\)"):
            next(iter(DataLoader(handler)))
        assert handler.step == 0
        batch = next(iter(DataLoader(handler, batch_size=None)))
        assert batch.instance_ids == ["a", "a"]
        handler.ack(batch)
        put(producer, "b")
        own = DataLoader(handler, batch_size=1, collate_fn=lambda items: items[0])
        assert next(iter(own)).instance_ids == ["b", "b"]


def test_without_torch_the_import_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "try:\n"
        "    from trainer_adapter import OnlineDataHandler\n"
        "except ModuleNotFoundError as error:\n"
        "    print(error.name, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("torch trainer_adapter.OnlineDataHandler needs torch")
    assert "pip install torch" in done.stdout
