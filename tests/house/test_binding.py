"""Layout of the binding: names with their layer, declarations of headers, and allowed includes."""

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CORE = ROOT / "shmbus_ext"
BINDING = CORE / "python"

_DEFINITION = re.compile(r"^(static )?(?:inline )?[A-Za-z_][\w \*]*?\b(\w+)\(", re.M)
_INCLUDE = re.compile(r'^#include "([^"]+)"', re.M)


def definitions(path: Path) -> Iterator[tuple[str, bool]]:
    """Return each function defined by a file, and whether it is static."""
    text = path.read_text()
    for match in _DEFINITION.finditer(text):
        end = re.search(r"[;{]", text[match.end() :])
        if end is not None and end[0] == "{":
            yield match[2], match[1] is not None


def declarations(path: Path) -> set[str]:
    defined = {name for name, _ in definitions(path)}
    return {match[2] for match in _DEFINITION.finditer(path.read_text())} - defined


def unit(path: Path) -> str:
    return path.relative_to(CORE).with_suffix("").as_posix()


def families() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(BINDING.rglob("*.[ch]")):
        found.setdefault(path.parent.name, []).append(path)
    return found


def known_by(paths: list[Path]) -> set[str]:
    includes = {include for path in paths for include in _INCLUDE.findall(path.read_text())}
    return {name.split("/")[1] for name in includes if re.fullmatch(r"python/\w+/.*", name)}


def calls() -> dict[str, set[str]]:
    texts = {unit(path): path.read_text() for path in sorted(BINDING.rglob("*.c"))}
    owner = {
        name: unit(path)
        for path in sorted(BINDING.rglob("*.c"))
        for name, is_static in definitions(path)
        if not is_static
    }
    used = {name: set(re.findall(r"\bpy_\w+", text)) for name, text in texts.items()}
    return {name: {owner[call] for call in used[name] if call in owner} for name in texts}


def circles(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes on a circle."""
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
        for folder in ("base", "ring", "stash", "batch", "pool", "channel")
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


def test_the_headers_of_a_family_declare_what_its_files_define() -> None:
    offences = []
    for family, paths in families().items():
        headers = [path for path in paths if path.suffix == ".h"]
        declared = set().union(*(declarations(path) for path in headers))
        defined = {
            function
            for path in paths
            if path.suffix == ".c" and path.stem != "module"
            for function, is_static in definitions(path)
            if not is_static
        }
        offences += [f"{family} does not define {each}" for each in sorted(declared - defined)]
        offences += [f"{family} does not declare {each}" for each in sorted(defined - declared)]
    report(offences)


def test_no_two_files_of_the_binding_call_each_other() -> None:
    graph = calls()
    assert "python/read/reader_object" in graph["python/read/take"]
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c"]
    report(circles(graph))


def test_no_two_families_of_objects_need_each_other() -> None:
    graph = {name: known_by(paths) for name, paths in families().items() if name != "python"}
    assert {"segment", "record", "put", "read"} <= graph.keys()
    report(circles(graph))
