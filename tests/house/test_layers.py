"""Allowed imports of modules: no circle; a floor imports only itself and lower floors."""

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from test_style import ROOT, SHMBUS_ALL, relative, report

PACKAGES = ("shmbus", "shmbus_ext", "trainer_adapter")

# From the ground up. A room is a module or a folder; the longest name fitting a module is its room.
# A room may import its own floor, in no circle, and the floors below.
FLOORS: dict[str, tuple[str, ...]] = {
    "core": ("shmbus_ext",),
    "words, numbers and waits": ("shmbus._version", "shmbus.base", "shmbus.errors"),
    "bytes of a sample": ("shmbus.data", "shmbus.http"),
    "files in shared memory": ("shmbus.channel", "shmbus.pool", "shmbus.segment"),
    "a bus from outside": ("shmbus.control", "shmbus.inspect"),
    "handles": ("shmbus.batch", "shmbus.client", "shmbus.handles", "shmbus.stash"),
    "a whole bus": ("shmbus", "shmbus.daemon", "shmbus.store"),
    "tensors and weights": (
        "shmbus.tensors",
        "shmbus.weights",
    ),
    "engines": ("shmbus.engines",),
    "commands": ("shmbus.__main__", "shmbus.cli"),
    "bridges to other stacks, nodes and browsers": (
        "shmbus.gateway",
        "shmbus.peers",
        "shmbus.recorder",
        "shmbus.relay",
        "shmbus.web",
    ),
    "parts of a trainer": (
        "trainer_adapter._arguments",
        "trainer_adapter._masked",
        "trainer_adapter.advantages",
        "trainer_adapter.attention",
        "trainer_adapter.balance",
        "trainer_adapter.batches",
        "trainer_adapter.compat",
        "trainer_adapter.corrections",
        "trainer_adapter.gpu",
        "trainer_adapter.logprobs",
        "trainer_adapter.losses",
        "trainer_adapter.microbatch",
        "trainer_adapter.scored_group",
    ),
    "trainers": (
        "trainer_adapter",
        "trainer_adapter.adapters",
        "trainer_adapter.demo",
        "trainer_adapter.handler",
    ),
}
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS.values()) for room in rooms}

# A trainer's part of shmbus: public names, these rooms, names of files, starts of programs, and
# words of messages.
OPEN_TO_TRAINERS = (
    "shmbus.base.arguments.",
    "shmbus.base.closing.ClosedByWith",
    "shmbus.base.format.several",
    "shmbus.base.format.with_notes",
    "shmbus.base.ledger.REASONS",
    "shmbus.base.near_names.",
    "shmbus.base.programs.",
    "shmbus.batch.",
    "shmbus.channel.",
    "shmbus.cli._options.Commands",
    "shmbus.cli._options.whole",
    "shmbus.data.encoding.decodable",
    "shmbus.data.sample_rows.",
    "shmbus.data.status_types.MismatchStatus",
    "shmbus.engines.",
    "shmbus.handles.open_requests.",
    "shmbus.inspect.stall_report.wait_sentence",
    "shmbus.peers.",
    "shmbus.pool.",
    "shmbus.segment.names.",
    "shmbus.segment.note_file.",
    "shmbus.stash.drops.REMEDIES",
    "shmbus.tensors.",
    "shmbus.weights.",
)
# The gateway and what it shares with trainers: the same, how commands take numbers, how a daemon's
# log is written, how a bus looks from outside, a file with a lock, and its own C.
OPEN_TO_THE_GATEWAY = (
    *OPEN_TO_TRAINERS,
    "shmbus.cli._options.add_numbers",
    "shmbus.cli._options.bus_name",
    "shmbus.cli._options.require_extra",
    "shmbus.daemon.logs",
    "shmbus.gateway.",
    "shmbus.http.",
    "shmbus.segment.locked_file.LockedFile",
    "shmbus_ext._core",
)

# The recorder of agents: public names, what a worker's session is made of, and the weights' rows.
OPEN_TO_THE_RECORDER = (
    "shmbus.base.arguments.fit_text",
    "shmbus.base.format.printable",
    "shmbus.data.encoding.decodable",
    "shmbus.data.prompts.Ticket",
    "shmbus.cli._options.Commands",
    "shmbus.cli._options.add_numbers",
    "shmbus.cli._options.bus_name",
    "shmbus.cli._options.number_of",
    "shmbus.cli._options.require_extra",
    "shmbus.cli._options.whole",
    "shmbus.daemon.logs",
    "shmbus.http.",
    "shmbus.pool.server_rows.",
    "shmbus.recorder.",
    "shmbus.segment.recorder_files.",
    "shmbus.segment.cache_salt.",
    "shmbus.segment.names.",
    "shmbus.handles.session.",
)

# A rollout worker has many siblings: its imports load none of these rooms.
NOT_FOR_A_PRODUCER = (
    "shmbus.client",
    "shmbus.control",
    "shmbus.daemon",
    "shmbus.handles.consumer",
    "shmbus.inspect",
    "shmbus.stash",
    "shmbus.store",
)
MOST_MODULES_OF_A_PRODUCER = 34


def modules() -> dict[str, Path]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
    }


def imported_names(path: Path) -> Iterator[str]:
    """Yield a file's imported names in full: `from a import b` gives a.b."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{relative(path)}: a relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def imports() -> dict[str, set[str]]:
    known = modules()

    def module_of(name: str) -> str:
        while name not in known and "." in name:
            name = name.rpartition(".")[0]
        return name

    return {
        module: ({module_of(name) for name in imported_names(path)} & known.keys()) - {module}
        for module, path in known.items()
    }


def room_of(module: str) -> str:
    room = module
    while room not in FLOOR_OF:
        assert "." in room, f"{module}: a module that no room has; give it a floor"
        room = room.rpartition(".")[0]
    return room


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    found: set[str] = set()
    todo = [start]
    while todo:
        new = graph[todo.pop()] - found
        found |= new
        todo += new
    return found


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = imports()
    beyond = {module: reachable(graph, module) for module in graph}
    circles = {
        frozenset(other for other in beyond[module] if module in beyond[other])
        for module in graph
        if module in beyond[module]
    }
    report([f"a circle of imports: {', '.join(sorted(circle))}" for circle in circles])


def test_imports_point_down_only() -> None:
    report(
        [
            f"{module} imports {imported}: {room_of(imported)} is above {room_of(module)}"
            for module, found in imports().items()
            for imported in sorted(found)
            if FLOOR_OF[room_of(module)] < FLOOR_OF[room_of(imported)]
        ]
    )


def test_every_room_has_a_module() -> None:
    named = {room_of(module) for module in modules()}
    report([f"{room}: a room without a module" for room in sorted(FLOOR_OF.keys() - named)])


def used_of_shmbus(path: Path) -> set[str]:
    return {name for name in imported_names(path) if name.split(".")[0].startswith("shmbus")} | {
        f"shmbus.{node.attr}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "shmbus"
    }


def test_trainers_the_gateway_and_the_recorder_use_only_what_is_open_to_them() -> None:
    public = {f"shmbus.{name}" for name in SHMBUS_ALL} | {"shmbus"}
    offences = []
    for module, path in modules().items():
        if module.startswith("trainer_adapter"):
            is_open = OPEN_TO_TRAINERS
        elif module.startswith(("shmbus.gateway", "shmbus.peers")):
            is_open = OPEN_TO_THE_GATEWAY
        elif module.startswith("shmbus.recorder."):
            is_open = OPEN_TO_THE_RECORDER
        else:
            continue
        offences += [
            f"{module} uses {name}, which is not public"
            for name in sorted(used_of_shmbus(path) - public)
            if not f"{name}.".startswith(tuple(f"{each.rstrip('.')}." for each in is_open))
        ]
    report(offences)


def test_nothing_imports_what_is_beside_the_product_and_the_stash_knows_no_time() -> None:
    clocks = ("asyncio", "socket", "threading", "time")
    report(
        [
            f"{module} imports {name}"
            for module, path in modules().items()
            for name in imported_names(path)
            if name.split(".")[0]
            in ("bench", "examples", "tests", *(clocks if module == "shmbus.stash.stash" else ()))
        ]
    )


def test_nothing_knows_the_gateway_nor_the_recorder() -> None:
    report(
        [
            f"{module} imports {imported}"
            for module, found in imports().items()
            for imported in sorted(found)
            if room_of(imported) in ("shmbus.gateway", "shmbus.recorder")
            and room_of(imported) != room_of(module)
        ]
    )


def test_a_producer_loads_few_modules_and_nothing_of_the_other_side() -> None:
    code = "import json, sys, shmbus.handles.producer; print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    ).stdout
    ours = [name for name in json.loads(printed) if name.split(".")[0] in PACKAGES]
    report(
        [
            f"shmbus.handles.producer loads {name}"
            for name in ours
            for room in NOT_FOR_A_PRODUCER
            if f"{name}.".startswith(f"{room}.")
        ]
    )
    assert len(ours) <= MOST_MODULES_OF_A_PRODUCER, ours
