"""Ends or stops one side of a channel at each of its failpoints, and looks at what is left.

usage: python -m channel_points NAME KIND:   (in a build with failpoints)

For each point of KIND ("sender", "receiver", "resumer") a forked child runs with SHMBUS_FAILPOINT
set, and this process is the other side. A dead side is followed by a successor here. Every step has
to come, whole and in order: none twice after its acknowledgement, none left out. One line of JSON a
case.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing.context import ForkProcess
from pathlib import Path

from failpoints import play

from shmbus import BusNotFoundError, PeerGoneError, WaitTimeoutError
from shmbus.channel import ChannelClosedError, ChannelReceiver, ChannelSender, unlink_channel

STEPS = 6
WAIT_S = 20.0
#: Seconds after which the other side looks whether this one was killed, or has it go on.
QUIET_S = 0.2
FORKS = multiprocessing.get_context("fork")

POINTS = {
    "sender": (
        "channel-locked", "channel-claimed", "channel-stating", "channel-stated", "channel-begun",
        "channel-grown", "channel-written", "channel-described", "channel-sent", "channel-left",
    ),
    "receiver": (
        "channel-locked", "channel-claimed", "channel-stating", "channel-stated", "channel-seen",
        "channel-acking", "channel-acked", "channel-left",
    ),
    "resumer": ("channel-withdrawn",),
}  # fmt: skip


def payload(step: int) -> bytes:
    """Bytes of a step, of another length each."""
    return bytes([step + 1]) * (1 + 3000 * step)


def run_sender(name: str) -> None:
    """Send every step."""
    with ChannelSender(name, timeout=60) as side:
        side.state(b"specs")
        for step in range(STEPS):
            side.send(payload(step), step=step)


def run_receiver(name: str) -> None:
    """Receive and acknowledge every step."""
    with ChannelReceiver(name, timeout=60, wait=60) as side:
        side.state(b"specs")
        for step in range(STEPS):
            message = side.receive()
            assert message.step == step and bytes(memoryview(message.memory)) == payload(step)
            side.ack()


def run_resumer(name: str) -> None:
    """Withdraw what was sent, and go on at another step."""
    with ChannelSender(name, timeout=60) as side:
        side.send(b"old"), side.send(b"old")
        side.resume_after(10)
        side.send(payload(11), step=11)


CHILDREN = {"sender": run_sender, "receiver": run_receiver, "resumer": run_resumer}


def run_to_point(name: str, kind: str, failpoint: str) -> None:
    """Be a side that meets its point."""
    os.environ["SHMBUS_FAILPOINT"] = failpoint
    CHILDREN[kind](name)


@contextlib.contextmanager
def child_of(name: str, kind: str, failpoint: str) -> Iterator[ForkProcess]:
    """Run a side that meets its point."""
    child = FORKS.Process(target=run_to_point, args=(name, kind, failpoint))
    child.start()
    try:
        yield child
    finally:
        resume(child)
        if child.is_alive():
            child.kill()
        child.join()


def resume(child: ForkProcess) -> None:
    """Let a child that is stopped go on."""
    if child.pid is not None and child.is_alive():
        os.kill(child.pid, signal.SIGCONT)


def end_of(child: ForkProcess) -> int | None:
    """Wait for a child's end; returns its exit status, or None where it does not come."""
    child.join(WAIT_S)
    return child.exitcode


def met(child: ForkProcess, action: str) -> bool:
    """Wait until the child was killed or stopped at its point."""
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        if action == "kill":
            if child.exitcode is not None:
                return child.exitcode == -signal.SIGKILL
        else:
            with contextlib.suppress(FileNotFoundError):  # it has ended
                stat = Path(f"/proc/{child.pid}/stat").read_text()
                if stat.rpartition(")")[2].split()[0] == "T":
                    return True
        time.sleep(0.005)
    return False


def receive_all(name: str, first: int, faults: list[str], *, stop_at: int = STEPS) -> int:
    """Receive what is there; returns the step after the last one."""
    with ChannelReceiver(name, timeout=WAIT_S, wait=WAIT_S) as receiver:
        expected = first
        while expected < stop_at:
            message = receiver.receive()
            if message.step != expected or bytes(memoryview(message.memory)) != payload(
                message.step
            ):
                faults.append(f"expected step {expected}, got {message.step}")
            receiver.ack()
            expected = message.step + 1
    return expected


def after_a_sender(name: str, child: ForkProcess, action: str) -> list[str]:
    """Receive from a sender that meets its point, and from its successor."""
    faults: list[str] = []
    expected = 0
    receiver = ChannelReceiver(name, timeout=WAIT_S, wait=WAIT_S)
    successor = None
    while expected < STEPS:
        try:
            message = receiver.receive(timeout=QUIET_S)
        except (PeerGoneError, WaitTimeoutError) as error:
            if action == "stop":
                if isinstance(error, PeerGoneError):
                    faults.append("a stopped sender was taken for a dead one")
                resume(child)
            elif successor is None and child.exitcode not in (None, 0):
                successor = ChannelSender(name)
            if successor is not None:
                successor.send(payload(successor.next_step))
            continue
        if message.step != expected or bytes(memoryview(message.memory)) != payload(expected):
            faults.append(f"expected step {expected}, got {message.step}")
        receiver.ack()
        expected += 1
        if successor is not None and successor.next_step < STEPS:
            successor.send(payload(successor.next_step))
    if successor is not None:
        successor.close()
    receiver.close()
    return faults


def after_a_receiver(name: str, child: ForkProcess, action: str) -> list[str]:
    """Send to a receiver that meets its point, and to its successor."""
    faults: list[str] = []
    sender = ChannelSender(name, timeout=QUIET_S)
    step = 0
    successor = None
    while step < STEPS:
        try:
            sender.send(payload(step), step=step)
        except (PeerGoneError, WaitTimeoutError, ChannelClosedError) as error:
            if action == "stop":
                if isinstance(error, PeerGoneError):
                    faults.append("a stopped receiver was taken for a dead one")
                resume(child)
                continue
            if child.exitcode is None:
                continue  # slow, and waiting for this very step
            successor = successor or ChannelReceiver(name)
            message = successor.receive(timeout=WAIT_S, step=sender.acked_step + 1)
            if bytes(memoryview(message.memory)) != payload(message.step):
                faults.append(f"step {message.step} is not what was sent")
            successor.ack()
            continue
        step += 1
    if action == "stop":
        # Its point may be after its last step, so the time of its stop is not known here.
        deadline = time.monotonic() + WAIT_S
        while child.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
            resume(child)
    elif sender.acked_step < STEPS - 1:
        end_of(child)
        first = sender.acked_step + 1
        if successor is not None:
            successor.close()
        receive_all(name, first, faults)
    if sender.acked_step != STEPS - 1:
        faults.append(f"acknowledged up to {sender.acked_step}")
    if successor is not None:
        successor.close()
    sender.close()
    return faults


def after_a_resumer(name: str, child: ForkProcess, action: str) -> list[str]:
    """Resume where a sender has met its point in doing so."""
    faults: list[str] = []
    if action == "stop":
        resume(child)
        end_of(child)
    else:
        with ChannelSender(name) as sender:
            sender.resume_after(10)
            sender.send(payload(11), step=11)
    receive_all(name, 11, faults, stop_at=12)
    return faults


FOLLOW = {
    "sender": after_a_sender,
    "receiver": after_a_receiver,
    "resumer": after_a_resumer,
}


def run(kind: str, failpoint: str, action: str) -> dict[str, object]:
    """Run one case: what went wrong, and whether the child met its point."""
    name = sys.argv[1]
    seen: list[bool] = []
    with child_of(name, kind, failpoint) as child:
        watcher = threading.Thread(target=lambda: seen.append(met(child, action)))
        watcher.start()
        if kind == "resumer":
            watcher.join()
        faults = FOLLOW[kind](name, child, action)
        watcher.join()
        if action == "stop":
            resume(child)
            if end_of(child) != 0:
                faults.append(f"a side that was stopped and went on ended with {child.exitcode}")
    with contextlib.suppress(BusNotFoundError):
        unlink_channel(name)
    return {"signalled": seen == [True], "faults": faults}


if __name__ == "__main__":
    points = {kind: dict.fromkeys(of_kind, (1,)) for kind, of_kind in POINTS.items()}
    play(points, run, *sys.argv[2:])
