"""Figures of a handler's batches, as a flat dict for wandb, TensorBoard and mlflow.

Invariants:

- Counting a batch is cheap until a read, or until some dozens of batches are counted together by
  vector operations on the host.
- Nothing waits for a device, except a read, and every `PENDING_MISMATCHES`-th comparison of
  logprobs.
- Memory is bounded for any number of batches between two calls.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, TypeAlias

import msgspec
import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from torch import Tensor

import shmbus
from shmbus.base.ledger import REASONS
from shmbus.batch.scores import are_equal
from shmbus.data.status_types import MismatchStatus
from shmbus.segment.note_file import MISMATCH_KIND, NoteFile
from trainer_adapter.batches.batch import Batch, BatchFacts
from trainer_adapter.batches.sample_flags import count_truncated
from trainer_adapter.handler.planner import BatchPlanner, MadeBatch
from trainer_adapter.mismatch import LogprobMismatch

Metrics: TypeAlias = "dict[str, float]"

logger = logging.getLogger(__name__)

#: Kinds of metrics: the part of a name before the slash.
KINDS: Final = (
    "reward", "lag", "length", "batch", "share", "time", "rate", "mismatch", "drops", "refill",
    "bus",
)  # fmt: skip


#: Batches and samples counted together if no reader comes in between.
PENDING_BATCHES: Final = 256
PENDING_SAMPLES: Final = 16_384
#: Comparisons of logprobs that may wait for their device.
PENDING_MISMATCHES: Final = 64


class Moments(NamedTuple):
    """Count, mean, sum of squared deviations and bounds of values; joinable."""

    size: int = 0
    mean: float = 0.0
    squares: float = 0.0
    low: float = math.inf
    high: float = -math.inf

    @classmethod
    def of_rows(cls, rows: NDArray[np.float64]) -> list[Moments]:
        """Compute the moments of each row of an array, in a few calls for the whole array."""
        count = rows.shape[1]
        means = np.add.reduce(rows, axis=1) / count
        rest = rows - means[:, None]
        squares = np.einsum("ij,ij->i", rest, rest)
        low, high = np.minimum.reduce(rows, axis=1), np.maximum.reduce(rows, axis=1)
        columns = (means.tolist(), squares.tolist(), low.tolist(), high.tolist())
        return [cls(count, *each) for each in zip(*columns, strict=True)]

    def joined(self, other: Moments) -> Moments:
        """Return the moments of both sets of values (Chan, Golub and LeVeque 1979)."""
        total = self.size + other.size
        step = other.mean - self.mean
        return Moments(
            total,
            self.mean + step * other.size / total,
            self.squares + other.squares + step * step * self.size * other.size / total,
            min(self.low, other.low),
            max(self.high, other.high),
        )

    @property
    def std(self) -> float:
        """The standard deviation, by n."""
        return math.sqrt(self.squares / self.size)


class BatchFigures(NamedTuple):
    """A meter's input for one batch."""

    facts: BatchFacts
    #: The trainer's version on receipt of the batch.
    policy_version: int
    #: Truncated sequences.
    truncated: int
    #: Used share of the budget.
    fill: float
    #: Seconds of the trainer's wait.
    waited_s: float
    #: Seconds of packing and of the way to the device.
    packed_s: float


class BatchMeter:
    """Adds up the batches between two readings."""

    def __init__(self, ledger: shmbus.Ledger, now_s: float) -> None:
        self._dropped: Mapping[str, int] = dict(ledger.dropped)
        self._useless = ledger.groups_dropped
        self._since_s = now_s
        self._begin()

    def _begin(self) -> None:
        self._pending: list[BatchFigures] = []
        self._pending_samples = 0
        self._rewards = self._lags = self._lengths = Moments()
        self._batches = self._groups = self._equal = self._truncated = 0
        self._fill = self._waited_s = self._packed_s = 0.0
        self._mismatches: dict[str, Moments] = {}

    def note_mismatch(self, figures: Metrics) -> None:
        """Count a comparison of engine and trainer."""
        for name, value in figures.items():
            known = self._mismatches.get(name, Moments())
            self._mismatches[name] = known.joined(Moments(1, value, 0.0, value, value))

    def note(self, figures: BatchFigures) -> None:
        """Count a batch."""
        self._pending.append(figures)
        self._pending_samples += figures.facts.samples.shape[1]
        if len(self._pending) >= PENDING_BATCHES or self._pending_samples >= PENDING_SAMPLES:
            self._add_up()

    def _add_up(self) -> None:
        """Count the pending batches in one array: every NumPy call costs."""
        pending, self._pending = self._pending, []
        self._pending_samples = 0
        if not pending:
            return
        facts = [one.facts for one in pending]
        versions = [one.policy_version for one in pending]
        # One array per batch, since the samples have left the near caches by now.
        table = np.concatenate([one.samples for one in facts], axis=1)
        # Not by the count, possibly left behind by a signal handler's exception.
        rows = np.empty((2, table.shape[1]))
        rows[0] = table[0].view(np.float64)
        rows[1] = np.repeat(versions, [one.samples.shape[1] for one in facts]) - table[1]
        rewards, lag = Moments.of_rows(rows)
        lengths = table[3]
        if any([one.rows is not None for one in facts]):
            lengths = np.concatenate([one.lengths for one in facts])
        (length,) = Moments.of_rows(lengths[None].astype(np.float64))
        self._rewards = self._rewards.joined(rewards)
        self._lags = self._lags.joined(lag)
        self._lengths = self._lengths.joined(length)
        sizes = np.concatenate([one.group_sizes for one in facts])
        starts = np.cumsum(sizes) - sizes
        scores = rows[0]
        bounds = np.minimum.reduceat(scores, starts), np.maximum.reduceat(scores, starts)
        self._groups += len(sizes)
        self._equal += int(np.count_nonzero(are_equal(*bounds)))
        self._batches += len(pending)
        for one in pending:
            self._truncated += one.truncated
            self._fill += one.fill
            self._waited_s += one.waited_s
            self._packed_s += one.packed_s

    def read(self, ledger: shmbus.Ledger, step: int, now_s: float) -> Metrics:
        """Return the figures since the last reading, and begin anew."""
        self._add_up()
        found: Metrics = {
            "step": float(step),
            "policy_version": float(ledger.policy_version),
            "batches": float(self._batches),
            **(self._of_batches(now_s) if self._batches else {}),
            **{name: moments.mean for name, moments in self._mismatches.items()},
            **self._of_bus(ledger),
        }
        self._dropped = dict(ledger.dropped)
        self._useless = ledger.groups_dropped
        self._since_s = now_s
        self._begin()
        return found

    def _of_batches(self, now_s: float) -> Metrics:
        rewards, lags, lengths, batches = self._rewards, self._lags, self._lengths, self._batches
        tokens = lengths.mean * lengths.size
        seconds = max(now_s - self._since_s, 1e-9)
        return {
            "reward/mean": rewards.mean,
            "reward/std": rewards.std,
            "reward/min": rewards.low,
            "reward/max": rewards.high,
            "lag/mean": lags.mean,
            "lag/max": lags.high,
            "length/mean": lengths.mean,
            "length/min": lengths.low,
            "length/max": lengths.high,
            "batch/tokens": tokens / batches,
            "batch/sequences": lengths.size / batches,
            "batch/groups": self._groups / batches,
            "batch/fill": self._fill / batches,
            "share/truncated": self._truncated / rewards.size,
            "share/zero_variance": self._equal / self._groups,
            "time/wait_s": self._waited_s / batches,
            "time/pack_s": self._packed_s / batches,
            "rate/tokens_per_s": tokens / seconds,
            "rate/sequences_per_s": lengths.size / seconds,
        }

    def _of_bus(self, ledger: shmbus.Ledger) -> Metrics:
        drops = {
            reason: float(ledger.dropped.get(reason, 0) - self._dropped.get(reason, 0))
            for reason in REASONS[1:]
            if reason != "relayed"  # no loss: the sample goes on, on another bus
        }
        return {
            "drops/total": sum(drops.values()),
            **{f"drops/{reason}": count for reason, count in drops.items()},
            "refill/groups": float(ledger.groups_dropped - self._useless),
            "bus/fill": 1 - ledger.free / ledger.capacity if ledger.capacity else 0.0,
            "bus/groups_open": float(ledger.groups_open),
            "bus/groups_ready": float(ledger.groups_ready),
            "bus/in_ring": float(ledger.in_ring),
            "bus/producers": float(ledger.producers),
        }


class HandlerMetrics:
    """Counts the batches of a handler."""

    def __init__(
        self,
        consumer: shmbus.Consumer,
        planner: BatchPlanner[Batch],
        *,
        tokens_per_batch: int | None,
        groups_per_batch: int | None,
    ) -> None:
        self._consumer, self._planner = consumer, planner
        self._tokens_per_batch, self._groups_per_batch = tokens_per_batch, groups_per_batch
        ledger = consumer.stats()
        self._dropped_before = ledger.groups_dropped
        self._meter = BatchMeter(ledger, time.monotonic())
        # Finding truncated samples costs a search of each meta.
        self._counts_truncated = False
        self._measured: MadeBatch[Batch] | None = None
        self._mismatches: list[Tensor] = []
        #: After the copies of `_mismatches` from a device.
        self._copied: Any = None
        #: The newest figures of mismatches, beside the bus for observers.
        self._newest = MismatchStatus(policy_version=0)
        self._notes: NoteFile | None = None
        #: False after a failure, of which the run is told once.
        self._shows = True

    @property
    def refill(self) -> int:
        """Training groups dropped since the handler was made."""
        return self._consumer.stats().groups_dropped - self._dropped_before

    def read(self, prefix: str) -> Metrics:
        """Return the figures since the last call, their names behind a prefix."""
        self._counts_truncated = True
        self._count_mismatches(wait=True)
        found = self._meter.read(self._consumer.stats(), self._planner.step, time.monotonic())
        return {prefix + name: value for name, value in found.items()} if prefix else found

    def measure(self, waited_s: float) -> None:
        """Count the first ready batch, once."""
        ready = self._planner.ready
        if not ready or ready[0] is self._measured or not isinstance(ready[0], MadeBatch):
            return
        self._measured = first = ready[0]
        self._count_mismatches(wait=False)
        facts = first.batch.facts
        assert facts is not None, "a handler's batch has them"
        truncated = count_truncated(first.batch.groups) if self._counts_truncated else 0
        if self._tokens_per_batch is not None:
            fill = facts.tokens / self._tokens_per_batch
        else:
            fill = len(first.planned) / (self._groups_per_batch or 1)
        version = self._consumer.policy_version
        self._meter.note(BatchFigures(facts, version, truncated, fill, waited_s, first.packed_s))

    def note_mismatch(self, figures: LogprobMismatch, engine: str, trainer: str) -> None:
        """Count a comparison of engine and trainer, once their device has computed it."""
        version = self._consumer.policy_version
        self._newest = replace(self._newest, policy_version=version, engine=engine, trainer=trainer)
        values = torch.stack([value.float() for value in figures])
        self._mismatches.append(values.to("cpu", non_blocking=True))
        if values.is_cuda:
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record()
        self._count_mismatches(wait=len(self._mismatches) >= PENDING_MISMATCHES)

    def _count_mismatches(self, *, wait: bool) -> None:
        """Count the comparisons, and tell observers the newest, unless a device still computes."""
        if self._copied is not None:
            if not (wait or self._copied.query()):
                return
            self._copied.synchronize()
            self._copied = None
        if not self._mismatches:
            return
        pending, self._mismatches = self._mismatches, []
        for values in torch.stack(pending).tolist():
            named = zip(LogprobMismatch._fields, values, strict=True)
            finite = {name: value for name, value in named if math.isfinite(value)}
            self._newest = replace(self._newest, **finite)
            self._meter.note_mismatch({f"mismatch/{name}": value for name, value in finite.items()})
        if self._shows:
            self._show()

    def _show(self) -> None:
        """Note the newest figures beside the bus, unless another trainer of the bus does so."""
        try:
            if self._notes is None or not self._notes.held:
                self._notes = NoteFile(self._consumer.name, [MISMATCH_KIND], "trainer")
            if self._notes.held:
                self._notes.write_body(msgspec.json.encode(self._newest))
        except (OSError, shmbus.ShmbusError) as error:
            self._shows = False
            logger.warning(
                "bus %r: `shmbus status` shows no logprob differences: %s",
                self._consumer.name, error,
            )  # fmt: skip

    def close(self) -> None:
        """Take back what observers were told; idempotent."""
        if self._notes is not None:
            self._notes.close()
