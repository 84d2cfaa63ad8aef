"""What a channel costs: ``python -m bench.channel``, against a copy of the same bytes.

``--device cpu`` (the default) goes through /dev/shm, ``--device cuda:0`` through memory of that
device. Method: a sender and a receiver, two processes. A step is 160 MB in three tensors. *Stall*
is how long `send` keeps its caller, with a receiver that keeps up and the sender's next step 2 ms
away; *rate* is of steps one behind the other. The bound is a copy of the same three tensors in the
sender's process, to its end: of the C library's memcpy, or of the device. For the rate of a
receiver that has copies it is two of them, since the device makes as many of a step. *One way* is a
step of 4 KB from before `send` until after `recv`, by a clock that both processes share. Beside it
are a bare futex between two processes (`bench/c/raw_futex.c`), a semaphore between two interpreters
(`bench/rows/interpreters.py`), and an empty message of bytes with no tensors, at the same pace. The
small ones take turns. On a device a step that is copied out makes it change over to the other
process and back; a *turn* is a tiny copy to its end, alone and just after another process has
worked. Figures are medians.
"""

from __future__ import annotations

import argparse
import ctypes
import multiprocessing
import os
import secrets
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, TypeAlias

from bench import command, machine
from bench.failures import MeasurementError
from bench.fitness import TWO, Need
from bench.native import CannotRun, compile_program
from bench.native import run as run_program
from bench.needs_torch import torch
from bench.processes import END_S, Role, Started, start_role
from bench.rows import interpreters
from bench.rows.wake import SOURCE
from bench.weights_cuda import turn_s
from shmbus.channel import ChannelReceiver, ChannelSender
from trainer_adapter.channel import ChannelClosedError, TensorChannel
from trainer_adapter.weights import DeviceMismatchError
from trainer_adapter.weights.probe import checked_device

__all__ = ["main"]

Shapes: TypeAlias = dict[str, tuple[int, ...]]

#: Elements of bfloat16 of a step's three tensors: 160 MB.
SHAPES: Final[Shapes] = {"hidden": (8192, 4096), "logits": (4096, 8192), "ids": (12_885_902,)}
#: Of both slots of such a step.
SHM_BYTES: Final = 384 << 20
SMALL: Final[Shapes] = {"small": (2048,)}
WARM_UP: Final = 10
#: Of each small thing, in turns: a slow minute of the machine falls on all of them.
TURNS: Final = 3
PAUSE_S: Final = 0.002
PATIENCE_S: Final = 60.0
#: That a device makes of a step: into the sender's memory, and out of it.
COPIES: Final = {"copies": 2, "views": 1}
#: Targets: of a copy's time, of its rate, times a futex's wake-up. The latter two are the CPU's: a
#: device's rate and latency follow from how it changes over between processes.
STALL_TARGET: Final = 1.3
RATE_TARGET: Final = 0.8
WAKE_TARGET: Final = 2.0


def tensors_of(shapes: Shapes, device: str) -> dict[str, torch.Tensor]:
    """Make a step's tensors."""
    return {
        name: torch.ones(shape, dtype=torch.bfloat16, device=device)
        for name, shape in shapes.items()
    }


def settled(device: str) -> None:
    """Wait for the device."""
    if device != "cpu":
        torch.cuda.synchronize(device)


def receive(pipe: Connection, name: str, shapes: Shapes, views: bool) -> None:
    """Take every step, a process of its own; sends when each was there."""
    torch.set_num_threads(1)
    specs = {key: ("bfloat16", shape) for key, shape in shapes.items()}
    came = []
    with TensorChannel.open(name, specs=specs, wait=PATIENCE_S, views=views) as channel:
        pipe.send(None)
        try:
            while True:
                with channel.recv(PATIENCE_S):
                    came.append(time.perf_counter_ns())
        except ChannelClosedError:
            pipe.send(came)


def receive_bytes(pipe: Connection, name: str) -> None:
    """Take every wake-up, a process of its own."""
    came = []
    with ChannelReceiver(name, wait=PATIENCE_S) as channel:
        pipe.send(None)
        for _ in range(pipe.recv()):
            channel.receive(timeout=PATIENCE_S)
            came.append(time.perf_counter_ns())
            channel.ack()
        pipe.send(came)


def _receiver(function: Callable[..., None], other: Connection, *arguments: object) -> Started:
    """Begin a receiver, whose end of the pipe is its own, so that the pipe ends with it."""
    child = start_role(Role(function, (other, *arguments)))
    other.close()
    return child


def _heard(pipe: Connection, child: Started) -> Any:
    """Return what a receiver sent; MeasurementError where it has died before."""
    try:
        return pipe.recv()
    except EOFError as error:
        child.join(END_S)
        raise MeasurementError(f"the receiver failed: {child.ended()}") from error


def copy_s(shapes: Shapes, device: str, rounds: int) -> float:
    """Return the median seconds of a copy of a step's tensors."""
    source, target = tensors_of(shapes, device), tensors_of(shapes, device)
    took = []
    for _ in range(rounds):
        settled(device)
        began = time.perf_counter()
        for name, tensor in source.items():
            if device == "cpu":
                ctypes.memmove(target[name].data_ptr(), tensor.data_ptr(), tensor.nbytes)
            else:
                target[name].copy_(tensor)
        settled(device)
        took.append(time.perf_counter() - began)
    return statistics.median(took)


def run(
    device: str, shapes: Shapes, rounds: int, *, pause_s: float, views: bool
) -> dict[str, float]:
    """Send so many steps; returns seconds of a send, of a step, and one way."""
    name = f"bench-channel-{os.getpid()}-{secrets.token_hex(3)}"
    pipe, other = multiprocessing.get_context("spawn").Pipe()
    tensors = tensors_of(shapes, device)
    options: dict[str, Any] = {} if device == "cpu" else {"device": device}
    stalls, sent = [], []
    with TensorChannel.create(name, timeout=PATIENCE_S, **options) as sender:
        child = _receiver(receive, other, name, shapes, views)
        _heard(pipe, child)
        for number in range(rounds + WARM_UP):
            if number == WARM_UP:
                settled(device)
                began = time.perf_counter()
            before = time.perf_counter_ns()
            sender.send(tensors, timeout=PATIENCE_S)
            stalls.append(time.perf_counter_ns() - before)
            sent.append(before)
            if pause_s:
                time.sleep(pause_s)
        sender.close()
        took = time.perf_counter() - began
    came = _heard(pipe, child)
    child.join(PATIENCE_S)
    ways = [after - before for before, after in zip(sent, came, strict=True)][WARM_UP:]
    return {
        "stall_s": statistics.median(stalls[WARM_UP:]) / 1e9,
        "step_s": took / rounds,
        "one_way_s": statistics.median(ways) / 1e9,
    }


def raw_wake_s(rounds: int) -> float | None:
    """Return the median seconds of a bare futex's wake-up; None where it cannot be compiled."""
    pauses = [int(PAUSE_S * 1e9)] * (rounds + WARM_UP)
    with tempfile.TemporaryDirectory(prefix="shmbus-bench-") as directory:
        program = Path(directory, "raw_futex")
        try:
            compile_program(SOURCE, program)
        except CannotRun as error:
            print(f"no raw futex: {error}")
            return None
        said, _ = run_program([str(program)], "\n".join(map(str, pauses)))
    return statistics.median(int(each) for each in said.split()[WARM_UP:]) / 1e9


def interpreters_wake_s(rounds: int) -> float:
    """Return the median seconds of a semaphore's wake-up between two interpreters."""
    ways = interpreters.measure([int(PAUSE_S * 1e9)] * (rounds + WARM_UP))
    return float(statistics.median(ways[WARM_UP:].tolist())) / 1e9


def empty_message_s(rounds: int) -> float:
    """Return the median seconds of an empty message of bytes, one way."""
    name = f"bench-channel-{os.getpid()}-{secrets.token_hex(3)}"
    pipe, other = multiprocessing.get_context("spawn").Pipe()
    sent = []
    with ChannelSender(name, timeout=PATIENCE_S) as sender:
        child = _receiver(receive_bytes, other, name)
        _heard(pipe, child)
        pipe.send(rounds + WARM_UP)
        for _ in range(rounds + WARM_UP):
            sent.append(time.perf_counter_ns())
            sender.send(b"")
            time.sleep(PAUSE_S)
        came = _heard(pipe, child)
        child.join(PATIENCE_S)
    ways = [after - before for before, after in zip(sent, came, strict=True)][WARM_UP:]
    return float(statistics.median(ways)) / 1e9


def measure(device: str, rounds: int) -> dict[str, Any]:
    """Measure every row."""
    torch.set_num_threads(1)
    rows: dict[str, Any] = {"device": device, "rounds": rounds}
    rows["copy_s"] = copy_s(SHAPES, device, rounds)
    if device != "cpu":
        rows |= turn_s(rounds, device)
    for views in (False, True):
        paced = run(device, SHAPES, rounds, pause_s=PAUSE_S, views=views)
        close = run(device, SHAPES, rounds, pause_s=0.0, views=views)
        how = "views" if views else "copies"
        copies = 1 if device == "cpu" else COPIES[how]
        rows[how] = {
            "stall_s": paced["stall_s"],
            "stall_of_copy": paced["stall_s"] / rows["copy_s"],
            "step_s": close["step_s"],
            "rate_of_copy": copies * rows["copy_s"] / close["step_s"],
        }
        if device == "cpu":  # the segment's own slots are always views
            rows["views"] = rows[how]
            break
    rows.update(one_way(device, rounds))
    for how in ("copies", "views"):
        rows[how].update(one_way_figures(rows, how))
    return rows


def one_way(device: str, rounds: int) -> dict[str, Any]:
    """Return the median seconds of each small thing one way, of turns that they take."""
    things: dict[str, Callable[[], float | None]] = {
        "raw_futex_s": lambda: raw_wake_s(rounds),
        "interpreters_s": lambda: interpreters_wake_s(rounds),
        "empty_message_s": lambda: empty_message_s(rounds),
        "copies_s": lambda: small_s(device, rounds, views=False),
        "views_s": lambda: small_s(device, rounds, views=True),
    }
    if device == "cpu":  # the segment's own slots are always views
        del things["copies_s"]
    turns: dict[str, list[float | None]] = {name: [] for name in things}
    for _ in range(TURNS):
        for name, thing in things.items():
            turns[name].append(thing())
    rows: dict[str, Any] = {"one_way_turns": turns}
    for name, seconds in turns.items():
        known = [each for each in seconds if each is not None]
        rows[name] = statistics.median(known) if known else None
    if device == "cpu":
        rows["copies_s"] = rows["views_s"]
    return rows


def small_s(device: str, rounds: int, *, views: bool) -> float:
    """Return the median seconds of a step of 4 KB, one way."""
    return run(device, SMALL, rounds, pause_s=PAUSE_S, views=views)["one_way_s"]


def one_way_figures(rows: dict[str, Any], how: str) -> dict[str, float | None]:
    """Return a small step's way with its bounds: a bare futex, and one between interpreters."""
    raw, seconds = rows["raw_futex_s"], rows[f"{how}_s"]
    return {
        "one_way_s": seconds,
        "one_way_of_futex": seconds / raw if raw else None,
        "one_way_of_interpreters": seconds / rows["interpreters_s"],
    }


def verdicts(rows: dict[str, Any]) -> list[tuple[str, str, str, bool]]:
    """Return each figure with its target, and whether it is met."""
    checks: list[tuple[str, str, float, Callable[[float, float], bool]]] = [
        ("sender's stall a step, of a copy", "stall_of_copy", STALL_TARGET, float.__le__),
        ("rate of steps, of a copy's", "rate_of_copy", RATE_TARGET, float.__ge__),
        ("4 KB one way, of a raw futex", "one_way_of_futex", WAKE_TARGET, float.__le__),
        (
            "4 KB one way, of a futex between interpreters",
            "one_way_of_interpreters",
            WAKE_TARGET,
            float.__le__,
        ),
    ]
    on_cpu = rows["device"] == "cpu"
    told = []
    for how in ("views",) if on_cpu else ("copies", "views"):
        for name, key, goal, compare in checks:
            value = rows[how][key]
            if value is None:
                continue
            named, figure = f"{how}: {name}", f"{value:.2f}"
            if not on_cpu and key != "stall_of_copy":
                told.append((named, figure, "none", True))
                continue
            sign = "<=" if compare is float.__le__ else ">="
            told.append((named, figure, f"{sign} {goal:g}", compare(value, goal)))
    return told


@command.orderly("channel")
def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print a table, and write the JSON; exit status 1 where a target is missed."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.channel", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--device", default="cpu", help="cpu, or a CUDA device such as cuda:0")
    parser.add_argument(
        "--rounds", type=command.at_least_one, default=200, help="steps of each figure (200)"
    )
    parser.add_argument("--output", type=command.file, help="where the JSON goes")
    options = parser.parse_args(argv)
    try:
        device = str(checked_device(options.device))
    except (ValueError, DeviceMismatchError) as error:
        parser.error(f"--device: {error}")
    if command.refused(Need(processors=TWO, shm_bytes=SHM_BYTES), "channel"):
        return 1
    facts = machine.describe()
    print(machine.summary(facts), flush=True)
    if device != "cpu":
        facts["gpu"] = torch.cuda.get_device_name(device)
    rows = measure(device, options.rounds)
    raw = rows["raw_futex_s"]
    print(
        f"a copy of 160 MB in three tensors: {rows['copy_s'] * 1e6:.0f} us; 4 KB one way: "
        f"{rows['views']['one_way_s'] * 1e6:.0f} us; an empty message of bytes: "
        f"{rows['empty_message_s'] * 1e6:.0f} us; a semaphore between two interpreters: "
        f"{rows['interpreters_s'] * 1e6:.0f} us; a raw futex: "
        + (f"{raw * 1e6:.0f} us" if raw else "not measured")
    )
    if "turn_after_s" in rows:
        turns = (f"{rows[f'turn_{how}_s'] * 1e6:.0f} us" for how in ("alone", "after"))
        print("a tiny copy, alone and just after another process: " + ", ".join(turns))
    told = verdicts(rows)
    for name, figure, target, met in told:
        print(f"  {name:54} {figure:>8}   target {target:8} {'' if met else 'MISSED'}")
    status = command.keep(options.output, {"machine": facts, "rows": rows}, "channel")
    return status or int(not all(met for *_, met in told))


if __name__ == "__main__":
    sys.exit(main())
