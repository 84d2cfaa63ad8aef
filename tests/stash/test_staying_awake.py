"""A consumer whose records come without a pause awaits them without sleeping, and hears the rest.

The stream is of one sample again and again: duplicates are dropped, so it never ends by itself and
no group of it is ever complete.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import numpy as np
import pytest
from conftest import Child, Spawner, wait_until

from shmbus import Bus, BusClosedError, Consumer, Producer

STREAM = """
import sys
import numpy as np
from shmbus import Producer

with Producer(sys.argv[1]) as producer:
    print("streaming", flush=True)
    while True:
        producer.put("half", group_size=2, index=0, x=np.arange(4), timeout=30)
"""


# The system call itself, and between it and Python's next look a signal for this thread. A reader
# that asks for signals while it is awake comes here no more before the handler has run.
YIELD = """
#define _GNU_SOURCE
#include <signal.h>
#include <sys/syscall.h>
#include <unistd.h>

int armed, unheard;

int sched_yield(void) {
    static int sent;
    long result = syscall(SYS_sched_yield);
    if (armed && syscall(SYS_gettid) == getpid()) {
        unheard += sent;
        if (!sent) {
            sent = 1;
            raise(SIGUSR1);
        }
    }
    return (int)result;
}
"""

# A record more before each look at the clock, so that a reader finds one whenever it would wait;
# and at one of them a signal for it.
CLOCK = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SIGNAL_AT = 20, ENOUGH = 500 };

int armed, unheard;

int clock_gettime(clockid_t clock, struct timespec *at) {
    static int count, ask, answer;
    char byte = 0;
    if (armed && syscall(SYS_gettid) == getpid()) {
        if (count == 0) {
            ask = open(getenv("ASK"), O_WRONLY);
            answer = open(getenv("ANSWER"), O_RDONLY);
        }
        unheard += count > SIGNAL_AT;
        if (count++ == SIGNAL_AT) {
            raise(SIGUSR1);
        }
        armed = unheard < ENOUGH && write(ask, &byte, 1) == 1 && read(answer, &byte, 1) == 1;
    }
    return (int)syscall(SYS_clock_gettime, clock, at);
}
"""

PARTNER = """
import os, sys
import numpy as np
from shmbus import Producer

ask = os.open(sys.argv[2], os.O_RDONLY)
answer = os.open(sys.argv[3], os.O_WRONLY)
with Producer(sys.argv[1]) as producer:
    number = 0
    while os.read(ask, 1):
        producer.put(f"half of {number}", group_size=2, index=0, x=np.arange(4), timeout=30)
        number += 1
        os.write(answer, b"x")
"""

AWAKE = """
import ctypes, signal, sys
from shmbus import Consumer

class Interrupted(Exception):
    pass

def handle(number, frame):
    raise Interrupted

signal.signal(signal.SIGUSR1, handle)
library = ctypes.CDLL(sys.argv[2])
with Consumer(sys.argv[1]) as consumer:
    ctypes.c_int.in_dll(library, "armed").value = 1
    try:
        consumer.take(1, 60)
    except Interrupted:
        print("unheard", ctypes.c_int.in_dll(library, "unheard").value, flush=True)
"""


class Interrupted(Exception):
    """What a signal's handler raises here."""


@pytest.fixture
def bus(bus_name: str) -> Iterator[str]:
    with Bus.create(bus_name, capacity="2MiB"):
        yield bus_name


def begin_stream(spawn: Spawner, bus: str) -> Child:
    child = spawn.script(STREAM, bus)
    child.expect("streaming", 60)
    return child


def state_of(thread: int) -> str:
    """Return the letter by which the kernel says what a thread of this process does."""
    with open(f"/proc/self/task/{thread}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0]


def put_the_rest(bus: str) -> None:
    with Producer(bus) as producer:
        producer.put("half", group_size=2, index=1, x=np.arange(4), timeout=30)


def test_a_signal_ends_the_take_of_a_consumer_that_records_keep_awake(
    bus: str, spawn: Spawner
) -> None:
    def handle(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    before = signal.signal(signal.SIGUSR1, handle)
    main = threading.get_ident()
    try:
        with Consumer(bus) as consumer:
            begin_stream(spawn, bus)
            killer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGUSR1))
            killer.start()
            with pytest.raises(Interrupted):
                consumer.take(1, 60)
            killer.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def preloaded(program: str, directory: Path) -> tuple[Path, dict[str, str]]:
    """Compile a library; return it, and the environment that puts it before all others."""
    source, library = directory / "preloaded.c", directory / "preloaded.so"
    source.write_text(program)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no {compiler[0]} here")
    subprocess.run([*compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    libraries = filter(None, [os.environ.get("LD_PRELOAD"), str(library)])
    return library, {"LD_PRELOAD": " ".join(libraries)}


def test_a_consumer_that_is_awake_asks_for_signals_each_time_it_steps_aside(
    bus: str, spawn: Spawner, tmp_path: Path
) -> None:
    library, env = preloaded(YIELD, tmp_path)
    begin_stream(spawn, bus)
    # Without asking it would step aside for the stream again and again.
    assert "unheard 0\n" in spawn.script(AWAKE, bus, library, env=env).finish(60)


def test_a_consumer_that_finds_records_whenever_it_would_wait_asks_for_signals(
    bus: str, spawn: Spawner, tmp_path: Path
) -> None:
    library, env = preloaded(CLOCK, tmp_path)
    pipes = [tmp_path / "ask", tmp_path / "answer"]
    for pipe in pipes:
        os.mkfifo(pipe)
    spawn.script(PARTNER, bus, *pipes)
    env |= {"ASK": str(pipes[0]), "ANSWER": str(pipes[1])}
    printed = spawn.script(AWAKE, bus, library, env=env).finish(60)
    (unheard,) = re.findall(r"unheard (\d+)", printed)
    # A look and a wait have a few of them; without asking there would be no end. Samples of groups
    # that are not whole bring nothing to deliver, and nothing that Python decides.
    assert int(unheard) < 10


def test_a_take_ends_at_its_timeout_and_a_close_ends_it_though_records_come(
    bus: str, spawn: Spawner
) -> None:
    with Consumer(bus) as consumer, ThreadPoolExecutor(1) as pool:
        begin_stream(spawn, bus)
        assert consumer.take(timeout=0.05) == []
        taken = pool.submit(consumer.take, 1, 30)
        wait_until(lambda: consumer.stats().dropped.get("duplicate", 0) > 1000)
        consumer.close()
        with pytest.raises(BusClosedError):
            taken.result(60)


def test_who_stayed_awake_sleeps_when_records_stop_and_is_woken_by_the_next(
    bus: str, spawn: Spawner
) -> None:
    with Consumer(bus) as consumer, ThreadPoolExecutor(1) as pool:
        child = begin_stream(spawn, bus)
        thread = pool.submit(threading.get_native_id).result()
        taken = pool.submit(consumer.take, 1, 30)
        wait_until(lambda: consumer.stats().dropped.get("duplicate", 0) > 1000)
        child.kill()
        wait_until(lambda: state_of(thread) == "S")
        put_the_rest(bus)
        (group,) = taken.result(60)
        assert (group.instance_id, len(group)) == ("half", 2)
