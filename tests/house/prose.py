"""Plain English, measured: the share of stand-in words in docstrings, comments and pages.

Usage: ``prose.py [--sentences N] [PATH ...]``; without a path, each room and exit status 1.
"""

import argparse
import ast
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Highest share of stand-ins, in percent, by folder. Well-read libraries have 6 to 9.
LIMITS = {"shmbus": 10.0, "trainer_adapter": 10.0, "shmbus_ext": 10.0, "docs": 10.0}
#: Most sentences of all folders of which stand-ins are `DENSE_SHARE` or more.
DENSE_LIMIT = 60
DENSE_SHARE = 0.4
#: Shorter sentences have too few words for a share.
DENSE_WORDS = 6
STAND_INS = frozenset(
    re.findall(
        r"\w+",
        """
        it its that this these those there then than such so
        who whom whose what which where whether whoever whatever
        one ones other others another some something somebody any each all both
        none nobody nothing
        be been being is are was were has have had do does did
        """,
    )
)
WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
CODE = re.compile(r"`[^`]*`")
SENTENCE_END = re.compile(r"(?<=[.;:?!])\s+")
C_COMMENT = re.compile(r"/\*(.*?)\*/", re.DOTALL)
PAGE_CODE = re.compile(r"```.*?```|<!--.*?-->|^ {4}.*?$|\]\([^)]*\)", re.DOTALL | re.MULTILINE)
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def python_texts(path: Path) -> Iterator[str]:
    """Yield docstrings, and comments joined over adjacent lines."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            yield text
    lines: dict[int, str] = {}
    with path.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.COMMENT:
                lines[token.start[0]] = token.string.lstrip("#: ")
    block: list[str] = []
    for number, line in lines.items():
        if block and number - 1 not in lines:
            yield " ".join(block)
            block = []
        block.append(line)
    yield " ".join(block)


def texts(path: Path) -> Iterator[str]:
    if path.suffix in (".py", ".pyi"):
        yield from python_texts(path)
    elif path.suffix in (".c", ".h"):
        for comment in C_COMMENT.findall(path.read_text()):
            yield re.sub(r"\n\s*\*?", " ", comment)
    else:
        yield from re.split(r"\n\s*\n|\||\n[-*#] ", PAGE_CODE.sub(" ", path.read_text()))


def count(sentence: str) -> tuple[int, int]:
    """Return the number of words outside backticks, and of stand-ins among these words."""
    found = [word.lower() for word in WORD.findall(CODE.sub(" ", sentence))]
    return len(found), sum(word in STAND_INS for word in found)


def files(folder: Path) -> list[Path]:
    """Return the files of a folder whose prose is measured."""
    suffixes = (".py", ".pyi", ".c", ".h", ".md")
    return sorted(path for path in folder.rglob("*") if path.suffix in suffixes)


def room_of(path: Path) -> str:
    """Return the folder below a top-level folder, or the top-level folder for its own files."""
    return "/".join(path.relative_to(ROOT).parts[:-1][:2])


def main() -> int:
    """Print the shares; 1 if a limit is exceeded."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("paths", nargs="*", type=Path, help="files or folders; default: all rooms")
    options.add_argument("--sentences", type=int, default=0, help="densest sentences to print")
    given = options.parse_args()
    tops = [top.resolve() for top in given.paths] or [ROOT / name for name in LIMITS]
    rooms: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    dense: list[tuple[float, str, str]] = []
    for path in (path for top in tops for path in (files(top) if top.is_dir() else [top])):
        for text in texts(path):
            for sentence in SENTENCE_END.split(" ".join(text.split())):
                words, hits = count(sentence)
                for name in {room_of(path), room_of(path).partition("/")[0]}:
                    rooms[name][0] += words
                    rooms[name][1] += hits
                if words >= DENSE_WORDS and hits >= DENSE_SHARE * words:
                    dense.append((hits / words, str(path.relative_to(ROOT)), sentence[:150]))
    for name, (words, hits) in sorted(rooms.items()):
        print(f"{name:32} {words:7,} words {100 * hits / max(words, 1):5.1f} % stand-ins")
    for share, name, sentence in sorted(dense, reverse=True)[: given.sentences]:
        print(f"{share:4.0%} {name}: {sentence}")
    print(f"{len(dense):,} sentences of {DENSE_SHARE:.0%} or more")
    if given.paths:
        return 0
    over = [
        f"{name}: {share:.1f} % stand-ins, at most {limit} %"
        for name, limit in LIMITS.items()
        if (share := 100 * rooms[name][1] / rooms[name][0]) > limit
    ]
    if len(dense) > DENSE_LIMIT:
        over.append(f"{len(dense):,} dense sentences, at most {DENSE_LIMIT:,}; see --sentences 20")
    for line in over:
        print(line, file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
