"""The carrier of files: whole versions under a link, a writer at a time, through any failure."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Spawner, wait_until
from safetensors.torch import load_file
from weight_models import Odd, bits, many, same

from shmbus import BusBusyError, DamagedError, WaitTimeoutError
from shmbus.weights import (
    LoraFiles,
    ManifestError,
    ModuleSource,
    WeightPublisher,
    WeightsError,
    WeightSubscriber,
)
from shmbus.weights.carriers import checkpoint


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
    plain = load_file(tmp_path / "latest" / "model.safetensors")  # like any engine
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


CONFIG = {"peft_type": "LORA", "r": 4, "target_modules": ["q"]}


def test_a_directory_has_one_publisher_at_a_time(tmp_path: Path) -> None:
    linked = tmp_path / "linked"
    linked.symlink_to(tmp_path)
    with publisher_of(many(3), tmp_path) as publisher:
        begun = tmp_path / ".new-0123abcd"  # its unfinished folder
        begun.mkdir()
        with pytest.raises(BusBusyError, match="another publisher writes there"):
            publisher_of(many(3), linked)
        assert begun.exists()
        publisher.publish(version=1)
    with publisher_of(many(3), linked) as publisher:
        assert not begun.exists()
        publisher.publish(version=2)
    with reader_of(tmp_path) as reader:
        assert reader.wait(timeout=5) == 2


def test_a_dtype_that_files_have_not_is_refused_before_a_version(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.register_buffer("wide", torch.zeros(2, dtype=torch.complex128))
    model.register_buffer("plain", torch.zeros(2))
    model.register_buffer("__metadata__", torch.zeros(2))  # its file would be unreadable
    with pytest.raises(ManifestError, match=r"'wide': torch\.complex128") as caught:
        publisher_of(model, tmp_path / "files")
    assert len(caught.value.faults) == 2 and not (tmp_path / "files").exists()


@pytest.mark.parametrize(
    "state",
    [
        {"a": torch.zeros(1, dtype=torch.complex128)},
        {"__metadata__": torch.zeros(1)},
        {"\ud800": torch.zeros(1)},
    ],
)
def test_an_unsaveable_adapter_is_refused(state: dict[str, torch.Tensor], tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"'run1-v1-\w{16}' was not written"):
        LoraFiles(tmp_path, "run1", CONFIG).publish(state, version=1)
    assert os.listdir(tmp_path) == []


def test_an_adapter_without_room_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    files = LoraFiles(tmp_path, "run1", CONFIG)
    files.publish({"a": torch.zeros(1)}, version=4)
    monkeypatch.setattr("safetensors.torch.save_file", fail)
    with pytest.raises(WeightsError, match=r"'run1-v5-\w{16}' .* No space .* there: 4"):
        files.publish({"a": torch.zeros(1)}, version=5)
    assert [name[:8] for name in os.listdir(tmp_path)] == ["run1-v4-"]


def test_adapters_that_share_a_directory_remove_their_own_remains_alone(tmp_path: Path) -> None:
    begun = tmp_path / ".new-run1-b-0123abcd"  # another trainer's unfinished folder
    left = tmp_path / ".new-run1-0123abcd"
    for each in (begun, left):
        each.mkdir()
    LoraFiles(tmp_path, "run1", CONFIG)
    assert begun.exists() and not left.exists()


def test_a_relative_directory_stays_in_place_and_may_vanish(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files, state = LoraFiles("adapters", "run1", CONFIG), {"a": torch.zeros(1)}
    with publisher_of(many(3), Path("files")) as publisher, reader_of(Path("files")) as reader:
        monkeypatch.chdir("/")
        publisher.publish(version=1)
        assert reader.wait(timeout=5) == 1
        first = Path(files.publish(state, version=1).path)
        files.forget(1)
        second = Path(files.publish(state, version=1).path)
        assert first.parent == second.parent == tmp_path / "adapters" and first != second
        for folder in ("files", "adapters"):
            shutil.rmtree(tmp_path / folder)
        with pytest.raises(WaitTimeoutError, match="none"):
            reader.at(1)
        for publish in (publisher.publish, lambda version: files.publish(state, version)):
            with pytest.raises(WeightsError, match="No such file"):
                publish(version=2)


@pytest.mark.parametrize("step", ["save_file", "fsync", "rename", "symlink_to", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_version_that_could_not_be_written_is_not_there_and_says_what_is(
    step: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    model, replica = many(3), many(3, 7)
    with publisher_of(model, tmp_path) as publisher, reader_of(tmp_path) as reader:
        publisher.publish(version=1)
        with monkeypatch.context() as broken:
            if step == "save_file":
                broken.setattr("safetensors.torch.save_file", fail)
            else:
                broken.setattr(os if step == "fsync" else Path, step, fail)
            expected = WeightsError if isinstance(error, OSError) else KeyboardInterrupt
            with pytest.raises(expected) as caught:
                publisher.publish(version=2)
        if isinstance(error, OSError):
            text = str(caught.value)
            assert "version 2" in text and "No space" in text and "version-1-00000001" in text
        with pytest.raises(WaitTimeoutError, match="version 2 is not there"):
            reader.at(2)
        assert sorted(os.listdir(tmp_path)) == ["latest", "version-1-00000001"]
        publisher.publish(version=3)
        with reader.latest(timeout=5) as weights:
            weights.load_into(replica)
            assert weights.version == 3 and same(model, replica)


def test_a_lockless_file_system_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(9, "Bad file descriptor")

    monkeypatch.setattr(checkpoint.fcntl, "flock", refuse)
    with publisher_of(many(3), tmp_path) as publisher, reader_of(tmp_path) as reader:
        publisher.publish(version=1)
        assert reader.wait(timeout=5) == 1


def test_tensors_of_an_adapter_may_share_memory(tmp_path: Path) -> None:
    both, config = torch.ones(4), CONFIG | {"lora_alpha": np.float32(16)}
    written = LoraFiles(tmp_path, "run1", config).publish({"a": both, "b": both}, version=1)
    assert written.size == 32
    assert json.loads(Path(written.path, "adapter_config.json").read_bytes())["lora_alpha"] == 16
