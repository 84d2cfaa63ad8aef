"""Ends or stops a side of a channel at each of its failpoints, and checks the remains.

A child of KIND ("sender", "receiver", "resumer") ends at each point, with a successor. Every step
comes whole and in order, none twice after its acknowledgement. A line of JSON a case.
"""

import contextlib
import functools
import time

from failpoints import await_signal, play
from supervisor import Child, deadline

from shmbus import BusNotFoundError, PeerGoneError, WaitTimeoutError
from shmbus.channel import ChannelClosedError, ChannelReceiver, ChannelSender, unlink_channel
from shmbus.channel.receiver import Message

STEPS = 6
WAIT_S = 20.0
#: Seconds before the peer looks for a kill, or has this side go on.
QUIET_S = 0.2

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
    return bytes([step + 1]) * (1 + 3000 * step)


def run_sender(name: str) -> None:
    with ChannelSender(name, timeout=60) as side:
        side.state(b"specs")
        for step in range(STEPS):
            side.send(payload(step), step=step)


def run_receiver(name: str) -> None:
    with ChannelReceiver(name, timeout=60, wait=60) as side:
        side.state(b"specs")
        for step in range(STEPS):
            message = side.receive()
            assert message.step == step and bytes(memoryview(message.memory)) == payload(step)
            side.ack()


def run_resumer(name: str) -> None:
    with ChannelSender(name, timeout=60) as side:
        side.send(b"old"), side.send(b"old")
        side.resume_after(10)
        side.send(payload(11), step=11)


CHILDREN = {"sender": run_sender, "receiver": run_receiver, "resumer": run_resumer}


def check(message: Message, expected: int, faults: list[str]) -> None:
    if message.step != expected or bytes(memoryview(message.memory)) != payload(message.step):
        faults.append(f"expected step {expected}, got {message.step}")


class Side:
    def __init__(self, child: Child) -> None:
        self.child = child
        self.stopped = False

    def look(self) -> bool:
        ended = self.child.look()
        self.stopped = self.stopped or self.child.stopped
        return ended

    def resume(self) -> None:
        if not self.look() and self.child.stopped:
            self.child.go_on()

    def finish(self) -> None:
        for _ in deadline("the end of a side"):
            self.resume()
            if self.look():
                break
            time.sleep(0.005)


def receive_all(name: str, first: int, faults: list[str], *, stop_at: int = STEPS) -> int:
    """Receive every step; return the number after the last."""
    with ChannelReceiver(name, timeout=WAIT_S, wait=WAIT_S) as receiver:
        expected = first
        while expected < stop_at:
            message = receiver.receive()
            check(message, expected, faults)
            receiver.ack()
            expected = message.step + 1
    return expected


def after_a_sender(name: str, side: Side, action: str) -> list[str]:
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
                side.resume()
            elif successor is None and side.look() and side.child.status:
                successor = ChannelSender(name)
            if successor is not None:
                successor.send(payload(successor.next_step))
            continue
        check(message, expected, faults)
        receiver.ack()
        expected += 1
        if successor is not None and successor.next_step < STEPS:
            successor.send(payload(successor.next_step))
    if successor is not None:
        successor.close()
    receiver.close()
    return faults


def after_a_receiver(name: str, side: Side, action: str) -> list[str]:
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
                side.resume()
                continue
            if not side.look():
                continue  # slow, and waiting for this very step
            successor = successor or ChannelReceiver(name)
            message = successor.receive(timeout=WAIT_S, step=sender.acked_step + 1)
            check(message, message.step, faults)
            successor.ack()
            continue
        step += 1
    side.finish()
    if action == "kill" and sender.acked_step < STEPS - 1:
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


def after_a_resumer(name: str, side: Side, action: str) -> list[str]:
    """Resume after a sender's own signal in a resume."""
    faults: list[str] = []
    side.finish()
    if action == "kill":
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


def case(kind: str, name: str, failpoint: str, action: str) -> dict[str, object]:
    side = Side(Child(lambda: CHILDREN[kind](name), failpoint))
    try:
        if kind == "resumer":
            await_signal(side.child, action)
            side.look()
        faults = FOLLOW[kind](name, side, action)
        side.finish()
        if action == "stop" and side.child.status:
            faults.append(f"a side that was stopped and went on ended with {side.child.status}")
    finally:
        side.child.kill()
        with contextlib.suppress(BusNotFoundError):
            unlink_channel(name)
    return {"signalled": side.child.killed or side.stopped, "faults": faults}


if __name__ == "__main__":
    play(
        {kind: dict.fromkeys(of_kind, (1,)) for kind, of_kind in POINTS.items()},
        {kind: functools.partial(case, kind) for kind in POINTS},
    )
