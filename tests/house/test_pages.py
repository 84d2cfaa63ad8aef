"""Every block of code on the pages of other stacks is run by a test, word for word."""

import re

import pytest
from doc_pages import PAGES, blocks
from test_style import ROOT

NAMED = re.compile(r"\(\s*\"([\w.-]+\.md)\",\s*(?:\"([^\"]+)\"|'([^']+)')")


def named() -> list[tuple[str, str]]:
    tests = ROOT / "tests"
    files = [*(tests / "peers").rglob("*.py"), *(tests / "trainer").glob("*.py")]
    files.append(tests / "house" / "test_upstream_pages.py")
    return [(m[1], m[2] or m[3]) for file in files for m in NAMED.finditer(file.read_text())]


@pytest.mark.parametrize("page", sorted(path.name for path in PAGES.glob("*.md")))
def test_each_block_of_a_page_is_run(page: str) -> None:
    words = [each for of, each in named() if of == page]
    texts = [text for _, text in blocks(page)]
    assert (PAGES / page).read_text().count("```") == 2 * len(texts), "a fence is not closed"
    for text in texts:
        assert any(each in text for each in words), f"no test runs this block of {page}:\n{text}"
    for each in words:
        assert any(each in text for text in texts), f"{page} has no block with {each!r}"
