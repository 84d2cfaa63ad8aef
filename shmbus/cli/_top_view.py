"""The frames of ``shmbus top``, drawn with rich: a pure function of a Watcher.

Invariants: a frame fits its width and height from 60 x 16 on; lines that do not fit are counted,
not cut silently; text of the segment is drawn as text, never as markup.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Group, JustifyMethod, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text, TextType

from shmbus._format import several, show_count, show_duration, show_size
from shmbus.inspect.rates import Watcher
from shmbus.inspect.types import BusStatus, DaemonStatus, GroupCells, LeaseStatus, ProducerStatus
from shmbus.pool.survey import describe_pool, read_pools

_BLOCKS = " ▁▂▃▄▅▆▇█"
_STATE_STYLES = {"alive": "green", "dead": "bold red", "closed": "dim", "gone": "dim"}
_STATE_ORDER = {"alive": 0, "dead": 1, "closed": 2, "gone": 3}
_LEVEL_STYLES = {"good": "green", "note": "", "warning": "yellow", "trouble": "bold red"}
_BORDER = "bright_black"
_FULL = 0.9
_HIGH = 0.7
#: Rows of title, sentence and fill, and of the chart: at least, and how many more where there is
#: room.
_TITLE_ROWS = 3
_CHART_ROWS = 1
_CHART_MORE_ROWS = 7
#: Missing samples of a group that are named.
_MISSING = 16
#: Slot pools beside the bus that get a row each.
_POOLS = 2


def draw(watcher: Watcher, width: int, height: int) -> RenderableType:
    """Draw one frame."""
    status = watcher.status
    pools = [
        Text(f" {describe_pool(pool)}", no_wrap=True, overflow="ellipsis", style="dim")
        for pool in read_pools(status.name)[:_POOLS]
    ]
    height -= len(pools)
    ledger = _ledger(status)
    middle_rows = max(len(ledger), 6) + 2
    free_rows = height - _TITLE_ROWS - (_CHART_ROWS + 3) - middle_rows
    leases = [] if status.daemon is None else status.daemon.leases
    lease_rows = min(len(leases), max(2, free_rows // 4 - 2)) if leases else 0
    free_rows -= lease_rows + 3 if lease_rows else 0
    group_rows = min(len(status.oldest_incomplete), max(0, free_rows // 3 - 2), 5)
    # Rows that the lists below do not need go to the chart.
    needed = (group_rows + 3 if group_rows else 0) + max(4, len(status.producers) + 3)
    chart_rows = _CHART_ROWS + min(_CHART_MORE_ROWS, max(0, free_rows - needed))
    free_rows -= chart_rows - _CHART_ROWS
    parts: list[RenderableType] = [
        _title(watcher, width),
        _sentence(status),
        _fill(status, width),
        *pools,
        _throughput(watcher, width, chart_rows),
        _middle(status, ledger, width, middle_rows),
    ]
    if lease_rows:
        parts.append(_leases(leases, lease_rows))
    if group_rows > 0:
        parts.append(_groups(status, group_rows))
        free_rows -= group_rows + 3
    if free_rows >= 4:
        parts.append(_producers(watcher, free_rows, width))
    return Group(*parts)


def _title(watcher: Watcher, width: int) -> Text:
    status = watcher.status
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(" shmbus ", style="bold black on cyan")
    text.append(f" {status.name} ", style="bold")
    text.append(
        f" {show_size(status.capacity)}  up {show_duration(status.age_s)}  "
        f"policy {status.policy_version}",
        style="dim",
    )
    if status.paused is not None:
        text.append(f"  paused: {status.paused.reason or 'no reason given'}", style="bold yellow")
    hint = "q quits "
    text.truncate(max(10, width - len(hint) - 1), overflow="ellipsis", pad=True)
    text.append(" " + hint, style="dim")
    return text


def _sentence(status: BusStatus) -> Text:
    verdict = status.verdict
    if verdict is None:
        return Text("")
    style = _LEVEL_STYLES[verdict.level]
    return Text(f" {verdict.sentence}", style=style, no_wrap=True, overflow="ellipsis")


def _fill(status: BusStatus, width: int) -> Text:
    color = "red" if status.fill >= _FULL else "yellow" if status.fill >= _HIGH else "green"
    used = status.capacity - status.free
    note = f" {status.fill:4.0%}  {show_size(used)} of {show_size(status.capacity)}"
    if status.space_wanted:
        note += "  a producer waits"
    cells = max(10, width - len(note) - 9)
    eighths = round(status.fill * cells * 8)
    full, rest = divmod(eighths, 8)
    text = Text(" ring  ", style="bold", no_wrap=True)
    text.append("█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else ""), style=color)
    text.append("·" * (cells - full - bool(rest)), style=_BORDER)
    text.append(note, style="bold" if status.fill >= _FULL else "")
    return text


def chart(values: Sequence[float], width: int, height: int) -> list[str]:
    """Draw values as columns of blocks, the newest at the right, the highest filling the height."""
    shown = list(values)[-width:]
    top = max(shown, default=0.0)
    steps = height * 8
    levels = [0 if top <= 0 else max(value > 0, round(value / top * steps)) for value in shown]
    rows = []
    for row in range(height - 1, -1, -1):
        cells = (_BLOCKS[min(8, max(0, level - row * 8))] for level in levels)
        rows.append("".join(cells).rjust(width))
    return rows


def _short(number: float) -> str:
    """Four digits at the most, with a unit: 950, 12.3k, 4.56M."""
    for unit in ("", "k", "M", "G"):
        if number < 1000:
            digits = 0 if not unit or number >= 100 else 1
            return f"{number:.{digits}f}{unit}"
        number /= 1000
    return f"{number:.1f}T"


def _panel(
    content: RenderableType, title: TextType, height: int, border: str = _BORDER, subtitle: str = ""
) -> Panel:
    return Panel(
        content, title=title, subtitle=subtitle or None, title_align="left",
        subtitle_align="right", border_style=border, height=height, box=box.ROUNDED,
    )  # fmt: skip


def _table(*columns: str) -> Table:
    """Make a table; a column of numbers ends with ">", one that may be cut with "~"."""
    table = Table(box=None, expand=True, padding=(0, 1), header_style="dim", pad_edge=False)
    for column in columns:
        justify: JustifyMethod = "right" if column.endswith(">") else "left"
        ratio = 1 if column.endswith("~") else None
        table.add_column(
            column.rstrip(">~"), justify=justify, ratio=ratio, no_wrap=True, overflow="ellipsis"
        )
    return table


def _throughput(watcher: Watcher, width: int, rows: int) -> Panel:
    rates = watcher.rates
    head = Text(no_wrap=True, overflow="ellipsis")
    for label, value, style in (
        ("in ", f"{_short(rates.committed)}/s", "bold cyan"),
        ("  out ", f"{_short(rates.acknowledged)}/s", "bold green"),
        ("  dropped ", f"{_short(rates.dropped)}/s", "bold red" if rates.dropped else "dim"),
        ("  payload ", f"{show_size(rates.bytes)}/s", "bold"),
        ("  tokens ", f"{_short(rates.tokens)}/s", "bold"),
    ):
        head.append(label, style="dim")
        head.append(value, style=style)
    drawn = [Text(line, style="cyan") for line in chart(watcher.history, width - 4, rows)]
    peak = max(watcher.history, default=0.0)
    subtitle = f"peak {_short(peak)}/s"
    return _panel(Group(head, *drawn), "trajectories", rows + 3, subtitle=subtitle)


def _ledger(status: BusStatus) -> list[tuple[str, int, str]]:
    ledger = status.ledger
    rows = [
        ("committed", ledger.committed, "bold"),
        ("acknowledged", ledger.acknowledged, "green"),
        ("leased", ledger.leased, "cyan"),
        ("stashed", ledger.stashed, ""),
        ("in the ring", ledger.in_ring, ""),
    ]
    rows += [(f"dropped: {reason}", count, "red") for reason, count in ledger.dropped.items()]
    if ledger.unreadable:
        rows.append(("unreadable", ledger.unreadable, "bold red"))
    return rows


def _middle(
    status: BusStatus, ledger: list[tuple[str, int, str]], width: int, rows: int
) -> RenderableType:
    figures = Table.grid(padding=(0, 2), expand=True)
    figures.add_column(no_wrap=True)
    figures.add_column(justify="right", no_wrap=True)
    for name, count, style in ledger:
        figures.add_row(Text(name, style="dim"), Text(show_count(count), style=style))
    verdict = "balances" if status.ledger.balanced else "DOES NOT BALANCE"
    border = _BORDER if status.ledger.balanced else "red"
    left = _panel(figures, "ledger", rows, border, verdict)
    border = _BORDER if status.collector.alive else "yellow"
    right = _panel(_collector(status), "collector", rows, border)
    both = Table.grid(expand=True)
    both.add_column(width=min(46, width // 2))
    both.add_column(ratio=1)
    both.add_row(left, right)
    return both


def _collector(status: BusStatus) -> RenderableType:
    collector = status.collector
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    if collector.seen_ago_s is None:
        grid.add_row("who", Text("none has ever read this bus", style="yellow"))
    else:
        style = "green" if collector.alive else "bold red"
        state = "alive" if collector.alive else "gone"
        grid.add_row("who", Text.assemble((f"{state} ", style), collector.label))
        grid.add_row("pid", Text(str(collector.pid)))
        grid.add_row("polled", Text(f"{show_duration(collector.seen_ago_s)} ago"))
    grid.add_row(
        "holds",
        Text(
            f"{show_count(collector.leased_groups)} leased, "
            f"{show_count(collector.stashed_groups)} stashed"
        ),
    )
    if status.groups_incomplete is not None and status.groups_complete is not None:
        grid.add_row(
            "groups",
            Text(
                f"{show_count(status.groups_incomplete)} incomplete, "
                f"{show_count(status.groups_complete)} complete"
            ),
        )
    if status.wanted or status.groups_given_up:
        grid.add_row(
            "failed",
            Text(
                f"{show_count(len(status.wanted))} asked for again, "
                f"{show_count(status.groups_given_up)} given up"
            ),
        )
    if status.daemon is not None:
        grid.add_row("daemon", _daemon(status.daemon))
    elif collector.stragglers_bytes:
        grid.add_row("moved", Text(f"{show_size(collector.stragglers_bytes)} of stragglers"))
    return grid


def _daemon(daemon: DaemonStatus) -> Text:
    if not daemon.answers:
        return Text("does not answer", style="bold red")
    if daemon.recovering:
        return Text(f"recovering, {several(daemon.in_doubt, 'group')} in doubt", style="yellow")
    state = "draining, " if daemon.draining else ""
    return Text(f"{state}up {show_duration(daemon.uptime_s)}, {daemon.groups_ready} ready")


def _leases(leases: list[LeaseStatus], rows: int) -> Panel:
    table = _table("rank", "pid>", "label~", "groups>", "trajectories>", "held>", "now")
    shown = leases if len(leases) <= rows else leases[: rows - 1]
    for lease in shown:
        now = ("disconnected", "bold red")
        if lease.connected:
            now = ("waits", "dim") if lease.waiting else ("works", "green")
        table.add_row(
            Text("-" if lease.rank < 0 else f"{lease.rank} of {lease.world_size}"),
            Text(str(lease.pid)),
            Text(lease.label),
            Text(show_count(lease.groups)),
            Text(show_count(lease.trajectories)),
            Text(show_duration(lease.oldest_lease_s) if lease.groups else "-"),
            Text(*now),
        )
    if len(shown) < len(leases):
        table.add_row("", "", Text(f"and {len(leases) - len(shown)} more", style="dim"))
    return _panel(table, "leases", rows + 3)


def _groups(status: BusStatus, rows: int) -> Panel:
    table = _table("instance~", "present>", "waits>", "missing~")
    for group in status.oldest_incomplete[:rows]:
        table.add_row(*_group(group))
    return _panel(table, "oldest incomplete groups", rows + 3)


def _group(group: GroupCells) -> tuple[Text, ...]:
    missing = ", ".join(map(str, group.missing[:_MISSING]))
    more = group.size - group.present - min(_MISSING, len(group.missing))
    if more:
        missing += f" and {more} more"
    round = "" if group.round is None else f" round {group.round}"
    return (
        Text(group.instance_id + round),
        Text(f"{group.present} of {group.size}"),
        Text(show_duration(group.age_s)),
        Text(missing, style="yellow"),
    )


def _producers(watcher: Watcher, height: int, width: int) -> Panel:
    status = watcher.status
    producers = sorted(
        status.producers, key=lambda p: (_STATE_ORDER.get(p.state, 9), p.producer_id)
    )
    room = height - 3
    shown = producers if len(producers) <= room else producers[: room - 1]
    aborted = ("aborted>",) if width >= 90 else ()
    table = _table("id>", "pid>", "label~", "state", "rate>", "committed>", *aborted, "holds>")
    for producer in shown:
        table.add_row(*_producer(producer, watcher.producer_rates, width))
    hidden = len(producers) - len(shown)
    if hidden:
        table.add_row("", "", Text(f"and {hidden} more", style="dim"))
    alive = sum(producer.state == "alive" for producer in producers)
    dead = sum(producer.state == "dead" for producer in producers)
    title = Text.assemble("producers  ", (f"{alive} alive", "green"))
    if dead:
        title.append(f"  {dead} dead", style="bold red")
    title.append(f"  of {status.max_producers}", style="dim")
    return _panel(table, title, height)


def _producer(producer: ProducerStatus, rates: dict[int, float], width: int) -> tuple[Text, ...]:
    rate = rates.get(producer.producer_id, 0.0)
    row = [
        Text(str(producer.producer_id)),
        Text(str(producer.pid)),
        Text(producer.label),
        Text("stopped", style="bold yellow")
        if producer.stopped
        else Text(producer.state, style=_STATE_STYLES.get(producer.state, "")),
        Text(f"{_short(rate)}/s", style="" if rate else "dim"),
        Text(show_count(producer.committed)),
        Text(show_size(producer.held_bytes), style="" if producer.held_bytes else "dim"),
    ]
    if width >= 90:
        row.insert(6, Text(show_count(producer.aborted), style="" if producer.aborted else "dim"))
    return tuple(row)
