"""The demo: one trainer, several workers, one bus, and a policy that learns through them.

Order of an iteration: take a batch of whole groups, step, publish the new weights, announce their
version on the bus, acknowledge the batch. At the end of the run (after the last step, Ctrl-C or an
error), the workers are stopped, the ledger is read, and both segments are removed, in this order.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import signal
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import torch

import shmbus
from trainer_adapter.batches.batch import Batch
from trainer_adapter.demo.policy import Learner, Policy
from trainer_adapter.demo.sampler import Evaluation, PolicyConfig, Sampler, evaluate
from trainer_adapter.demo.task import SortTask, text_of
from trainer_adapter.demo.view import Point, Summary, ledger_text, plot_reward, write_summary
from trainer_adapter.demo.worker import Supervisor, WeightsChannel, WorkerConfig
from trainer_adapter.handler.handler import OnlineDataHandler

#: Ring for records; ample for these small records.
CAPACITY: Final = "32MiB"
#: Groups in a batch: enough to keep noise out of a step's direction.
GROUPS_PER_BATCH: Final = 48
#: Open prompts while the trainer waits for a batch, in batches.
AHEAD_BATCHES: Final = 2
#: Groups with an oldest sample further behind, in versions, are dropped: they slow the learning.
MAX_POLICY_LAG: Final = 4
#: Seconds until a group of a lost worker is dropped.
GROUP_TIMEOUT_S: Final = 5.0
#: Steps between two evaluations on held-out prompts, and their number of prompts.
EVALUATE_EVERY: Final = 20
HELD_OUT_PROMPTS: Final = 256
REWARD_TARGET: Final = 0.9
#: Seconds to wait for the first complete group before an error.
FIRST_BATCH_S: Final = 60.0
#: Seconds between two looks after the workers while the trainer waits; and between two lines.
TEND_S: Final = 0.25
SHOW_PERIOD_S: Final = 5.0


class DemoConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command line."""

    workers: int = 4
    group_size: int = 8
    seed: int = 0
    steps: int = 500
    chaos: bool = False
    #: Folder for ``summary.json`` and ``reward.png``.
    output: str = "shmbus-demo"


class Demo:
    """One run, from the first to the last process and segment."""

    def __init__(self, config: DemoConfig) -> None:
        self.config = config
        self.task = SortTask()
        shape = PolicyConfig()
        torch.manual_seed(config.seed)
        # The workers need the remaining cores; batches this small gain nothing from threads.
        torch.set_num_threads(1)
        self.learner = Learner(Policy(shape, seed=config.seed))
        self.sampler = Sampler(shape)
        self.held_out = self.task.held_out_prompts(HELD_OUT_PROMPTS)
        self.training: list[Point] = []
        self.evaluations: list[Point] = []
        self.last = Evaluation(0.0, 0.0)
        self.groups = self.sequences = self.tokens = 0
        self.interrupted = False
        self._rng = np.random.default_rng(config.seed)
        self._recent: deque[tuple[float, int, int]] = deque(maxlen=50)
        self._next_show_s = 0.0

    def run(self) -> Summary:
        """Train; returns the summary of the run."""
        config = self.config
        name = f"demo-{os.getpid()}-{secrets.token_hex(3)}"
        with contextlib.ExitStack() as stack:
            most = 4 * config.workers + 8
            stack.enter_context(shmbus.Bus.create(name, CAPACITY, max_producers=most))
            size = self.learner.policy.config.num_parameters
            channel = WeightsChannel(name, size, create=True)
            stack.callback(channel.close)
            channel.publish(self.learner.policy.export_weights(), 0)
            handler = stack.enter_context(self.handler(name, group_timeout=GROUP_TIMEOUT_S))
            template = WorkerConfig(bus=name, seed=config.seed, parent=os.getpid())
            supervisor = Supervisor(template, config.workers, chaos=config.chaos)
            try:
                print(
                    f"shmbus demo: sorting digits, {config.workers} workers, groups of "
                    f"{config.group_size}{', chaos' if config.chaos else ''}",
                    flush=True,
                )
                with _ends_as_interrupts():
                    self.train(channel, handler, supervisor)
            except KeyboardInterrupt:
                self.interrupted = True
            finally:
                supervisor.stop()
            return self.summary(handler, supervisor)

    def handler(self, bus: str, group_timeout: float | None = None) -> OnlineDataHandler:
        """Make the data handler of the trainer."""
        return OnlineDataHandler(
            bus,
            groups_per_batch=GROUPS_PER_BATCH,
            advantages="grpo",
            max_policy_lag=MAX_POLICY_LAG,
            group_timeout=group_timeout,
            on_timeout="drop",
            label="demo trainer",
        )

    def train(
        self, channel: WeightsChannel, handler: OnlineDataHandler, supervisor: Supervisor
    ) -> None:
        """Take every step."""
        self.began_s = time.monotonic()
        self._evaluate()
        self.offer(handler)
        for step in range(1, self.config.steps + 1):
            batch = self._next_batch(handler, supervisor)
            result = self.learner.step(batch)
            channel.publish(self.learner.policy.export_weights(), step)
            handler.set_policy_version(step)
            self._count(batch, step, result.mean_score)
            handler.ack(batch)
            if step % EVALUATE_EVERY == 0 or step == self.config.steps:
                self._evaluate()
            self._show(handler, supervisor)

    def offer(self, handler: OnlineDataHandler) -> None:
        """Keep prompts open, without end."""
        numbered = ((n, self.task.sample_prompt(self._rng)) for n in itertools.count(1))
        prompts = ((f"{text_of(prompt)}#{n}", prompt) for n, prompt in numbered)
        handler.offer(prompts, ahead=AHEAD_BATCHES, group_size=self.config.group_size)

    def _next_batch(self, handler: OnlineDataHandler, supervisor: Supervisor) -> Batch:
        """Wait in short turns, to restart dead workers during the trainer's wait."""
        deadline = time.monotonic() + FIRST_BATCH_S
        while True:
            supervisor.tend()
            with contextlib.suppress(TimeoutError):
                return handler.next_batch(timeout=TEND_S)
            self._show(handler, supervisor)
            if time.monotonic() > deadline:
                # The message of this error names the missing parts.
                return handler.next_batch(timeout=0)

    def _evaluate(self) -> None:
        self.sampler.load(self.learner.policy.export_weights())
        # The same draws each time: the curve shows the policy and not the dice.
        self.last = evaluate(self.sampler, self.task, self.held_out, np.random.default_rng(1))
        self.evaluations.append(Point(self._seconds(), self.learner.steps, self.last.mean_reward))

    def _seconds(self) -> float:
        return round(time.monotonic() - self.began_s, 3)

    def _count(self, batch: Batch, step: int, reward: float) -> None:
        self.groups += len(batch.groups)
        self.sequences += batch.num_sequences
        self.tokens += batch.num_tokens
        self.training.append(Point(self._seconds(), step, round(reward, 4)))
        self._recent.append((time.monotonic(), self.groups, self.tokens))

    def _show(self, handler: OnlineDataHandler, supervisor: Supervisor) -> None:
        now = time.monotonic()
        if now < self._next_show_s:
            return
        self._next_show_s = now + SHOW_PERIOD_S
        first_s, groups, tokens = self._recent[0] if self._recent else (now, 0, 0)
        passed_s = max(now - first_s, 1e-3)
        newest = self.training[-1] if self.training else Point(0.0, 0, 0.0)
        ledger = handler.stats()
        print(
            f"{self._seconds():5.0f} s  step {newest.step:>4}/{self.config.steps}  reward: "
            f"held-out {self.last.mean_reward:.3f}, training {newest.reward:.3f}  "
            f"{(self.groups - groups) / passed_s:6,.0f} groups/s "
            f"{(self.tokens - tokens) / passed_s:9,.0f} tokens/s  "
            f"ring {1 - ledger.free / ledger.capacity:4.0%}  open {ledger.groups_open:>3}  "
            f"workers {supervisor.alive}/{self.config.workers}"
            + (f"  killed {supervisor.kills}" if supervisor.kills else ""),
            flush=True,
        )

    def summary(self, handler: OnlineDataHandler, supervisor: Supervisor) -> Summary:
        """Return the run in numbers."""
        config, seconds, ledger = self.config, self._seconds(), handler.stats()
        rewards = [point.reward for point in self.evaluations] or [0.0]
        reached = [p.seconds for p in self.evaluations if p.reward >= REWARD_TARGET]
        return Summary(
            version=shmbus.__version__,
            task="sorting digits",
            seed=config.seed,
            workers=config.workers,
            group_size=config.group_size,
            chaos=config.chaos,
            steps=len(self.training),
            seconds=seconds,
            reward_start=rewards[0],
            reward_end=rewards[-1],
            solved_end=self.last.solved_share,
            reward_target=REWARD_TARGET,
            target_reached=rewards[-1] >= REWARD_TARGET,
            seconds_to_target=reached[0] if reached else None,
            groups=self.groups,
            trajectories=self.sequences,
            tokens=self.tokens,
            groups_per_s=round(self.groups / seconds, 1),
            tokens_per_s=round(self.tokens / seconds, 1),
            kills=supervisor.kills,
            restarts=supervisor.restarts,
            interrupted=self.interrupted,
            ledger=ledger,
            ledger_balanced=ledger.balanced,
            held_out=self.evaluations,
            training=self.training,
        )


@contextlib.contextmanager
def _ends_as_interrupts() -> Iterator[None]:
    """End on SIGTERM and a closed terminal as on Ctrl-C: no worker and no segment stays."""
    before = {
        number: signal.signal(number, signal.default_int_handler)
        for number in (signal.SIGHUP, signal.SIGTERM)
        if signal.getsignal(number) == signal.SIG_DFL  # under nohup a hangup stays ignored
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def main(config: DemoConfig) -> int:
    """Run the demo and report."""
    directory = Path(config.output)
    directory.mkdir(parents=True, exist_ok=True)
    summary = Demo(config).run()
    lines = [
        f"\nHeld-out reward {summary.reward_start:.3f} -> {summary.reward_end:.3f} "
        f"({summary.solved_end:.0%} of the completions exactly right) in {summary.seconds:.0f} s:",
        f"{summary.steps} steps, {summary.groups:,} groups, {summary.tokens:,} tokens.",
    ]
    if (at_s := summary.seconds_to_target) is not None:
        lines.append(f"Target {summary.reward_target:g} first reached after {at_s:.0f} s.")
    if summary.chaos:
        lines.append(f"Workers killed and restarted: {summary.kills}.")
    lines += ["\nLedger, in trajectories:", ledger_text(summary.ledger)]
    lines.append(
        f"\nWrote {write_summary(summary, directory)} and {plot_reward(summary, directory)}"
    )
    lines.append(
        "Interrupted; all workers are stopped and both segments removed."
        if summary.interrupted
        else "Next: a worker and a trainer of your own, docs/first-hour.md"
    )
    for line in lines:
        print(line)
    return 0 if summary.ledger_balanced and not summary.interrupted else 1
