"""The matrix of versions: how its rows are judged, and that docs/compat.md has them."""

from versions import KINDS, ROOT, chosen


def test_the_document_has_the_rows_of_the_matrix() -> None:
    lines = (ROOT / "docs" / "compat.md").read_text().splitlines()
    for package, kind in KINDS.items():
        head = lines.index(f"| {package} | {kind.beside} | tests |")
        table = lines[head + 2 : lines.index("", head)]
        versions = [text.split("|")[1].strip().partition("+")[0] for text in table]
        assert versions == list(kind.versions)


def test_rows_are_chosen_by_package_or_version_and_a_new_version_may_be_asked_for() -> None:
    assert len(chosen([])) == sum(len(kind.versions) for kind in KINDS.values())
    assert chosen(["transformers", "torch==9.9"]) == [
        ("torch", "9.9"),
        *(("transformers", version) for version in KINDS["transformers"].versions),
    ]
