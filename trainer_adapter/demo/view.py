"""The demo's display while it runs: a live view in a terminal, or plain lines.

Invariant: the display costs the training little: figures are passed on as they are, and drawn a few
times a second.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Final

import msgspec
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_BLOCKS: Final = "▁▂▃▄▅▆▇█"
#: Seconds between two plain lines.
PLAIN_PERIOD_S: Final = 5.0


class Figures(msgspec.Struct):
    """What there is to show."""

    seconds: float = 0.0
    step: int = 0
    steps: int = 0
    version: int = 0
    groups_per_s: float = 0.0
    tokens_per_s: float = 0.0
    ring_fill: float = 0.0
    groups_open: int = 0
    groups_ready: int = 0
    stashed: int = 0
    committed: int = 0
    acknowledged: int = 0
    dropped: int = 0
    workers: int = 0
    workers_alive: int = 0
    kills: int = 0
    train_reward: float = 0.0
    held_out_reward: float = 0.0
    target: float = 0.9
    lag: float = 0.0
    rewards: Sequence[float] = ()


def sparkline(values: Sequence[float], width: int) -> str:
    """Values in [0, 1] as one row of blocks, the newest at the right."""
    if len(values) > width:
        per = len(values) / width
        values = [values[int(i * per)] for i in range(width - 1)] + [values[-1]]
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[round(min(1.0, max(0.0, value)) * top)] for value in values)


class LiveView:
    """The view for a terminal."""

    def __init__(self, console: Console, title: str) -> None:
        self._title = title
        self._console = console
        self._figures = Figures()
        self._live = Live(
            console=console, refresh_per_second=4, transient=False, get_renderable=self._draw
        )

    def start(self) -> None:
        """Take the terminal."""
        self._live.start()

    def show(self, figures: Figures) -> None:
        """Hand the newest figures over."""
        self._figures = figures

    def stop(self) -> None:
        """Leave the last view on the screen."""
        self._live.stop()

    def _draw(self) -> RenderableType:
        f = self._figures
        width = max(20, min(self._console.width - 12, 100))
        reward = Text()
        reward.append(f"{f.held_out_reward:.3f}", style="bold green" if self._met() else "bold")
        reward.append(f" held-out   {f.train_reward:.3f} training   target {f.target:g}\n")
        reward.append(sparkline(f.rewards, width), style="cyan")
        columns = Columns(
            [
                _table(
                    "throughput",
                    [
                        ("groups/s", f"{f.groups_per_s:,.0f}"),
                        ("tokens/s", f"{f.tokens_per_s:,.0f}"),
                        ("policy version", f"{f.version}"),
                        ("versions behind", f"{f.lag:.1f}"),
                    ],
                ),
                _table(
                    "bus",
                    [
                        ("ring fill", f"{f.ring_fill:.0%}"),
                        ("open groups", f"{f.groups_open:,}"),
                        ("ready groups", f"{f.groups_ready:,}"),
                        ("stashed", f"{f.stashed:,}"),
                    ],
                ),
                _table(
                    "ledger",
                    [
                        ("committed", f"{f.committed:,}"),
                        ("acknowledged", f"{f.acknowledged:,}"),
                        ("dropped", f"{f.dropped:,}"),
                        ("workers", f"{f.workers_alive}/{f.workers}, {f.kills} killed"),
                    ],
                ),
            ],
            equal=True,
            expand=False,
        )
        progress = Table.grid(padding=(0, 1))
        progress.add_row(
            f"step {f.step}/{f.steps}",
            ProgressBar(total=max(f.steps, 1), completed=f.step, width=max(20, width - 30)),
            f"{f.seconds:.0f} s",
        )
        return Panel(Group(reward, Text(), columns, progress), title=self._title, expand=False)

    def _met(self) -> bool:
        return self._figures.held_out_reward >= self._figures.target


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(
        title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0)
    )
    table.add_column(style="dim")
    table.add_column(justify="right", min_width=9)
    for row in rows:
        table.add_row(*row)
    return table


class PlainView:
    """Lines for a log, now and then."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._next_s = 0.0

    def start(self) -> None:
        """Say what this is."""
        self._console.print(self._title, highlight=False)

    def show(self, figures: Figures) -> None:
        """Print a line, if it is time for one."""
        now = time.monotonic()
        if now < self._next_s:
            return
        self._next_s = now + PLAIN_PERIOD_S
        f = figures
        self._console.print(
            f"{f.seconds:5.0f} s  step {f.step:>4}/{f.steps}  reward: held-out "
            f"{f.held_out_reward:.3f}, training {f.train_reward:.3f}  "
            f"{f.groups_per_s:6,.0f} groups/s "
            f"{f.tokens_per_s:9,.0f} tokens/s  ring {f.ring_fill:4.0%}  open {f.groups_open:>3}  "
            f"workers {f.workers_alive}/{f.workers}" + (f"  killed {f.kills}" if f.kills else ""),
            highlight=False,
            soft_wrap=True,
        )

    def stop(self) -> None:
        """Nothing to put back."""
