"""The report of a run: Markdown tables and plots, made of ``results.json`` and nothing else.

``python -m bench.report DIR`` makes them again, with ``--readme`` the marked blocks of pages too
(`bench.report.blocks`); ``python -m bench.report fold`` folds several (`bench.report.fold`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from bench import command, machine
from bench.contest.run import SERIES
from bench.report.verdicts import OURS, USUAL, find, percentile

__all__ = [
    "contest_text",
    "judged",
    "markdown",
    "survives",
    "throughput_table",
    "with_spread",
    "write",
]

#: Tokens a second of a claim of the field: over REST, and over shared memory.
CLAIM_REST: Final = 223.0
CLAIM_SHARED: Final = 6_284.0

#: Heads, and lines of cells.
_Table: TypeAlias = tuple[list[str], list[list[str]]]


def write(result: dict[str, Any], directory: Path) -> None:
    """Write ``report.md`` and the plots; where matplotlib is missing, the report says so."""
    try:
        from bench.report import plots
    except ImportError as error:
        pictures: list[tuple[str, str]] = []
        missing = f"\nNo plots: {error}; pip install 'shmbus[bench]'.\n"
    else:
        pictures = plots.write(result, directory)
        missing = ""
    parts = [
        "# One run of the benchmark\n",
        "```text\n" + machine.summary(result["machine"]) + "\n```\n",
    ]
    # Whatever makes figures mean less, or nothing, stands above them.
    parts += [f"{note.strip()}\n" for note in result.get("notes", ())]
    parts += [f"![{caption}]({name})\n\n*{caption}*\n" for name, caption in pictures]
    parts += [missing, _rows(result), _contest(result), _claim(result), _skipped(result)]
    parts += [_favours(result), _took(result)]
    command.write(directory / "report.md", "\n".join(filter(None, parts)))


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
    return "## Targets\n\n" + _shortfalls(result) + judged(result["rows"])


def judged(rows: Sequence[dict[str, Any]]) -> str:
    """Lay out rows with their targets and verdicts."""
    lines = []
    # Kept runs of an older form have no bounds.
    bounded = any(row.get("bound") for row in rows)
    for row in rows:
        value = "" if row["value"] is None else with_spread(row["value"], row["spread"] or ())
        verdict = {None: "", True: "met", False: "**not met**"}[row["met"]]
        if row.get("out_of_reach"):
            verdict += f"; {row['out_of_reach']}"
        if row.get("not_quiet") and row["target"]:
            verdict = f"machine not quiet: {row['not_quiet']}"
        if row["skipped"]:
            verdict = f"skipped: {row['skipped']}"
        near = [_near(row["bound"])] if bounded else []
        lines.append([row["title"], row["measured"], value, *near, row["target"] or "", verdict])
    heads = ["what", "measured", "value (its interval)", "target", "verdict"]
    if bounded:
        heads.insert(3, "its bound, and its share of it")
    return markdown(heads, lines)


def _near(bound: dict[str, Any] | None) -> str:
    """Say a row's bound, and the share of it that the row reached, with its interval."""
    if bound is None:
        return ""
    share = with_spread(bound["share"], bound["share_interval"])
    return f"{bound['name']}, {_short(bound['median'])} {bound['unit']}: {share}"


def _shortfalls(result: dict[str, Any]) -> str:
    """List the missed targets in words, above the table."""
    known = [row for row in result["rows"] if row["met"] is not None]
    short = [row for row in known if not row["met"]]
    if not short:
        return f"All {len(known)} targets that could be measured are met.\n\n" if known else ""
    lines = [
        f"- {row['title']}: {_short(row['value'])}, where the target is {row['target']} "
        f"({row['measured']})" + (f"; {row['out_of_reach']}" if row.get("out_of_reach") else "")
        for row in short
    ]
    count = f"{len(known) - len(short)} of {len(known)} targets are met. These are not:"
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


def with_spread(value: float, values: Sequence[float]) -> str:
    """Write a number, and the lowest and the highest of others where they differ."""
    text = _short(value)
    if values and min(values) < max(values):
        text += f" ({_short(min(values))} to {_short(max(values))})"
    return text


def _us(value: float) -> str:
    return f"{value:,.1f}" if value < 1000 else f"{value:,.0f}"


def _percentiles(one: dict[str, Any]) -> str:
    return " / ".join(_us(percentile(one, percent)) for percent in (50, 99, 99.9))


def survives(one: dict[str, Any]) -> str:
    """Say what became of a run whose writers were killed."""
    if not one["goes_on"]:
        word = f"**no**: stopped after kill {one['stopped_after']}"
    else:
        word = f"yes, {one['kills']} of {one['kills']} ({one['in_send']} within a send)"
    harm = [f"{one[what]} {what}" for what in ("lost", "torn", "doubled") if one[what]]
    return f"{word}{', ' if harm else ''}{', '.join(harm)}"


def throughput_table(result: dict[str, Any]) -> _Table:
    """Set the contenders beside each other, at the usual size."""
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
                facts["title"], _rate(one), _short(one["rate"] * USUAL / 1e6),
                f"{of_memcpy:.2g}", times, _rate(read) if read else "",
                _rate(packed) if packed else "", _cpu(one), facts["groups"] or "no",
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
        after_kill = survives(killed) if killed else ""
        copies = str(facts["copies"])
        lines.append([facts["title"], copies, _memcpys(result, name), faults, memory, after_kill])
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
        throughput_table,
    ),
    ("One way, p50 / p99 / p99.9, microseconds", "latency", _latency_table),
    ("What it costs, and what a death does", "survival", _cost_table),
)
#: Series of rates, and what the table of each says.
_RATES: Final = {
    "size": "tokens",
    "kind": "workload; none where it is no other one for a contender",
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


def _took(result: dict[str, Any]) -> str:
    """Say what took how long, the longest first."""
    spent = [
        (row["title"], row["took_s"]) for row in result["rows"] if row.get("took_s", 0.0) >= 1.0
    ]
    contest = result["contest"]
    spent += [
        (f"{contest['contenders'][name]['title']}, in the contest", seconds)
        for name, seconds in contest.get("took_s", {}).items()
        if seconds
    ]
    if not spent or "took_s" not in result:
        return ""
    lines = [[what, f"{s:.0f}"] for what, s in sorted(spent, key=lambda one: -one[1])]
    return (
        f"## Where the time went: {result['took_s']:.0f} seconds\n\n"
        "Of rows that were measured together, the first one's name.\n\n"
        + markdown(["what", "seconds"], lines)
    )


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
