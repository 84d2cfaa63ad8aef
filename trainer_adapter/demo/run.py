"""The demo itself: one trainer, several workers, one bus, and a policy that learns through them.

Order of an iteration: take a batch of whole groups, step, publish the new weights, announce their
version on the bus, acknowledge the batch. At the end of the run (after the last step, Ctrl-C or an
error), the workers are stopped, the ledger is read, and both segments are removed, in this order.
"""

from __future__ import annotations

import itertools
import os
import secrets
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Final

import msgspec
import numpy as np
import torch
from rich.console import Console

import shmbus
from trainer_adapter.batches.batch import Batch
from trainer_adapter.demo.evaluate import Evaluation, evaluate
from trainer_adapter.demo.learner import Learner
from trainer_adapter.demo.policy import Policy
from trainer_adapter.demo.report import (
    Point,
    Summary,
    ledger_text,
    plot_reward,
    write_summary,
)
from trainer_adapter.demo.sampler import PolicyConfig, Sampler
from trainer_adapter.demo.supervisor import Supervisor
from trainer_adapter.demo.task import SortTask, show
from trainer_adapter.demo.view import Figures, LiveView, PlainView
from trainer_adapter.demo.weights import WeightsChannel
from trainer_adapter.demo.worker import WorkerConfig
from trainer_adapter.handler.handler import OnlineDataHandler

#: Ring for records; they are small here, so this is ample.
CAPACITY: Final = "32MiB"
#: Groups in a batch: enough that the direction of a step is not noise.
GROUPS_PER_BATCH: Final = 48
#: Samples that a worker makes as one batch.
SAMPLES_AT_ONCE: Final = 48
#: Prompts that are open while the trainer waits for a batch, in batches.
AHEAD_BATCHES: Final = 2
#: Groups whose oldest sample is more versions behind are dropped: older ones slow the learning.
MAX_POLICY_LAG: Final = 4
#: Seconds after which a group that lost its worker is dropped.
GROUP_TIMEOUT_S: Final = 5.0
#: Steps between two evaluations on held-out prompts, and how many prompts those are.
EVALUATE_EVERY: Final = 20
HELD_OUT_PROMPTS: Final = 256
REWARD_TARGET: Final = 0.9
#: Seconds to wait for the first complete group before something must be wrong.
FIRST_BATCH_S: Final = 60.0
#: Seconds between two readings of the ledger for the view.
LOOK_PERIOD_S: Final = 0.25


class DemoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line says."""

    workers: int = 4
    group_size: int = 8
    seed: int = 0
    steps: int = 500
    chaos: bool = False
    live: bool = True
    #: Folder for ``summary.json`` and ``reward.png``.
    output: str = "shmbus-demo"


class Demo:
    """One run, from the first to the last process and segment."""

    def __init__(self, config: DemoConfig, console: Console) -> None:
        self.config = config
        self.console = console
        self.task = SortTask()
        self.shape = PolicyConfig()
        self.held_out = self.task.held_out_prompts(HELD_OUT_PROMPTS)
        self.sampler = Sampler(self.shape)
        self.figures = Figures(steps=config.steps, workers=config.workers, target=REWARD_TARGET)
        self.training: list[Point] = []
        self.evaluations: list[Point] = []
        self.last: Evaluation | None = None
        self.groups = self.sequences = self.tokens = 0
        self._rng = np.random.default_rng(config.seed)
        self.interrupted = False
        self._recent: list[tuple[float, int, int]] = []
        self._next_look_s = 0.0

    def run(self) -> Summary:
        """Train; returns the summary of the run."""
        config = self.config
        torch.manual_seed(config.seed)
        # The workers need the other cores; batches this small gain nothing from threads.
        torch.set_num_threads(1)
        name = f"demo-{os.getpid()}-{secrets.token_hex(3)}"
        self.learner = Learner(Policy(self.shape, seed=config.seed))
        title = (
            f"shmbus demo: sorting digits, {config.workers} workers, groups of "
            f"{config.group_size}{', chaos' if config.chaos else ''}"
        )
        view = (LiveView if config.live else PlainView)(self.console, title)
        with shmbus.Bus.create(name, CAPACITY, max_producers=4 * config.workers + 8):
            channel = WeightsChannel(name, self.shape.num_parameters, create=True)
            try:
                channel.publish(self.learner.policy.export_weights(), 0)
                with OnlineDataHandler(
                    name,
                    groups_per_batch=GROUPS_PER_BATCH,
                    advantages="grpo",
                    max_policy_lag=MAX_POLICY_LAG,
                    group_timeout=GROUP_TIMEOUT_S,
                    on_timeout="drop",
                    label="demo trainer",
                ) as handler:
                    return self._with_workers(name, channel, handler, view)
            finally:
                channel.close()

    def _with_workers(
        self,
        name: str,
        channel: WeightsChannel,
        handler: OnlineDataHandler,
        view: LiveView | PlainView,
    ) -> Summary:
        self.began_s = time.monotonic()
        supervisor = Supervisor(
            self._worker_config(name), self.config.workers, chaos=self.config.chaos
        )
        try:
            view.start()
            try:
                with _sigterm_as_interrupt():
                    self._train(channel, handler, supervisor, view)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                view.stop()
        finally:
            supervisor.stop()
        return self._summary(handler, supervisor)

    def _worker_config(self, name: str) -> WorkerConfig:
        return WorkerConfig(
            bus=name,
            number=0,
            life=0,
            seed=self.config.seed,
            samples_at_once=SAMPLES_AT_ONCE,
            parent=os.getpid(),
        )

    def _train(
        self,
        channel: WeightsChannel,
        handler: OnlineDataHandler,
        supervisor: Supervisor,
        view: LiveView | PlainView,
    ) -> None:
        policy = self.learner.policy
        self._evaluate(policy)
        self._offer(handler)
        for step in range(1, self.config.steps + 1):
            batch = self._next_batch(handler, supervisor, view)
            lag = float((step - 1) - batch.policy_versions.float().mean())
            metrics = self.learner.step(batch)
            channel.publish(policy.export_weights(), step)
            handler.set_policy_version(step)
            self._count(batch, step, lag, metrics.mean_score)
            handler.ack(batch)
            if step % EVALUATE_EVERY == 0 or step == self.config.steps:
                self._evaluate(policy)
            self._look(handler, supervisor, view)

    def _next_batch(
        self, handler: OnlineDataHandler, supervisor: Supervisor, view: LiveView | PlainView
    ) -> Batch:
        """Wait in short turns, so that dead workers are restarted while the trainer waits."""
        deadline = time.monotonic() + FIRST_BATCH_S
        while True:
            supervisor.tend()
            with suppress(TimeoutError):
                return handler.next_batch(timeout=LOOK_PERIOD_S)
            self._look(handler, supervisor, view)
            if time.monotonic() > deadline:
                # The message of this error says what is missing.
                return handler.next_batch(timeout=0)

    def _offer(self, handler: OnlineDataHandler) -> None:
        """Keep prompts open, without end."""
        numbered = ((n, self.task.sample_prompt(self._rng)) for n in itertools.count(1))
        prompts = ((f"{show(prompt)}#{n}", prompt) for n, prompt in numbered)
        handler.offer(prompts, ahead=AHEAD_BATCHES, group_size=self.config.group_size)

    def _evaluate(self, policy: Policy) -> None:
        self.sampler.load(policy.export_weights())
        # The same draws each time, so that the curve shows the policy and not the dice.
        self.last = evaluate(self.sampler, self.task, self.held_out, np.random.default_rng(1))
        self.figures.held_out_reward = self.last.mean_reward
        self.evaluations.append(Point(self._seconds(), self.learner.steps, self.last.mean_reward))

    def _seconds(self) -> float:
        return round(time.monotonic() - self.began_s, 3)

    def _count(self, batch: Batch, step: int, lag: float, reward: float) -> None:
        self.groups += len(batch.groups)
        self.sequences += batch.sequences
        self.tokens += batch.total_tokens
        self.training.append(Point(self._seconds(), step, round(reward, 4)))
        self._recent.append((time.monotonic(), self.groups, self.tokens))
        del self._recent[:-50]
        f = self.figures
        f.step = f.version = step
        f.train_reward = reward
        f.lag = lag
        f.rewards = [p.reward for p in self.training]
        f.seconds = self._seconds()
        spent_s = self._recent[-1][0] - self._recent[0][0]
        if spent_s > 0:
            f.groups_per_s = (self._recent[-1][1] - self._recent[0][1]) / spent_s
            f.tokens_per_s = (self._recent[-1][2] - self._recent[0][2]) / spent_s

    def _look(
        self, handler: OnlineDataHandler, supervisor: Supervisor, view: LiveView | PlainView
    ) -> None:
        now = time.monotonic()
        if now < self._next_look_s:
            return
        self._next_look_s = now + LOOK_PERIOD_S
        ledger = handler.stats()
        f = self.figures
        f.seconds = self._seconds()
        f.ring_fill = 1 - ledger.free / ledger.capacity
        f.groups_open, f.groups_ready = ledger.groups_open, ledger.groups_ready
        f.stashed, f.committed = ledger.stashed, ledger.committed
        f.acknowledged, f.dropped = ledger.acknowledged, sum(ledger.dropped.values())
        f.workers_alive, f.kills = supervisor.alive, supervisor.kills
        view.show(f)

    def _summary(self, handler: OnlineDataHandler, supervisor: Supervisor) -> Summary:
        seconds = self._seconds()
        ledger = handler.stats()
        reached = [p for p in self.evaluations if p.reward >= REWARD_TARGET]
        return Summary(
            version=shmbus.__version__,
            task="sorting digits",
            seed=self.config.seed,
            workers=self.config.workers,
            group_size=self.config.group_size,
            chaos=self.config.chaos,
            steps=len(self.training),
            seconds=seconds,
            reward_start=self.evaluations[0].reward if self.evaluations else 0.0,
            reward_end=self.evaluations[-1].reward if self.evaluations else 0.0,
            solved_end=self.last.solved_share if self.last else 0.0,
            reward_target=REWARD_TARGET,
            target_reached=bool(reached) and self.evaluations[-1].reward >= REWARD_TARGET,
            seconds_to_target=reached[0].seconds if reached else None,
            groups=self.groups,
            trajectories=self.sequences,
            tokens=self.tokens,
            groups_per_s=round(self.groups / seconds, 1),
            tokens_per_s=round(self.tokens / seconds, 1),
            policy_version=len(self.training),
            kills=supervisor.kills,
            restarts=supervisor.restarts,
            interrupted=self.interrupted,
            ledger=ledger,
            ledger_balanced=ledger.balanced,
            held_out=self.evaluations,
            training=self.training,
        )


@contextmanager
def _sigterm_as_interrupt() -> Iterator[None]:
    """End on SIGTERM as on Ctrl-C: stop the workers, and remove the segments."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(config: DemoConfig) -> int:
    """Run the demo and report."""
    console = Console()
    directory = Path(config.output)
    directory.mkdir(parents=True, exist_ok=True)
    if config.live and not console.is_terminal:
        config = msgspec.structs.replace(config, live=False)
    summary = Demo(config, console).run()
    console.print(
        f"\nHeld-out reward {summary.reward_start:.3f} -> {summary.reward_end:.3f} "
        f"({summary.solved_end:.0%} of the completions exactly right) in {summary.seconds:.0f} s:\n"
        f"{summary.steps} steps, {summary.groups:,} groups, {summary.tokens:,} tokens.",
        highlight=False,
    )
    if summary.seconds_to_target is not None:
        console.print(
            f"Target {summary.reward_target:g} first reached after "
            f"{summary.seconds_to_target:.0f} s.",
            highlight=False,
        )
    if summary.chaos:
        console.print(f"Workers killed and restarted: {summary.kills}.", highlight=False)
    console.print("\nLedger, in trajectories:", highlight=False)
    console.print(ledger_text(summary.ledger), highlight=False)
    console.print(
        f"\nWrote {write_summary(summary, directory)} and {plot_reward(summary, directory)}",
        highlight=False,
        soft_wrap=True,
    )
    if summary.interrupted:
        console.print("Interrupted; all workers are stopped and both segments removed.")
    else:
        console.print("Next: a worker and a trainer of your own, docs/first-hour.md")
    return 0 if summary.ledger_balanced and not summary.interrupted else 1
