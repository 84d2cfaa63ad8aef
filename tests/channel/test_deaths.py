"""Sides that are killed or stopped while the other one waits: an error at once, and a successor."""

from __future__ import annotations

import signal

import pytest
from conftest import Spawner

from shmbus import PeerGoneError, WaitTimeoutError
from shmbus.channel import ChannelReceiver, ChannelSender

# Its steps are their own numbers; it lives on afterwards.
SENDER = """
import sys, time
from shmbus.channel import ChannelSender
sender = ChannelSender(sys.argv[1], slots=2)
for _ in range(int(sys.argv[2])):
    sender.send(b"%d" % sender.next_step)
print("sent", flush=True)
time.sleep(600)
"""

RECEIVER = """
import sys, time
from shmbus.channel import ChannelReceiver
receiver = ChannelReceiver(sys.argv[1], wait=30)
for _ in range(int(sys.argv[2])):
    receiver.receive()
    receiver.ack()
receiver.receive()
print("holds", flush=True)
time.sleep(600)
"""

# Far beyond what a test waits: only the death can end the wait in time.
NEVER_S = 3600.0


def text_of(receiver: ChannelReceiver) -> bytes:
    message = receiver.receive(timeout=20)
    text = bytes(memoryview(message.memory))
    receiver.ack()
    return text


@pytest.mark.timeout(60)
def test_a_killed_sender_ends_a_wait_and_its_successor_goes_on(
    bus_name: str, spawn: Spawner
) -> None:
    child = spawn.script(SENDER, bus_name, 2)
    child.expect("sent")
    with ChannelReceiver(bus_name) as receiver:
        assert [text_of(receiver), text_of(receiver)] == [b"0", b"1"]
        child.kill()
        with pytest.raises(PeerGoneError, match="sent up to step 1") as gone:
            receiver.receive(timeout=NEVER_S)
        assert (gone.value.side, gone.value.pid) == ("sender", child.pid)
        with pytest.raises(WaitTimeoutError, match="has died, and no successor has come"):
            receiver.receive(timeout=0.05)
        successor = spawn.script(SENDER, bus_name, 1)
        assert text_of(receiver) == b"2"
        successor.kill()


@pytest.mark.timeout(60)
def test_a_killed_receiver_ends_a_wait_and_its_successor_gets_what_it_held(
    bus_name: str, spawn: Spawner
) -> None:
    with ChannelSender(bus_name) as sender:
        child = spawn.script(RECEIVER, bus_name, 1)
        for _ in range(3):
            sender.send(b"%d" % sender.next_step, timeout=30)
        child.expect("holds")
        child.kill()
        with pytest.raises(PeerGoneError, match="acknowledged up to step 0") as gone:
            sender.send(b"3", step=3, timeout=NEVER_S)
        assert (gone.value.side, gone.value.pid) == ("receiver", child.pid)
        with ChannelReceiver(bus_name) as successor:
            assert [text_of(successor), text_of(successor)] == [b"1", b"2"]
            sender.send(b"3", step=3)
            assert text_of(successor) == b"3"


@pytest.mark.timeout(60)
def test_a_stopped_side_is_slow_and_not_dead(bus_name: str, spawn: Spawner) -> None:
    with ChannelSender(bus_name, slots=1) as sender:
        child = spawn.script(RECEIVER, bus_name, 1)
        sender.send(b"0")
        sender.send(b"1", timeout=30)
        child.expect("holds")
        child.send_signal(signal.SIGSTOP)
        with pytest.raises(WaitTimeoutError, match=r"lives, and is slow or stopped.*call again"):
            sender.send(b"2", timeout=0.3)
        child.send_signal(signal.SIGCONT)
        child.kill()
        with pytest.raises(PeerGoneError):
            sender.send(b"2", timeout=NEVER_S)
        with ChannelReceiver(bus_name) as successor:
            assert text_of(successor) == b"1"
