"""Channels between ranks: turns, ranks passed over, and repeated steps."""

import os
import signal
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fork_server import TEMPLATE

from shmbus import PeerGoneError, WaitTimeoutError
from shmbus.channel import unlink_channel
from shmbus.tensors import (
    ChannelClosedError,
    SpecMismatchError,
    StepOrderError,
    StepSkippedError,
    TensorChannel,
)
from shmbus.tensors.channel_group import ChannelGroup, GroupReceiver, GroupSender

SPECS = {"x": ("int64", (None,))}


@pytest.fixture
def name() -> Iterator[str]:
    name = f"test-group-{os.getpid()}"
    yield name
    for file in Path("/dev/shm").glob(f"shmbus-channel.{name}.*"):
        unlink_channel(file.name.removeprefix("shmbus-channel."))


def x(value: int) -> dict[str, torch.Tensor]:
    return {"x": torch.tensor([value])}


def sides(group: ChannelGroup, **options: Any) -> tuple[list[GroupSender], list[GroupReceiver]]:
    senders = [group.sender(rank, slots=4, **options) for rank in range(group.senders)]
    return senders, [group.receiver(rank, specs=SPECS) for rank in range(group.receivers)]


def take(receiver: GroupReceiver, timeout: float = 30.0) -> int:
    with receiver.recv(timeout) as item:
        return int(item["x"][0])


def close(*ends: Any) -> None:
    for end in ends:
        end.close()


def test_equal_counts_are_paired_by_rank(name: str) -> None:
    tx, rx = sides(TensorChannel.group(name, senders=2, receivers=2))
    for rank in (0, 1):
        tx[rank].send(x(rank), step=0)
    assert [take(each) for each in rx] == [0, 1]
    close(*tx, *rx)


def test_a_sender_deals_to_its_receivers_in_turn(name: str) -> None:
    (tx,), rx = sides(TensorChannel.group(name, senders=1, receivers=2))
    assert [tx.send(x(step), step=step) for step in range(6)] == list(range(6))
    assert [[take(each) for _ in range(3)] for each in rx] == [[0, 2, 4], [1, 3, 5]]
    with pytest.raises(StepOrderError, match=f"{name}.0.0.: expected step 6 of the .*, got step 8"):
        tx.send(x(8), step=8)
    close(tx, *rx)


def test_a_receiver_takes_of_its_senders_in_turn_and_of_whoever_has_something(name: str) -> None:
    tx, (rx,) = sides(TensorChannel.group(name, senders=2, receivers=1))
    for step in range(2):
        tx[0].send(x(step))
        tx[1].send(x(10 + step))
    assert [take(rx) for _ in range(4)] == [0, 10, 1, 11]
    tx[1].send(x(12))
    tx[1].skip(reason="nothing to train on")
    tx[1].send(x(14))
    assert take(rx) == 12
    with pytest.raises(StepSkippedError, match="nothing to train on"):
        rx.recv(30.0)
    assert take(rx) == 14
    tx[1].close()
    tx[0].send(x(2))
    assert take(rx) == 2  # one sender has ended, the other goes on
    with pytest.raises(WaitTimeoutError, match=r"the sender .* lives, and is slow"):
        rx.recv(0.0)
    tx[0].close()
    with pytest.raises(ChannelClosedError, match=f"{name}.0.0.*{name}.1.0|{name}.1.0.*{name}.0.0"):
        rx.recv(30.0)
    rx.close()


def receive_one(name: str, rank: int, pipe: Any) -> None:
    rx = TensorChannel.group(name, senders=1, receivers=2).receiver(rank, specs=SPECS, wait=30.0)
    item = rx.recv(30.0)
    pipe.send(int(item["x"][0]))
    signal.pause()


ROWS, WIDTH, STEPS = 4, 3, 6


def learning(states: Iterable[torch.Tensor], mean: Any) -> list[torch.Tensor]:
    """Train a head on a share of each step's rows; `mean` combines the gradients."""
    torch.manual_seed(0)
    head = torch.nn.Linear(WIDTH, 1)
    kept = []
    for state in states:
        head.zero_grad()
        head(state).square().mean().backward()
        for each in head.parameters():
            assert each.grad is not None
            mean(each.grad)
            each.data -= 0.1 * each.grad
        kept.append(head.weight.detach().clone())
    return kept


def learn_as_a_rank(name: str, rank: int, address: str, pipe: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    group = TensorChannel.group(name, senders=2, receivers=2)
    specs = {"h": ("float32", (ROWS, WIDTH))}

    def received() -> Iterator[torch.Tensor]:
        with group.receiver(rank, specs=specs, wait=30.0) as rx:
            for _ in range(STEPS):
                with rx.recv(30.0) as item:
                    yield item["h"]

    def mean(grad: torch.Tensor) -> None:
        torch.distributed.all_reduce(grad)
        grad /= 2

    pipe.send([each.tolist() for each in learning(received(), mean)])
    torch.distributed.destroy_process_group()


def send_one(name: str, rank: int, pipe: Any) -> None:
    tx = TensorChannel.group(name, senders=2, receivers=1).sender(rank, slots=4)
    tx.send(x(100))
    pipe.send(0)
    signal.pause()


def child(target: Any, name: str, rank: int) -> tuple[Any, Any]:
    ours, theirs = TEMPLATE.Pipe()
    process = TEMPLATE.Process(target=target, args=(name, rank, theirs), daemon=True)
    process.start()
    return process, ours


def test_a_killed_receiver_is_named_and_its_steps_wait(name: str) -> None:
    group = TensorChannel.group(name, senders=1, receivers=2)
    tx = group.sender(0, slots=4)
    alive = group.receiver(0, specs=SPECS)
    process, pipe = child(receive_one, name, 1)
    tx.send(x(0))
    tx.send(x(1))
    assert pipe.poll(30.0) and pipe.recv() == 1
    process.kill()
    process.join(30)
    with pytest.raises(PeerGoneError, match=f"{name}.0.1.*receiver .* has died"):
        tx.send(x(2))
    for step in (2, 4, 6, 8):  # of the living one
        assert tx.next_step == step
        tx.send(x(step), step=step, timeout=30.0)
        if step == 6:
            assert [take(alive) for _ in range(4)] == [0, 2, 4, 6]
    assert take(alive) == 8
    successor = group.receiver(1, specs=SPECS)
    assert take(successor) == 1  # the unacknowledged step
    for step in (3, 5, 7, 9, 10):
        assert tx.next_step == step
        tx.send(x(step))
        assert take(successor if step % 2 else alive) == step
    close(tx, alive, successor)


def test_a_killed_sender_is_named_once_and_the_other_goes_on(name: str) -> None:
    group = TensorChannel.group(name, senders=2, receivers=1)
    process, pipe = child(send_one, name, 1)
    tx = group.sender(0, slots=4)
    assert pipe.poll(30.0)
    rx = group.receiver(0, specs=SPECS)
    process.kill()
    process.join(30)
    tx.send(x(0))
    assert [take(rx), take(rx)] == [0, 100]  # the sent steps stay
    tx.send(x(1))
    assert take(rx) == 1
    with pytest.raises(PeerGoneError, match=f"{name}.1.0.*sender .* has died"):
        rx.recv(30.0)
    tx.send(x(2))
    assert take(rx) == 2
    successor = group.sender(1, slots=4)
    assert successor.next_step == 1
    successor.send(x(101))
    assert take(rx) == 101
    close(tx, successor, rx)


def test_a_resumed_group_repeats_and_skips_nothing(name: str) -> None:
    group = TensorChannel.group(name, senders=1, receivers=2)
    (tx,), rx = sides(group)
    for step in range(6):
        tx.send(x(step))
    assert [take(rx[0]), take(rx[1]), take(rx[0])] == [0, 1, 2]
    saved = rx[0].state_dict() | rx[1].state_dict()
    assert take(rx[1]) == 3  # after the checkpoint
    close(*rx, tx)
    tx = group.sender(0, slots=4)
    tx.load_state_dict(saved)
    rx = [group.receiver(rank, specs=SPECS) for rank in (0, 1)]
    for each in rx:
        each.load_state_dict(saved)
    sent = []
    while tx.next_step < 6:
        sent.append(tx.send(x(tx.next_step)))
    assert sent == [3, 5]  # the fourth is on its way still
    assert [take(rx[1]), take(rx[0]), take(rx[1])] == [3, 4, 5]
    assert tx.next_step == 6
    with pytest.raises(ValueError, match=f"expected a step of channel '{name}.0.0'"):
        tx.load_state_dict({})
    close(tx, *rx)


def test_one_rank_of_another_specification_is_told_on_both_sides_before_a_step(name: str) -> None:
    group = TensorChannel.group(name, senders=1, receivers=2)
    tx = group.sender(0, specs=SPECS)
    rx = group.receiver(0, specs=SPECS)
    other = group.receiver(1, specs={"x": ("float32", (None,))})
    assert tx.send(x(0)) == 0 and take(rx) == 0
    for call in (lambda: tx.send(x(1)), lambda: other.recv(30.0)):
        with pytest.raises(SpecMismatchError, match=r"int64\[\*\].*float32\[\*\]"):
            call()
    close(tx, rx, other)


def test_counts_that_do_not_divide_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="multiple of the opposite number, got 2 and 3"):
        TensorChannel.group("x", senders=2, receivers=3)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        TensorChannel.group("x", senders=2, receivers=2).sender(2)


def test_two_gloo_ranks_learn_as_one_process(name: str, tmp_path: Path, seed: int) -> None:
    chance = torch.Generator().manual_seed(seed)
    steps = [torch.randn(2 * ROWS, WIDTH, generator=chance) for _ in range(STEPS)]
    address = f"file://{tmp_path}/store"
    pipes, processes = [], []
    for rank in (0, 1):
        ours, theirs = TEMPLATE.Pipe()
        arguments = (name, rank, address, theirs)
        processes.append(TEMPLATE.Process(target=learn_as_a_rank, args=arguments))
        processes[-1].start()
        pipes.append(ours)
    group = TensorChannel.group(name, senders=2, receivers=2)
    with group.sender(0, slots=4) as first, group.sender(1, slots=4) as second:
        for step in steps:
            first.send({"h": step[:ROWS].clone()}, timeout=30.0)
            second.send({"h": step[ROWS:].clone()}, timeout=30.0)
        assert all(pipe.poll(60.0) for pipe in pipes)
        found = [torch.tensor(pipe.recv()) for pipe in pipes]
    for process in processes:
        process.join(30.0)
        assert process.exitcode == 0
    assert torch.equal(*found)
    torch.testing.assert_close(found[0], torch.stack(learning(steps, lambda grad: None)))
