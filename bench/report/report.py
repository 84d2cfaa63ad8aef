"""The report of a run: Markdown tables and plots, made of ``results.json`` and nothing else.

``python -m bench.report DIR`` makes them again. ``--readme README.md bench/README.md`` replaces the
marked blocks of those pages, so that their figures are always of one run: a few rows
(``short``), all rows of shmbus itself (``rows``), the contenders beside each other (``contest``).
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from bench import machine
from bench.contest.run import SERIES
from bench.report.verdicts import OURS, USUAL, find, percentile

__all__ = ["BLOCKS", "contest_text", "main", "replace_blocks", "write"]

#: The line before a block of this name, and the line behind each block.
BEGIN: Final = "<!-- bench {}: made by python -m bench.report; do not edit -->"
END: Final = "<!-- bench: end -->"
#: Rows of the short table: the two rates, what a daemon and a sleeping reader cost, the three ways
#: that a bus replaces, and a death. Missed targets belong here too.
SHORT_ROWS: Final = (
    "hop-2048",
    "packed",
    "daemon-packed",
    "wake-p50",
    "against-multiprocessing.Queue",
    "against-TransferQueue",
    "against-atropos",
    "survival",
)
#: Tokens a second of a claim of the field: over REST, and over shared memory.
CLAIM_REST: Final = 223.0
CLAIM_SHARED: Final = 6_284.0

#: Heads, and lines of cells.
_Table: TypeAlias = tuple[list[str], list[list[str]]]


def main(argv: Sequence[str] | None = None) -> int:
    """Make the report of a directory again."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description="Make tables and plots of a run's results.json.",
        epilog="example: python -m bench.report bench/results/two-cores --readme README.md "
        "bench/README.md",
    )
    parser.add_argument("directory", type=Path, help="that holds results.json")
    parser.add_argument(
        "--readme", type=Path, nargs="+", default=[], metavar="PAGE",
        help="Markdown pages whose blocks are replaced",
    )  # fmt: skip
    options = parser.parse_args(argv)
    result = json.loads((options.directory / "results.json").read_text())
    write(result, options.directory)
    for page in options.readme:
        replace_blocks(result, options.directory, page)
    return 0


def write(result: dict[str, Any], directory: Path) -> None:
    """Write ``report.md`` and the plots; where matplotlib is missing, the report says so."""
    try:
        from bench.report import plots
    except ModuleNotFoundError as error:
        pictures: list[tuple[str, str]] = []
        missing = f"\nNo plots: {error}; pip install 'shmbus[bench]'.\n"
    else:
        pictures = plots.write(result, directory)
        missing = ""
    parts = [
        "# One run of the benchmark\n",
        "```text\n" + machine.summary(result["machine"]) + "\n```\n",
    ]
    parts += [f"![{caption}]({name})\n\n*{caption}*\n" for name, caption in pictures]
    parts += [missing, _rows(result), _contest(result), _claim(result), _skipped(result)]
    parts += [_favours(result)]
    (directory / "report.md").write_text("\n".join(filter(None, parts)))


# -- tables ------------------------------------------------------------------------------------


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Lay out a Markdown table."""
    text = [heads, ["---"] * len(heads), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in text) + "\n"


def aligned(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Lay out a table of plain text."""
    cells = [list(heads), *map(list, lines)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * width for width in widths])
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _rows(result: dict[str, Any]) -> str:
    if not result["rows"]:
        return ""
    return "## Targets\n\n" + _shortfalls(result) + _judged(result["rows"])


def _judged(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out rows with their targets and verdicts."""
    lines = []
    for row in rows:
        value = "" if row["value"] is None else _short(row["value"])
        if row["spread"] and row["spread"][0] < row["spread"][1]:
            value += f" ({_short(row['spread'][0])} to {_short(row['spread'][1])})"
        verdict = {None: "", True: "met", False: "**not met**"}[row["met"]]
        if row["skipped"]:
            verdict = f"skipped: {row['skipped']}"
        lines.append([row["title"], row["measured"], value, row["target"] or "", verdict])
    heads = ["what", "measured", "value (lowest to highest)", "target", "verdict"]
    return markdown(heads, lines)


def _shortfalls(result: dict[str, Any]) -> str:
    """List the missed targets in words, above the table."""
    judged = [row for row in result["rows"] if row["met"] is not None]
    short = [row for row in judged if not row["met"]]
    if not short:
        return f"All {len(judged)} targets that could be measured are met.\n\n" if judged else ""
    lines = [
        f"- {row['title']}: {_short(row['value'])}, where the target is {row['target']} "
        f"({row['measured']})"
        for row in short
    ]
    count = f"{len(judged) - len(short)} of {len(judged)} targets are met. These are not:"
    return "\n".join([count, "", *lines]) + "\n\n"


def _here(contest: dict[str, Any]) -> list[str]:
    return [name for name, facts in contest["contenders"].items() if not facts["skipped"]]


def _rate(one: dict[str, Any]) -> str:
    return f"{one['rate']:,.0f}"


def _cpu(one: dict[str, Any]) -> str:
    return f"{one['cpu_s'] / one['tokens_moved'] * 1e6:.3g}"


def _short(value: float) -> str:
    """Write a number with about three digits, and never with an exponent."""
    if value >= 10:
        return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _percentiles(one: dict[str, Any]) -> str:
    return " / ".join(_us(percentile(one, percent)) for percent in (50, 99, 99.9))


def _survives(one: dict[str, Any]) -> str:
    if not one["goes_on"]:
        word = f"**no**: stopped after kill {one['stopped_after']}"
    else:
        word = f"yes, {one['kills']} of {one['kills']} ({one['in_send']} within a send)"
    harm = [f"{one[what]} {what}" for what in ("lost", "torn", "doubled") if one[what]]
    return f"{word}{', ' if harm else ''}{', '.join(harm)}"


def _throughput_table(result: dict[str, Any]) -> _Table:
    contest = result["contest"]
    ours = find(contest, "size", OURS, USUAL)
    heads = ["contender", "trajectories/s", "M tokens/s", "of memcpy", "shmbus is",
             "each byte read", "packed", "CPU s a M tokens", "groups by id"]  # fmt: skip
    lines = []
    for name in _here(contest):
        facts = contest["contenders"][name]
        one = find(contest, "size", name, USUAL)
        read, packed = find(contest, "read", name), find(contest, "packed", name)
        if one is None:
            lines.append([facts["title"], "failed, see below", *[""] * 7])
            continue
        of_memcpy = one["rate"] * one["bytes_each"] / result["memcpy_bytes_per_s"]
        times = f"{_short(ours['rate'] / one['rate'])} times" if ours and name != OURS else ""
        lines.append(
            [
                facts["title"], _rate(one), _short(one["rate"] * USUAL / 1e6), f"{of_memcpy:.2g}",
                times, _rate(read) if read else "", _rate(packed) if packed else "", _cpu(one),
                facts["groups"] or "no",
            ]
        )  # fmt: skip
    return heads, lines


def _latency_table(result: dict[str, Any]) -> _Table:
    contest = result["contest"]
    heads = ["contender", "sleeping reader", "polling reader", "under load", "load, trajectories/s"]
    lines = []
    for name in _here(contest):
        points = [find(contest, "latency", name, p) for p in ("sleeping", "busy", "under load")]
        if any(points):
            cells = [_percentiles(one) if one else "" for one in points]
            load = points[2]
            cells.append(f"{load['load_per_s']:,.0f}" if load else "")
            lines.append([contest["contenders"][name]["title"], *cells])
    return heads, lines


def _cost_table(result: dict[str, Any]) -> _Table:
    contest = result["contest"]
    heads = ["contender", "copies", "CPU a byte, in memcpys", "page faults a trajectory",
             "memory while running, MiB", "goes on after kill -9 in mid-write"]  # fmt: skip
    lines = []
    for name in _here(contest):
        facts = contest["contenders"][name]
        watched, killed = find(contest, "watched", name), find(contest, "survival", name)
        faults = memory = ""
        if watched:
            all_faults = watched["faults"] + watched["figures"]["others_faults"]
            faults = f"{all_faults / watched['trajectories']:.2f}"
            memory = f"{watched['figures'].get('memory_bytes', 0) / 2**20:,.0f}"
        survives = _survives(killed) if killed else ""
        copies = str(facts["copies"])
        lines.append([facts["title"], copies, _memcpys(result, name), faults, memory, survives])
    return heads, lines


def _memcpys(result: dict[str, Any], name: str) -> str:
    """Return the cost of a further byte: the slope of processor time between two sizes."""
    contest = result["contest"]
    small, large = (find(contest, "size", name, tokens) for tokens in (USUAL, 32_768))
    if small is None or large is None:
        return ""
    costs = [one["cpu_s"] / one["trajectories"] for one in (small, large)]
    slope = (costs[1] - costs[0]) / (large["bytes_each"] - small["bytes_each"])
    return _short(slope * result["memcpy_bytes_per_s"])


def _series_table(result: dict[str, Any], series: str) -> _Table:
    contest = result["contest"]
    points = list(dict.fromkeys(one["point"] for one in contest[series]))
    heads = ["contender", *(f"{p:,}" if isinstance(p, int) else str(p) for p in points)]
    lines = []
    for name in _here(contest):
        found = [find(contest, series, name, point) for point in points]
        if any(found):
            title = contest["contenders"][name]["title"]
            lines.append([title, *(_rate(one) if one else "" for one in found)])
    return heads, lines


_TABLES: Final[tuple[tuple[str, str, Callable[[dict[str, Any]], _Table]], ...]] = (
    (
        "2,048 tokens, one producer: trajectories/s to arrays, each byte read, packed to batches",
        "size",
        _throughput_table,
    ),
    ("One way, p50 / p99 / p99.9, microseconds", "latency", _latency_table),
    ("What it costs, and what a death does", "survival", _cost_table),
)
#: Series of rates, and what the table of each says.
_RATES: Final = {
    "size": "tokens",
    "kind": "workload",
    "producers": "producers, each byte read",
    "capacity": "size of the ring",
}


def _tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    contest = result["contest"]
    if not contest:
        return []
    found = [(title, *make(result)) for title, series, make in _TABLES if contest[series]]
    for series, what in _RATES.items():
        if len({one["point"] for one in contest[series]}) > 1:
            found.append((f"Trajectories a second by {what}", *_series_table(result, series)))
    return found


def _contest(result: dict[str, Any]) -> str:
    return "\n".join(
        f"## {title}\n\n{markdown(heads, lines)}" for title, heads, lines in _tables(result)
    )


def contest_text(result: dict[str, Any]) -> str:
    """Lay the tables of the contest out as plain text."""
    parts = [f"{title}\n\n{aligned(heads, lines)}\n" for title, heads, lines in _tables(result)]
    return "\n".join([*parts, *([_skipped(result)] if result["contest"] else [])])


# -- what is said beside them ------------------------------------------------------------------


def _versions(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in facts["versions"].items())


def _skipped(result: dict[str, Any]) -> str:
    contest = result["contest"]
    if not contest:
        return ""
    lines = [
        f"- {facts['title']}: skipped: {facts['skipped']}"
        for facts in contest["contenders"].values()
        if facts["skipped"]
    ]
    points: dict[tuple[str, str, str], list[str]] = {}
    for series in SERIES:
        for one in contest.get(series, ()):
            if "failed" in one:
                same = points.setdefault((one["contender"], series, one["failed"]), [])
                same.append(str(one["point"]))
    lines += [
        f"- {contender}, {series} {', '.join(same)}".rstrip() + f": {why}"
        for (contender, series, why), same in points.items()
    ]
    return "Not measured:\n\n" + "\n".join(lines) + "\n" if lines else ""


def _favours(result: dict[str, Any]) -> str:
    contest = result["contest"]
    if not contest:
        return ""
    lines = [
        [
            facts["title"],
            f"{_versions(facts)}; Python {facts['python']}",
            facts["favour"],
            facts["copied"],
        ]
        for name in _here(contest)
        for facts in [contest["contenders"][name]]
    ]
    heads = ["contender", "versions", "in its favour", "where a byte is copied"]
    return "## Versions, and what each was given\n\n" + markdown(heads, lines)


def _claim(result: dict[str, Any]) -> str:
    """Say which part of a claim of the field is transport, by the measured rates."""
    contest = result["contest"]
    if not contest:
        return ""
    rest, ours = (find(contest, "size", name, USUAL) for name in ("atropos", OURS))
    if rest is None or ours is None:
        return ""
    rest_tokens, our_tokens = rest["rate"] * USUAL, ours["rate"] * USUAL
    text = [
        "## The REST server, and a claim\n",
        f"A claim goes round: {CLAIM_REST:,.0f} tokens/s over the Atropos REST server, "
        f"{CLAIM_SHARED:,.0f} over shared memory. Here the server moved {rest_tokens:,.0f} "
        f"tokens/s and shmbus {our_tokens:,.0f}. So at {CLAIM_REST:,.0f} tokens/s the server "
        f"takes {CLAIM_REST / rest_tokens:.2%} of the time, and at {CLAIM_SHARED:,.0f} tokens/s "
        f"{CLAIM_SHARED / rest_tokens:.1%}; shared memory takes {CLAIM_SHARED / our_tokens:.4%}. "
        "All the rest of such a difference is generation, waiting, polling or something else in "
        "the loop around it.\n",
    ]
    paced = {name: find(contest, "paced", name, USUAL) for name in ("atropos", OURS)}
    if paced["atropos"] and paced[OURS]:
        rates = [
            # Between the first delivery and the last lie all trajectories but the first.
            (one["trajectories"] - 1) * USUAL / one["seconds"]
            for one in (paced["atropos"], paced[OURS])
            if one
        ]
        text.append(
            f"At equal work (one producer that takes as long for each trajectory as a model with "
            f"{CLAIM_SHARED:,.0f} tokens/s) the server delivered {rates[0]:,.0f} tokens/s and "
            f"shmbus {rates[1]:,.0f}.\n"
        )
    return "\n".join(text)


# -- blocks of other pages -----------------------------------------------------------------------


def replace_blocks(result: dict[str, Any], directory: Path, page: Path) -> None:
    """Replace the blocks that a page has marks for."""
    where = os.path.relpath(directory, page.resolve().parent)
    text = page.read_text()
    present = [name for name in BLOCKS if BEGIN.format(name) in text]
    if not present:
        begin = BEGIN.format("NAME")
        raise SystemExit(
            f"{page}: expected the line {begin!r}, NAME one of {', '.join(BLOCKS)}; found none"
        )
    for name in present:
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{page}: expected the line {END!r} behind {begin!r}, found none")
        text = f"{before}{begin}\n{BLOCKS[name](result, where)}\n{END}{after}"
    page.write_text(text)


def _run_of(result: dict[str, Any], where: str) -> str:
    facts = result["machine"]
    return (
        f"One run of `shmbus bench --{result['level']}` on {facts['cores']} cores of an "
        f"{facts['cpu']}, load {facts['load_average'][0]:.1f} at its start;\n"
        f"[the whole report]({where}/report.md).\n"
    )


def _short_block(result: dict[str, Any], where: str) -> str:
    rows = {row["name"]: row for row in result["rows"]}
    chosen = [rows[name] for name in SHORT_ROWS if name in rows]
    plot = f"![Throughput by size against memcpy]({where}/throughput.svg)\n"
    return "\n".join([_run_of(result, where), _judged(chosen), plot])


def _rows_block(result: dict[str, Any], where: str) -> str:
    own = [row for row in result["rows"] if not row["name"].startswith("against-")]
    return f"{_run_of(result, where)}\n{_judged(own)}"


def _contest_block(result: dict[str, Any], where: str) -> str:
    heads, lines = _throughput_table(result)
    short = [[line[0], line[1], line[3], line[4], line[5], line[8]] for line in lines]
    killed = {
        contest_facts["title"]: find(result["contest"], "survival", name)
        for name, contest_facts in result["contest"]["contenders"].items()
    }
    for line in short:
        one = killed[line[0]]
        line.append(_survives(one) if one else "")
    chosen = [
        heads[0],
        heads[1],
        heads[3],
        heads[4],
        heads[5],
        heads[8],
        "after kill -9 in mid-write",
    ]
    block = [
        f"![Throughput by size against memcpy]({where}/throughput.svg)\n",
        markdown(chosen, short),
        f"![One-way latency]({where}/latency.svg)\n",
        f"![How costs grow]({where}/scaling.svg)\n" if result["open_groups"] else "",
    ]  # fmt: skip
    return "\n".join(filter(None, block))


#: What a block of each name holds.
BLOCKS: Final[dict[str, Callable[[dict[str, Any], str], str]]] = {
    "short": _short_block,
    "rows": _rows_block,
    "contest": _contest_block,
}
