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


# One more record before each step of the consumer's, and at one of them a signal for it. A step is
# where it lets others run (yield), or looks at the clock (clock); there it finds one whenever it
# would wait.
STEPS = """
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { SIGNAL_AT = 20, ENOUGH = 500 };

int armed, unheard;

static void step(char where) {
    static int count, ask, answer;
    char byte = 0;
    if (!armed || *getenv("STEP") != where || syscall(SYS_gettid) != getpid()) {
        return;
    }
    unheard += count > SIGNAL_AT;
    if (count == SIGNAL_AT) {
        raise(SIGUSR1);
    }
    if (count == 0) {
        ask = open(getenv("ASK"), O_WRONLY);
    }
    armed = unheard < ENOUGH && write(ask, &byte, 1) == 1;
    if (count++ == 0) {
        answer = open(getenv("ANSWER"), O_RDONLY);
    }
    armed = armed && read(answer, &byte, 1) == 1;
}

int sched_yield(void) {
    step('y');
    return (int)syscall(SYS_sched_yield);
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    step('c');
    return (int)syscall(SYS_clock_gettime, clock, at);
}
"""

# Samples of groups that are never whole bring nothing to deliver, and nothing that Python decides.
# At first so many that its consumer wakes up often, then as it asks for them.
PARTNER = """
import os, sys, time
import numpy as np
from shmbus import Producer

ask = os.open(sys.argv[2], os.O_RDONLY | os.O_NONBLOCK)
answer = number = 0
with Producer(sys.argv[1]) as producer:
    while True:
        try:
            asked = os.read(ask, 1)
        except BlockingIOError:
            asked = b""
        if asked or (not answer and number < 3000):
            producer.put(f"half of {number}", group_size=2, index=0, x=np.arange(4), timeout=30)
            number += 1
        if asked:
            answer = answer or os.open(sys.argv[3], os.O_WRONLY)
            os.write(answer, b"x")
        until = time.monotonic() + 2e-5
        while not answer and time.monotonic() < until:
            pass
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
    print("taking", flush=True)
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
    with Bus.create(bus_name, capacity="8MiB"):
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


# A look and a wait look at the clock a few times; without asking there would be no end.
@pytest.mark.parametrize("step, most", [("yield", 0), ("clock", 9)])
def test_a_consumer_that_records_keep_awake_asks_for_signals_at_each_step(
    bus: str, spawn: Spawner, tmp_path: Path, step: str, most: int
) -> None:
    source, library = tmp_path / "steps.c", tmp_path / "steps.so"
    source.write_text(STEPS)
    compiler = shlex.split(os.environ.get("CC") or "cc")
    if shutil.which(compiler[0]) is None:
        pytest.skip(f"there is no {compiler[0]} here")
    subprocess.run([*compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    libraries = " ".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    pipes = [tmp_path / "ask", tmp_path / "answer"]
    for pipe in pipes:
        os.mkfifo(pipe)
    env = {"STEP": step, "LD_PRELOAD": libraries, "ASK": str(pipes[0]), "ANSWER": str(pipes[1])}
    child = spawn.script(AWAKE, bus, library, env=env)
    child.expect("taking", 60)
    spawn.script(PARTNER, bus, *pipes)
    printed = child.finish(60)
    (unheard,) = re.findall(r"unheard (\d+)", printed)
    assert int(unheard) <= most


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
