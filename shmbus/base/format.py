"""Figures, tables and foreign texts for people: output of commands, reports of a stall, errors."""

from __future__ import annotations

import re
from collections.abc import Sequence

#: Escapes written by `printable`.
_ESCAPE = re.compile(r"\\(?:[trn]|x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8})")


def with_notes(error: BaseException) -> str:
    """Return the message and the notes of an error, each on a line."""
    return "\n".join([str(error), *getattr(error, "__notes__", ())])


def show_size(size: float) -> str:
    """Bytes for people: 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def show_wait(seconds: float) -> str:
    """Format a waiting time for people: 5 s, and 0 s instead of powers of ten."""
    return f"{seconds:.3g} s" if seconds >= 0.001 else "0 s"


def show_count(number: float) -> str:
    """Group digits: 12,345."""
    return f"{number:,.0f}"


def several(number: int, what: str, verb: str = "") -> str:
    """Format a count with its noun and verb: 1 group, 1 group waits, 12,345 trajectories are."""
    if number == 1:
        verb = {"": "", "are": "is", "were": "was", "have": "has"}.get(verb, f"{verb}s")
    else:
        what = what[:-1] + "ies" if what.endswith("y") else what + "s"
    return f"{show_count(number)} {what} {verb}".rstrip()


def show_duration(seconds: float) -> str:
    """Seconds for people: 0.2 s, 3 min 20 s, 2 h 5 min, 4 d 3 h."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    if seconds < 60:
        return f"{seconds:.0f} s"
    for large, small, name, part in (
        (60, 1, "min", "s"),
        (3600, 60, "h", "min"),
        (86400, 3600, "d", "h"),
    ):
        if seconds < large * 60 or name == "d" or (name == "h" and seconds < 86400):
            whole = int(seconds // large)
            rest = int(seconds % large // small)
            return f"{whole} {name} {rest} {part}" if rest else f"{whole} {name}"
    raise AssertionError("the last row of the table takes everything")


def bar(fraction: float, width: int) -> str:
    """Draw a fraction as a bar of eighths."""
    eighths = round(min(1.0, max(0.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    drawn = "█" * full + (" ▏▎▍▌▋▊▉"[rest] if rest else "")
    return drawn.ljust(width, "░")


def table(head: Sequence[str], rows: Sequence[Sequence[str]], indent: str = "  ") -> str:
    """Lay out rows in columns; a heading with a final ">" aligns its column to the right."""
    names = [name.rstrip(">") for name in head]
    widths = [max(len(line[i]) for line in [names, *rows]) for i in range(len(head))]
    lines = []
    for line in [names, *rows]:
        cells = [
            cell.rjust(width) if name.endswith(">") else cell.ljust(width)
            for name, cell, width in zip(head, line, widths, strict=True)
        ]
        lines.append((indent + "  ".join(cells)).rstrip())
    return "\n".join(lines)


def printable(value: str) -> str:
    r"""Escape a text's unprintable characters for a terminal, as in ``\x1b``."""
    if value.isprintable():
        return value
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in value)


def unprinted(text: str) -> str:
    """Undo `printable`: turn every escape back into its character."""
    found = _ESCAPE.sub(lambda escape: escape[0].encode().decode("unicode_escape"), text)
    return found if printable(found) == text else text


def label_text(label: bytes) -> str:
    """Decode a label of a segment up to its first NUL, with terminal control characters escaped."""
    return printable(label.split(b"\0", 1)[0].decode("utf-8", "backslashreplace"))


def fold(names: Sequence[str], most: int = 3) -> str:
    """Name the first few of many like items, and count the rest."""
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {show_count(more)} more" if more > 0 else "")
