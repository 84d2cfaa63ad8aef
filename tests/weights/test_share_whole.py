"""A model that is being shared has no name before all of its values are there."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from typing import Any

import torch

from shmbus.inspect.leftovers import survey
from shmbus.weights.shared_file import path_of
from shmbus.weights.shared_model import attach_model, share_model

SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["shmbus.weights.shared_model"])
PARTS = 4
#: Elements of a part: copying all of them takes longer than to look for the file twice.
ELEMENTS = 8 << 20


def model_of(value: float) -> torch.nn.Module:
    parts = [torch.full((ELEMENTS,), value) for _ in range(PARTS)]
    return torch.nn.ParameterList(torch.nn.Parameter(part) for part in parts)


def read_at_once(bus: str, pipe: Any) -> None:
    model = model_of(0.0)
    pipe.send("looks")
    with attach_model(bus, model, timeout=60) as shared, shared.reading() as version:
        pipe.send((version, [float(part[-1].detach()) for part in model]))


def share_one(bus: str, pipe: Any) -> None:
    model = model_of(1.0)
    pipe.send("begins")
    share_model(bus, model, version=1)
    pipe.send("has shared")
    signal.pause()


def test_a_server_that_waits_for_a_model_gets_all_of_it(bus_name: str) -> None:
    ours, theirs = SPAWN.Pipe()
    server = SPAWN.Process(target=read_at_once, args=(bus_name, theirs))
    server.start()
    model = model_of(1.0)
    assert ours.recv() == "looks"
    with share_model(bus_name, model, version=1):
        assert ours.recv() == (1, [1.0] * PARTS)
        server.join()


def test_a_trainer_that_is_killed_while_it_shares_leaves_all_or_nothing(
    bus_name: str, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(8):
        ours, theirs = SPAWN.Pipe()
        trainer = SPAWN.Process(target=share_one, args=(bus_name, theirs))
        trainer.start()
        assert ours.recv() == "begins"
        time.sleep(chance.uniform(0, 0.1))
        trainer.kill()
        trainer.join()
        if os.path.exists(path_of(bus_name)):
            model = model_of(0.0)
            with attach_model(bus_name, model) as shared, shared.reading() as version:
                assert version == 1
                assert all(bool((part == 1).all()) for part in model)
        assert all(each.verdict == "removable" for each in survey() if each.name == bus_name)
        share_model(bus_name, torch.nn.Linear(2, 2), version=0).close()  # over what was left
