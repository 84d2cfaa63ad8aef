"""What the demo shows: a live view in a terminal or plain lines, and its results at the end."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

import shmbus

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
#: Seconds between two plain lines.
PLAIN_PERIOD_S: Final = 5.0


class Figures(msgspec.Struct):
    """The newest figures of a run."""

    steps: int
    workers: int
    target: float
    ledger: shmbus.Ledger
    seconds: float = 0.0
    step: int = 0
    groups_per_s: float = 0.0
    tokens_per_s: float = 0.0
    workers_alive: int = 0
    kills: int = 0
    held_out_reward: float = 0.0
    #: Policy versions that the last batch was behind, on average.
    lag: float = 0.0
    #: Mean reward of each batch.
    rewards: list[float] = []

    @property
    def ring_fill(self) -> float:
        """The part of the ring that is leased to lanes."""
        return 1 - self.ledger.free / self.ledger.capacity


def sparkline(values: Sequence[float], width: int) -> str:
    """Values in [0, 1] as one row of blocks, the newest at the right."""
    if len(values) > width:
        per = len(values) / width
        values = [values[int(i * per)] for i in range(width - 1)] + [values[-1]]
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(min(1.0, max(0.0, value)) * top)] for value in values)


class LiveView:
    """The view for a terminal, drawn a few times a second; it leaves its last frame there."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._console = console
        self._figures: Figures | None = None
        self._live = Live(
            console=console, refresh_per_second=4, transient=False, get_renderable=self._draw
        )
        self._live.start()

    def show(self, figures: Figures) -> None:
        """Take the newest figures."""
        self._figures = figures

    def stop(self) -> None:
        """Leave the terminal."""
        self._live.stop()

    def _draw(self) -> RenderableType:
        f = self._figures
        if f is None:
            return Panel("starting", title=self._title, expand=False)
        ledger = f.ledger
        width = max(20, min(self._console.width - 12, 100))
        reward = Text()
        met = f.held_out_reward >= f.target
        reward.append(f"{f.held_out_reward:.3f}", style="bold green" if met else "bold")
        train = f.rewards[-1] if f.rewards else 0.0
        reward.append(f" held-out   {train:.3f} training   target {f.target:g}\n")
        reward.append(sparkline(f.rewards, width), style="cyan")
        tables = {
            "throughput": {
                "groups/s": f"{f.groups_per_s:,.0f}", "tokens/s": f"{f.tokens_per_s:,.0f}",
                "policy version": f"{f.step}", "versions behind": f"{f.lag:.1f}",
            },
            "bus": {
                "ring fill": f"{f.ring_fill:.0%}", "open groups": f"{ledger.groups_open:,}",
                "ready groups": f"{ledger.groups_ready:,}", "stashed": f"{ledger.stashed:,}",
            },
            "ledger": {
                "committed": f"{ledger.committed:,}", "acknowledged": f"{ledger.acknowledged:,}",
                "dropped": f"{sum(ledger.dropped.values()):,}",
                "workers": f"{f.workers_alive}/{f.workers}, {f.kills} killed",
            },
        }  # fmt: skip
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            f"step {f.step}/{f.steps}",
            ProgressBar(total=max(f.steps, 1), completed=f.step, width=max(20, width - 30)),
            f"{f.seconds:.0f} s",
        )
        columns = Columns([_table(*each) for each in tables.items()], equal=True, expand=False)
        return Panel(Group(reward, Text(), columns, progress), title=self._title, expand=False)


def _table(title: str, rows: dict[str, str]) -> Table:
    table = Table(
        title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    table.add_column(style="dim")
    table.add_column(justify="right", min_width=9)
    for row in rows.items():
        table.add_row(*row)
    return table


class PlainView:
    """Lines for a log, now and then."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._next_s = 0.0
        console.print(title, highlight=False)

    def show(self, figures: Figures) -> None:
        """Print a line, if it is time for one."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + PLAIN_PERIOD_S
        f = figures
        train = f.rewards[-1] if f.rewards else 0.0
        self._console.print(
            f"{f.seconds:5.0f} s  step {f.step:>4}/{f.steps}  reward: held-out "
            f"{f.held_out_reward:.3f}, training {train:.3f}  {f.groups_per_s:6,.0f} groups/s "
            f"{f.tokens_per_s:9,.0f} tokens/s  ring {f.ring_fill:4.0%}  "
            f"open {f.ledger.groups_open:>3}  workers {f.workers_alive}/{f.workers}"
            + (f"  killed {f.kills}" if f.kills else ""),
            highlight=False,
            soft_wrap=True,
        )

    def stop(self) -> None:
        """Nothing to put back."""


# -- results ----------------------------------------------------------------------------------


class Point(msgspec.Struct, frozen=True):
    """One moment of the run: the mean reward of its batch, or of held-out prompts."""

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
    windows = (summary.training[max(0, i - 9) : i + 1] for i in range(len(summary.training)))
    means = [sum(point.reward for point in window) / len(window) for window in windows]
    at_s = [point.seconds for point in summary.training]
    axes.plot(at_s, means, color="#9db8d2", label="training batches (running mean)")
    held_out = [(point.seconds, point.reward) for point in summary.held_out]
    axes.plot(*zip(*held_out, strict=True), color="#1f4e79", marker="o", ms=3.5, label="held-out")
    target = f"target {summary.reward_target:g}"
    axes.axhline(summary.reward_target, color="#b05a2c", linestyle="--", label=target)
    axes.set(xlabel="seconds", ylabel="mean reward", ylim=(0, 1.02), xlim=(0, None))
    chaos = f", {summary.kills} workers killed" if summary.chaos else ""
    axes.set_title(
        f"{summary.task}: {summary.workers} workers, groups of {summary.group_size}{chaos}"
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    path = directory / "reward.png"
    figure.savefig(path)
    plt.close(figure)
    return path


def ledger_text(ledger: shmbus.Ledger) -> str:
    """Render the ledger as an account that anybody can add up."""
    rows = [
        ("acknowledged", ledger.acknowledged), ("leased", ledger.leased),
        ("stashed", ledger.stashed), ("in the ring", ledger.in_ring),
        *((f"dropped: {reason}", n) for reason, n in sorted(ledger.dropped.items())),
    ]  # fmt: skip
    lines = [f"  {'committed':<24}{ledger.committed:>12,}"]
    lines += [f"    {name:<22}{count:>12,}" for name, count in rows]
    verdict = "balances" if ledger.balanced else "DOES NOT BALANCE"
    return "\n".join([*lines, f"  {'sum':<24}{ledger.accounted:>12,}  {verdict}"])
