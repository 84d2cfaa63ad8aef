"""docs/errors.md has an entry for each public error class and drop reason, in the code's words.

Messages, findings of `shmbus status` and lines of `shmbus doctor` lead to headings that exist.
"""

import ast
import importlib
import pickle
import re
import sys
import traceback
from collections.abc import Iterator
from functools import cache

import pytest
from test_docs import anchors
from test_style import ROOT

import shmbus
from shmbus import BusFullError, ShmbusError, errors
from shmbus.base.ledger import REASONS
from shmbus.cli import doctor, main
from shmbus.inspect import verdict
from shmbus.inspect.status import read_status
from shmbus.segment.explain import UnfinishedError
from shmbus.stash import drops
from shmbus.stash.drops import REMEDIES

PAGE = (ROOT / "docs" / "errors.md").read_text()
#: Modules whose `__all__` names error classes, beside `shmbus.errors`.
PUBLIC = ("shmbus", "shmbus.tensors", "shmbus.engines", "shmbus.weights")
#: A shorter piece of a message says nothing about the message.
STABLE = 8


def public_errors() -> set[str]:
    found = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, ShmbusError)
    }
    for module in map(importlib.import_module, PUBLIC):
        found |= {
            name
            for name in module.__all__
            if isinstance(value := getattr(module, name), type) and issubclass(value, Exception)
        }
    return found - {"ShmbusError"}


def entries() -> dict[str, list[str]]:
    parts = re.split(r"^### (\w+Error)\n", PAGE, flags=re.M)
    return {
        name: re.findall(r"^`([^`]+)`(?:<br>)?$", text, re.M)
        for name, text in zip(parts[1::2], parts[2::2], strict=True)
    }


@cache
def literals() -> str:
    """Every string of the code as users see the string, with "..." for each value."""
    found = []
    for package in ("shmbus", "trainer_adapter"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.JoinedStr):
                    texts = [n.value if isinstance(n, ast.Constant) else "..." for n in node.values]
                    found.append("".join(map(str, texts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    for path in (ROOT / "shmbus_ext").rglob("*.c"):
        for run in re.findall(r'(?:"(?:[^"\\\n]|\\.)*"\s*)+', path.read_text()):
            text = "".join(re.findall(r'"((?:[^"\\\n]|\\.)*)"', run))
            found.append(re.sub(r"%[.\d]*(?:ll|z)?[a-zA-Z]", "...", text))
    return "\n".join(found).replace("`", "'")


def test_each_public_error_class_has_one_entry_that_quotes_its_message() -> None:
    assert entries().keys() == public_errors()
    assert [name for name, quotes in entries().items() if not quotes] == []


def test_each_quoted_message_stands_in_the_code() -> None:
    assert [
        f"docs/errors.md, {name}: {piece!r} is in no string of the code"
        for name, quotes in entries().items()
        for quote in quotes
        for piece in map(str.strip, quote.split("..."))
        if len(piece) >= STABLE and piece not in literals()
    ] == []


def test_each_drop_reason_has_a_row_with_the_words_of_its_log_line() -> None:
    table = PAGE.partition("## Dropped samples")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M))
    assert rows.keys() == set(REASONS) - {"acknowledged"}
    assert [reason for reason, words in rows.items() if words not in REMEDIES[reason]] == []


def strings(node: ast.AST) -> set[str]:
    return {
        each.value
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def calls_of_finding(module: str) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse((ROOT / module).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "Finding":
            yield node


def subclasses(of: type[ShmbusError]) -> Iterator[type[ShmbusError]]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


def test_each_kind_of_finding_has_a_page() -> None:
    kinds: set[str] = set()
    for call in calls_of_finding("shmbus/inspect/verdict.py"):
        (kind,) = (each.value for each in call.keywords if each.arg == "kind")
        # A condition chooses by values of the status, without strings of its own.
        kinds |= strings(kind)
    assert verdict.PAGES.keys() == kinds > set(verdict._FIRST)


def test_each_check_of_the_doctor_has_a_page() -> None:
    found = {each.check for each in doctor.diagnose(torch=False)}
    for call in calls_of_finding("shmbus/cli/doctor.py"):
        found |= strings(call.args[0])
    found |= {each.__name__.removeprefix("_check_") for each in doctor._CHECKS}
    assert doctor.PAGES.keys() == found


def test_each_page_of_a_message_has_its_heading() -> None:
    for path in (ROOT / "shmbus").rglob("*.py"):
        if re.search(r"^class \w+Error\(", path.read_text(), re.M):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    classes = {each for each in subclasses(ShmbusError) if each.__module__.startswith("shmbus.")}
    pages = {each.page for each in classes} | {drops.PAGE}
    assert {f"docs/errors.md#{name.lower()}" for name in public_errors()} <= pages
    for page in pages | {*verdict.PAGES.values(), *doctor.PAGES.values()}:
        path, _, anchor = page.partition("#")
        assert not anchor or anchor in anchors(ROOT / path), page


def test_a_message_stays_as_raised_and_its_page_stands_beside(
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = "docs/errors.md#busfullerror"
    for error in (BusFullError("full"), pickle.loads(pickle.dumps(BusFullError("full")))):
        assert (str(error), error.page, error.__notes__) == ("full", page, [f"see {page}"])
    assert UnfinishedError.page == errors.LayoutMismatchError.page
    if sys.version_info >= (3, 11):
        error = BusFullError("full")
        error.add_note("later")
        shown = "".join(traceback.format_exception(error)).splitlines()
        assert shown[-2:] == [f"see {page}", "later"]
    assert main(["status", "no-such-bus"]) == 1
    said = capsys.readouterr().err
    assert said.splitlines()[-1] == "see docs/errors.md#busnotfounderror"
    assert said.count("see docs/") == 1


def test_a_verdict_and_the_doctor_print_the_page_of_a_finding(
    bus_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"):
        found = read_status(bus_name).verdict
        assert found is not None and found.page == verdict.PAGES[found.findings[0].kind]
        assert main(["status", bus_name]) == 0
        assert capsys.readouterr().out.splitlines()[:2] == [found.sentence, f"see {found.page}"]
    doctor._print(doctor.Finding("shm", "warn", "64 MiB", "enlarge the mount"))
    assert capsys.readouterr().out.splitlines()[-1].strip() == f"see {doctor.PAGES['shm']}"
