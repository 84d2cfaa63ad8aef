"""Code of a documentation page, run word for word.

A test names a block by the page and by words that only this block has, and gives the names that
the page leaves to its reader. Of the block itself only the name of the bus is replaced, and what
the test gives as `swap`. `tests/house/test_pages.py` finds blocks that no test runs.
"""

import ast
import asyncio
import inspect
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
#: Prefixes of pages named from the root; `PAGES` holds the pages of adapters.
FROM_THE_ROOT = ("docs/", "bench/", "README.md", "CONTRIBUTING.md")
PAGES = ROOT / "docs" / "adapters"
#: The bus of every page.
BUS = "run1"
_FENCED = re.compile(r"^( *)```(\w+)[^\n]*\n(.*?)^\1```$", re.DOTALL | re.MULTILINE)


def path(page: str) -> Path:
    return (ROOT if page.startswith(FROM_THE_ROOT) else PAGES) / page


def blocks(page: str) -> list[tuple[str, str]]:
    """Language and text of each block of a page."""
    return [(found[2], dedent(found[3])) for found in _FENCED.finditer(path(page).read_text())]


def block(page: str, words: str) -> str:
    [found] = [text for _, text in blocks(page) if words in text]
    return found


def installs(page: str, words: str) -> set[str]:
    """What the pip line of a block installs, beside shmbus."""
    [line] = [
        each for each in block(page, words).splitlines() if each.startswith("pip install shmbus ")
    ]
    return set(shlex.split(line, comments=True)[3:])


def halves(page: str, words: str) -> tuple[str, str]:
    """Return the code of two processes in a block: before and after a comment with these words."""
    first, comment, second = block(page, words).partition(words)
    return first, comment + second


def execute(code: str, bus: str, *, swap: Mapping[str, str] | None = None, **names: Any) -> Any:
    import shmbus

    code = re.sub(rf'"{BUS}\b', f'"{bus}', code)
    for old, new in (swap or {}).items():
        assert old in code, old
        code = code.replace(old, new)
    space: dict[str, Any] = {"shmbus": shmbus, "__name__": "page", **names}
    compiled = compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    if compiled.co_flags & inspect.CO_COROUTINE:
        asyncio.run(eval(compiled, space))
    else:
        exec(compiled, space)
    return space


def run(page: str, words: str, bus: str, **names: Any) -> dict[str, Any]:
    space: dict[str, Any] = execute(block(page, words), bus, **names)
    return space
