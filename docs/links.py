"""Checks every external link and every arXiv number of the sources.

Run ``python docs/links.py`` by hand; a workflow runs the script each week. Needs a network, unlike
the test of links inside the documentation (tests/house/test_docs.py).

Invariant: only "not found", "gone" or an unknown host counts as a missing page; "forbidden", "too
many requests" and server errors pass.
"""

from __future__ import annotations

import re
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

__all__ = ["links_of", "main"]

ROOT: Final = Path(__file__).resolve().parent.parent
#: Places of cited links; tests contain made-up links.
FOLDERS: Final = ("docs", "bench", "shmbus", "shmbus_ext", "trainer_adapter", "examples")
SUFFIXES: Final = {".md", ".py", ".pyi", ".c", ".h", ".toml"}
#: Of an answer, in seconds.
TIMEOUT_S: Final = 20.0
#: Statuses of a missing page.
GONE: Final = {404, 410}

_LINK: Final = re.compile(r"https?://[A-Za-z0-9][A-Za-z0-9.-]*\.[a-z]{2,}[^\s\"'`<>()\\{}|\]]*")
_ARXIV: Final = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


def links_of(text: str) -> Iterator[str]:
    """Yield the links of a text, arXiv numbers as links.

    Parameters
    ----------
    text : str

    Yields
    ------
    str
        Without the full stop or comma of the sentence around it.
    """
    for found in _LINK.findall(text):
        yield found.rstrip(".,;:")
    for number in _ARXIV.findall(text):
        yield "https://arxiv.org" + f"/abs/{number}"


def _cited() -> dict[str, list[str]]:
    """Return each link with the citing files."""
    found: dict[str, list[str]] = {}
    paths: Iterable[Path] = [
        *ROOT.glob("*.md"),
        ROOT / "pyproject.toml",
        *(path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))),
    ]
    for path in paths:
        if path.suffix in SUFFIXES and path.is_file():
            for link in links_of(path.read_text(encoding="utf-8", errors="replace")):
                found.setdefault(link, []).append(str(path.relative_to(ROOT)))
    return found


def _fault(link: str) -> str | None:
    """Return the fault of a missing link, or None."""
    request = urllib.request.Request(link, headers={"User-Agent": "Mozilla/5.0 (link check)"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S):
            return None
    except urllib.error.HTTPError as error:
        return f"{error.code} {error.reason}" if error.code in GONE else None
    except (urllib.error.URLError, OSError) as error:
        return str(error)


def main() -> int:
    """Request every link; exit status 1 for a missing page."""
    cited = _cited()
    gone = {link: fault for link in sorted(cited) if (fault := _fault(link)) is not None}
    for link, fault in gone.items():
        print(f"{', '.join(sorted(set(cited[link])))}: {link}: {fault}", file=sys.stderr)
    print(f"{len(cited)} links, {len(gone)} gone")
    return 1 if gone else 0


if __name__ == "__main__":
    sys.exit(main())
