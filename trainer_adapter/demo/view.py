"""The results of a run of the demo, as a file, as a picture and as an account."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec

import shmbus


class Point(msgspec.Struct, frozen=True):
    """A moment of the run: the mean reward of its batch, or of held-out prompts."""

    seconds: float
    step: int
    reward: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The run in numbers, as in ``summary.json``."""

    version: str
    task: str
    seed: int
    workers: int
    group_size: int
    chaos: bool
    steps: int
    seconds: float
    reward_start: float
    reward_end: float
    solved_end: float
    reward_target: float
    target_reached: bool
    seconds_to_target: float | None
    groups: int
    trajectories: int
    tokens: int
    groups_per_s: float
    tokens_per_s: float
    kills: int
    restarts: int
    interrupted: bool
    ledger: shmbus.Ledger
    ledger_balanced: bool
    held_out: list[Point]
    training: list[Point]


def write_summary(summary: Summary, directory: Path) -> Path:
    """Write ``summary.json``; return its path."""
    path = directory / "summary.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return path


@contextlib.contextmanager
def _drawn(path: Path, place: Literal["lower right", "upper left"]) -> Iterator[Any]:
    """Give axes to fill, with a legend at a place, and write their figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    yield axes
    axes.grid(alpha=0.25)
    axes.legend(loc=place)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def plot_reward(summary: Summary, directory: Path) -> Path:
    """Draw reward over time into ``reward.png``; return its path."""
    path = directory / "reward.png"
    windows = (summary.training[max(0, i - 9) : i + 1] for i in range(len(summary.training)))
    means = [sum(point.reward for point in window) / len(window) for window in windows]
    at_s = [point.seconds for point in summary.training]
    held_out = [(point.seconds, point.reward) for point in summary.held_out]
    target = f"target {summary.reward_target:g}"
    chaos = f", {summary.kills} workers killed" if summary.chaos else ""
    with _drawn(path, "lower right") as axes:
        axes.plot(at_s, means, color="#9db8d2", label="training batches (running mean)")
        line = {"color": "#1f4e79", "marker": "o", "ms": 3.5}
        axes.plot(*zip(*held_out, strict=True), label="held-out", **line)
        axes.axhline(summary.reward_target, color="#b05a2c", linestyle="--", label=target)
        axes.set(xlabel="seconds", ylabel="mean reward", ylim=(0, 1.02), xlim=(0, None))
        axes.set_title(
            f"{summary.task}: {summary.workers} workers, groups of {summary.group_size}{chaos}"
        )
    return path


def plot_chat(training: list[Point], held_out: list[Point], directory: Path) -> Path:
    """Draw reward over steps into ``reward.png``; return its path."""
    path = directory / "reward.png"
    with _drawn(path, "upper left") as axes:
        for points, label, style in (
            (training, "training batches", {"color": "#9db8d2"}),
            (held_out, "held-out questions", {"color": "#1f4e79", "marker": "o"}),
        ):
            axes.plot([p.step for p in points], [p.reward for p in points], label=label, **style)
        axes.set(xlabel="optimizer steps", ylabel="mean reward", ylim=(0, 1.02), xlim=(0, None))
    return path


def ledger_text(ledger: shmbus.Ledger) -> str:
    """Render the ledger as an account that adds up."""
    rows = [
        ("acknowledged", ledger.acknowledged), ("leased", ledger.leased),
        ("stashed", ledger.stashed), ("in the ring", ledger.in_ring),
        *((f"dropped: {reason}", n) for reason, n in sorted(ledger.dropped.items())),
    ]  # fmt: skip
    lines = [f"  {'committed':<24}{ledger.committed:>12,}"]
    lines += [f"    {name:<22}{count:>12,}" for name, count in rows]
    verdict = "balances" if ledger.balanced else "DOES NOT BALANCE"
    return "\n".join([*lines, f"  {'sum':<24}{ledger.accounted:>12,}  {verdict}"])
