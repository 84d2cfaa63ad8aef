"""Code of a documentation page, run word for word.

A test names a block by the page and by words that only this block has, and gives the names that
the page leaves to its reader. Of the block itself only the name of the bus is replaced.
`tests/house/test_pages.py` finds blocks that no test runs.
"""

import re
import shlex
from pathlib import Path
from typing import Any

PAGES = Path(__file__).resolve().parents[1] / "docs" / "adapters"
#: The bus of every page.
BUS = "run1"
_FENCED = re.compile(r"^( *)```(\w+)\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of a page."""
    return [(found[2], found[3]) for found in _FENCED.finditer((PAGES / page).read_text())]


def block(page: str, words: str) -> str:
    [found] = [text for _, text in blocks(page) if words in text]
    return found


def installs(page: str, words: str) -> set[str]:
    """What the pip line of a block installs, beside shmbus."""
    [line] = [
        each for each in block(page, words).splitlines() if each.startswith("pip install shmbus ")
    ]
    return set(shlex.split(line, comments=True)[3:])


def run(page: str, words: str, bus: str, **names: Any) -> dict[str, Any]:
    import shmbus

    code = block(page, words).replace(f'"{BUS}"', repr(bus))
    space: dict[str, Any] = {"shmbus": shmbus, "__name__": "page", **names}
    exec(compile(code, f"{page}: {words}", "exec"), space)
    return space
