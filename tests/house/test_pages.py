"""Every fenced block of the pages is run by a test, word for word, or names its stand-in."""

import contextlib
import io
import re
import shlex
from collections.abc import Iterator

import pytest
from doc_pages import PAGES, ROOT, blocks, path

from shmbus.cli import main

NAMED = re.compile(r"\(\s*\"([\w./-]+\.md)\",\s*(?:\"((?:[^\"\\]|\\.)+)\"|'([^']+)')")
FOUND = sorted(
    [
        *(page.name for page in PAGES.glob("*.md") if page.name != "README.md"),
        *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")),
        *("README.md", "CONTRIBUTING.md", "bench/README.md", "docs/adapters/README.md"),
    ]
)
#: Tests that run every block of a page, in order.
WHOLE = {
    "docs/faq.md": "tests/house/test_faq.py",
    "docs/first-hour.md": "tests/examples/test_first_hour.py",
    "docs/vllm.md": "tests/examples/test_vllm_page.py",
}
#: Words of a block: the test that runs the block, or the stand-in of a block that cannot run here.
ELSEWHERE = {
    "README.md": {
        "import numpy as np": "tests/house/test_readme.py",
        "BusFullError: bus 'run1' is full": "tests/house/test_readme.py",
    },
    "docs/gateway.md": {
        "class MyEnv": "tests/gateway/test_gateway_page.py",
        "AtroposTrainer(": "tests/gateway/test_gateway_page.py",
    },
}
SHELL = ("sh", "bash")
#: Programs of other projects on the pages; a command of shmbus is parsed, and `pip` looked up.
FOREIGN = ("curl", "export", "python", "ray", "ssh", "vllm")


def named() -> list[tuple[str, str]]:
    files = [each for each in (ROOT / "tests").rglob("*.py") if each.name != "test_pages.py"]
    found = [match for file in files for match in NAMED.finditer(file.read_text())]
    pairs = [(m[1], m[2].encode().decode("unicode_escape") if m[2] else m[3]) for m in found]
    return [(page, words) for page, words in pairs if not words.endswith(".md")]


def commands(code: str) -> Iterator[list[str]]:
    """Words of each command of a shell block, whose quotes may span lines."""
    text = ""
    for line in code.replace("\\\n", " ").splitlines():
        text += line + "\n"
        with contextlib.suppress(ValueError):  # an open quote
            words = shlex.split(text, comments=True)
            text = ""
            if words:
                yield words


@pytest.mark.parametrize("page", FOUND)
def test_each_block_of_a_page_is_run(page: str) -> None:
    found, text = blocks(page), path(page).read_text()
    assert text.count("```") == 2 * len(found), "a fence is not closed"
    if page in WHOLE:
        assert path(page).name in (ROOT / WHOLE[page]).read_text()
        return
    words = [each for of, each in named() if of == page]
    for each, file in ELSEWHERE.get(page, {}).items():
        assert (ROOT / file).is_file() and any(each in code for _, code in found), each
        words.append(each)
    for each in words:
        assert any(each in code for _, code in found), f"{page} has no block with {each!r}"
    for language, code in found:
        line = text[: text.find(code.splitlines()[0])].count("\n")
        runs = any(each in code for each in words) or language in SHELL
        assert runs, f"{page}:{line}: no test runs this block:\n{code}"


@pytest.mark.parametrize("page", FOUND)
def test_each_command_of_a_page_is_taken(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in of commands that stay, or need other machines: the parser of the command line."""
    from argparse import ArgumentParser, Namespace

    parse, targets = ArgumentParser.parse_args, (ROOT / "Makefile").read_text()
    extras = (ROOT / "pyproject.toml").read_text()

    def parsed_only(parser: ArgumentParser, *arguments: list[str]) -> Namespace:
        found: Namespace = parse(parser, *arguments)
        found.run = lambda _: 0
        return found

    monkeypatch.setattr(ArgumentParser, "parse_args", parsed_only)
    shells = [code for language, code in blocks(page) if language in SHELL and page not in WHOLE]
    for words in (words for code in shells for words in commands(code)):
        while re.fullmatch(r"[A-Z_]+=.*", words[0]):
            del words[0]
        program, *arguments = words
        if program == "shmbus":
            with contextlib.redirect_stdout(io.StringIO()):
                assert main(arguments) == 0, words
        elif program == "make":
            assert re.search(rf"^{arguments[0]}:", targets, re.M), words
        elif program == "pip":
            for extra in re.findall(r"shmbus\[([\w,]+)\]", " ".join(arguments)):
                assert all(re.search(rf"^{each} = ", extras, re.M) for each in extra.split(","))
        else:
            assert program in FOREIGN, f"{page}: {words}"
