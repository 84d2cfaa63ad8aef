"""No part of the project outgrows its ceiling; a ceiling falls with the code, and never rises."""

import pytest
from test_style import ROOT, tree

CODE = (".py", ".pyi", ".c", ".h")
#: Lines of code by top folder.
CEILINGS = {
    ("shmbus", "shmbus_ext", "trainer_adapter"): 108_000,
    ("tests",): 92_000,
    ("bench",): 9_000,
}
MOST_WORDS_OF_MARKDOWN = 48_000


@pytest.mark.parametrize("folders", CEILINGS, ids=lambda folders: folders[0])
def test_code_stays_below_its_ceiling(folders: tuple[str, ...]) -> None:
    files = [
        path
        for path in tree()
        if path.suffix in CODE and path.relative_to(ROOT).parts[0] in folders
    ]
    assert sum(path.read_text().count("\n") for path in files) <= CEILINGS[folders]


def test_pages_stay_below_their_ceiling() -> None:
    pages = [path for path in tree() if path.suffix == ".md"]
    assert sum(len(path.read_text().split()) for path in pages) <= MOST_WORDS_OF_MARKDOWN
