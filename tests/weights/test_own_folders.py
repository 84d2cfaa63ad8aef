"""Folders of adapters and checkpoints belong to the writing user."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shmbus
from shmbus.weights.adapters import LoraFiles
from shmbus.weights.carriers.checkpoint import CheckpointWriter
from shmbus.weights.manifest import Manifest

CONFIG = {"peft_type": "LORA", "r": 4, "target_modules": ["q"]}
NOBODY = 65_534
MAKERS: dict[str, Callable[[Path], object]] = {
    "adapters": lambda path: LoraFiles(path, "a", CONFIG),
    "checkpoints": lambda path: CheckpointWriter(path, Manifest(tensors=[])),
}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
@pytest.mark.parametrize("kind", ["folder", "their link", "own link to their folder"])
def test_a_foreign_folder(tmp_path: Path, make: Callable[[Path], object], kind: str) -> None:
    path, target = tmp_path / "given", tmp_path / "target"
    target.mkdir()
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
    os.chown(target if kind.startswith("own") else path, NOBODY, NOBODY, follow_symlinks=False)
    with pytest.raises(PermissionError, match=f"belongs to uid {NOBODY}"):
        make(path)
    assert list(target.iterdir()) == []


def test_a_link_of_the_user_to_a_folder_of_the_user_is_followed(tmp_path: Path) -> None:
    path, mine = tmp_path / "given", tmp_path / "mine"
    mine.mkdir()
    path.symlink_to(mine)
    files = LoraFiles(path, "a", CONFIG)
    files.publish({"w": torch.zeros(2)}, 1)
    assert files.versions() == [1]
    assert [path.name[:5] for path in mine.iterdir() if path.is_dir()] == ["a-v1-"]


def test_a_file_in_the_folders_place_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "given"
    path.write_bytes(b"")
    with pytest.raises((FileExistsError, shmbus.LayoutMismatchError)):
        LoraFiles(path, "a", CONFIG)
