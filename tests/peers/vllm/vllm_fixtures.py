"""Fixtures of vLLM's tests: models on disk, and the name of a channel."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import vllm_model as tiny

from shmbus.channel import unlink_channel


@pytest.fixture
def folders(tmp_path: Path) -> dict[int, Path]:
    found = {}
    for seed in (0, 1, 2):
        tiny.save(str(tmp_path / str(seed)), seed)
        found[seed] = tmp_path / str(seed)
    return found


@pytest.fixture
def channel() -> Iterator[str]:
    name = f"test-hidden-{os.getpid()}"
    yield name
    for file in Path("/dev/shm").glob(f"shmbus-channel.{name}*"):
        unlink_channel(file.name.removeprefix("shmbus-channel."))
