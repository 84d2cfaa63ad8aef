"""Fills the marked blocks of pages from kept results: ``python -m bench.report PAGE...``.

A block begins with ``<!-- bench: NAME ROW... -->`` and ends with ``<!-- bench: end -->``. NAME is a
file of ``bench/results`` without its suffix, ROW a row's name or a pattern of names (without a ROW:
every row). ``picture`` in the place of a row draws the contenders beside memcpy.
"""

import argparse
import fnmatch
import json
import os
import re
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.program import command
from bench.row import HEADS, Row, cells

__all__ = ["BLOCK", "block", "filled", "main"]

RESULTS: Final = Path(__file__).with_name("results")
END: Final = "<!-- bench: end -->"
BLOCK: Final = re.compile(r"<!-- bench: (?!end )([^>]*?) -->\n.*?<!-- bench: end -->", re.DOTALL)
PICTURE: Final = "picture"


def main(argv: Sequence[str] | None = None) -> int:
    """Fill the blocks of the named pages."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.report", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("pages", nargs="+", type=Path, metavar="PAGE")
    for page in parser.parse_args(argv).pages:
        text = page.read_text()
        if not BLOCK.search(text):
            parser.error(f"{page}: expected a block '<!-- bench: NAME -->' to '{END}', found none")
        page.write_text(filled(text, page))
    return 0


def filled(text: str, page: Path, *, draw: bool = True) -> str:
    """Return a page's text with fresh blocks."""

    def made(found: re.Match[str]) -> str:
        name, *chosen = found[1].split()
        return f"<!-- bench: {found[1]} -->\n{block(name, chosen, page, draw=draw)}\n{END}"

    return BLOCK.sub(made, text)


def block(name: str, chosen: Sequence[str], page: Path, *, draw: bool = True) -> str:
    """Make the text of a block."""
    path = RESULTS / f"{name}.json"
    result = json.loads(path.read_text())
    rows = [Row.from_json(each) for each in result["rows"]]
    patterns = [each for each in chosen if each != PICTURE] or ["*"]
    # In the order in which the page names them.
    wanted = dict.fromkeys(
        row.name for pattern in patterns for row in rows if fnmatch.fnmatch(row.name, pattern)
    )
    by_name = {row.name: row for row in rows}
    where = os.path.relpath(RESULTS, page.resolve().parent)
    lines = [
        f"{_of(result)}; [all figures]({where}/{name}.json).\n",
        _markdown(by_name, wanted, last=None if page.parent.name == "bench" else -1),
    ]
    if PICTURE in chosen:
        if draw:
            picture(rows, RESULTS / f"{name}.svg")
        lines.append(f"![Throughput of each way]({where}/{name}.svg)\n")
    return "\n".join(lines)


def _of(result: dict[str, Any]) -> str:
    facts = result["machine"]
    cpu = facts["cpu"].replace("(R)", "")
    on = facts.get("gpu") or f"{facts['cores']} cores of an {cpu}"
    load = "".join(f", load {each:.1f}" for each in facts["load_average"][:1])
    program = result["program"]
    # A kept result outlives the program: a checkout of the commit still contains the program.
    folder = RESULTS.parent
    places = (folder.parent / program, folder / program, folder / f"{program}.py")
    gone = not any(place.exists() for place in places)
    ran = f"`{program}` of commit {facts['commit'][:8]}" if gone else f"`{command(program)}`"
    return f"{ran} on {on}, {facts['date_utc'][:10]}{load}"


def _markdown(
    rows: dict[str, Row], names: Sequence[str] | dict[str, None], *, last: int | None = None
) -> str:
    # The first page shows the figures without the verdicts of the last column.
    lines = [HEADS, ["---"] * len(HEADS), *(cells(rows[name]) for name in names)]
    return "".join(f"|{'|'.join(line[:last])}|\n" for line in lines)


def picture(rows: Sequence[Row], path: Path) -> None:
    """Draw each contender's rate, and memcpy of as many bytes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_name = {row.name: row for row in rows}
    ours = by_name["hop-2048"]
    bars = {"shmbus": statistics.median(ours.values)}
    for row in rows:
        if row.name.startswith("against-") and row.beside_values:
            bars[row.name.removeprefix("against-")] = statistics.median(row.beside_values)
    names = sorted(bars, key=bars.__getitem__)
    # The same results give the same file.
    with pyplot.rc_context({"svg.hashsalt": "shmbus", "font.size": 9}):
        figure, axes = pyplot.subplots(figsize=(8, 0.35 * len(names) + 1))
        colours = ["#d6336c" if name.startswith("shmbus") else "#9aa5b1" for name in names]
        axes.barh(names, [bars[name] for name in names], color=colours, log=True)
        copied = statistics.median(ours.beside_values)
        axes.axvline(copied, color="#1f2933", linestyle="--", label="memcpy of as many bytes")
        axes.set_xlabel("trajectories of 2,048 tokens a second, one producer, one consumer")
        axes.legend(loc="lower right")
        figure.tight_layout()
        figure.savefig(path, metadata={"Date": None})
        pyplot.close(figure)


if __name__ == "__main__":
    sys.exit(main())
