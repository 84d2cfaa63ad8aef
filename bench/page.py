"""What the page costs: its server, what it looks at, and the browser that shows it.

``python -m bench.page [--seconds S] [--browser-s S] [--output FILE.json]``, where the extra ``web``
is installed; with playwright and a Chromium (``SHMBUS_CHROMIUM``) also the browser's part.

- Ten pages on a bus of 100,000 undelivered trajectories at 20,000 a second, by turns with none:
  processor time of the server, and of daemon and producers with and without pages, from the
  kernel's own nanoseconds, so that the load of the machine changes it little.
- The same server at rest, with nobody watching.
- A bus at its limits: 4,096 producers, 10,000 open groups, groups of 512 and of 16,384.
- In a browser: how long until the first groups are on the screen, and its memory after a minute and
  at the end (``--browser-s``: 600 by default; 3,600 for the hour).
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import shmbus
from bench import command, machine
from bench.failures import MeasurementError
from bench.fitness import Need
from bench.sending import bus_bytes
from shmbus.inspect.rates import Watcher
from shmbus.inspect.status import read_status
from shmbus.web import settings
from shmbus.web.picture import picture
from shmbus.web.server import read_files

__all__ = ["main"]

CAPACITY: Final = "512MiB"
UNDELIVERED: Final = 100_000
RATE_HZ: Final = 20_000
PRODUCERS: Final = 2
PAGES: Final = 10
#: Open at once where a bus has as many producers as it may: one each, and what a program has.
FILES: Final = 4096 + 256
GROUP: Final = 8
START_S: Final = 60.0
#: Seconds between two looks at the browser's heap: it goes up and down with compiled code.
HEAP_EVERY_S: Final = 30.0

#: Puts complete groups at a steady rate, until its standard input ends.
PRODUCER: Final = """
import sys, time, shmbus
name, rate = sys.argv[1], float(sys.argv[2])
producer = shmbus.Producer(name)
batch = 25 * 8
at, number = time.monotonic(), 0
print("ready", flush=True)
while True:
    producer.put_many([{"instance_id": f"{producer.producer_id}-{number + i // 8}", "group_size": 8,
        "index": i % 8, "score": float(i % 2), "tokens": [1] * 64} for i in range(batch)])
    number += batch // 8
    at += batch / rate
    time.sleep(max(0.0, at - time.monotonic()))
"""
TRAINER: Final = """
import sys, shmbus
with shmbus.Consumer(sys.argv[1], label="train.py") as consumer:
    print("ready", flush=True)
    while True:
        consumer.ack(consumer.take(max_groups=64, timeout=1.0))
"""


def cpu_s(pid: int) -> float:
    """Seconds that all threads of a process have been on a processor."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


@contextlib.contextmanager
def child(*command: str, until: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run a command until the block ends; enters once it has printed what matches `until`."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    try:
        seen = ""
        while not re.search(until, seen):
            line = process.stdout.readline()
            if not line:
                raise MeasurementError(f"{command[:4]} ended: {seen}")
            seen += line
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield process, seen
    finally:
        process.terminate()
        process.wait(START_S)


class Page:
    """One page that watches, as a browser does; notes how late each picture is."""

    def __init__(self, address: str) -> None:
        self.lags_s: list[float] = []
        self.bytes = 0
        self.first_s = 0.0
        self._end = False
        base, _, token = address.partition("/?token=")
        port = base.rpartition(":")[2]
        self._request = urllib.request.Request(
            f"{base}/events", headers={"Cookie": f"shmbus-{port}={token}"}
        )
        self._began_s = time.time()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=START_S) as stream:
            while not self._end:
                line = stream.readline()
                self.bytes += len(line)
                found = re.search(rb'"now":(\d+\.?\d*)', line)
                if found and line.startswith(b"data: "):
                    self.first_s = self.first_s or time.time() - self._began_s
                    self.lags_s.append(time.time() - float(found[1]))

    def close(self) -> None:
        """End it."""
        self._end = True
        self._thread.join(START_S)


def fill(name: str) -> None:
    """Put so many trajectories of incomplete groups that the bus has them all along."""
    with shmbus.Producer(name, label="filler") as producer:
        for first in range(0, UNDELIVERED // GROUP, 64):
            producer.put_many(
                [
                    {"instance_id": f"open-{number}", "group_size": GROUP + 1, "index": index,
                     "score": 0.5, "tokens": [1] * 64}
                    for number in range(first, first + 64) for index in range(GROUP)
                ]
            )  # fmt: skip


def traffic(seconds: float) -> dict[str, Any]:
    """Watch a bus at work with ten pages and with none, by turns."""
    name = f"bench.page.{os.getpid()}"
    python = (sys.executable, "-c")
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: shmbus.unlink(name))
        daemon, _ = stack.enter_context(
            child(sys.executable, "-m", "shmbus", "serve", name, "--capacity", CAPACITY,
                  until="serving")
        )  # fmt: skip
        fill(name)
        web, said = stack.enter_context(
            child(sys.executable, "-m", "shmbus", "web", name, until="token=")
        )
        address = re.search(r"http://\S+", said)
        assert address is not None
        rest = _at_rest(web.pid, seconds)
        at_work = [daemon.pid]
        stack.enter_context(child(*python, TRAINER, name, until="ready"))
        for _ in range(PRODUCERS):
            rate = str(RATE_HZ / PRODUCERS)
            at_work.append(
                stack.enter_context(child(*python, PRODUCER, name, rate, until="ready"))[0].pid
            )
        time.sleep(2.0)
        turns = [_turn(name, address[0], web.pid, at_work, pages, seconds) for pages in
                 (0, PAGES) * 3]  # fmt: skip
    without = [turn["at_work_cpu_per_1000"] for turn in turns[::2]]
    with_ = [turn["at_work_cpu_per_1000"] for turn in turns[1::2]]
    return {"rest": rest, "turns": turns, "cost_ratio": sum(with_) / sum(without)}


def _at_rest(pid: int, seconds: float) -> float:
    """Return the part of a processor that the server takes with nobody watching."""
    before = cpu_s(pid)
    time.sleep(seconds)
    return (cpu_s(pid) - before) / seconds


def _turn(
    name: str, address: str, web: int, at_work: list[int], pages: int, seconds: float
) -> dict[str, Any]:
    open_ = [Page(address) for _ in range(pages)]
    if pages:
        time.sleep(2.0)
    status = read_status(name, walk=False)
    began, server, daemon = time.monotonic(), cpu_s(web), cpu_s(at_work[0])
    busy = sum(map(cpu_s, at_work))
    time.sleep(seconds)
    after = read_status(name, walk=False)
    elapsed = time.monotonic() - began
    put = after.ledger.committed - status.ledger.committed
    turn: dict[str, Any] = {
        "pages": pages,
        "rate_hz": put / elapsed,
        "undelivered": after.ledger.undelivered,
        "server_cpu": (cpu_s(web) - server) / elapsed,
        "daemon_cpu": (cpu_s(at_work[0]) - daemon) / elapsed,
        "at_work_cpu_per_1000": 1000 * (sum(map(cpu_s, at_work)) - busy) / max(1, put),
    }
    for page in open_:
        page.close()
    if open_:
        turn["worst_lag_s"] = max(lag for page in open_ for lag in page.lags_s)
        turn["first_s"] = max(page.first_s for page in open_)
        turn["bytes_a_second"] = sum(page.bytes for page in open_) / pages / elapsed
    return turn


def limits() -> list[dict[str, Any]]:
    """Look once at buses at their limits: what it costs, and its message."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return [
        _look("4,096 producers", max_producers=4096, producers=4096, groups=512, size=16, of=8),
        _look("10,000 open groups", producers=1, groups=10_000, size=9, of=8),
        _look("groups of 512", producers=1, groups=100, size=512, of=511),
        _look("a group of 16,384", producers=1, groups=1, size=16_384, of=16_383),
    ]


def _look(
    what: str, *, producers: int, groups: int, size: int, of: int, max_producers: int = 64
) -> dict[str, Any]:
    name = f"bench.page.{os.getpid()}"
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: shmbus.unlink(name))
        command = (sys.executable, "-m", "shmbus", "serve", name, "--capacity", "128MiB")
        stack.enter_context(child(*command, "--max-producers", str(max_producers), until="serving"))
        writers = [stack.enter_context(shmbus.Producer(name)) for _ in range(producers)]
        for at, writer in enumerate(writers):
            keys = range(at, groups, producers) if producers <= groups else [at % groups]
            for key in keys:
                indices = range(of) if producers <= groups else [at // groups]
                writer.put_many(
                    [
                        {"instance_id": f"g{key}", "group_size": size, "index": index,
                         "score": index % 2, "tokens": [1]}
                        for index in indices
                    ]
                )  # fmt: skip
        watcher = Watcher(
            name, groups=settings.GROUPS, events=settings.EVENTS, share=settings.WALK_SHARE
        )
        time.sleep(1.0)
        watcher.poll()
        before = time.thread_time()
        watcher.poll()
        shown = picture(watcher, time.time())
        cost_s = time.thread_time() - before
        return {
            "what": what,
            "look_cpu_ms": 1000 * cost_s,
            "message_bytes": len(json.dumps(shown)),
            "groups_left_out": shown["wall"]["omitted"],
            "producers_left_out": shown["producers"]["omitted"],
        }


def browser(seconds: float) -> dict[str, Any] | None:
    """Show a bus at work in a real browser; None where there is none, which is said."""
    chromium = os.environ.get("SHMBUS_CHROMIUM", "/usr/bin/chromium")
    if command.lacks(("playwright",), "page", "pip install 'shmbus[web-test]'"):
        return None
    if not Path(chromium).exists():
        print(f"page: there is no {chromium}; name a Chromium in SHMBUS_CHROMIUM", file=sys.stderr)
        return None
    sync_playwright: Any = importlib.import_module("playwright.sync_api").sync_playwright
    name = f"bench.page.{os.getpid()}"
    with contextlib.ExitStack() as stack:
        stack.callback(lambda: shmbus.unlink(name))
        serve = (sys.executable, "-m", "shmbus", "serve", name, "--capacity", "64MiB")
        stack.enter_context(child(*serve, until="serving"))
        _, said = stack.enter_context(
            child(sys.executable, "-m", "shmbus", "web", name, until="token=")
        )
        address = re.search(r"http://\S+", said)
        assert address is not None
        python = (sys.executable, "-c")
        stack.enter_context(child(*python, TRAINER, name, until="ready"))
        stack.enter_context(child(*python, PRODUCER, name, "2000", until="ready"))
        with shmbus.Producer(name, label="slow") as producer:
            for number in range(60):
                producer.put(f"open-{number}", group_size=8, index=number % 8, tokens=[1])
        playwright = stack.enter_context(sync_playwright())
        chrome = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        stack.callback(chrome.close)
        page = chrome.new_page()
        began = time.monotonic()
        page.goto(address[0])
        page.wait_for_selector(".wall button")
        first_s = time.monotonic() - began
        session = page.context.new_cdp_session(page)

        def heap() -> int:
            session.send("HeapProfiler.collectGarbage")
            return int(session.send("Runtime.getHeapUsage")["usedSize"])

        page.wait_for_timeout(min(60.0, seconds) * 1000)
        heaps = [heap()]
        until = began + seconds
        while time.monotonic() < until:
            page.wait_for_timeout(HEAP_EVERY_S * 1000)
            heaps.append(heap())
        return {
            "first_groups_s": first_s,
            "heap_after_a_minute": heaps[0],
            "heap_ratio_at_the_end": heaps[-1] / heaps[0],
            "heap_ratio_at_most": max(heaps) / heaps[0],
            "heaps": heaps,
            "seconds": seconds,
        }


@command.orderly("page")
def main(arguments: list[str] | None = None) -> int:
    """Measure, print, and write where told."""
    parser = argparse.ArgumentParser(prog="python -m bench.page", description=__doc__)
    parser.add_argument(
        "--seconds", type=command.positive, default=20.0, help="of each turn (default 20)"
    )
    parser.add_argument("--browser-s", type=command.pause, default=600.0, help="0 for no browser")
    parser.add_argument("--output", type=command.file, help="where the JSON goes")
    told = parser.parse_args(arguments)
    if command.lacks(("aiohttp",), "page", "pip install 'shmbus[web]'"):
        return 1
    if command.refused(Need(shm_bytes=bus_bytes(CAPACITY)), "page"):
        return 1
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if most != resource.RLIM_INFINITY and most < FILES:
        print(f"page: cannot be measured here: needs {FILES} files open at once, {most} may be; "
              "allow more by ulimit -Hn", file=sys.stderr)  # fmt: skip
        return 1
    found: dict[str, Any] = {
        "machine": machine.describe(),
        "files_bytes": sum(len(body) for _, _, body in read_files().values()),
        "traffic": traffic(told.seconds),
        "limits": limits(),
    }
    gc.collect()
    if told.browser_s:
        found["browser"] = browser(told.browser_s)
    text = json.dumps(found, indent=1)
    print(text)
    return 0 if told.output is None else command.keep(told.output, found, "page")


if __name__ == "__main__":
    sys.exit(main())
