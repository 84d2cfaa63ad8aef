"""A draft head learns to predict the hidden states of a generating process, on CPU or GPU.

    python examples/draft_head.py                    # both processes on the CPU
    python examples/draft_head.py --device cuda:0    # both on the same GPU

The generating process sends hidden states and tokens of its steps, of varying length, over a
`TensorChannel`. From the state at a token and the next token, the head predicts the next state.
--compare repeats the steps in the trainer's own process; every gradient has to match to the last
bit.
"""

from __future__ import annotations

import argparse
import contextlib
import multiprocessing
import os
import threading
from collections.abc import Iterator

import torch

from shmbus import BusNotFoundError
from shmbus.channel import unlink_channel
from shmbus.tensors import ChannelClosedError, StepSkippedError, TensorChannel

ROWS, WIDTH, TOKENS, LONGEST = 16, 64, 128, 20
SPECS = {"hidden": ("float32", (ROWS, None, WIDTH)), "ids": ("int64", (ROWS, None))}
Step = dict[str, torch.Tensor]


class Generator(torch.nn.Module):
    """Stands in for an engine: a recurrent model as token sampler."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(TOKENS, WIDTH)
        self.cell = torch.nn.GRUCell(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, TOKENS)

    @torch.no_grad()
    def generate(self, length: int) -> Step:
        """Sample so many tokens, and keep their states."""
        state = torch.zeros(ROWS, WIDTH, device=self.head.weight.device)
        token = torch.zeros(ROWS, dtype=torch.int64, device=state.device)
        states, ids = [], []
        for _ in range(length):
            state = self.cell(self.embedding(token), state)
            token = torch.multinomial(self.head(state).softmax(-1), 1).squeeze(1)
            states.append(state)
            ids.append(token)
        return {"hidden": torch.stack(states, 1), "ids": torch.stack(ids, 1)}


class DraftHead(torch.nn.Module):
    """Maps the current state and the next token to the next state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(TOKENS, WIDTH)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(2 * WIDTH, 4 * WIDTH),
            torch.nn.SiLU(),
            torch.nn.Linear(4 * WIDTH, WIDTH),
        )

    def loss(self, step: Step) -> torch.Tensor:
        """Return the mean squared error, relative to a prediction of no change."""
        hidden, ids = step["hidden"], step["ids"]
        # A token leads to its state: the token at t goes into the state at t+1.
        known = torch.cat([hidden[:, :-1], self.embedding(ids[:, :-1])], -1)
        change = hidden[:, 1:] - hidden[:, :-1]
        loss = torch.nn.functional.mse_loss(self.net(known), change)
        return loss / change.square().mean()


def generated(steps: int, device: str) -> Iterator[Step | None]:
    """Generate steps; None for a step too short for a prediction."""
    torch.manual_seed(1)
    generator = Generator().to(device)
    for _ in range(steps):
        length = int(torch.randint(1, LONGEST, ()))
        yield generator.generate(length) if length > 1 else None


def engine(name: str, steps: int, device: str) -> None:
    """Generate and send, in a separate process."""
    torch.set_num_threads(1)
    threading.Thread(target=end_with_trainer, args=(name,), daemon=True).start()
    with TensorChannel.create(name, device=None if device == "cpu" else device) as channel:
        for step in generated(steps, device):
            if step is None:
                channel.skip(reason="one token only: nothing to predict")
            else:
                channel.send(step)


def end_with_trainer(name: str) -> None:
    """End this process after the trainer's, also after a kill before the channel's first use."""
    trainer = multiprocessing.parent_process()
    assert trainer is not None
    trainer.join()
    with contextlib.suppress(BusNotFoundError):
        unlink_channel(name)
    os._exit(1)


def received(name: str) -> Iterator[Step | None]:
    """Receive steps; the next step acknowledges its predecessor."""
    with TensorChannel.open(name, specs=SPECS, wait=60.0) as channel:
        while True:
            try:
                with channel.recv(timeout=60.0) as item:
                    yield dict(item)
            except StepSkippedError:
                yield None
            except ChannelClosedError:
                return


def learn(steps: Iterator[Step | None], device: str) -> Iterator[tuple[float, list[torch.Tensor]]]:
    """Train a head; yield the loss and the gradients of each step."""
    with torch.random.fork_rng(devices=[]):  # the same head in both runs
        torch.manual_seed(2)
        head = DraftHead().to(device)
    optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
    for step in steps:
        if step is not None:
            optimizer.zero_grad()
            loss = head.loss(step)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            grads = [each.grad.clone() for each in head.parameters() if each.grad is not None]
            yield loss.item(), grads


def main() -> None:
    """Run the engine beside the head, and print how the loss fell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--quick", action="store_true", help="80 steps, compared")
    parser.add_argument("--compare", action="store_true", help="with gradients of this process")
    parser.add_argument("--name", default=f"draft-head-{os.getpid()}")
    options = parser.parse_args()
    steps = 80 if options.quick else options.steps
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    process = spawn.Process(target=engine, args=(options.name, steps, options.device), daemon=True)
    process.start()
    losses = []
    here = None
    if options.compare or options.quick:
        here = learn(generated(steps, options.device), options.device)
    for loss, gradients in learn(received(options.name), options.device):
        losses.append(loss)
        if here is not None:
            same = next(here)[1]
            assert all(map(torch.equal, gradients, same)), f"step {len(losses)} differs"
    process.join(60)
    first, last = (sum(part) / len(part) for part in (losses[:5], losses[-5:]))
    skipped = f"{steps - len(losses)} skipped"
    compared = "every gradient as of tensors made here, " if here is not None else ""
    print(f"{len(losses)} steps, {skipped}, {compared}loss {first:.3f} -> {last:.3f}")


if __name__ == "__main__":
    main()
