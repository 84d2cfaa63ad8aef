"""The marked blocks of pages: their figures are those of the reports that are kept.

Of the folded reports beside a run (``folded.json``; of the run alone where there is none) a few
rows (``short``) and all rows of shmbus itself (``rows``); of the run the contenders beside each
other (``contest``). Large payloads (``large``) are those of `bench.large`, of every machine that
has them beside its reports; weights (``weights``) those of `bench.weights`, of all its runs that
lie beside the machines'.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from bench import command
from bench.report import fold, reading
from bench.report.report import judged, markdown, survives, throughput_table, with_spread
from bench.report.verdicts import find

__all__ = ["BEGIN", "BLOCKS", "END", "FOLDED", "SHORT_ROWS", "block", "replace_blocks"]

#: The line before a block of this name, and the line behind each block.
BEGIN: Final = "<!-- bench {}: made by python -m bench.report; do not edit -->"
END: Final = "<!-- bench: end -->"
#: Beside a run: what it came to together with others.
FOLDED: Final = "folded.json"
#: The block of large payloads, and the file beside a machine's reports that it is made of.
LARGE: Final = "large"
LARGE_FILE: Final = "large.json"
#: The block of weights, and the files that it is made of.
WEIGHTS: Final = "weights"
WEIGHTS_FILES: Final = "weights-*.json"
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


def replace_blocks(result: dict[str, Any], directory: Path, page: Path) -> None:
    """Replace the blocks that a page has marks for."""
    where = os.path.relpath(directory, page.resolve().parent)
    text = page.read_text()
    known = (*BLOCKS, *OF_MACHINES)
    present = [name for name in known if BEGIN.format(name) in text]
    if not present:
        begin = BEGIN.format("NAME")
        raise SystemExit(
            f"{page}: expected the line {begin!r}, NAME one of {', '.join(known)}; found none"
        )
    for name in present:
        before, begin, rest = text.partition(BEGIN.format(name))
        _, end, after = rest.partition(END)
        if not end:
            raise SystemExit(f"{page}: expected the line {END!r} behind {begin!r}, found none")
        text = f"{before}{begin}\n{block(name, result, directory, where)}\n{END}{after}"
    command.write(page, text)


def _folded(directory: Path) -> dict[str, Any] | None:
    path = directory / FOLDED
    return reading.folded(path) if path.exists() else None


def _run_of(result: dict[str, Any], where: str) -> str:
    facts = result["machine"]
    return (
        f"One run of `shmbus bench --{result['level']}` on {fold.cores_of(facts)}, "
        f"load {facts['load_average'][0]:.1f} at its start;\n"
        f"[the whole report]({where}/report.md).\n"
    )


def _folded_table(rows: Sequence[fold.FoldedRow]) -> str:
    """Lay out what reports come to together."""
    lines = []
    bounded = any(row.bound for row in rows)
    for row in rows:
        value = "" if row.median is None else with_spread(row.median, row.values)
        target = str(row.target) if row.target else ""
        bound = [row.bound] if bounded else []
        lines.append([row.title, row.measured, value, row.reports, *bound, target, row.verdict])
    heads = ["what", "in the newest run", "median (lowest to highest)", "of quiet runs", "target",
             "verdict"]  # fmt: skip
    if bounded:
        heads.insert(4, "share of its bound")
    return markdown(heads, lines)


def block(name: str, result: dict[str, Any], directory: Path, where: str) -> str:
    """Make a block: of the folded reports where there are some, else of the run."""
    if name in OF_MACHINES:
        return OF_MACHINES[name](directory, where)
    folded = _folded(directory)
    if folded is None or name not in FOLDED_BLOCKS:
        return BLOCKS[name](result, where)
    return FOLDED_BLOCKS[name](folded, where)


def _said_of(folded: dict[str, Any], where: str) -> str:
    return f"{fold.named(folded)}\n[The newest report]({where}/report.md).\n"


def _short_folded(folded: dict[str, Any], where: str) -> str:
    rows = {row.name: row for row in fold.fold(folded)}
    chosen = [rows[name] for name in SHORT_ROWS if name in rows]
    plot = f"![Throughput by size against memcpy]({where}/throughput.svg)\n"
    return "\n".join([_said_of(folded, where), _folded_table(chosen), plot])


def _rows_folded(folded: dict[str, Any], where: str) -> str:
    own = [row for row in fold.fold(folded) if not row.name.startswith("against-")]
    return f"{_said_of(folded, where)}\n{_folded_table(own)}"


def _short_block(result: dict[str, Any], where: str) -> str:
    rows = {row["name"]: row for row in result["rows"]}
    chosen = [rows[name] for name in SHORT_ROWS if name in rows]
    plot = f"![Throughput by size against memcpy]({where}/throughput.svg)\n"
    return "\n".join([_run_of(result, where), judged(chosen), plot])


def _rows_block(result: dict[str, Any], where: str) -> str:
    own = [row for row in result["rows"] if not row["name"].startswith("against-")]
    return f"{_run_of(result, where)}\n{judged(own)}"


def _contest_block(result: dict[str, Any], where: str) -> str:
    if not result["contest"]:
        return "Nothing was set beside other ways in this run.\n"
    heads, lines = throughput_table(result)
    few = [[line[0], line[1], line[3], line[4], line[5], line[8]] for line in lines]
    killed = {
        contest_facts["title"]: find(result["contest"], "survival", name)
        for name, contest_facts in result["contest"]["contenders"].items()
    }
    for line in few:
        one = killed[line[0]]
        line.append(survives(one) if one else "")
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
        markdown(chosen, few),
        f"![One-way latency]({where}/latency.svg)\n",
        f"![How costs grow]({where}/scaling.svg)\n" if result["open_groups"] else "",
    ]  # fmt: skip
    return "\n".join(filter(None, block))


def _large_block(directory: Path, where: str) -> str:
    """Lay out large payloads, machine by machine."""
    beside = os.path.dirname(where)
    parts = []
    for path in sorted(directory.resolve().parent.glob(f"*/{LARGE_FILE}")):
        found = json.loads(path.read_text())
        facts, rows = found["machine"], found["rows"]
        days = sorted({row["date_utc"][:10] for row in rows})
        parts += [
            f"{len(rows)} points of `python -m bench.large` on {fold.cores_of(facts)},\n"
            f"last-level cache {found['cache_bytes'] >> 20} MiB, of "
            f"{' and '.join(days)}; [all figures]({beside}/{path.parent.name}/{LARGE_FILE}).\n",
            judged(rows),
        ]
    return "\n".join(parts) or "Not measured yet.\n"


def _weights_block(directory: Path, where: str) -> str:
    """Lay out what weights cost, run by run."""
    beside = os.path.dirname(where)
    parts = []
    for path in sorted(directory.resolve().parent.glob(WEIGHTS_FILES)):
        found = json.loads(path.read_text())
        facts = found["machine"]
        on, by = fold.cores_of(facts), ""
        if "gpu" in facts:
            on = facts["gpu"] + (" under MPS" if facts["mps"] else "")
            by = f"`--device {found['rows']['device']}`, "
        lines = [
            [what, value, target, "met" if met else "**not met**"]
            for what, value, target, met in found["verdicts"]
        ]
        parts += [
            f"A run of `python -m bench.weights`, {by}{found['rows']['bytes'] / 1e9:.1f} GB, "
            f"{on}, {facts['date_utc'][:10]};\n[all figures]({beside}/{path.name}).\n",
            markdown(["what", "measured", "target", "verdict"], lines),
        ]
    return "\n".join(parts) or "Not measured yet.\n"


#: What a block of each name holds.
BLOCKS: Final[dict[str, Callable[[dict[str, Any], str], str]]] = {
    "short": _short_block,
    "rows": _rows_block,
    "contest": _contest_block,
}
#: And of folded reports.
FOLDED_BLOCKS: Final[dict[str, Callable[[dict[str, Any], str], str]]] = {
    "short": _short_folded,
    "rows": _rows_folded,
}
#: And of what lies beside reports, of all machines.
OF_MACHINES: Final[dict[str, Callable[[Path, str], str]]] = {
    LARGE: _large_block,
    WEIGHTS: _weights_block,
}
