"""C core and binding as a graph of functions: calls go down only, and headers declare exports."""

import os
import re
import shlex
import shutil
import subprocess
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import NamedTuple

import pytest

CORE = Path(__file__).resolve().parents[2] / "shmbus_ext"
ROOMS = ("base", "ring", "stash", "batch", "pool", "channel")
GROUND = "base"
BINDING = CORE / "python"
#: Folders of the binding: a family of objects each.
FAMILIES = tuple(f"python/{path.name}" for path in sorted(BINDING.iterdir()) if path.is_dir())
COMPILER = shlex.split(os.environ.get("CC", "cc"))

pytestmark = [
    pytest.mark.skipif(
        shutil.which(COMPILER[0]) is None or shutil.which("nm") is None,
        reason="compiling the core takes a C compiler and nm",
    ),
    pytest.mark.timeout(300),
]


class Symbols(NamedTuple):
    """Functions of an object file; compilers' clones for other processors have a dot."""

    defined: set[str]
    undefined: set[str]


def symbols_of(compiled: Path) -> Symbols:
    listed = subprocess.run(
        ["nm", "--extern-only", "--format=posix", str(compiled)],
        check=True,
        capture_output=True,
        text=True,
    )
    found = Symbols(set(), set())
    for line in listed.stdout.splitlines():
        name, kind = line.split()[:2]
        if "." not in name and kind in "TiUw":
            (found.defined if kind in "Ti" else found.undefined).add(name)
    return found


@pytest.fixture(scope="module")
def files(failpoint_build: Path) -> dict[str, Symbols]:
    objects = failpoint_build / "objects" / CORE.name
    units = [path.relative_to(CORE).with_suffix("") for path in sorted(CORE.rglob("*.c"))]
    return {unit.as_posix(): symbols_of(objects / unit.with_suffix(".o")) for unit in units}


def room_of(file: str) -> str:
    return file.rpartition("/")[0]


def calls(files: dict[str, Symbols]) -> dict[str, set[str]]:
    owner = {name: file for file, symbols in files.items() for name in symbols.defined}
    return {
        file: {owner[name] for name in symbols.undefined if name in owner}
        for file, symbols in files.items()
    }


def require_no_circle(graph: dict[str, set[str]]) -> None:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' -> '.join(reversed(error.args[1]))}")


def test_no_name_has_two_definitions(files: dict[str, Symbols]) -> None:
    definitions: dict[str, list[str]] = {}
    for file, symbols in files.items():
        for name in symbols.defined:
            definitions.setdefault(name, []).append(file)
    assert {name: owners for name, owners in definitions.items() if len(owners) > 1} == {}


def test_no_files_call_each_other_in_a_circle(files: dict[str, Symbols]) -> None:
    graph = calls(files)
    assert "python/read/reader_object" in graph["python/read/take"]
    require_no_circle(graph)


def test_the_rooms_of_the_core_do_not_call_each_other(files: dict[str, Symbols]) -> None:
    assert [
        f"{file} calls {called}"
        for file, all_called in calls(files).items()
        for called in sorted(all_called)
        if room_of(file) in ROOMS and room_of(called) not in (room_of(file), GROUND)
    ] == []


def declared(header: Path) -> set[str]:
    """Functions that a header declares and does not define: prototypes begin in column 0."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
    return set(
        re.findall(r"^(?!static|typedef|_|#)\w[^;{}()]*?\b(\w+)\([^;{}]*\)[^;{}]*;", text, re.M)
    )


@pytest.mark.parametrize("room", [*ROOMS, "python", *FAMILIES])
def test_the_headers_of_a_room_declare_what_its_files_define(
    room: str, files: dict[str, Symbols]
) -> None:
    headers = sorted((CORE / room).glob("*.h"))
    defined = {
        name for file, each in files.items() if room_of(file) == room for name in each.defined
    }
    assert set().union(*(declared(header) for header in headers)) == defined - {"PyInit__core"}


def test_no_two_families_of_objects_include_each_other() -> None:
    include = re.compile(r'^#include "(python/\w+)/', re.M)
    graph = {
        family: {
            known
            for path in (CORE / family).glob("*.[ch]")
            for known in include.findall(path.read_text())
        }
        - {family}
        for family in FAMILIES
    }
    assert graph["python/put"]
    require_no_circle(graph)


def test_names_of_the_binding_begin_with_py_and_never_equal_a_name_of_the_core(
    files: dict[str, Symbols],
) -> None:
    definition = re.compile(r"^(?:static )?(?:inline )?[A-Za-z_][\w \*]*?\b(\w+)\([^;{]*{", re.M)
    core = {name for file, each in files.items() if room_of(file) in ROOMS for name in each.defined}
    binding = {
        name for file, each in files.items() if room_of(file) not in ROOMS for name in each.defined
    }
    headers = {
        name for path in BINDING.rglob("*.h") for name in definition.findall(path.read_text())
    }
    everything = {
        name for path in BINDING.rglob("*.[ch]") for name in definition.findall(path.read_text())
    }
    assert "writer_claim" in core
    assert [name for name in sorted(binding) if not name.startswith(("py_", "PyInit__core"))] == []
    assert [name for name in sorted(headers) if not name.startswith(("py_", "list_"))] == []
    assert core & everything == set()
