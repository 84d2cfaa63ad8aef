"""Flame graphs of put, take, pack and lease: where a process of a running bus spends its time.

``python -m bench.flame`` runs a producer and a consumer as `bench.rows.hop` does, samples one of
the processes by ``perf record``, and draws what it was in as an SVG without a script:

- put: the producer, to a consumer that views everything;
- take: that consumer, with its views and acknowledgements;
- pack: the trainer, in packed batches;
- lease: the daemon, between a producer and a trainer.

A box is as wide as its share of the samples, and stands on its caller. Frames of the interpreter
lie together as ``python``; before Python 3.12 they have no names of their own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Final

from bench import command, machine
from bench.failures import MeasurementError
from bench.fitness import TWO, Need, here, why_not
from bench.rows import packed
from bench.rows.daemon import serving
from bench.sending import produce, temporary_bus
from bench.workload import Workload

__all__ = ["GRAPHS", "RESULTS", "Node", "draw", "fold", "main", "tree"]

GRAPHS: Final = ("put", "take", "pack", "lease")
#: Where the graphs that pages link lie.
RESULTS: Final = machine.ROOT / "bench" / "results" / "flames"
#: Samples a second; not a divisor of the timer's rate, so that nothing periodic beats with it.
RATE: Final = 997
#: Bytes of stack that a sample takes along to be unwound: compilers keep no frame pointers.
STACK_BYTES: Final = 16_384
#: Seconds until all processes are under way, torch imported.
BEGIN_S: Final = 6.0
#: More than any run moves.
ENDLESS: Final = 1 << 40
CAPACITY: Final = "64MiB"
#: Frames of an interpreter, and of what calls it.
INTERPRETER: Final = ("_PyEval_", "PyEval_", "_PyFunction_", "_PyObject_", "PyObject_", "_PyVector")
#: Boxes narrower than this part of the whole are left out: they could not be read.
LEAST: Final = 0.003
#: Of the picture, in its units.
WIDTH: Final = 1200
ROW: Final = 17
LETTER: Final = 6.6
COLOURS: Final = {"kernel": "#e8a33d", "python": "#9aa5b1", "shmbus": "#f06595", "": "#ffd8a8"}


@dataclass
class Node:
    """A function in one place of the stack: how many samples were in it or below it."""

    name: str
    samples: int = 0
    below: dict[str, Node] = field(default_factory=dict)


def fold(script: Iterable[str]) -> Iterator[list[str]]:
    """Read what ``perf script`` prints: for each sample its frames, the outermost first."""
    frames: list[str] = []
    for line in [*script, ""]:
        if not line.strip():
            if frames:
                yield _without_repeats(reversed(frames))
            frames = []
        elif line[0].isspace():
            frames.append(_frame(line))


def _frame(line: str) -> str:
    """Name a frame of the form ``address function+offset (file)``."""
    _, _, rest = line.strip().partition(" ")
    name, _, file = rest.rpartition(" (")
    name, file = name.rpartition("+")[0] or name, file.rstrip(")")
    if file.startswith("[kernel"):
        return f"kernel: {name}"
    if name.startswith("py::"):
        # With -X perf: py::function:file.
        return f"python: {name[4:].partition(':')[0]}"
    if name.startswith(INTERPRETER) or (name == "[unknown]" and "python" in file):
        return "python"
    if "_core" in Path(file).name:
        return f"shmbus: {name}"
    return name if name != "[unknown]" else Path(file).name or name


def _without_repeats(frames: Iterable[str]) -> list[str]:
    found: list[str] = []
    for frame in frames:
        if not found or found[-1] != frame:
            found.append(frame)
    return found


def tree(stacks: Iterable[Sequence[str]], name: str) -> Node:
    """Lay stacks over each other."""
    root = Node(name)
    for stack in stacks:
        node = root
        node.samples += 1
        for frame in stack:
            node = node.below.setdefault(frame, Node(frame))
            node.samples += 1
    return root


def draw(root: Node, about: str) -> str:
    """Draw a flame graph.

    Parameters
    ----------
    root : Node
    about : str
        Said below the graph.

    Returns
    -------
    str
        An SVG document.
    """
    boxes: list[tuple[int, float, Node]] = []

    def place(node: Node, level: int, left: float) -> None:
        boxes.append((level, left, node))
        for child in sorted(node.below.values(), key=lambda one: one.name):
            if child.samples >= LEAST * root.samples:
                place(child, level + 1, left)
            left += child.samples

    place(root, 0, 0.0)
    height = (max(level for level, _, _ in boxes) + 3) * ROW
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="monospace" font-size="11">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="4" y="{height - 5}">{escape(about)}</text>',
    ]
    scale = WIDTH / max(root.samples, 1)
    for level, left, node in boxes:
        x, wide = left * scale, node.samples * scale
        y = height - (level + 3) * ROW
        share = node.samples / max(root.samples, 1)
        fits = node.name[: int(wide / LETTER)]
        parts.append(
            f'<g><title>{escape(node.name)}: {share:.1%}</title><rect x="{x:.1f}" y="{y}" '
            f'width="{wide:.1f}" height="{ROW - 1}" fill="{_colour(node.name)}" stroke="white"/>'
            + (f'<text x="{x + 2:.1f}" y="{y + 12}">{escape(fits)}</text>' if fits else "")
            + "</g>"
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def _colour(name: str) -> str:
    return COLOURS[name.partition(":")[0] if name.partition(":")[0] in COLOURS else ""]


# -- the processes -----------------------------------------------------------------------------


@command.orderly("flame")
def main(argv: Sequence[str] | None = None) -> int:
    """Record and draw; exit status 1, and why, where that cannot be done."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.flame", description="Flame graphs of a running bus, by perf."
    )
    parser.add_argument(
        "graph", nargs="*", metavar="GRAPH", help=f"of {', '.join(GRAPHS)}; all where none is named"
    )
    parser.add_argument(
        "--seconds", type=command.positive, default=4.0, help="of sampling (default 4)"
    )
    parser.add_argument("--output", type=command.directory, default=str(RESULTS), metavar="DIR")
    parser.add_argument("--side", nargs=2, metavar=("SIDE", "BUS"), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.side:
        return _run_side(*options.side)
    if unknown := set(options.graph) - set(GRAPHS):
        parser.error(f"expected some of {', '.join(GRAPHS)}, got {', '.join(sorted(unknown))}")
    why = why_not(Need(processors=TWO, shm_bytes=128 << 20), here())
    if why or shutil.which("perf") is None:
        lacks = "there is no perf here; install it (Debian: apt-get install linux-perf)"
        print(f"flame: {why or lacks}", file=sys.stderr)
        return 1
    options.output.mkdir(exist_ok=True)
    for graph in options.graph or GRAPHS:
        root = tree(_record(graph, options.seconds), graph)
        if not root.samples:
            print(f"flame: perf saw nothing of {graph}", file=sys.stderr)
            return 1
        facts = machine.describe()
        about = (
            f"{graph}: {root.samples} samples of {options.seconds:g} s; {facts['cpu']}, Python "
            f"{facts['python']}, load {facts['load_average'][0]:.1f}"
        )
        path = options.output / f"{graph}.svg"
        path.write_text(draw(root, about))
        print(f"{path}: {about}")
    return 0


#: Which sides run for a graph, the sampled one last.
_SIDES: Final = {
    "put": ("consume", "produce"),
    "take": ("produce", "consume"),
    "pack": ("produce", "train"),
    "lease": ("serve", "produce", "train"),
}


def _record(graph: str, seconds: float) -> list[list[str]]:
    """Run the sides of a graph, and sample one of them."""
    with (
        tempfile.TemporaryDirectory(prefix="shmbus-flame-") as directory,
        temporary_bus(CAPACITY) as name,
        ExitStack() as stack,
    ):
        pid = 0
        for side in _SIDES[graph]:
            if side == "serve":
                served = stack.enter_context(serving(name))
            else:
                pid = stack.enter_context(_side(side, name))
        time.sleep(BEGIN_S)
        data = Path(directory, "perf.data")
        _perf(
            "record", "-q", "-F", str(RATE), "--call-graph", f"dwarf,{STACK_BYTES}",
            "-p", str(served if graph == "lease" else pid), "-o", str(data),
            "--", "sleep", str(seconds),
        )  # fmt: skip
        script = _perf("script", "-i", str(data), "-F", "ip,sym,symoff,dso")
        return list(fold(script.splitlines()))


def _perf(*arguments: str) -> str:
    """Run perf; return what it printed."""
    done = subprocess.run(["perf", *arguments], check=False, capture_output=True, text=True)
    if done.returncode:
        raise MeasurementError(
            f"perf {arguments[0]} ended with {done.returncode}: {' '.join(done.stderr.split())}; "
            "where it may not look, sysctl kernel.perf_event_paranoid=1 allows it"
        )
    return done.stdout


@contextmanager
def _side(side: str, name: str) -> Iterator[int]:
    """Run one side as a process; yield its pid."""
    named = ["-X", "perf"] if sys.version_info >= (3, 12) else []
    process = subprocess.Popen(
        [sys.executable, *named, "-m", "bench.flame", "--side", side, name],
        stderr=subprocess.DEVNULL,
    )
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def _run_side(side: str, name: str) -> int:
    """Be one side of a graph until the end."""
    endless = Workload(trajectories=ENDLESS, tokens=2048, capacity=CAPACITY)
    if side == "produce":
        _produce(name, endless)
    elif side == "train":
        packed.train(_begin, name, endless)
    else:
        _consume(name)
    return 0


def _begin() -> None:
    """In the place of what waits for the other processes: the bus waits for them."""


def _produce(name: str, workload: Workload) -> None:
    produce(_begin, name, workload, 0)


def _consume(name: str) -> None:
    import shmbus

    with shmbus.Consumer(name) as consumer:
        while True:
            groups = consumer.take(timeout=BEGIN_S)
            for group in groups:
                for one in group:
                    _look(one.__getitem__)
            consumer.ack(groups)


def _look(field_of: Callable[[str], object]) -> None:
    for name in ("tokens", "loss_mask", "logprobs"):
        field_of(name)


if __name__ == "__main__":
    sys.exit(main())
