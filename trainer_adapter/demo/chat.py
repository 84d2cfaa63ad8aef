"""``shmbus demo --engine vllm``: GRPO of a chat model with a vLLM server, in one command.

Order of a step: batch, optimizer, new weights into the server, acknowledgement with the next
checkpoint. Invariant: the same command resumes after a kill of every process, from the newest
checkpoint, and trains no prompt twice. A dead server or worker restarts within the run.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
import socket
import sys
import time
import zlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import shmbus
from shmbus.base.format import with_notes
from shmbus.engines import EngineFleet, VllmServer
from shmbus.weights import ModuleSource, WeightPublisher
from trainer_adapter.attention import register_with_transformers
from trainer_adapter.corrections import importance_correction
from trainer_adapter.demo import chat_task
from trainer_adapter.demo.supervisor import Supervisor
from trainer_adapter.demo.view import Point, plot_chat
from trainer_adapter.handler.handler import OnlineDataHandler
from trainer_adapter.losses import policy_loss
from trainer_adapter.mismatch import logprob_mismatch


class ChatConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command line."""

    model: str
    group_size: int = chat_task.GROUP_SIZE
    seed: int = 0
    #: Optimizer steps; None takes the scale's number.
    steps: int | None = None
    #: True if the server sleeps while the trainer trains, on one GPU.
    turns: bool = False
    #: Folder for the checkpoint, ``curve.json`` and ``reward.png``.
    output: str = "shmbus-demo"


class Scale(NamedTuple):
    """Sizes of a run on a kind of machine."""

    device: str
    dtype: str
    groups_per_batch: int
    steps: int
    evaluate_every: int
    held_out: int
    server: list[str]
    #: The server's device, as CUDA_VISIBLE_DEVICES has it; empty for the trainer's.
    server_gpu: str = ""


class Remedy(NamedTuple):
    """How a run treats the gap between the engine's logprobs and the trainer's."""

    #: Of published weights: "nearest" or "stochastic".
    rounding: str = "stochastic"
    #: Dtype of the trainer's forward pass.
    forward: str = "float32"
    #: "none", "truncated" importance weights, or "recomputed": a ratio of the trainer's logprobs.
    correction: str = "none"


CPU = Scale("cpu", "float32", 4, 24, 4, 32, ["--enforce-eager"])
GPU = Scale("cuda", "bfloat16", 32, 60, 10, 128, ["--gpu-memory-utilization", "0.3"])
DEFAULT = Remedy()
#: Steps between two measurements of the gap by a second forward pass at the engine's dtype.
PROBE_STEPS = 10
#: State of AdamW for a parameter.
MOMENTS = ("step", "exp_avg", "exp_avg_sq")
#: Seconds to wait for a batch, and for an evaluation.
PATIENCE_S = 600.0
LEARNING_RATE = 1e-5


class UnusableError(Exception):
    """A model or a machine that cannot run the demo."""


def load(folder: Path, device: str) -> tuple[Any, Any]:
    """Load model and tokenizer; raise UnusableError with the reason."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if not (folder / "config.json").is_file():
        raise UnusableError(
            f"{folder}: no config.json; --model expects a Hugging Face folder (in a clone, "
            "`make demo-real` makes one)"
        )
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation=register_with_transformers(), dtype=torch.float32
        )
    except Exception as error:  # transformers raises whatever a file makes its parsers raise
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UnusableError(f"{folder}: transformers cannot load this model: {reason}") from error
    if not tokenizer.chat_template:
        raise UnusableError(f"{folder}: the tokenizer has no chat template; take a chat model")
    return model.to(device), tokenizer


class ChatRun:
    """One run: trainer, workers and server, from the first step or from a checkpoint."""

    def __init__(self, config: ChatConfig, scale: Scale, remedy: Remedy = DEFAULT) -> None:
        self.config, self.scale, self.remedy = config, scale, remedy
        self.steps = config.steps or scale.steps
        self.output = Path(config.output).resolve()
        self.output.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(config.seed)
        if torch.device(scale.device).index is not None:
            torch.cuda.set_device(scale.device)
        self.model, self.tokenizer = load(Path(config.model), scale.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, weight_decay=0.0
        )
        self.figures: list[dict[str, float]] = []
        self.training: list[Point] = []
        self.held_out: list[Point] = []
        self._unsaved: list[Any] = []
        self._before_s = 0.0
        self._began_s = time.monotonic()

    @property
    def saved(self) -> Path:
        """The newest checkpoint."""
        return self.output / "checkpoint.safetensors"

    @property
    def log(self) -> Path:
        """The output of the server."""
        return self.output / "server.log"

    @property
    def bus(self) -> str:
        """The same bus in each life of a run."""
        return f"demo-{zlib.crc32(os.fsencode(self.output)):08x}"

    def run(self) -> None:
        """Train until the last step."""
        options = [*self.scale.server, *["--enable-sleep-mode"] * self.config.turns]
        server = chat_task.server_of(
            Path(self.config.model), _free_port(), self.scale.dtype, options, self.log,
            self.scale.server_gpu,
        )  # fmt: skip
        dtype = getattr(torch, self.scale.dtype)
        source = ModuleSource(self.model, dtype=dtype, rounding=self.remedy.rounding)  # type: ignore[arg-type]
        workers = partial(chat_task.start_workers, self.bus, server.address, self.config.model)
        with (
            shmbus.Bus.ensure(self.bus, "256MiB", schema=chat_task.SCHEMA),
            _served(server),
            OnlineDataHandler(
                self.bus, groups_per_batch=self.scale.groups_per_batch, device=self.scale.device,
                sample_retries=5, max_policy_lag=4,
            ) as handler,
            WeightPublisher(self.bus, source) as publisher,
        ):  # fmt: skip
            self._resume(handler)
            fleet = EngineFleet([VllmServer(server.address)], bus=self.bus, mode="keep")
            fleet.update_sync(publisher, handler.step)
            turns = self.config.turns
            with Supervisor(server, fleet, publisher, workers, turns=turns) as supervisor:
                self._train(handler, supervisor)
        shmbus.unlink(self.bus)

    def _train(self, handler: OnlineDataHandler, supervisor: Supervisor) -> None:
        handler.offer(
            chat_task.prompts(self.tokenizer, self.config.seed),
            ahead=2, group_size=self.config.group_size,
        )  # fmt: skip
        if not self.held_out:
            self._evaluate(handler)
        while handler.step < self.steps:
            asked = time.monotonic()
            batch = handler.next_batch(PATIENCE_S)
            got = time.monotonic()
            supervisor.sleep()
            asleep = time.monotonic()
            figures = self._step(handler, batch)
            if self.scale.device != "cpu":
                torch.cuda.synchronize()
                figures["free_gb"] = torch.cuda.mem_get_info()[0] / 1e9
            stepped = time.monotonic()
            supervisor.update(handler.step)
            self._unsaved.append(batch)
            updated = time.monotonic()
            figures |= {
                "reward": float(batch.scores.mean()), "tokens": batch.num_tokens,
                "wait_s": got - asked, "sleep_s": asleep - got, "train_s": stepped - asleep,
                "update_s": updated - stepped,
            }  # fmt: skip
            self.figures.append(figures)
            self.training.append(Point(self._seconds(), handler.step, figures["reward"]))
            rounding = f" ({figures['gap_share']:.0%} rounding)" if "gap_share" in figures else ""
            print(
                f"step {handler.step:>3}/{self.steps}  reward {figures['reward']:.3f}  |dlogp| "
                f"{figures['mean']:.4f}{rounding}  wait {figures['wait_s']:.1f} s  train "
                f"{figures['train_s']:.1f} s  weights {figures['update_s']:.2f} s  "
                f"{self._seconds():,.0f} s",
                flush=True,
            )
            if handler.step % self.scale.evaluate_every == 0 or handler.step == self.steps:
                self._evaluate(handler)

    def _step(self, handler: OnlineDataHandler, batch: Any) -> dict[str, float]:
        """Train on a batch; return the figures of the gap and of clipping."""
        logprobs = chat_task.logprobs_of(self.model, batch, self.remedy.forward)
        low = None
        if handler.step % PROBE_STEPS == 0:
            with torch.no_grad():
                low = chat_task.logprobs_of(self.model, batch, self.scale.dtype)
        mismatch = logprob_mismatch(logprobs.detach(), batch, at_engine_dtype=low)
        handler.note_mismatch(mismatch, engine=self.scale.dtype, trainer=self.remedy.forward)
        old, weights = batch.logprobs, None
        if self.remedy.correction != "none":
            old = logprobs.detach()
            if self.remedy.correction == "truncated":
                weights = importance_correction(old, batch.logprobs, batch.loss_mask).weights
        loss = policy_loss(logprobs, old, batch.advantages, batch.loss_mask, weights=weights)
        self.optimizer.zero_grad()
        torch.autograd.backward(loss.loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return {"clip_fraction": float(loss.clip_fraction), **mismatch.metrics("")}

    def _evaluate(self, handler: OnlineDataHandler) -> None:
        """Ask the held-out questions; then save, draw, and acknowledge what the checkpoint has."""
        held_out = chat_task.prompts(self.tokenizer, chat_task.HELD_OUT_SEED)
        for number in range(self.scale.held_out):
            handler.request(
                f"eval-{handler.step}-{number}", group_size=1, split="eval", priority=7,
                **next(held_out),
            )  # fmt: skip
        found = handler.evaluate(self.scale.held_out, timeout=PATIENCE_S)
        self.held_out.append(Point(self._seconds(), handler.step, found["eval/reward/mean"]))
        reward = self.held_out[-1].reward
        print(f"step {handler.step:>3}/{self.steps}  held-out {reward:.3f}", flush=True)
        self._save(handler)
        plot_chat(self.training, self.held_out, self.output)
        while self._unsaved:
            handler.ack(self._unsaved.pop(0))

    def _save(self, handler: OnlineDataHandler) -> None:
        """Write model, optimizer, handler and curve as one file, in the place of the last."""
        named = list(self.model.named_parameters())
        tensors = {f"model.{name}": parameter.detach() for name, parameter in named}
        for name, parameter in named:
            for key, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"{key}.{name}"] = value
        said = msgspec.msgpack.encode((handler.state_dict(), self.training, self.held_out))
        new = self.saved.with_suffix(".new")
        save_file(tensors, new, {"state": base64.b64encode(said).decode()})
        os.replace(new, self.saved)

    def _resume(self, handler: OnlineDataHandler) -> None:
        if not self.saved.exists():
            return
        with safe_open(self.saved, "pt", device=self.scale.device) as file:
            said = base64.b64decode(file.metadata()["state"])
            state, *points = msgspec.msgpack.decode(said)
            names = file.keys()
            tensors = {name: file.get_tensor(name) for name in names}
        optimizer = self.optimizer.state_dict()
        with torch.no_grad():
            for number, (name, parameter) in enumerate(self.model.named_parameters()):
                parameter.copy_(tensors[f"model.{name}"])
                if f"step.{name}" in tensors:
                    moments = {key: tensors[f"{key}.{name}"] for key in MOMENTS}
                    optimizer["state"][number] = moments
        self.optimizer.load_state_dict(optimizer)
        handler.load_state_dict(state)
        self.training, self.held_out = msgspec.convert(points, tuple[list[Point], list[Point]])
        self._before_s = self.held_out[-1].seconds
        print(f"resumed after step {handler.step} from {self.saved}", flush=True)

    def _seconds(self) -> float:
        return self._before_s + time.monotonic() - self._began_s


@contextlib.contextmanager
def _served(server: Any) -> Iterator[None]:
    try:
        asyncio.run(server.start())
        yield
    finally:
        asyncio.run(server.end())


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def scale_here(*, turns: bool = False) -> Scale:
    """Return the sizes for this machine; of several GPUs the server takes the first."""
    if turns:
        if not torch.cuda.is_available():
            raise UnusableError("--turns needs a GPU: vLLM on a CPU has no sleep mode")
        return GPU
    if torch.cuda.device_count() < 2:
        return GPU if torch.cuda.is_available() else CPU
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    return GPU._replace(device="cuda:1", server_gpu=first)


def main(config: ChatConfig) -> int:
    """Run the demo; return 0 for a higher held-out reward at the end than before the first step."""
    run = None
    try:
        scale = scale_here(turns=config.turns)
        run = ChatRun(config, scale)
        print(
            f"shmbus demo: {config.model} with vLLM on {scale.device}, {scale.dtype}, "
            f"{run.steps} steps of {scale.groups_per_batch} groups of {config.group_size}; the "
            "first minute starts the server",
            flush=True,
        )
        run.run()
    except KeyboardInterrupt:
        print(f"stopped; the same command resumes from {config.output}", file=sys.stderr)
        return 130
    except (UnusableError, shmbus.ShmbusError) as error:
        print(f"shmbus demo: {with_notes(error)}", file=sys.stderr)
        if run is not None and run.log.exists():
            print(f"the server's output is in {run.log}", file=sys.stderr)
        if run is not None and not run.saved.exists():  # no later life needs the bus
            with contextlib.suppress(shmbus.BusNotFoundError):
                shmbus.unlink(run.bus)
        return 1
    before, after = run.held_out[0].reward, run.held_out[-1].reward
    print(
        f"held-out reward {before:.3f} before, {after:.3f} after {run.steps} steps in "
        f"{run.held_out[-1].seconds:,.0f} s: {run.output / 'reward.png'}"
    )
    return 0 if after > before else 1
