"""New weights into a generating process while requests are in flight, in three ways.

    python examples/weights_in_flight.py versions     # whole versions through shared memory
    python examples/weights_in_flight.py one-copy     # trainer and server have the same memory
    python examples/weights_in_flight.py checkpoint   # files, for engines that reload by a path

The server answers requests of 16 tokens without a pause. Each token shows its version; a mix of
two would show as "torn". For servers of vLLM and SGLang see docs/weights.md.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection

import torch

from shmbus.weights import (
    ModuleSource,
    WeightPublisher,
    WeightSubscriber,
    attach_model,
    share_model,
)

STEPS = 5
TOKENS = 16


def build() -> torch.nn.Module:
    """Make a model with the version number as its weights: a mix shows."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    return model.requires_grad_(False)


def fill(model: torch.nn.Module, version: int) -> None:
    """Stand in for an optimizer's step."""
    for parameter in model.parameters():
        parameter.fill_(float(version))


def token(model: torch.nn.Module) -> str:
    """Generate: read every weight, like a forward pass."""
    met = torch.cat([parameter.unique() for parameter in model.parameters()]).unique()
    return str(int(met[0])) if len(met) == 1 else "torn"


def serve(bus: str, mode: str, folder: str, to_trainer: Connection) -> None:
    """Answer requests, and take new weights between two tokens."""
    torch.set_num_threads(1)
    model = build()
    shared = attach_model(bus, model, timeout=60.0) if mode == "one-copy" else None
    carrier = "checkpoint" if mode == "checkpoint" else "shm"
    subscriber = (
        WeightSubscriber(bus, label="server", carrier=carrier, directory=folder if folder else None)
        if shared is None
        else None
    )
    last = -1
    while not to_trainer.poll():
        answer = []
        for _ in range(TOKENS):
            if shared is not None:
                with shared.reading(timeout=60.0):
                    answer.append(token(model))
            elif subscriber is not None:
                with subscriber.latest(timeout=60.0) as weights:
                    if weights.version != last:
                        weights.load_into(model)
                        last = weights.version
                answer.append(token(model))
            time.sleep(0.001)
        to_trainer.send(answer)
    to_trainer.recv()


def main() -> None:
    """Train, and print the versions met by requests."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    modes = ("versions", "one-copy", "checkpoint")
    parser.add_argument("mode", nargs="?", choices=modes, default="versions")
    parser.add_argument("bus", nargs="?", default="weights-in-flight", help="name of the bus")
    options = parser.parse_args()
    mode, bus = options.mode, options.bus
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    model = build()
    fill(model, 0)
    with tempfile.TemporaryDirectory() as folder:
        directory = folder if mode == "checkpoint" else ""
        if mode == "one-copy":
            shared, publisher = share_model(bus, model, version=0), None
        else:
            carrier = "checkpoint" if mode == "checkpoint" else "shm"
            publisher = WeightPublisher(
                bus, ModuleSource(model), carrier=carrier, directory=directory or None
            )
            publisher.publish(version=0)
            shared = None
        server = spawn.Process(target=serve, args=(bus, mode, directory, theirs), daemon=True)
        server.start()
        answers = [ours.recv()]  # from here on weights change under running requests
        for version in range(1, STEPS + 1):
            if shared is not None:
                with shared.stepping(version, timeout=60.0):
                    fill(model, version)
            elif publisher is not None:
                fill(model, version)
                publisher.publish(version=version)
            while answers[-1][-1] != str(version):
                answers.append(ours.recv())
        ours.send("enough")
        while server.is_alive() and ours.poll(0.1):
            answers.append(ours.recv())
        server.join(60)
        for each in (shared, publisher):
            if each is not None:
                each.close()
    met = [token for answer in answers for token in answer]
    assert "torn" not in met and sorted(met, key=int) == met, "a request met a mix"
    mixed = sum(len(set(answer)) > 1 for answer in answers)
    print(f"{mode}: {len(answers)} requests, {mixed} of them met a new version, none a mix of two")


if __name__ == "__main__":
    main()
