"""Threads may meet in a first decode: no table of a message's class is built there.

msgspec reads the annotations of a class to build the tables. The interpreter may switch threads
meanwhile, and the process crashes in the half-built tables of the class.
"""

import ast
import json
from pathlib import Path

from conftest import Spawner

ROOT = Path(__file__).parents[2]
#: Classes of decoders of a union, and of notes whose readers name the class.
FURTHER = [
    ("shmbus.handles.session", "PackedSample"),
    ("shmbus.handles.session", "Opened"),
    ("shmbus.handles.session", "_Answer"),
    ("shmbus.handles.session", "_Told"),
    ("shmbus.segment.recorder_files", "RecorderNote"),
    ("shmbus.data.status_types", "MismatchStatus"),
    ("shmbus.relay.direct", "Endpoint"),
]
FIRST = """
import contextlib, importlib, json, sys
import msgspec, torch

built = []
def look(frame, event, argument):
    if event == "call" and frame.f_code.co_name in ("get_class_annotations", "get_type_hints"):
        built.append(frame.f_code.co_filename)

found = []
for module, name in json.loads(sys.argv[1]):
    kind = getattr(importlib.import_module(module), name)
    sys.setprofile(look)
    with contextlib.suppress(msgspec.ValidationError):
        msgspec.json.decode(b"{}", type=kind)
    sys.setprofile(None)
    if built:
        found.append(f"{module}.{name}")
        built.clear()
print(json.dumps(found))
"""


def decoded(module: Path) -> set[tuple[str, str]]:
    """Return the classes that a module decodes by name."""
    name = ".".join(module.relative_to(ROOT).with_suffix("").parts)
    tree = ast.parse(module.read_text())
    found = set()
    for owner in (tree, *(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))):
        for call in ast.walk(owner):
            if not isinstance(call, ast.Call) or ast.unparse(call.func)[-7:] != ".decode":
                continue
            for given in (each.value for each in call.keywords if each.arg == "type"):
                for node in ast.walk(given):
                    if isinstance(node, ast.Name) and node.id == "cls":
                        if isinstance(owner, ast.ClassDef):
                            found.add((name, owner.name))
                    elif isinstance(node, ast.Name) and node.id.strip("_")[:1].isupper():
                        found.add((name, node.id))
    return {(name, each) for name, each in found if each != "Any"}


def test_no_first_decode_builds_the_tables_of_a_class(spawn: Spawner) -> None:
    modules = [
        path for room in ("shmbus", "trainer_adapter") for path in ROOT.glob(f"{room}/**/*.py")
    ]
    known = sorted(set().union(*map(decoded, modules)))
    assert ("shmbus.segment.fleet_note", "FleetNote") in known
    assert json.loads(spawn.script(FIRST, json.dumps([*known, *FURTHER])).finish()) == []
