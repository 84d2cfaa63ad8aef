"""docs/errors.md has an entry for each public error class and drop reason, in the code's words."""

import ast
import importlib
import re
from functools import cache

from test_style import ROOT

from shmbus import ShmbusError, errors
from shmbus.base.ledger import REASONS
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
    strange = [
        f"docs/errors.md, {name}: {piece!r} is in no string of the code"
        for name, quotes in entries().items()
        for quote in quotes
        for piece in map(str.strip, quote.split("..."))
        if len(piece) >= STABLE and piece not in literals()
    ]
    assert strange == []


def test_each_drop_reason_has_a_row_with_the_words_of_its_log_line() -> None:
    table = PAGE.partition("## Dropped samples")[2]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", table, re.M))
    assert rows.keys() == set(REASONS) - {"acknowledged"}
    assert [reason for reason, words in rows.items() if words not in REMEDIES[reason]] == []
