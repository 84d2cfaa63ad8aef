"""The plots of a report: SVG, from results alone; unmeasured points are left out.

shmbus has one colour throughout, the roofline is a dashed line, and every curve is named at its
end, so that no legend has to be matched by colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

from bench.report.verdicts import GROWTH, OURS, USUAL, find

__all__ = ["write"]

INK: Final = "#1f2933"
FAINT: Final = "#9aa5b1"
#: One colour a contender, the same in each plot; told apart also in greys and by most eyes.
COLOURS: Final = {
    OURS: "#d6336c",
    "shmbus-daemon": "#f783ac",
    "iceoryx2": "#1c7ed6",
    "faster-fifo": "#2b8a3e",
    "pyzmq": "#e8890c",
    "multiprocessing.Queue": "#7048e8",
    "redis": "#0c8599",
    "torch.multiprocessing": "#a0522d",
    "ray": "#5c940d",
    "TransferQueue": "#868e96",
    "atropos": "#212529",
}
STYLE: Final[dict[Any, Any]] = {
    "font.size": 10,
    "font.family": "DejaVu Sans",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e7eb",
    "grid.linewidth": 0.8,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "white",
    "savefig.facecolor": "white",
    # The same results give the same file.
    "svg.hashsalt": "shmbus",
}
#: Points between two names at the ends of curves: less, and they would overlap.
NAME_PT: Final = 12.5


def write(result: dict[str, Any], directory: Path) -> list[tuple[str, str]]:
    """Draw what the results have, and return each file's name with its caption."""
    contest = result["contest"]
    if not contest:
        return []
    drawn: list[tuple[str, str]] = []
    with plt.rc_context(STYLE):
        if any("rate" in one for one in contest["size"]):
            sizes = {one["point"] for one in contest["size"]}
            figure = _throughput(result) if len(sizes) > 2 else _bars(result)
            caption = (
                "Throughput against memcpy, which copies from memory to memory; what is in the "
                "cache at both ends can be faster than that"
            )
            drawn.append(_save(figure, directory, "throughput.svg", caption))
        if any("us" in one for one in contest["latency"]):
            caption = "One-way latency: the share of probes that took at most so long"
            drawn.append(_save(_latency(result), directory, "latency.svg", caption))
        if contest["producers"] or result["open_groups"]:
            caption = (
                f"How the cost of a trajectory grows; dotted: {GROWTH:g} times the first point"
            )
            drawn.append(_save(_scaling(result), directory, "scaling.svg", caption))
    return drawn


def _save(figure: Figure, directory: Path, name: str, caption: str) -> tuple[str, str]:
    figure.savefig(directory / name, metadata={"Date": None})
    plt.close(figure)
    return name, caption


def _titles(contest: dict[str, Any]) -> dict[str, str]:
    return {name: name if name != OURS else "shmbus" for name in contest["contenders"]}


def _line(name: str) -> dict[str, Any]:
    """Say how a contender's curve is drawn; ours lies above the others."""
    ours = name == OURS
    colour = COLOURS.get(name, FAINT)
    return {"color": colour, "linewidth": 2.6 if ours else 1.5, "zorder": 4 if ours else 3}


def _plain(value: float, _: int = 0) -> str:
    """Write a tick of a logarithmic axis: 0.001, 5, 2k, 1M."""
    for bound, unit in ((1e6, "M"), (1e3, "k")):
        if value >= bound:
            return f"{value / bound:g}{unit}"
    return f"{value:g}"


def _name_ends(axes: Axes, ends: Sequence[tuple[float, float, str, str]]) -> None:
    """Write (x, y, name, colour) to the right of the plot, pushed apart where they are close."""
    figure = axes.figure
    figure.canvas.draw()
    points = 72.0 / figure.dpi
    placed = sorted(
        (axes.transData.transform((x, y))[1] * points, x, y, n, c) for x, y, n, c in ends
    )
    right = axes.get_window_extent().x1 * points
    heights: list[float] = []
    for height, *_ in placed:
        heights.append(max(height, heights[-1] + NAME_PT) if heights else height)
    # What was pushed above the plot comes down again, and takes those below with it.
    top = axes.get_window_extent().y1 * points + 2
    for number in range(len(heights) - 1, -1, -1):
        heights[number] = min(heights[number], top)
        top = heights[number] - NAME_PT
    for (height, x, y, name, colour), wanted in zip(placed, heights, strict=True):
        start = axes.transData.transform((x, y))[0] * points
        axes.annotate(
            name,
            (x, y),
            xytext=(right - start + 8, wanted - height),
            textcoords="offset points",
            va="center",
            color=colour,
            fontsize=9,
            fontweight="bold" if name == "shmbus" else "normal",
            annotation_clip=False,
        )


def _throughput(result: dict[str, Any]) -> Figure:
    contest = result["contest"]
    figure, axes = plt.subplots(figsize=(8.6, 5.0))
    figure.subplots_adjust(left=0.09, right=0.77, top=0.9, bottom=0.12)
    axes.set(xscale="log", yscale="log")
    memcpy = result["memcpy_bytes_per_s"] / 1e9
    sizes = sorted({int(one["point"]) for one in contest["size"]})
    axes.axhline(memcpy, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
    ends = [(float(sizes[-1]), memcpy, "memcpy, one core", INK)]
    for name, title in _titles(contest).items():
        found = [find(contest, "size", name, tokens) for tokens in sizes]
        good = [one for one in found if one]
        if not good:
            continue
        x = [int(one["point"]) for one in good]
        y = [one["rate"] * one["bytes_each"] / 1e9 for one in good]
        low = [one["lowest"] * one["bytes_each"] / 1e9 for one in good]
        high = [one["highest"] * one["bytes_each"] / 1e9 for one in good]
        colour = COLOURS.get(name, FAINT)
        axes.fill_between(x, low, high, color=colour, alpha=0.15, linewidth=0)
        axes.plot(x, y, marker="o", markersize=4, **_line(name))
        ends.append((x[-1], y[-1], title, colour))
    _token_axis(axes, sizes)
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_ylabel("GB/s, from put to arrays in the consumer")
    axes.set_title("One producer, one consumer; the band is lowest to highest of the runs")
    _name_ends(axes, ends)
    return figure


def _token_axis(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("tokens of a trajectory (9 bytes each)")


def _bars(result: dict[str, Any]) -> Figure:
    contest = result["contest"]
    found = [(name, find(contest, "size", name, USUAL)) for name in contest["contenders"]]
    good = sorted([(one["rate"], name) for name, one in found if one])
    figure, axes = plt.subplots(figsize=(8.6, 0.9 + 0.42 * len(good)))
    figure.subplots_adjust(left=0.22, right=0.9, top=0.86, bottom=0.2)
    axes.set(xscale="log")
    memcpy = result["memcpy_bytes_per_s"] / (USUAL * 9)
    axes.axvline(memcpy, color=INK, linestyle=(0, (5, 3)), linewidth=1.2)
    axes.annotate("memcpy", (memcpy, 1), xycoords=("data", "axes fraction"), xytext=(3, 2),
                  textcoords="offset points", fontsize=9)  # fmt: skip
    names = [name for _, name in good]
    rates = [rate for rate, _ in good]
    axes.barh(names, rates, color=[COLOURS.get(name, FAINT) for name in names], height=0.62)
    for place, rate in enumerate(rates):
        axes.annotate(
            f"{rate:,.0f}",
            (rate, place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            zorder=6,
            # Where the roofline crosses a number, the number stays readable.
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
        )
    axes.set_xlim(min(rates) / 3, max(*rates, memcpy) * 4)
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_xlabel("trajectories of 2,048 tokens a second")
    axes.set_title("One producer, one consumer")
    return figure


def _latency(result: dict[str, Any]) -> Figure:
    contest = result["contest"]
    modes = ("sleeping", "busy", "under load")
    heads = ("a sleeping reader", "a polling reader", "a sleeping reader, under load")
    figure, all_axes = plt.subplots(1, 3, figsize=(11.2, 4.8), sharey=True)
    figure.subplots_adjust(left=0.065, right=0.985, top=0.92, bottom=0.25, wspace=0.08)
    named: dict[str, Any] = {}
    for axes, mode, head in zip(all_axes, modes, heads, strict=True):
        axes.set(xscale="log", yscale="log")
        for name in contest["contenders"]:
            one = find(contest, "latency", name, mode)
            if one is None:
                continue
            # Drawn is the share that took longer, which a logarithmic axis spreads at the tail.
            x = one["us"][:-1]
            y = [100 - percent for percent in one["percents"][:-1]]
            (named[name],) = axes.plot(x, y, **_line(name))
        axes.set_ylim(100, 0.1)
        axes.set_yticks([100, 50, 10, 1, 0.1], ["0", "50", "90", "99", "99.9"])
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.xaxis.set_major_formatter(FuncFormatter(_plain))
        axes.set_title(head)
        axes.set_xlabel("microseconds (1k: a millisecond)")
    all_axes[0].set_ylabel("percent of probes that took at most so long")
    names = [_titles(contest)[name] for name in named]
    figure.legend(named.values(), names, loc="lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _scaling(result: dict[str, Any]) -> Figure:
    contest = result["contest"]
    panels = [
        draw
        for draw, there in (
            (_by_producers, contest["producers"]),
            (_by_capacity, contest["capacity"]),
            (_by_open_groups, result["open_groups"]),
        )
        if there
    ]
    figure, all_axes = plt.subplots(
        1, len(panels), figsize=(3.75 * len(panels), 4.4), squeeze=False
    )
    figure.subplots_adjust(left=0.08, right=0.985, top=0.92, bottom=0.24, wspace=0.3)
    for axes, draw in zip(all_axes[0], panels, strict=True):
        draw(axes, result)
        axes.xaxis.set_minor_locator(NullLocator())
    handles, labels = all_axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=5, frameon=False, fontsize=9)
    return figure


def _limit(axes: Axes, first: float) -> None:
    """Draw what no point of a curve of ours may exceed."""
    axes.axhline(
        GROWTH * first,
        color=COLOURS[OURS],
        linestyle=(0, (1, 2)),
        linewidth=1.2,
        label=f"{GROWTH:g} times shmbus' first point",
    )


def _by_producers(axes: Axes, result: dict[str, Any]) -> None:
    contest = result["contest"]
    counts = sorted({int(one["point"]) for one in contest["producers"]})
    axes.set(xscale="log", yscale="log")
    for name, title in _titles(contest).items():
        found = [find(contest, "producers", name, count) for count in counts]
        good = [one for one in found if one]
        costs = [one["cpu_s"] / one["trajectories"] * 1e6 for one in good]
        if good and name == OURS:
            _limit(axes, costs[0])
        if good:
            axes.plot(
                [one["point"] for one in good],
                costs,
                marker="o",
                markersize=4,
                label=title,
                **_line(name),
            )
    axes.set_xticks(counts, [f"{count}" for count in counts])
    axes.yaxis.set_major_formatter(FuncFormatter(_plain))
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_title("more producers")
    axes.set_xlabel("producers, to a consumer that copies every byte")
    axes.set_ylabel("processor microseconds a trajectory")


def _by_capacity(axes: Axes, result: dict[str, Any]) -> None:
    points = [one for one in result["contest"]["capacity"] if "rate" in one]
    costs = [one["cpu_s"] / one["trajectories"] * 1e6 for one in points]
    if points:
        _limit(axes, costs[0])
    axes.plot(
        range(len(points)),
        costs,
        marker="o",
        markersize=4,
        **_line(OURS),
    )
    axes.set_xticks(range(len(points)), [str(one["point"]).replace("iB", "") for one in points])
    axes.set_ylim(0, axes.get_ylim()[1] * 1.05)
    axes.set_title("a larger ring (shmbus)")
    axes.set_xlabel("bytes of the ring")
    axes.set_ylabel("processor microseconds a trajectory")


def _by_open_groups(axes: Axes, result: dict[str, Any]) -> None:
    points = result["open_groups"]
    axes.set(xscale="log")
    for order, dashes in (("by-age", "solid"), ("scrambled", "dashed")):
        found = [one for one in points if one["order"] == order]
        x, y = [one["open_groups"] for one in found], [one["ns"] for one in found]
        label = f"arrivals {order.replace('-', ' ')}"
        axes.plot(x, y, linestyle=dashes, marker="o", markersize=4, label=label, **_line(OURS))
    axes.legend(handles=axes.get_lines(), loc="lower left", frameon=False, fontsize=9)
    _limit(axes, min(one["ns"] for one in points if one["open_groups"] == points[0]["open_groups"]))
    axes.set_ylim(0, 1.15 * max(one["ns"] for one in points))
    axes.xaxis.set_major_formatter(FuncFormatter(_plain))
    axes.set_title("more open groups (shmbus)")
    axes.set_xlabel("open groups")
    axes.set_ylabel("processor nanoseconds of the stash")
