"""What a draft head costs in GPU-hours: ``python -m bench.draft --device cuda``.

A target of Qwen3-4B's shape (random weights) reads data, and a head of one layer learns, from
hidden states of three layers and the last, to say what the target says next, over `UNROLLED`
positions. Arms: both in one process on one device, by turns; two processes on one device through a
`TensorChannel` (start MPS first, or they take turns); two devices by safetensors in /dev/shm, as
speculators does; two devices by NCCL; two devices through the channel. Every arm has the same data
and seeds, so their losses are the same but for rounding. The value is what 10,000 samples take.

``--soak N`` instead sends N short steps on one device, and says whether memory grew. With
``--device cpu`` a small model goes through host memory and gloo: that shows that it runs.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias, TypedDict

import torch
import torch.nn.functional as F

from bench import program
from bench.engines import PATIENCE_S, join_group, settle
from bench.processes import MeasurementError, Role, run_alone, run_together, use_template
from bench.row import Row, skipped
from shmbus.tensors import ChannelClosedError, TensorChannel

__all__ = ["main"]

Step: TypeAlias = dict[str, torch.Tensor]


class Shape(NamedTuple):
    """Of a target, and of what it reads in a step."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    vocab: int
    draft_vocab: int
    samples: int
    tokens: int


LARGE: Final = Shape(2560, 9728, 36, 32, 8, 128, 151936, 32000, 8, 1024)
SMALL: Final = Shape(64, 96, 4, 4, 2, 16, 512, 256, 2, 24)
UNROLLED: Final = 3
SAMPLES: Final = 10_000
WARM_UP: Final = 5
#: Steps that files may be ahead.
AHEAD: Final = 4
LEARNING_RATE: Final = 1e-3
ARMS: Final = {
    "alternating": "one process, one device",
    "channel": "two processes on one device, through a channel",
    "files": "two devices, by safetensors in /dev/shm",
    "nccl": "two devices, by NCCL",
    "channel-2": "two devices, through a channel",
}


# -- the two models --------------------------------------------------------------------------------


class Target:
    """Reads data, and gives hidden states."""

    def __init__(self, shape: Shape, device: str) -> None:
        from transformers import Qwen3Config, Qwen3Model

        config = Qwen3Config(
            vocab_size=shape.vocab, hidden_size=shape.hidden, intermediate_size=shape.inner,
            num_hidden_layers=shape.layers, num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads, head_dim=shape.head, attn_implementation="sdpa",
        )  # fmt: skip
        torch.manual_seed(0)
        with torch.device(device):
            self._model = Qwen3Model(config).to(torch.bfloat16).eval()
        self._shape, self._device = shape, device
        self._layers = (2, shape.layers // 2, shape.layers - 2)

    @torch.no_grad()
    def read(self, number: int) -> Step:
        """Read the data of a step, which comes by its number."""
        made = torch.Generator().manual_seed(number)
        size = (self._shape.samples, self._shape.tokens)
        ids = torch.randint(0, self._shape.draft_vocab, size, generator=made).to(self._device)
        out = self._model(ids, output_hidden_states=True, use_cache=False)
        chosen = torch.cat([out.hidden_states[layer] for layer in self._layers], -1)
        return {"ids": ids, "hidden": chosen, "last": out.last_hidden_state.contiguous()}


class Draft(torch.nn.Module):
    """One layer over three hidden states and the next token's embedding."""

    says: torch.Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.heads * shape.head
        self.embed = torch.nn.Embedding(shape.draft_vocab, shape.hidden)
        self.fuse = torch.nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.qkv = torch.nn.Linear(2 * shape.hidden, 3 * width, bias=False)
        self.out = torch.nn.Linear(width, shape.hidden, bias=False)
        self.up = torch.nn.Linear(shape.hidden, 2 * shape.inner, bias=False)
        self.down = torch.nn.Linear(shape.inner, shape.hidden, bias=False)
        self.head = torch.nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.embed.weight.requires_grad_(False)
        #: The target's own, of the draft's vocabulary.
        self.register_buffer("says", torch.randn(shape.draft_vocab, shape.hidden) * 0.2)
        self.head.weight.data.copy_(self.says)

    def layer(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Compute the next state, [B, T, hidden]."""
        batch, length, width = state.shape
        seen = F.rms_norm(torch.cat([self.embed(tokens), state], -1), (2 * width,))
        heads = self.qkv(seen).view(batch, length, 3, self.shape.heads, self.shape.head)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        state = state + self.out(found.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.up(F.rms_norm(state, (width,))).chunk(2, -1)
        after: torch.Tensor = state + self.down(F.silu(gate) * up)
        return after

    def loss(self, step: Step) -> torch.Tensor:
        """Cross-entropy with what the target says, over the unrolled positions."""
        with torch.no_grad():
            wanted = F.linear(step["last"], self.says).argmax(-1)
        state, total = self.fuse(step["hidden"]), torch.zeros((), device=step["ids"].device)
        length = step["ids"].shape[1] - UNROLLED
        for ahead in range(UNROLLED):
            cut = slice(ahead + 1, ahead + 1 + length)
            state = self.layer(state[:, :length], step["ids"][:, cut])
            said = self.head(F.rms_norm(state, state.shape[-1:]))
            total = total + F.cross_entropy(said.flatten(0, 1), wanted[:, cut].flatten())
        return total / UNROLLED


class Trainer:
    """Trains a draft, and keeps its losses and the most memory of each step."""

    def __init__(self, shape: Shape, device: str) -> None:
        torch.manual_seed(1)
        with torch.device(device):
            self.draft = Draft(shape).to(torch.bfloat16)
        wanted = [each for each in self.draft.parameters() if each.requires_grad]
        self._optimizer = torch.optim.AdamW(wanted, lr=LEARNING_RATE)
        self._device = device
        self.losses: list[torch.Tensor] = []
        self.peaks: list[int] = []

    def step(self, given: Step) -> None:
        """Take one step."""
        loss = self.draft.loss(given)
        loss.backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.detach())
        if self._device != "cpu":
            self.peaks.append(torch.cuda.memory_reserved(self._device))


class Report(TypedDict):
    """What a trainer found: after the warm-up."""

    seconds: float
    losses: list[float]
    peaks: list[int]


# -- ways from one to the other --------------------------------------------------------------------

Way: TypeAlias = tuple[str, str, Shape]


@contextmanager
def sending(way: Way, device: str) -> Iterator[Callable[[int, Step], None]]:
    """Send steps, each as soon as there is room."""
    kind, place, _ = way
    if kind == "files":

        def put(number: int, step: Step) -> None:
            from safetensors.torch import save_file

            ready = Path(place) / str(number)
            wait_until(lambda: not (Path(place) / str(number - AHEAD)).exists())
            save_file({name: each.cpu() for name, each in step.items()}, f"{ready}.new")
            os.rename(f"{ready}.new", ready)

        yield put
    elif kind == "nccl":
        join_group(place, 0, device)

        def deliver(number: int, step: Step) -> None:
            del number
            for each in step.values():
                torch.distributed.send(each, 1)

        yield deliver
        settle(device)
        torch.distributed.destroy_process_group()
    else:
        options: dict[str, Any] = {} if device == "cpu" else {"device": device}
        with TensorChannel.create(place, timeout=PATIENCE_S, **options) as channel:

            def pass_on(number: int, step: Step) -> None:
                channel.send(step, step=number)

            yield pass_on


def received(way: Way, device: str, steps: int) -> Iterator[Step]:
    """Yield steps; each may be overwritten when the next is asked for."""
    kind, place, shape = way
    size = (shape.samples, shape.tokens)
    sizes = {"ids": size, "hidden": (*size, 3 * shape.hidden), "last": (*size, shape.hidden)}
    if kind == "files":
        from safetensors.torch import load_file

        for number in range(steps):
            ready = Path(place) / str(number)
            wait_until(ready.exists)
            step = load_file(ready, device=device)
            settle(device)
            ready.unlink()
            yield step
    elif kind == "nccl":
        join_group(place, 1, device)
        dtypes = {"ids": torch.int64}
        for _ in range(steps):
            step = {
                name: torch.empty(size, dtype=dtypes.get(name, torch.bfloat16), device=device)
                for name, size in sizes.items()
            }
            for each in step.values():
                torch.distributed.recv(each, 0)
            yield step
        settle(device)
        torch.distributed.destroy_process_group()
    else:
        specs = {
            name: ("int64" if name == "ids" else "bfloat16", size) for name, size in sizes.items()
        }
        options: dict[str, Any] = {} if device == "cpu" else {"device": device}
        with TensorChannel.open(
            place, specs=specs, wait=PATIENCE_S, timeout=PATIENCE_S, **options
        ) as channel:
            try:
                while True:
                    with channel.recv() as item:
                        yield dict(item.items())
            except ChannelClosedError:
                return


def wait_until(done: Callable[[], bool]) -> None:
    """Look again and again."""
    deadline = time.monotonic() + PATIENCE_S
    while not done():
        if time.monotonic() > deadline:
            raise MeasurementError(f"nothing came in {PATIENCE_S:g} s")
        time.sleep(0.0005)


def target(start: Callable[[], None], way: Way, device: str, steps: int) -> float:
    """Read and send: an engine's process; the share of its time that sending took."""
    model, stalled = Target(way[2], device), 0.0
    model.read(0)
    settle(device)
    start()
    with sending(way, device) as send:
        began = time.perf_counter()
        for number in range(steps):
            step = model.read(number)
            settle(device)
            before = time.perf_counter()
            send(number, step)
            stalled += time.perf_counter() - before
        return stalled / (time.perf_counter() - began)


def train(start: Callable[[], None], way: Way, device: str, steps: int) -> Report:
    """Train on what comes: a trainer's process."""
    trainer, began = Trainer(way[2], device), 0.0
    start()
    for number, step in enumerate(received(way, device, steps)):
        trainer.step(step)
        del step
        if number == WARM_UP - 1:
            settle(device)
            began = time.perf_counter()
    settle(device)
    took = time.perf_counter() - began
    losses = [float(each) for each in trainer.losses]
    return Report(seconds=took, losses=losses, peaks=trainer.peaks)


def by_turns(start: Callable[[], None], shape: Shape, device: str, steps: int) -> Report:
    """Read and train in one process."""
    model, trainer, began = Target(shape, device), Trainer(shape, device), 0.0
    start()
    for number in range(steps):
        trainer.step(model.read(number))
        if number == WARM_UP - 1:
            settle(device)
            began = time.perf_counter()
    settle(device)
    took = time.perf_counter() - began
    losses = [float(each) for each in trainer.losses]
    return Report(seconds=took, losses=losses, peaks=trainer.peaks)


# -- what is measured ------------------------------------------------------------------------------


def run(arm: str, shape: Shape, devices: Sequence[str], steps: int) -> tuple[Report, float]:
    """Run an arm; what its trainer found, and the share of time for which its target stood."""
    if arm == "alternating":
        return run_alone(by_turns, shape, devices[0], steps), 0.0
    two = arm in ("files", "nccl", "channel-2")
    if two and devices[0] == devices[-1] != "cpu":
        raise MeasurementError("needs two devices, and there is one")
    place = f"bench-draft-{os.getpid()}-{secrets.token_hex(3)}"
    if arm == "nccl":
        with socket.socket() as chosen:
            chosen.bind(("127.0.0.1", 0))
            place = f"tcp://127.0.0.1:{chosen.getsockname()[1]}"
    folder = Path("/dev/shm") / place if arm == "files" else None
    if folder is not None:
        folder.mkdir()
        place = str(folder)
    way: Way = (arm, place, shape)
    try:
        report, stalled = run_together(
            [
                Role(train, (way, devices[-1] if two else devices[0], steps)),
                Role(target, (way, devices[0], steps)),
            ]
        )
        return report, stalled
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


def measure(options: argparse.Namespace) -> list[Row]:
    """Measure the arms, or what a long run keeps."""
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.tiny:
        use_template("torch", "transformers.models.qwen3.modeling_qwen3")
    if options.device != "cpu" and not torch.cuda.is_available():
        return [skipped("draft", "a draft head", "torch sees no CUDA device")]
    count = 0 if options.device == "cpu" else torch.cuda.device_count()
    devices = [f"cuda:{number}" for number in range(min(2, count))] or ["cpu"]
    shape = SMALL if options.tiny or not count else LARGE
    if options.soak:
        return [soak(shape._replace(samples=1, tokens=256), devices, options.soak)]
    steps = WARM_UP + (2 if options.tiny else options.steps)
    rows: list[Row] = []
    best: list[float] = []
    for arm in options.arms.split(","):
        title = f"draft head, {ARMS[arm]}"
        try:
            report, stalled = run(arm, shape, devices, steps)
        except (MeasurementError, OSError) as error:
            rows.append(skipped(f"draft-{arm}", title, str(error)))
            continue
        used = 2 if arm in ("files", "nccl", "channel-2") else 1
        rate = (steps - WARM_UP) * shape.samples / report["seconds"]
        hours = used * SAMPLES / rate / 3600
        losses = report["losses"]
        note = (
            f"{rate:.1f} samples/s; loss {losses[0]:.3f} to {losses[-1]:.3f}; "
            f"the target stood for {stalled:.0%}"
        )
        rows.append(
            Row(
                name=f"draft-{arm}", title=title, unit="GPU-h", values=(hours,), note=note,
                figures={"losses": losses, "samples_a_second": rate, "stalled": stalled},
            )
        )  # fmt: skip
        print(f"{title}: {hours:.4f} GPU-h; {note}", flush=True)
        if used == 2 and arm != "channel-2":
            best.append(hours)
    if best:
        rows = [
            Row(**{**vars(row), "beside": "two devices", "beside_values": (min(best),)})
            if row.name == "draft-channel" and row.values
            else row
            for row in rows
        ]
    return rows


def soak(shape: Shape, devices: Sequence[str], steps: int) -> Row:
    """Send many short steps, and compare the memory of the first tenth with the last."""
    report, _ = run("channel", shape, devices, steps)
    part = max(1, steps // 10)
    first, last = (max(cut, default=0) for cut in (report["peaks"][:part], report["peaks"][-part:]))
    ends = [statistics.fmean(cut) for cut in (report["losses"][:part], report["losses"][-part:])]
    return Row(
        name="draft-soak", title=f"draft head, {steps:,} steps through a channel", unit="B",
        values=(float(last - first),),
        note=f"more than in the first tenth; loss {ends[0]:.3f} to {ends[1]:.3f}",
        figures={"first": first, "last": last},
    )  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print, write."""
    parser = program.parser_of("draft", __doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--arms", default=",".join(ARMS), help="by commas (default: %(default)s)")
    parser.add_argument("--steps", type=program.at_least_one, default=60)
    parser.add_argument("--soak", type=program.at_least_one, metavar="N")
    return program.run("draft", parser, measure, argv)


if __name__ == "__main__":
    sys.exit(main())
