"""What a tensor channel costs: ``python -m bench.channel``, against a copy of the same bytes.

``--device cpu`` (the default) goes through /dev/shm, ``--device cuda:0`` through memory of that
device. A sender and a receiver, two processes; a step is 160 MB in three tensors. *Stall* is how
long `send` keeps its caller, with a receiver that keeps up and the sender's next step 2 ms away;
*rate* is of steps one behind the other. *One way* is a step of 4 KB, beside a semaphore between two
interpreters at the same pace.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import secrets
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import torch

from bench import machine, program
from bench.processes import Role, run_together, use_template
from bench.row import Row, skipped
from bench.yardsticks import passed_on_us
from shmbus.tensors import ChannelClosedError, TensorChannel

__all__ = ["main"]

Shapes: TypeAlias = dict[str, tuple[int, ...]]

#: Elements of bfloat16 of a step's three tensors: 160 MB.
SHAPES: Final[Shapes] = {"hidden": (8192, 4096), "logits": (4096, 8192), "ids": (12_885_902,)}
#: Of --tiny.
TINY: Final[Shapes] = {"hidden": (64, 64), "logits": (64, 64), "ids": (1024,)}
#: Of both slots of such a step.
SHM_BYTES: Final = 384 << 20
SMALL: Final[Shapes] = {"small": (2048,)}
STEPS: Final = 100
WARM_UP: Final = 10
TURNS: Final = 3
PAUSE_S: Final = 0.002
PATIENCE_S: Final = 60.0


def tensors_of(shapes: Shapes, device: str) -> dict[str, torch.Tensor]:
    """Make a step's tensors."""
    return {
        name: torch.ones(shape, dtype=torch.bfloat16, device=device)
        for name, shape in shapes.items()
    }


def settle(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def _receive(start: Callable[[], None], name: str, shapes: Shapes, views: bool) -> list[int]:
    """Take every step; return when each was there."""
    torch.set_num_threads(1)
    specs = {key: ("bfloat16", shape) for key, shape in shapes.items()}
    came = []
    with TensorChannel.open(name, specs=specs, wait=PATIENCE_S, views=views) as channel:
        start()
        try:
            while True:
                with channel.recv(PATIENCE_S):
                    came.append(time.perf_counter_ns())
        except ChannelClosedError:
            return came


def _send(
    start: Callable[[], None], name: str, shapes: Shapes, device: str, steps: int, pause_s: float
) -> tuple[list[int], list[int], float]:
    """Send so many steps; return the stamp before each, how long it took, and all seconds."""
    torch.set_num_threads(1)
    tensors = tensors_of(shapes, device)
    options: dict[str, Any] = {} if device == "cpu" else {"device": device}
    stalls, sent, began = [], [], 0.0
    with TensorChannel.create(name, timeout=PATIENCE_S, **options) as sender:
        start()
        for number in range(steps + WARM_UP):
            if number == WARM_UP:
                settle(device)
                began = time.perf_counter()
            before = time.perf_counter_ns()
            sender.send(tensors, timeout=PATIENCE_S)
            stalls.append(time.perf_counter_ns() - before)
            sent.append(before)
            if pause_s:
                time.sleep(pause_s)
        sender.close()
        return sent, stalls, time.perf_counter() - began


def run(
    device: str, shapes: Shapes, steps: int, *, pause_s: float, views: bool
) -> tuple[float, float, float]:
    """Return the median seconds of a send and of one way, and the seconds of a step."""
    name = f"bench-channel-{os.getpid()}-{secrets.token_hex(3)}"
    came, (sent, stalls, took) = run_together(
        [
            Role(_receive, (name, shapes, views)),
            Role(_send, (name, shapes, device, steps, pause_s)),
        ]
    )
    ways = [after - before for before, after in zip(sent, came, strict=True)]
    return (
        statistics.median(stalls[WARM_UP:]) / 1e9,
        statistics.median(ways[WARM_UP:]) / 1e9,
        took / steps,
    )


def copy_s(device: str, shapes: Shapes, rounds: int) -> float:
    """Return the median seconds of a copy of a step's tensors."""
    source, target = tensors_of(shapes, device), tensors_of(shapes, device)
    took = []
    for _ in range(rounds):
        settle(device)
        began = time.perf_counter()
        for name, tensor in source.items():
            if device == "cpu":
                ctypes.memmove(target[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)
            else:
                target[name].copy_(tensor)
        settle(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure every row, by turns with the copy."""
    device, on = options.device, "" if options.device == "cpu" else "cuda-"
    if why := machine.lacks(cores=2, shm_bytes=SHM_BYTES):
        return [skipped("channel", "a tensor channel", why)]
    torch.set_num_threads(1)
    if options.tiny and device == "cpu":
        use_template("torch", "shmbus.tensors", "bench.yardsticks")
    steps, shapes = (3, TINY) if options.tiny else (STEPS, SHAPES)
    turns = options.repetitions or (1 if options.tiny else TURNS)
    rows = []
    # The segment's own slots are always views.
    for views in (True,) if device == "cpu" else (False, True):
        copies, stalls, rates, ways, bells = [], [], [], [], []
        for _ in range(turns):
            copies.append(copy_s(device, shapes, steps))
            stalls.append(run(device, shapes, steps, pause_s=PAUSE_S, views=views)[0])
            rates.append(1 / run(device, shapes, steps, pause_s=0.0, views=views)[2])
            ways.append(1e6 * run(device, SMALL, steps, pause_s=PAUSE_S, views=views)[1])
            bells.append(passed_on_us([int(PAUSE_S * 1e9)] * (steps + WARM_UP), WARM_UP, 0))
        how = "" if device == "cpu" else " to views" if views else " to copies"
        end = "" if views else "-copies"
        rows += [
            Row(
                name=f"channel-{on}stall{end}", title=f"send of 160 MB{how}, its caller's stall",
                unit="ms", values=tuple(1e3 * each for each in stalls),
                beside="a copy", beside_values=tuple(1e3 * each for each in copies),
            ),
            Row(
                name=f"channel-{on}rate{end}", title=f"steps of 160 MB{how}",
                unit="a second", values=tuple(rates),
                beside="copies", beside_values=tuple(1 / each for each in copies),
            ),
            Row(
                name=f"channel-{on}one-way{end}", title=f"4 KB one way{how}",
                unit="us", values=tuple(ways),
                beside="a semaphore between two interpreters", beside_values=tuple(bells),
            ),
        ]  # fmt: skip
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line."""
    parser = program.parser_of("channel", __doc__)
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA device such as cuda:0")
    return program.run("channel", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
