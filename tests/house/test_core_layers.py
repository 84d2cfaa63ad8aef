"""The C core as a graph of object files' symbols: calls go down only, and exports are declared."""

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
COMPILER = shlex.split(os.environ.get("CC", "cc"))

pytestmark = [
    pytest.mark.skipif(
        shutil.which(COMPILER[0]) is None or shutil.which("nm") is None,
        reason="compiling the core takes a C compiler and nm",
    ),
    pytest.mark.timeout(300),
]


class Symbols(NamedTuple):
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
        # A name with a dot is the compiler's: a clone for another processor.
        if "." not in name:
            (found.undefined if kind in "Uw" else found.defined).add(name)
    return found


@pytest.fixture(scope="module")
def core(failpoint_build: Path) -> dict[str, Symbols]:
    objects = failpoint_build / "objects" / CORE.name
    return {
        f"{room}/{source.stem}": symbols_of(objects / room / f"{source.stem}.o")
        for room in ROOMS
        for source in sorted((CORE / room).glob("*.c"))
    }


def owners(core: dict[str, Symbols]) -> dict[str, str]:
    return {name: file for file, symbols in core.items() for name in symbols.defined}


def calls(core: dict[str, Symbols]) -> dict[str, set[str]]:
    owner = owners(core)
    return {
        file: {owner[name] for name in symbols.undefined if name in owner}
        for file, symbols in core.items()
    }


def test_no_name_has_two_definitions(core: dict[str, Symbols]) -> None:
    definitions: dict[str, list[str]] = {}
    for file, symbols in core.items():
        for name in symbols.defined:
            definitions.setdefault(name, []).append(file)
    assert {name: files for name, files in definitions.items() if len(files) > 1} == {}


def test_no_files_call_each_other_in_a_circle(core: dict[str, Symbols]) -> None:
    try:
        TopologicalSorter(calls(core)).prepare()
    except CycleError as error:
        pytest.fail(f"a circle of calls: {' -> '.join(reversed(error.args[1]))}")


def test_the_rooms_of_the_core_do_not_call_each_other(core: dict[str, Symbols]) -> None:
    assert [
        f"{file} calls {called}"
        for file, all_called in calls(core).items()
        for called in sorted(all_called)
        if called.split("/")[0] != file.split("/")[0] and called.split("/")[0] != GROUND
    ] == []


def declared(header: Path) -> set[str]:
    """Functions that a header declares and does not define: prototypes begin in column 0."""
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
    prototypes = re.findall(
        r"^(?!static|typedef|_|#)\w[^;{}()]*?\b(\w+)\([^;{}]*\)[^;{}]*;", text, re.M
    )
    return set(prototypes)


def test_the_headers_of_a_room_declare_what_its_files_define(core: dict[str, Symbols]) -> None:
    for room in ROOMS:
        headers = sorted((CORE / room).glob("*.h"))
        defined = {
            name
            for file, symbols in core.items()
            if file.startswith(f"{room}/")
            for name in symbols.defined
        }
        assert set().union(*(declared(header) for header in headers)) == defined, room
