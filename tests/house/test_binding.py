"""How the binding is laid out: names that say the layer, what a header declares, who knows whom."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "shmbus_ext"
BINDING = CORE / "python"

_DEFINITION = re.compile(r"^(static )?(?:inline )?[A-Za-z_][\w \*]*?\b(\w+)\(", re.M)
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)


def definitions(path: Path) -> Iterator[tuple[str, bool]]:
    """Name of each function that a file defines, and whether no other file sees it."""
    text = path.read_text()
    for match in _DEFINITION.finditer(text):
        # A definition's head ends with a brace, a declaration's with a semicolon.
        end = re.search(r"[;{]", text[match.end() :])
        if end is not None and end[0] == "{":
            yield match[2], match[1] is not None


def declarations(path: Path) -> set[str]:
    """Functions that a header declares and does not define."""
    defined = {name for name, _ in definitions(path)}
    return {match[2] for match in _DEFINITION.finditer(path.read_text())} - defined


def unit(path: Path) -> str:
    """A source file and its header are one."""
    return path.relative_to(CORE).with_suffix("").as_posix()


def units() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(BINDING.rglob("*.[ch]")):
        found.setdefault(unit(path), []).append(path)
    return found


def known_by(paths: list[Path]) -> set[str]:
    """Units of the binding that these files include."""
    return {
        include.removesuffix(".h")
        for path in paths
        for include in _INCLUDE.findall(path.read_text())
        if include.startswith("python/")
    }


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Nodes that can be reached from themselves."""
    reached = {node: set(known) - {node} for node, known in graph.items()}
    for middle in graph:
        for node in graph:
            if middle in reached[node]:
                reached[node] |= reached.get(middle, set())
    return sorted(node for node in graph if node in reached[node])


def report(offences: list[str]) -> None:
    assert not offences, "\n" + "\n".join(offences)


def test_what_other_files_call_begins_with_py() -> None:
    report(
        [
            f"{unit(path)}: {name}"
            for path in sorted(BINDING.rglob("*.c"))
            for name, is_static in definitions(path)
            if not is_static and not name.startswith("py_") and name != "PyInit__core"
        ]
        + [
            f"{unit(path)}: {name}"
            for path in sorted(BINDING.rglob("*.h"))
            for name, _ in definitions(path)
            if not name.startswith(("py_", "list_"))
        ]
    )


def test_no_helper_of_the_binding_has_a_name_of_the_core() -> None:
    core = {
        name
        for folder in ("ring", "stash", "batch", "pool", "channel")
        for path in (CORE / folder).glob("*.[ch]")
        for name, is_static in definitions(path)
        if not is_static
    }
    assert "writer_claim" in core
    report(
        [
            f"{unit(path)}: {name}"
            for path in sorted(BINDING.rglob("*.[ch]"))
            for name, _ in definitions(path)
            if name in core
        ]
    )


def test_a_header_declares_what_its_own_file_defines_and_nothing_else() -> None:
    offences = []
    for name, paths in units().items():
        headers = [path for path in paths if path.suffix == ".h"]
        sources = [path for path in paths if path.suffix == ".c"]
        declared = set().union(*(declarations(path) for path in headers))
        defined = {
            function
            for path in sources
            for function, is_static in definitions(path)
            if not is_static
        }
        offences += [f"{name}.h declares {each}" for each in sorted(declared - defined)]
        if name != "python/module":
            offences += [f"{name}.h lacks {each}" for each in sorted(defined - declared)]
    report(offences)


def test_no_two_files_of_the_binding_need_each_other() -> None:
    graph = {name: known_by(paths) for name, paths in units().items()}
    assert "python/read/reader_object" in graph["python/read/take"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    report(circles(graph))


def test_no_two_families_of_objects_need_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for name, paths in units().items():
        family = name.split("/")[1]
        if family in {path.name for path in BINDING.iterdir() if path.is_dir()}:
            graph.setdefault(family, set()).update(
                known.split("/")[1] for known in known_by(paths) if known.count("/") == 2
            )
    families = {
        "segment",
        "record",
        "put",
        "requests",
        "group",
        "read",
        "batch",
        "pool",
        "channel",
        "gateway",
    }
    assert families == graph.keys()
    report(circles(graph))
