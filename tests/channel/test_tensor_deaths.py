"""Each published failure of tensors between processes: a naive twin hangs in it, this raises.

`SHMBUS_TEST_LONG=1` stops both sides for a minute instead of a second.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from naive import Hang, NaiveReceiver, NaiveSender

from shmbus import PeerGoneError, WaitTimeoutError
from shmbus.tensors import (
    ChannelClosedError,
    SpecMismatchError,
    StepOrderError,
    StepSkippedError,
    TensorChannel,
)
from shmbus.tensors import receiver as receiving
from shmbus.tensors import sender as sending

SPAWN = multiprocessing.get_context("forkserver")
SPAWN.set_forkserver_preload(["shmbus.tensors"])

SPECS = {"hidden": ("float32", (4, 8)), "ids": ("int64", (4,))}
SIZES = [4 * 8 * 4, 4 * 8]
# Far beyond what a test waits: only the other side's message or death can end a wait in time.
NEVER_S = 3600.0
#: Of sides that are stopped together: less than they are stopped.
PATIENCE_S = 0.2
STOPPED_S = 60.0 if "SHMBUS_TEST_LONG" in os.environ else 1.0


def good(value: int = 0) -> dict[str, torch.Tensor]:
    return {"hidden": torch.full((4, 8), float(value)), "ids": torch.full((4,), value)}


def outcomes(*sides: Callable[[], Any]) -> list[type[BaseException] | None]:
    """Run both sides at once; returns what each one raised."""
    found: list[type[BaseException] | None] = [None] * len(sides)

    def run(number: int, side: Callable[[], Any]) -> None:
        try:
            side()
        except Exception as error:
            found[number] = type(error)

    threads = [
        threading.Thread(target=run, args=(number, side), daemon=True)
        for number, side in enumerate(sides)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "a side hangs"
    return found


def twins(folder: Path) -> tuple[NaiveSender, NaiveReceiver]:
    return NaiveSender(folder / "naive"), NaiveReceiver(folder / "naive")


def test_the_naive_twin_carries_steps_that_both_sides_know(tmp_path: Path) -> None:
    sender, receiver = twins(tmp_path)
    sent = list(good().values())
    for _ in range(3):
        assert outcomes(lambda: sender.send(sent), lambda: receiver.receive(SIZES)) == [None] * 2


# --- what is sent is not what is expected


@pytest.mark.parametrize(
    "tensors",
    [
        pytest.param({**good(), "extra": torch.ones(2)}, id="extra-tensor"),
        pytest.param({"hidden": good()["hidden"]}, id="missing-tensor"),
        pytest.param({**good(), "hidden": torch.ones(4, 8, dtype=torch.bfloat16)}, id="dtype"),
    ],
)
def test_a_step_that_is_not_what_is_expected_raises_on_both_sides(
    bus_name: str, tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    naive, other = twins(tmp_path)
    sent = list(tensors.values())
    assert outcomes(lambda: naive.send(sent), lambda: other.receive(SIZES)) == [Hang, Hang]
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):
        found = outcomes(
            lambda: sender.send(tensors, timeout=NEVER_S), lambda: receiver.recv(NEVER_S)
        )
        assert found == [SpecMismatchError] * 2


def test_a_step_that_is_skipped_is_told_to_the_receiver(bus_name: str, tmp_path: Path) -> None:
    naive, other = twins(tmp_path)
    assert outcomes(lambda: naive.send([]), lambda: other.receive(SIZES)) == [Hang, Hang]
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):
        found = outcomes(
            lambda: sender.skip(reason="loss mask empty"), lambda: receiver.recv(NEVER_S)
        )
        assert found == [None, StepSkippedError]
        sender.send(good(1), step=1)
        with receiver.recv(20) as item:
            assert item.step == 1


# --- deaths


@contextlib.contextmanager
def child_at(target: Callable[..., None], where: Any, phase: str) -> Iterator[Any]:
    """Run a side in a process of its own that stays in a phase; it is there when this returns."""
    ours, theirs = SPAWN.Pipe()
    child = SPAWN.Process(target=target, args=(where, phase, theirs), daemon=True)
    child.start()
    try:
        assert ours.poll(30), f"no child in phase {phase}"
        assert ours.recv() == phase
        yield child
    finally:
        child.kill()
        child.join(20)


def die_soon(child: Any) -> None:
    """Kill a child while this process waits for it."""
    threading.Timer(0.05, child.kill).start()


def stay(phase: str, pipe: Connection) -> None:
    pipe.send(phase)
    time.sleep(600)


def naive_sender(path: Path, phase: str, pipe: Connection) -> None:
    sender = NaiveSender(path, NEVER_S)
    if phase == "between tensors":
        sender.put(good()["hidden"])
    stay(phase, pipe)


def naive_receiver(path: Path, phase: str, pipe: Connection) -> None:
    receiver = NaiveReceiver(path, NEVER_S)
    if phase == "between tensors":
        pipe.send(phase)
        receiver.take(SIZES[0])
        time.sleep(600)
    stay(phase, pipe)


def tensor_sender(name: str, phase: str, pipe: Connection) -> None:
    specs = SPECS if phase == "declared" else None
    sender = TensorChannel.create(name, slots=1, specs=specs, timeout=NEVER_S)
    if phase in ("created", "declared"):
        stay(phase, pipe)
    if phase == "copying":
        sending.copy_bytes = lambda *_: stay(phase, pipe)  # type: ignore[attr-defined]
    sender.send(good())
    if phase == "sent":
        stay(phase, pipe)
    pipe.send(phase)
    sender.send(good(1))  # the one slot is full


def tensor_receiver(name: str, phase: str, pipe: Connection) -> None:
    receiver = TensorChannel.open(name, specs=SPECS, wait=30)
    if phase == "opened":
        stay(phase, pipe)
    if phase == "waiting":
        pipe.send(phase)
    if phase == "opening a step":
        receiving.StepReader.open = lambda *_: stay(phase, pipe)  # type: ignore[method-assign,assignment]
    with receiver.recv(NEVER_S):
        if phase == "holding a step":
            stay(phase, pipe)
    stay(phase, pipe)


@pytest.mark.parametrize("phase", ["before a step", "between tensors"])
def test_a_death_hangs_the_naive_twin(tmp_path: Path, phase: str) -> None:
    path = tmp_path / "sender-dies"
    receiver = NaiveReceiver(path)
    if phase == "between tensors":
        taking = threading.Thread(target=receiver.take, args=(SIZES[0],))
        receiver._deadline_s = 30.0
        taking.start()
    with child_at(naive_sender, path, phase) as child:
        if phase == "between tensors":
            taking.join()
        child.kill()
        receiver._deadline_s = 0.5
        with pytest.raises(Hang):
            receiver.take(SIZES[1])
    path = tmp_path / "receiver-dies"
    sender = NaiveSender(path)
    with child_at(naive_receiver, path, phase) as child:
        if phase == "between tensors":
            sender._deadline_s = 30.0
            sender.put(good()["hidden"])
        child.kill()
        sender._deadline_s = 0.5
        with pytest.raises(Hang):
            sender.put(good()["ids"])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("phase", ["created", "declared", "copying", "sent", "waiting"])
def test_a_sender_that_is_killed_in_a_phase_is_told_and_succeeded(
    bus_name: str, phase: str
) -> None:
    sent = phase in ("sent", "waiting")
    with child_at(tensor_sender, bus_name, phase) as child:
        receiver = TensorChannel.open(bus_name, specs=SPECS)
        if phase == "waiting":
            child.kill()  # to receive a step would end its wait
            child.join()
        else:
            die_soon(child)
        if sent:
            with receiver.recv(NEVER_S) as item:
                assert torch.equal(item["hidden"], good()["hidden"])
        with pytest.raises(PeerGoneError) as gone:
            receiver.recv(NEVER_S)
        assert (gone.value.side, gone.value.pid) == ("sender", child.pid)
    with TensorChannel.create(bus_name, slots=1) as sender, receiver:
        assert sender.next_step == int(sent)
        sender.send(good(7))
        with receiver.recv(20) as item:
            assert (item.step, item["ids"].tolist()) == (int(sent), [7] * 4)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "phase", ["opened", "waiting", "opening a step", "holding a step", "acknowledged"]
)
def test_a_receiver_that_is_killed_in_a_phase_is_told_and_succeeded(
    bus_name: str, phase: str
) -> None:
    acked = int(phase == "acknowledged")
    with TensorChannel.create(bus_name, slots=1) as sender:
        if phase not in ("opened", "waiting"):
            sender.send(good(0))
        with child_at(tensor_receiver, bus_name, phase) as child:
            if phase in ("opened", "waiting"):
                child.kill()  # a wait would take the step
                child.join()
            else:
                die_soon(child)
            with pytest.raises(PeerGoneError) as gone:
                while True:
                    sender.send(good(sender.next_step), timeout=NEVER_S)
            assert (gone.value.side, gone.value.pid) == ("receiver", child.pid)
        with TensorChannel.open(bus_name, specs=SPECS) as successor:
            for step in (acked, acked + 1):
                with successor.recv(20) as item:
                    assert (item.step, item["ids"].tolist()) == (step, [step] * 4)
                sender.send(good(sender.next_step), step=step + 1)
            with successor.recv(20):
                pass


# --- sides that come again


def test_a_sender_that_is_restarted_goes_on_at_its_step(bus_name: str, tmp_path: Path) -> None:
    naive, other = twins(tmp_path)
    sent = list(good().values())
    for _ in range(2):
        assert outcomes(lambda: naive.send(sent), lambda: other.receive(SIZES)) == [None] * 2
    again = NaiveSender(tmp_path / "naive")
    assert outcomes(lambda: again.send(sent), lambda: other.receive(SIZES)) == [Hang, Hang]
    with child_at(tensor_sender, bus_name, "sent") as child:
        receiver = TensorChannel.open(bus_name, specs=SPECS)
        with receiver.recv(NEVER_S):
            pass
        die_soon(child)
        with pytest.raises(PeerGoneError):
            receiver.recv(NEVER_S)
    with TensorChannel.create(bus_name, slots=1) as successor, receiver:
        with pytest.raises(StepOrderError, match="it was sent already"):
            successor.send(good(), step=0)
        assert successor.next_step == 1
        assert outcomes(lambda: successor.send(good()), lambda: receiver.recv(NEVER_S).ack()) == [
            None,
            None,
        ]
        assert receiver.acked_step == 1


def test_a_resume_in_mid_epoch_leaves_nothing_out_and_repeats_nothing(
    bus_name: str, tmp_path: Path
) -> None:
    naive, other = twins(tmp_path)
    sent = list(good().values())
    other.bytes, other.steps = 3 * sum(SIZES), 3  # of its checkpoint; the sender's data begin again
    assert outcomes(lambda: naive.send(sent), lambda: other.receive(SIZES)) == [Hang, Hang]
    state = {"acked_step": 2}
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):
        sender.load_state_dict(state)
        receiver.load_state_dict(state)
        with pytest.raises(StepOrderError, match="expected step 3, got step 0"):
            sender.send(good(), step=0)
        sender.send(good(3), step=3)
        with receiver.recv(NEVER_S) as item:
            assert (item.step, item["ids"].tolist()) == (3, [3] * 4)


def test_a_sender_that_resumes_later_than_its_receiver_raises_there(bus_name: str) -> None:
    with (
        TensorChannel.create(bus_name) as sender,
        TensorChannel.open(bus_name, specs=SPECS) as receiver,
    ):
        sender.load_state_dict({"acked_step": 5})
        receiver.load_state_dict({"acked_step": 2})
        sender.send(good(6))
        with pytest.raises(StepOrderError, match="expected step 3, got step 6"):
            receiver.recv(NEVER_S)
        receiver.load_state_dict({"acked_step": 5})
        with receiver.recv(20) as item:
            assert item.step == 6


# --- both sides stopped


def impatient_sender(path: Path, phase: str, pipe: Connection) -> None:
    """Take a late answer for a death, as a transport does that knows deaths by their delay.

    From when it is told: on a loaded machine each answer may be late.
    """
    sender = NaiveSender(path, NEVER_S)
    pipe.send(phase)
    with contextlib.suppress(Hang):
        while True:
            sender.send(list(good().values()))
            if pipe.poll():
                pipe.send(pipe.recv())
                sender._deadline_s = PATIENCE_S
    pipe.send("gone")


def tireless_receiver(path: Path, phase: str, pipe: Connection) -> None:
    receiver = NaiveReceiver(path, 2.0)
    pipe.send(phase)
    try:
        while True:
            receiver.receive(SIZES)
    except Hang:
        pipe.send("hangs")
    time.sleep(600)


def steady_sender(name: str, phase: str, pipe: Connection) -> None:
    with TensorChannel.create(name, timeout=PATIENCE_S) as sender:
        pipe.send(phase)
        while not pipe.poll(0.001):
            with contextlib.suppress(WaitTimeoutError):  # nothing is lost: call again
                sender.send(good(sender.next_step))
        pipe.send(sender.next_step)
        while sender.acked_step + 1 < sender.next_step:
            time.sleep(0.001)


def steady_receiver(name: str, phase: str, pipe: Connection) -> None:
    receiver = TensorChannel.open(name, specs=SPECS, wait=30, timeout=PATIENCE_S)
    expected = 0
    with contextlib.suppress(ChannelClosedError):
        while True:
            with contextlib.suppress(WaitTimeoutError), receiver.recv() as item:
                assert (item.step, item["ids"].tolist()) == (expected, [expected] * 4)
                expected += 1
                if expected == 3:
                    pipe.send(phase)
    pipe.send(expected)
    time.sleep(600)


def stop_both(sender: Any, receiver: Any, duration_s: float) -> None:
    """Stop both; the sender goes on first, and finds a receiver that is late."""
    for child in (receiver, sender):
        os.kill(child.pid, signal.SIGSTOP)
    time.sleep(duration_s)
    for child in (sender, receiver):
        os.kill(child.pid, signal.SIGCONT)
        time.sleep(2 * PATIENCE_S)


@contextlib.contextmanager
def pair(sender: Callable[..., None], receiver: Callable[..., None], where: Any) -> Iterator[Any]:
    """Run both sides, each a process of its own, until both have begun."""
    pipes = [SPAWN.Pipe() for _ in range(2)]
    children = [
        SPAWN.Process(target=target, args=(where, "begun", pipe[1]), daemon=True)
        for target, pipe in zip((sender, receiver), pipes, strict=True)
    ]
    for child in children:
        child.start()
    try:
        for ours, _ in pipes:
            assert ours.poll(30)
            assert ours.recv() == "begun"
        yield [ours for ours, _ in pipes], children
    finally:
        for child in children:
            child.kill()
            child.join(20)


@pytest.mark.timeout(60)
def test_both_sides_stopped_hang_the_naive_twin(tmp_path: Path) -> None:
    with pair(impatient_sender, tireless_receiver, tmp_path / "naive") as (pipes, children):
        pipes[0].send("be impatient")
        assert pipes[0].poll(20)
        assert pipes[0].recv() == "be impatient"
        stop_both(children[0], children[1], 2 * PATIENCE_S)
        assert [pipe.poll(20) and pipe.recv() for pipe in pipes] == ["gone", "hangs"]


@pytest.mark.timeout(60 + 2 * STOPPED_S)
def test_both_sides_stopped_and_continued_go_on_with_each_step_once(bus_name: str) -> None:
    with pair(steady_sender, steady_receiver, bus_name) as (pipes, children):
        stop_both(children[0], children[1], STOPPED_S)
        pipes[0].send("enough")
        assert pipes[0].poll(20)
        sent = pipes[0].recv()
        assert pipes[1].poll(20)
        assert pipes[1].recv() == sent >= 3
