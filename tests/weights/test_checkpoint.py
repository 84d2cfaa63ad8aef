"""The carrier of files: whole versions under one link, whatever the writer dies of."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from conftest import Spawner, wait_until
from safetensors.torch import load_file
from weight_models import Odd, bits, many, same

from shmbus import DamagedError, WaitTimeoutError
from shmbus.weights import (
    ManifestError,
    ModuleSource,
    WeightPublisher,
    WeightsError,
    WeightSubscriber,
)


def publisher_of(model: torch.nn.Module, directory: Path) -> WeightPublisher:
    return WeightPublisher("run1", ModuleSource(model), carrier="checkpoint", directory=directory)


def reader_of(directory: Path) -> WeightSubscriber:
    return WeightSubscriber("run1", carrier="checkpoint", directory=directory)


def test_every_bit_arrives_by_files_and_old_ones_go(tmp_path: Path) -> None:
    model, replica = Odd(1), Odd(2)
    with publisher_of(model, tmp_path) as publisher, reader_of(tmp_path) as reader:
        assert publisher.carrier.name == "checkpoint"
        for version in (7, 3, 9, 10):
            with torch.no_grad():
                model.turned.add_(1)
            if version == 3:
                publisher.new_life()
            publisher.publish(version=version, text="x")
            with reader.latest(timeout=5) as weights:
                assert (weights.version, weights.text) == (version, "x")
                weights.load_into(replica)
            assert same(model, replica)
        assert reader.wait(newer_than=9, timeout=5) == 10
        with pytest.raises(WaitTimeoutError):
            reader.wait(newer_than=10, timeout=0.1)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names == ["latest", "version-10-00000004", "version-9-00000003"]
    plain = load_file(tmp_path / "latest" / "model.safetensors")  # as any engine reads it
    assert bits(plain["turned"]) == bits(model.turned)


def test_a_killed_writer_leaves_a_whole_newest_file(tmp_path: Path, spawn: Spawner) -> None:
    child = spawn.script(
        "import sys, torch\nfrom shmbus.weights import *\n"
        "model = torch.nn.Linear(900, 900)\n"
        "p = WeightPublisher('run1', ModuleSource(model), carrier='checkpoint', "
        "directory=sys.argv[1])\n"
        "for version in range(1, 100000):\n"
        "    torch.nn.init.constant_(model.weight, version)\n"
        "    torch.nn.init.constant_(model.bias, version)\n"
        "    p.publish(version=version)\n",
        tmp_path,
    )
    replica = torch.nn.Linear(900, 900)
    with reader_of(tmp_path) as reader:
        wait_until(lambda: reader.wait(timeout=30) > 3)
        child.kill()
        with reader.latest(timeout=5) as weights:
            weights.load_into(replica)
            assert (replica.weight == weights.version).all()
            assert (replica.bias == weights.version).all()
    (tmp_path / ".new-left").mkdir(exist_ok=True)
    with publisher_of(replica, tmp_path) as publisher:
        publisher.publish(version=0)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".new")]


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with publisher_of(many(3), tmp_path) as publisher, reader_of(tmp_path) as reader:
        publisher.publish(version=1)
        path = tmp_path / os.readlink(tmp_path / "latest") / "model.safetensors"
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) // 2])
        with pytest.raises(DamagedError, match="nothing was loaded"):
            reader.latest(timeout=1)
        path.write_bytes(whole.replace(b'"shmbus"', b'"shmbux"'))
        with pytest.raises(ManifestError, match="not published by shmbus"):
            reader.latest(timeout=1)


def test_options_of_the_other_carrier_are_refused(tmp_path: Path) -> None:
    source = ModuleSource(many(1))
    with pytest.raises(ValueError, match="world_size=1"):
        WeightPublisher("x", source, carrier="checkpoint", directory=tmp_path, world_size=2)
    with pytest.raises(ValueError, match="digests=False"):
        WeightPublisher("x", source, carrier="checkpoint", directory=tmp_path, digests=True)
    with pytest.raises(WeightsError, match="no directory was given"):
        WeightPublisher("x", source, carrier="checkpoint")
    with publisher_of(many(1), tmp_path) as publisher:
        publisher.publish(version=1)
    with (
        WeightSubscriber("x", carrier="checkpoint", directory=tmp_path, verify="all") as reader,
        pytest.raises(WeightsError, match="writes no digests"),
    ):
        reader.latest(timeout=1)
