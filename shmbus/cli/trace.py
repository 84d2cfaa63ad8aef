"""``shmbus trace``: the life of groups, waits and weights of a bus, for Perfetto.

Invariants:

- A daemon notes samples only while the trace asks it; no other part of a run knows of a trace.
- Every read is written at once: memory serves open slices only. A file without its end is whole but
  for its last line, and viewers open it.
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import ExitStack
from typing import Final, TextIO

import msgspec

from shmbus import errors
from shmbus.base import limits
from shmbus.base.format import printable, several, show_duration
from shmbus.cli._options import Commands, add_command, path, seconds
from shmbus.inspect.groups import read_groups
from shmbus.inspect.history import read_events
from shmbus.inspect.status import read_status
from shmbus.inspect.trace_events import TraceEvent, TraceEvents
from shmbus.pool.pool_status import read_pools

#: Seconds between two looks at the history, and at all else. A daemon remembers 8,192 events of
#: groups: two looks see all events up to 30,000 a second.
_HISTORY_S: Final = 0.25
_STATUS_S: Final = 1.0
#: Incomplete groups in a request for their samples' producers.
_GROUPS: Final = 200


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "trace",
        run,
        help="write the life of groups, waits and weights for Perfetto",
        description="Writes the daemon's recorded events, and new events until Ctrl-C, SIGTERM or "
        "--seconds, as Chrome's trace events: open the file in https://ui.perfetto.dev. The trace "
        "shows each producer, trainer and reader of weights as a process, and a group as a slice "
        "from its first sample to its lease, then as a slice of its trainer. Samples appear only "
        "for the time of the trace.",
        examples=[
            "shmbus trace run1 -o run.json --seconds 60",
            "shmbus trace run1 -o run.json --seconds 0",
        ],
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", type=path, required=True, help="the file to write"
    )
    parser.add_argument(
        "--seconds", type=seconds(0), help="duration (default: until Ctrl-C); 0: only past events"
    )


class _File:
    """A JSON array of trace events, one a line."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.written = 0
        stream.write("[")

    def add(self, events: Iterable[TraceEvent]) -> None:
        for event in events:
            self._stream.write(",\n" if self.written else "\n")
            self._stream.write(msgspec.json.encode(event).decode())
            self.written += 1
        self._stream.flush()

    def end(self) -> None:
        self._stream.write("\n]\n")


class _Trace:
    def __init__(self, name: str, file: _File) -> None:
        self._name = name
        self._file = file
        self._events = TraceEvents(printable(name))
        self._after = 0
        self._daemon_pid = 0
        self._looked_s = 0.0
        #: Reason for a missing history; "" with a history.
        self.problem = ""

    def look(self) -> None:
        now_s = time.time()
        if self.problem or not 0 <= now_s - self._looked_s < _STATUS_S:
            self._looked_s = now_s
            self._look_at_state(now_s)
        while True:
            found = read_events(
                self._name, after=self._after, limit=limits.MAX_EVENTS_SHOWN, trace=True
            )
            self.problem = found.problem
            # Events forgotten before the trace began leave no gap.
            missed = found.missed if self._after else 0
            self._after = found.newest
            if self._events.has_strangers(found.events):
                self._look_at_state(now_s)
            self._file.add(self._events.history(found.events, missed))
            if len(found.events) < limits.MAX_EVENTS_SHOWN:
                return

    def _look_at_state(self, now_s: float) -> None:
        status = read_status(self._name, walk=False)
        pid = status.daemon.pid if status.daemon is not None else 0
        if pid and pid != self._daemon_pid:
            if self._daemon_pid:
                self._after = 0  # another daemon, which counts from the start
            self._daemon_pid = pid
        self._file.add(self._events.status(status, now_s))
        self._events.groups(read_groups(self._name, _GROUPS, walk_records=0), now_s)
        self._file.add(self._events.weights(read_pools(self._name), now_s))

    def end(self) -> None:
        self._file.add(self._events.end(time.time()))


def run(arguments: argparse.Namespace) -> int:
    """Trace until a limit, a signal or the end of the bus; the file is always whole."""
    stopped = threading.Event()
    name, began_s = arguments.name, time.monotonic()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    found = read_events(name, limit=1)  # before creating a file
    if found.problem:
        raise RuntimeError(found.problem)
    if arguments.seconds is None:
        print(f"tracing bus {printable(name)}; Ctrl-C ends it", file=sys.stderr)
    end = ""
    try:
        with ExitStack() as stack:
            stream = stack.enter_context(open(arguments.output, "w", encoding="utf-8"))
            file = _File(stream)
            stack.callback(file.end)
            trace = _Trace(name, file)
            try:
                while True:
                    trace.look()
                    left_s = _HISTORY_S
                    if arguments.seconds is not None:
                        left_s = arguments.seconds - (time.monotonic() - began_s)
                    if left_s <= 0 or stopped.wait(min(left_s, _HISTORY_S)):
                        break
            except errors.ShmbusError as error:
                end = f"it ends early: {error}"
            trace.end()
    except OSError as error:
        raise RuntimeError(
            f"--output: cannot write {arguments.output!r}: {error.strerror}; choose another"
        ) from error
    end = end or (f"its end is missing: {trace.problem}" if trace.problem else "")
    lasted = show_duration(time.monotonic() - began_s)
    print(
        f"{several(file.written, 'event')} of {lasted} in {printable(arguments.output)}: open "
        "it in https://ui.perfetto.dev"
    )
    if end:
        print(f"shmbus trace: {end}", file=sys.stderr)
    return 0
