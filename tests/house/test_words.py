"""One word a concept: old names for the concepts of docs/glossary.md do not come back in code.

Identifiers of Python and C are looked at, and the names of files; texts and comments are not. A
word of plain English may be an identifier where it means something else: its file is allowed then.
"""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from test_style import ROOT, files, relative, report


class OldWord(NamedTuple):
    """A name that is gone: a regex for whole identifiers, the word now, files that may have it."""

    pattern: str
    now: str
    allowed: tuple[str, ...] = ()


# A part of an identifier is what stands between underscores.
OLD_WORDS = (
    OldWord(r"(?i)(.*_)?(loan|loans|loaned)(_.*)?", "lease", ("bench/contenders/iceoryx2.py",)),
    OldWord(r"Loan\w*", "ClientLease"),
    OldWord(r"Rows(Object|Type)?|rows_(put|take|lease)\w*", "GroupTable, GroupEntry"),
    OldWord(r"(?i)(.*_)?(unwant|asking)(_.*)?", "retry request"),
    OldWord(r"wanted_(claim|publish|read|row|unclaim|withdraw)\w*", "retry_*"),
    OldWord(
        r"(.*_)?apart(_.*)?",
        "failing",
        ("bench/contest/run.py", "tests/attention/"),
    ),
    OldWord(r"(?i)miss|misses", "FailedIndex"),
    OldWord(r"(?i)(.*_)?(bury|buried|burials?|heirs?|widows?)(_.*)?", "reap, successor"),
    OldWord(r"(?i)(.*_)?past_caches?(_.*)?", "non_temporal"),
    OldWord(r"(?i)(.*_)?(gathered|gathering)(_.*)?", "consumer_packs"),
    OldWord(r"copies_arrive", "copy_fence"),
    OldWord(r"(?i)(.*_)?stirred(_.*)?", "dirty"),
    OldWord(r"OTHERS|Rule|BASELINE_OTHERS", "LEAVE_ONE_OUT, Baseline"),
    OldWord(r"Away", "DaemonUnreachable"),
    OldWord(r"Guard|guard_\w+", "RecursiveLock"),
    OldWord(r"(?i)keep_?house|house_?keeping", "run_maintenance"),
    OldWord(
        r"(?i)(.*_)?(brisk|lingers|thorough)(_.*)?", "wakes_often, waits_for_rest, delegate_all"
    ),
    OldWord(r"check_asked|MAX_ASKED", "clamp_request, MAX_REQUESTED"),
    OldWord(r"HandlerMaker|Backlog|DaemonWorld|World", "the planner, StepPlanner"),
)


def identifiers(path: Path) -> Iterator[tuple[int, str]]:
    """Each identifier of a file with its line."""
    text = path.read_text()
    if path.suffix in (".py", ".pyi"):
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type == tokenize.NAME:
                yield token.start[0], token.string
        return
    # Comments and strings become as many empty lines.
    code = re.sub(
        r'/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"',
        lambda m: "\n" * m[0].count("\n"),
        text,
        flags=re.S,
    )
    for number, line in enumerate(code.splitlines(), start=1):
        for name in re.findall(r"[A-Za-z_]\w*", line):
            yield number, name


@pytest.fixture(scope="module")
def found() -> list[tuple[str, int, str]]:
    """(file, line, name) of each identifier; line 0 for the name of a file."""
    names = []
    for path in files(".py", ".pyi", ".c", ".h"):
        file = relative(path)
        names.append((file, 0, path.stem))
        # A test's name is a sentence.
        names += [(file, n, name) for n, name in identifiers(path) if not name.startswith("test_")]
    return names


@pytest.mark.parametrize("old", OLD_WORDS, ids=lambda old: old.now)
def test_an_old_word_does_not_come_back(old: OldWord, found: list[tuple[str, int, str]]) -> None:
    pattern = re.compile(old.pattern)
    report(
        [
            f"{file}:{line}: {name}: the word is {old.now}"
            for file, line, name in found
            if pattern.fullmatch(name) and not file.startswith(old.allowed)
        ]
    )


def test_the_glossary_has_each_word_once_in_order() -> None:
    sections = (ROOT / "docs" / "glossary.md").read_text().split("\n## ")[1:]
    terms = [re.findall(r"^\*\*(.+?)\*\*: ", section, re.M) for section in sections]
    for words in terms:
        assert words == sorted(words, key=str.lower)
    every = [word for words in terms for word in words]
    assert len(every) == len(set(every)) > 40


def test_an_old_word_is_found() -> None:
    old = OLD_WORDS[0]
    for name in ("loan", "read_loans", "LOAN_HELD", "loan_new"):
        assert re.fullmatch(old.pattern, name)
    for name in ("loaner", "download"):
        assert not re.fullmatch(old.pattern, name)
