"""Results of a demo run: a summary as JSON, the reward over time as PNG, the ledger as text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

import shmbus


class Point(msgspec.Struct, frozen=True):
    """One moment of the run."""

    #: Since the start.
    seconds: float
    step: int
    #: Mean reward of the batch (training), or of held-out prompts.
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
    policy_version: int
    kills: int
    restarts: int
    interrupted: bool
    ledger: shmbus.Ledger
    ledger_balanced: bool
    held_out: list[Point]
    training: list[Point]


def write_summary(summary: Summary, directory: Path) -> Path:
    """Write ``summary.json``; returns its path."""
    path = directory / "summary.json"
    path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    return path


def plot_reward(summary: Summary, directory: Path) -> Path:
    """Draw reward over time into ``reward.png``; returns its path."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), dpi=110)
    training = summary.training
    axes.plot(
        [p.seconds for p in training],
        _smooth([p.reward for p in training]),
        color="#9db8d2",
        linewidth=1.2,
        label="training batches (running mean)",
    )
    axes.plot(
        [p.seconds for p in summary.held_out],
        [p.reward for p in summary.held_out],
        color="#1f4e79",
        linewidth=2,
        marker="o",
        markersize=3.5,
        label="held-out prompts",
    )
    axes.axhline(summary.reward_target, color="#b05a2c", linewidth=1, linestyle="--")
    axes.annotate(
        f"target {summary.reward_target:g}",
        (0.008, summary.reward_target),
        xycoords=("axes fraction", "data"),
        xytext=(0, 4),
        textcoords="offset points",
        ha="left",
        color="#b05a2c",
    )
    axes.set_xlabel("seconds")
    axes.set_ylabel("mean reward")
    axes.set_ylim(0, 1.02)
    axes.set_xlim(left=0)
    chaos = f", {summary.kills} workers killed" if summary.chaos else ""
    axes.set_title(
        f"{summary.task}: {summary.workers} workers, groups of {summary.group_size}{chaos}",
        fontsize=11,
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.tight_layout()
    path = directory / "reward.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def _smooth(values: Sequence[float], width: int = 10) -> list[float]:
    means = []
    for i in range(len(values)):
        window = values[max(0, i + 1 - width) : i + 1]
        means.append(sum(window) / len(window))
    return means


def ledger_text(ledger: shmbus.Ledger) -> str:
    """Render the ledger as an account that anybody can add up."""
    rows = [
        ("acknowledged", ledger.acknowledged),
        ("leased", ledger.leased),
        ("stashed", ledger.stashed),
        ("in the ring", ledger.in_ring),
        *((f"dropped: {reason}", n) for reason, n in sorted(ledger.dropped.items())),
    ]
    lines = [f"  {'committed':<24}{ledger.committed:>12,}"]
    lines += [f"    {name:<22}{count:>12,}" for name, count in rows]
    verdict = "balances" if ledger.balanced else "DOES NOT BALANCE"
    lines.append(f"  {'sum':<24}{ledger.accounted:>12,}  {verdict}")
    return "\n".join(lines)
