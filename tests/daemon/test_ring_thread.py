"""The thread woken by the ring: leases without the loop; its errors end the daemon."""

import threading
from pathlib import Path

import numpy as np
from conftest import Daemon, Spawner, wait_until

from shmbus import Bus, Consumer, Group, Producer
from shmbus.control.ask import ask_status
from shmbus.control.messages import StatusReply

# Longer than any step here on a loaded machine.
DEADLINE_S = 30.0

# The loop stops in its next timer beside a file for the purpose.
STOPPED_LOOP = """
import os, sys, time
from shmbus.cli import main
from shmbus.daemon.server import Server
stop, stopped = sys.argv.pop(), sys.argv.pop()
tick = Server._tick
def tick_or_stop(self):
    while os.path.exists(stop):
        open(stopped, "w").close()
        time.sleep(0.01)
    tick(self)
Server._tick = tick_or_stop
sys.exit(main())
"""

# Its first read meets an error, elsewhere a client's fault.
BROKEN = """
import sys, threading
from shmbus import ProtocolError
from shmbus.cli import main
from shmbus.daemon.service import Service
pump = Service.pump
def pump_or_fail(self, now):
    if threading.current_thread() is not threading.main_thread():
        raise ProtocolError("broken by a test")
    return pump(self, now)
Service.pump = pump_or_fail
sys.exit(main())
"""


def take_beside(consumer: Consumer, seconds: float) -> tuple[threading.Thread, list[Group]]:
    """Have a consumer take in a thread, and wait until its daemon reports the wait."""
    groups: list[Group] = []
    taker = threading.Thread(target=lambda: groups.extend(consumer.take(timeout=seconds)))
    taker.start()
    wait_until(lambda: _somebody_waits(consumer.name), what="the client to wait")
    return taker, groups


def _somebody_waits(name: str) -> bool:
    reply = ask_status(name)
    return isinstance(reply, StatusReply) and any(client.waiting for client in reply.daemon.leases)


def put(name: str, key: str) -> None:
    with Producer(name) as producer:
        producer.put(key, group_size=1, index=0, tokens=np.arange(4, dtype=np.int32))


def test_a_group_reaches_a_waiting_client_while_the_loop_stands_still(
    spawn: Spawner, bus_name: str, tmp_path: Path
) -> None:
    stop, stopped = tmp_path / "stop", tmp_path / "stopped"
    with Bus.create(bus_name, "1MiB"):
        served = spawn.script(STOPPED_LOOP, "serve", bus_name, stopped, stop)
        wait_until(lambda: " serving " in served.output(), what="the daemon to serve")
        with Consumer(bus_name) as consumer:
            taker, groups = take_beside(consumer, DEADLINE_S)
            stop.touch()
            wait_until(stopped.exists, what="the loop to stand still")
            put(bus_name, "g1")
            taker.join(DEADLINE_S)
            assert stop.exists() and [group.instance_id for group in groups] == ["g1"]
            stop.unlink()
            consumer.ack(groups)
            wait_until(lambda: consumer.stats().acknowledged == 1, what="the acknowledgement")


def test_an_error_in_it_ends_the_daemon_and_the_next_one_loses_nothing(
    spawn: Spawner, bus_name: str
) -> None:
    with Bus.create(bus_name, "1MiB"):
        broken = spawn.script(BROKEN, "serve", bus_name)
        wait_until(lambda: " serving " in broken.output(), what="the daemon to serve")
        put(bus_name, "g1")
        assert broken.wait(DEADLINE_S) == 1
        assert "broken by a test" in broken.output()
        served = Daemon(spawn, bus_name, ())
        with Consumer(bus_name) as consumer:
            groups = consumer.take(timeout=DEADLINE_S)
            assert [group.instance_id for group in groups] == ["g1"]
            consumer.ack(groups)
        served.stop()
