"""What the commands of the benchmark have in common: their options, their ends, their files.

Invariants:

- A path that cannot be written is refused before anything is measured.
- A file is replaced whole: where a disk is full, what was there before stays as it was.
- Figures that cannot be written in the end are printed: a run may have taken half an hour.
- An interrupt and SIGTERM are ordinary exits, so that processes and segments are cleaned up; a
  second one does not cut that short.
- What this machine refuses is said in a sentence, and no traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import math
import os
import select
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from bench import fitness
from bench.failures import sentence
from bench.fitness import Need
from bench.processes import ENDS
from shmbus._arguments import parse_size

__all__ = [
    "TRAIN",
    "add_usual",
    "at_least_one",
    "capacity",
    "directory",
    "file",
    "keep",
    "lacks",
    "nothing",
    "orderly",
    "pause",
    "picture",
    "positive",
    "refused",
    "write",
]

#: Written and removed again where a file is to be: a disk without this has no room for figures.
PROBE_BYTES: Final = 64 << 10
#: What `lacks` says of a program that has no torch.
TRAIN: Final = "pip install 'shmbus[train]'"
DRAW: Final = "pip install 'shmbus[bench]'"
#: What matplotlib writes, of what pages show.
PICTURES: Final = (".png", ".svg", ".pdf")


def at_least_one(text: str) -> int:
    """Read a number of things, as argparse's ``type``."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, 1 or more, got {text!r}")
    return value


def positive(text: str) -> float:
    """Read seconds, or a size, as argparse's ``type``."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def pause(text: str) -> float:
    """Read seconds that may be none at all, as argparse's ``type``."""
    try:
        return 0.0 if float(text) == 0 else positive(text)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"expected a number, 0 or more, got {text!r}") from None


def capacity(text: str) -> str:
    """Read the capacity of a bus, as argparse's ``type``; it stays a text, as a bus is given it."""
    try:
        parse_size(text, "")
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error).removeprefix(": ")) from error
    return text


def add_usual(parser: argparse.ArgumentParser, default: str) -> None:
    """Add the options of a program that measures a bus, whose capacity is `default`."""
    parser.add_argument("--output", type=file, metavar="PATH", help="write the figures as JSON")
    parser.add_argument(
        "--capacity", type=capacity, default=default, help=f"of the bus (default {default})"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="only see that it runs; its figures mean nothing"
    )


def file(text: str) -> Path:
    """Read the path of a file that is to be written, as argparse's ``type``."""
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(
            f"expected the path of a file, {path} is a directory; name a file in it"
        )
    if not path.exists() or path.is_file():
        _probe(path.resolve().parent)
    return path


def picture(text: str) -> Path:
    """Read the path of a picture that is to be drawn, as argparse's ``type``."""
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"there is no matplotlib here; {DRAW}")
    path = file(text)
    if path.suffix not in PICTURES:
        raise argparse.ArgumentTypeError(
            f"expected a name that ends in {', '.join(PICTURES)}, got {text!r}"
        )
    return path


def directory(text: str) -> Path:
    """Read the path of a directory that is made or written into, as argparse's ``type``."""
    path = Path(text)
    if path.exists() and not path.is_dir():
        raise argparse.ArgumentTypeError(
            f"expected the path of a directory, {path} is a file; name another one"
        )
    _probe(path if path.is_dir() else path.resolve().parent)
    return path


def _probe(place: Path) -> None:
    """Refuse a directory in which nothing can be written."""
    if not place.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {place}; make it first")
    try:
        with tempfile.TemporaryFile(dir=place) as probe:
            probe.write(bytes(PROBE_BYTES))
            probe.flush()
    except OSError as error:
        raise argparse.ArgumentTypeError(
            f"cannot write into {place}: {error.strerror}; name another place"
        ) from error


def write(path: Path, text: str) -> None:
    """Write a file, whole or not at all; OSError where it cannot be."""
    if path.exists() and not path.is_file():
        # A device or a pipe, which nothing may take the place of.
        path.write_text(text)
        return
    path = path.resolve()
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_text(text)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def keep(path: Path | None, result: dict[str, Any], program: str) -> int:
    """Write figures as JSON where a path is named, and print them where that fails; exit status."""
    if path is None:
        return 0
    text = json.dumps(result, indent=1) + "\n"
    try:
        write(path, text)
    except OSError as error:
        print(
            f"{program}: --output: cannot write {path}: {error.strerror}; the figures are on "
            "stdout, and an older file is as it was",
            file=sys.stderr,
        )
        print(text, end="")
        return 1
    return 0


def refused(need: Need, program: str) -> bool:
    """Say on stderr what keeps a command from measuring here; False if nothing does."""
    why = fitness.why_not(need, fitness.here())
    if why:
        print(f"{program}: cannot be measured here: {why}", file=sys.stderr)
    return bool(why)


def nothing(program: str) -> int:
    """Say on stderr that nothing could be measured here; return the exit status of that."""
    print(f"{program}: nothing could be measured here; what is printed says why", file=sys.stderr)
    return 1


def lacks(modules: Sequence[str], program: str, install: str) -> bool:
    """Say on stderr which packages a command lacks, and how they come here; False if none."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        print(f"{program}: there is no {', '.join(missing)} here; {install}", file=sys.stderr)
    return bool(missing)


@contextlib.contextmanager
def orderly(program: str) -> Iterator[None]:
    """Clean up and exit in order, whatever ends a command before it is done.

    With 128 and the signal's number on an interrupt and on SIGTERM, and with 1 and a sentence on
    stderr where the machine refuses something. Nothing is said where who read stdout has gone.
    """

    def end(number: int, _: object) -> None:
        for each in ENDS:
            signal.signal(each, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        sys.exit(128 + number)

    # What is ignored stays so: a shell has it so for what runs in the background.
    before = {each: signal.getsignal(each) for each in ENDS}
    heard = [each for each, handler in before.items() if handler is not signal.SIG_IGN]
    for each in heard:
        signal.signal(each, end)
    try:
        try:
            yield
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        sys.exit(128 + signal.SIGINT)
    except Exception as error:
        refused = _refused_by_stdout()
        said = sentence(error)
        if refused is not None:
            said = f"cannot write to stdout: {refused.strerror}; give it a file or a reader"
        elif not said:
            raise
        if not isinstance(refused, BrokenPipeError):
            print(f"{program}: {said}", file=sys.stderr)
        sys.exit(1)
    finally:
        for each in heard:
            # A second one still finds nobody where the program ends of the first.
            if signal.getsignal(each) is end:
                signal.signal(each, before[each])


def _refused_by_stdout() -> OSError | None:
    """Return why nothing can be printed, and print nowhere from now on; None if it can."""
    if sys.stdout is None:
        return None
    try:
        sys.stdout.flush()
        # What was more than a buffer holds is gone with the error that it met; a pipe still knows.
        if not _reader_gone(sys.stdout.fileno()):
            return None
        refused: OSError = BrokenPipeError()
    except io.UnsupportedOperation:
        return None
    except OSError as error:
        refused = error
    # The flush at exit must have a place to go.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return refused


def _reader_gone(file: int) -> bool:
    poll = select.poll()
    poll.register(file, 0)
    return any(events & select.POLLERR for _, events in poll.poll(0))
