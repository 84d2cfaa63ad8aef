"""Every public module has its names in the API reference of the site, each on one page."""

import ast
import importlib.util
import json
import re
from collections import Counter
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

ROOT = Path(__file__).resolve().parents[2]

ROOMS = ("shmbus/peers", "trainer_adapter", "trainer_adapter/adapters")
PACKAGES = {
    "shmbus",
    "shmbus.batch.gather",
    "shmbus.relay",
    "trainer_adapter",
    "trainer_adapter.adapters.trl",
    "trainer_adapter.attention",
    "shmbus.tensors",
    "shmbus.engines",
    "shmbus.weights",
}


def exported(path: Path) -> bool:
    return any(
        isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
        for node in ast.parse(path.read_text()).body
    )


def public_modules() -> set[str]:
    found = set(PACKAGES)
    for room in ROOMS:
        for path in (ROOT / room).glob("*.py"):
            if not path.name.startswith("_") and exported(path):
                found.add(".".join([*room.split("/"), path.stem]))
    return found


def modules_of_the_reference() -> set[str]:
    for node in ast.parse((ROOT / "docs" / "site.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "REFERENCE":
            pages = ast.literal_eval(node.value)
            return {module for _, _, modules in pages.values() for module in modules}
    raise LookupError("docs/site.py has no REFERENCE")


def test_every_public_module_is_in_the_reference() -> None:
    assert public_modules() <= modules_of_the_reference()


def test_the_reference_has_public_modules_only() -> None:
    assert modules_of_the_reference() <= public_modules()


def site() -> ModuleType:
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("site_of_the_docs", ROOT / "docs" / "site.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_each_public_name_is_described_on_one_page_and_named_on_the_others() -> None:
    made = site()
    described: Counter[str] = Counter()
    named: set[str] = set()
    for page in made.REFERENCE:
        text = made._reference_page(page)
        described.update(re.findall(r"^::: (\S+)$", text, re.M))
        named.update(re.findall(r"\]\[([\w.]+)\]", text))
    assert {entry for entry, count in described.items() if count > 1} == set()
    assert named - described.keys() == set()
    assert described["shmbus.errors.ChannelError"] == 1
    assert "trainer_adapter.advantages.group_advantages" in named


def test_a_picture_that_is_a_link_leads_to_both_of_its_pages() -> None:
    made = site()

    class Files:
        def get_file_from_path(self, path: str) -> SimpleNamespace | None:
            if path not in ("page.md", "page-readme.png", "kept-out.md"):
                return None
            included = path != "kept-out.md"
            return SimpleNamespace(inclusion=SimpleNamespace(is_included=lambda: included))

    page = SimpleNamespace(file=SimpleNamespace(src_uri="index.md"), meta={})
    given = "[![A page](docs/page-readme.png)](docs/page.md#top), [code](setup.py)"
    found = made.on_page_markdown(given, page, None, Files())
    assert found == "[![A page](page-readme.png)](page.md#top), code"
    # What the site leaves out is text, too.
    assert made._site_uri("docs/kept-out.md", Files()) is None


BUILT = ROOT / "build" / "site"


@pytest.mark.skipif(not BUILT.is_dir(), reason="`make docs` builds the site and runs this")
def test_commands_and_numbered_steps_stay_blocks_of_their_own() -> None:
    for page in sorted(BUILT.rglob("*.html")):
        text = page.read_text()
        melted = re.findall(r"<p>[^<]*\n\d\. ", text)
        assert not melted, f"{page}: a numbered step inside a paragraph"
        if page.parent.name == "examples" and page.stem != "index":
            code = re.findall(r"<pre>.*?</pre>", text, re.DOTALL)
            assert len(code) >= 2, f"{page}: the commands are no code block"


@pytest.mark.skipif(not BUILT.is_dir(), reason="`make docs` builds the site and runs this")
def test_the_search_index_holds_no_code_of_examples_and_no_version_numbers_as_words() -> None:
    index = json.loads((BUILT / "search" / "search_index.json").read_text())
    separator = re.compile(index["config"]["separator"])
    examples = [doc for doc in index["docs"] if doc["location"].startswith("examples/")]
    assert examples and not any("__future__" in doc["text"] for doc in examples)
    assert all(doc.get("boost") == 0.1 for doc in examples)
    words = {word for doc in index["docs"] for word in separator.split(doc["text"])}
    assert not [word for word in words if "==" in word]


@pytest.mark.skipif(not BUILT.is_dir(), reason="`make docs` builds the site and runs this")
def test_every_page_is_in_a_tab_and_wide_tables_name_their_columns_on_a_phone() -> None:
    first = (BUILT / "index.html").read_text()
    for tab in site().TABS:
        assert re.search(rf'class="md-tabs__link">\s*{tab}\s*<', first), tab
    table = re.findall(r"<table data-wide>.*?</table>", (BUILT / "index.html").read_text(), re.S)
    assert table and '<td data-label="shmbus"' in table[0]


def test_a_page_without_a_tab_is_an_error() -> None:
    with pytest.raises(LookupError):
        site()._place("new-page.md")


def test_error_classes_are_on_a_page_of_their_own() -> None:
    described = re.findall(r"^::: (\S+)$", site()._reference_page("errors"), re.M)
    assert "shmbus.errors.BusFullError" in described
    assert "shmbus.weights.errors.ManifestError" in described
    assert all(entry.endswith("Error") for entry in described)
