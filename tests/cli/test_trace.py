"""``shmbus trace``: a file for Perfetto of what a bus did, while it was looked at and before."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import trace_format
from conftest import Daemon, wait_until
from trace_format import slices

from shmbus import Bus, Consumer, Producer
from shmbus.inspect.history import read_events

Start = Callable[..., Daemon]


def put(producer: Producer, key: str) -> None:
    for index in range(2):
        producer.put(key, group_size=2, index=index, score=index, tokens=[1])


def begin(name: str, path: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shmbus", "trace", name, "-o", str(path), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def events_of(path: Path) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = json.loads(path.read_text())
    trace_format.check(events)
    return events


def test_a_trace_has_past_and_present(bus_name: str, daemon: Start, tmp_path: Path) -> None:
    daemon("--capacity", "2MiB")
    path = tmp_path / "run.json"
    with Producer(bus_name, label="w0") as producer, Consumer(bus_name, label="train.py") as taker:
        put(producer, "before")
        taker.take(timeout=10)[0].ack()
        traced = begin(bus_name, path)
        try:
            wait_until(lambda: path.exists() and "before" in path.read_text(), what="the trace")
            put(producer, "q")
            [group] = taker.take(timeout=10)
            wait_until(lambda: "q/1 put" in path.read_text() or "q/1" in path.read_text(),
                       what="its samples")  # fmt: skip
            group.ack()
            put(producer, "open")
            [group] = taker.take(timeout=10)
            wait_until(lambda: '"waits for a trainer"' in path.read_text(), what="its lease")
            wait_until(lambda: "open/1" in path.read_text(), what="the last group")
            traced.send_signal(signal.SIGINT)
            out, err = traced.communicate(timeout=60)
        finally:
            traced.kill()
            traced.communicate()
    assert traced.returncode == 0 and "ui.perfetto.dev" in out, err
    events = events_of(path)
    ends = {each["name"]: each["args"]["end"] for each in slices(events, "train.py (pid ")}
    assert ends == {
        "before": "acknowledged", "q": "acknowledged", "open": "open at the end of the trace",
    }  # fmt: skip
    groups = [each["name"] for each in slices(events, "groups of ")]
    assert [name for name in groups if name in ends] == ["before", "q", "open"]
    assert "incomplete" in groups
    names = trace_format.processes(events).values()
    assert any(name.startswith("w0 (pid ") for name in names)
    assert not any(name.startswith("producer ") for name in names)


def test_samples_are_noted_only_while_somebody_traces(bus_name: str, daemon: Start) -> None:
    daemon("--capacity", "2MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as taker:
        put(producer, "before")
        taker.take(timeout=10)[0].ack()
        found = read_events(bus_name, trace=True)
        put(producer, "after")
        taker.take(timeout=10)[0].ack()
        more = read_events(bus_name, after=found.newest, trace=True)
    [before] = [each for each in found.events if each.kind == "leased"]
    [after] = [each for each in more.events if each.kind == "leased"]
    assert before.samples == [] and before.began_unix_s > 0
    assert [sample.index for sample in after.samples] == [0, 1]
    assert abs(after.samples[0].unix_s - after.unix_s) < 3600  # the clock of people


def test_a_trace_is_read_from_the_oldest_on_page_by_page(bus_name: str, daemon: Start) -> None:
    daemon("--capacity", "2MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as taker:
        for number in range(5):
            put(producer, f"q{number}")
            taker.take(timeout=10)[0].ack()
        whole = read_events(bus_name, limit=500).events
        after, pages = 0, []
        while page := read_events(bus_name, after=after, limit=3, trace=True):
            assert page.missed == 0
            if not page.events:
                break
            pages += page.events
            after = page.newest
    assert [each.number for each in pages] == [each.number for each in whole]


def test_a_trace_of_a_removed_bus_ends(bus_name: str, daemon: Start, tmp_path: Path) -> None:
    served = daemon("--capacity", "2MiB")
    for full in (tmp_path, Path("/dev/full")):
        assert f"cannot write '{full}'" in begin(bus_name, full).communicate(timeout=60)[1]
    path = tmp_path / "run.json"
    traced = begin(bus_name, path)
    try:
        wait_until(lambda: path.exists() and path.stat().st_size > 2, what="the trace")
        served.child.kill()
        with Bus.open(bus_name) as bus:
            bus.unlink()
        out, err = traced.communicate(timeout=60)
    finally:
        traced.kill()
        traced.communicate()
    assert traced.returncode == 0 and "ends early" in err and bus_name in err, (out, err)
    assert events_of(path)


def test_a_bus_without_a_daemon_is_a_sentence_and_no_file(bus_name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    with Bus.create(bus_name, "1MiB"):
        traced = begin(bus_name, path, "--seconds", "0")
        _, err = traced.communicate(timeout=60)
    assert traced.returncode == 1 and "shmbus serve" in err and not path.exists()


def test_a_trace_that_goes_nowhere_is_refused(bus_name: str) -> None:
    command = [sys.executable, "-m", "shmbus", "trace", bus_name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "-o/--output" in done.stderr
