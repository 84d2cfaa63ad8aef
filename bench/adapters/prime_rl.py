"""Processor time of a trainer for each micro batch: prime-rl's own receiver beside the adapter's.

    python -m bench.adapters.prime_rl [STEPS] [TOKENS] [EXPERTS]

prime-rl is not installed: own is what its file transport does at 0f59b24, on /dev/shm, where it is
fastest: the file of a step read, and decoded by msgspec. Of both its trainer's tensors are made
then. EXPERTS are bytes of routed experts a token, of a mixture of experts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# The classes of its commits, which the tests have written down, and the hand-over, an example.
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "trainer"))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import msgspec
import numpy as np
import prime_rl_transport as prime_rl
import torch
from published_prime_rl import RoutedExperts, installed

import shmbus
from bench.adapters import ROUNDS, numbers
from shmbus.channel import unlink_channel

MICRO_BATCHES = 8
TYPES = {
    "input_ids": torch.long, "position_ids": torch.long, "advantages": torch.float,
    "loss_mask": torch.bool, "inference_logprobs": torch.float, "temperatures": torch.float,
}  # fmt: skip

torch.set_num_threads(1)


def micro_batch(kind: Any, tokens: int, experts: int) -> Any:
    return kind(
        list(range(tokens)), [True] * tokens, [0.5] * tokens, [-0.25] * tokens,
        list(range(tokens)), [tokens], [1.0] * tokens, ["gsm8k"], [tokens],
        routed_experts=RoutedExperts(bytes(tokens * experts), [tokens, experts], "uint8")
        if experts else None,
    )  # fmt: skip


def tensors(batches: list[Any]) -> None:
    """What prime-rl's trainer makes of the micro batches of a step."""
    for batch in batches:
        for name, dtype in TYPES.items():
            torch.tensor(getattr(batch, name), dtype=dtype).unsqueeze(0)
        if batch.routed_experts is not None:
            np.frombuffer(batch.routed_experts.data, np.uint8).reshape(batch.routed_experts.shape)


def measure(steps: int, send: Callable[[], object], receive: Callable[[], list[Any]]) -> Any:
    """Return the microseconds of a micro batch: received, and made tensors too."""
    received_s = all_s = 0.0
    for number in range(steps + 1):
        send()
        began_s = time.process_time()
        batches = receive()
        middle_s = time.process_time()
        tensors(batches)
        if number:  # the first one warms up
            received_s += middle_s - began_s
            all_s += time.process_time() - began_s
        del batches  # as prime-rl's get_batch, which returns tensors
    return tuple(spent / (steps * MICRO_BATCHES) * 1e6 for spent in (received_s, all_s))


def by_file(steps: int, batches: list[Any]) -> Any:
    decoder = msgspec.msgpack.Decoder(list[type(batches[0])])  # type: ignore[misc]
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        path = Path(file.name)
        return measure(
            steps,
            lambda: path.write_bytes(msgspec.msgpack.encode(batches)),
            lambda: decoder.decode(path.read_bytes()),
        )


def by_channel(steps: int, batches: list[Any]) -> Any:
    run = f"prime-rl-cost-{os.getpid()}"
    kind = type(batches[0])
    sender = prime_rl.ShmbusBatchSender(run, 1, micro_batch=kind)
    receiver = prime_rl.ShmbusBatchReceiver(run, 0, micro_batch=kind)
    try:
        return measure(steps, lambda: asyncio.run(sender.send([batches])), receiver.receive)
    finally:
        receiver.close()
        sender.close()
        with contextlib.suppress(shmbus.BusNotFoundError):
            unlink_channel(f"{run}.rank0.0")


def main() -> None:
    steps, tokens, experts = numbers(20, 8192, 0)
    with installed("0f59b24") as theirs:
        batches = [micro_batch(theirs.MicroBatch, tokens, experts) for _ in range(MICRO_BATCHES)]
        rounds = [(by_file(steps, batches), by_channel(steps, batches)) for _ in range(ROUNDS)]
    found = {}
    for place, name in enumerate(("received", "as_tensors")):
        own, bus = (min(each[which][place] for each in rounds) for which in (0, 1))
        found[name] = {
            "own_us": round(own, 1), "bus_us": round(bus, 1), "ratio": round(bus / own, 3),
        }  # fmt: skip
    print(json.dumps(found))


if __name__ == "__main__":
    main()
