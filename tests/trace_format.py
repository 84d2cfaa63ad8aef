"""Demands of the Trace Event Format on events, for correct viewers."""

import numbers
from collections import defaultdict
from typing import Any

#: Fields of each type of event, beside name, process and track.
_FIELDS = {
    "X": {"ts", "dur"}, "i": {"ts", "s"}, "C": {"ts", "args"}, "M": {"args"}, "s": {"ts", "id"},
    "f": {"ts", "id", "bp"},
}  # fmt: skip


def check(events: list[dict[str, Any]]) -> None:
    """Check each event, and that the slices of a track are disjoint or nested."""
    tracks = defaultdict(list)
    named = set()
    arrows = defaultdict(list)
    for event in events:
        assert event["ph"] in _FIELDS and event.keys() >= {"name", "pid", "tid"}, event
        assert event.keys() >= _FIELDS[event["ph"]], event
        assert isinstance(event["name"], str) and event["name"], event
        assert all(isinstance(event[field], int) for field in ("pid", "tid")), event
        assert event["ph"] == "M" or event["pid"] in named, "a process has its name first"
        if event["ph"] == "M" and event["name"] == "process_name":
            assert isinstance(event["args"]["name"], str)
            named.add(event["pid"])
        elif event["ph"] == "C":
            assert all(isinstance(value, numbers.Real) for value in event["args"].values())
        elif event["ph"] == "X":
            assert event["ts"] > 0 and event["dur"] >= 0, event
            tracks[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] in "sf":
            arrows[event["id"]].append(event)
    for slices in tracks.values():
        open_until: list[int] = []
        for began, end in sorted(slices, key=lambda each: (each[0], -each[1])):
            while open_until and open_until[-1] <= began:
                open_until.pop()
            assert not open_until or end <= open_until[-1], "two slices cross"
            open_until.append(end)
    for ends in arrows.values():
        assert [end["ph"] for end in ends][:1] == ["s"] and len(ends) <= 2
        assert ends[0]["ts"] <= ends[-1]["ts"]


def processes(events: list[dict[str, Any]]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def slices(events: list[dict[str, Any]], process: str) -> list[dict[str, Any]]:
    """Return slices of processes by the beginning of their name, in the order of time."""
    pids = {pid for pid, name in processes(events).items() if name.startswith(process)}
    found = [e for e in events if e["ph"] == "X" and e["pid"] in pids]
    return sorted(found, key=lambda e: (e["ts"], -e["dur"]))
