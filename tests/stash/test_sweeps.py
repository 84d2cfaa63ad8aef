"""Sweeps for dead producers, and the ledger: flat however many producers are attached."""

import signal
from pathlib import Path

from conftest import Spawner, wait_until
from counted_calls import count

from shmbus import Bus, Consumer, Producer

SWEEPS = """
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
with ExitStack() as stack:
    stack.enter_context(shmbus.Bus.create(sys.argv[1], "16MiB", max_producers=700))
    for _ in range(600):
        stack.enter_context(shmbus.Producer(sys.argv[1]))
    consumer = stack.enter_context(shmbus.Consumer(sys.argv[1]))
    locks()
    ledgers = [consumer.stats() for _ in range(10)]
    asked = locks()
    swept = []
    for _ in range(3):
        consumer._source.reader.sweep()
        swept.append(locks())
    print(json.dumps([asked, swept, ledgers[-1].producers]))
"""


def test_a_sweep_asks_about_a_share_of_the_producers_and_a_ledger_about_none_soon_after(
    bus_name: str, spawn: Spawner, tmp_path: Path
) -> None:
    asked, swept, attached = count(spawn, tmp_path, SWEEPS, bus_name)
    assert asked <= 256 and max(swept) <= 256 and sum(swept) >= 600
    assert attached == 600


DIES = """
import sys, time, shmbus
producers = [shmbus.Producer(sys.argv[1]) for _ in range(int(sys.argv[2]))]
print("attached", flush=True)
time.sleep(1000)
"""


def test_many_deaths_at_once_are_found_by_one_sweep_and_one_death_among_many_by_a_round(
    bus_name: str, spawn: Spawner
) -> None:
    with Bus.create(bus_name, "16MiB", max_producers=700), Consumer(bus_name) as consumer:
        crowd = spawn.script(DIES, bus_name, 300, until="attached")
        alone = spawn.script(DIES, bus_name, 1, until="attached")
        sweep = consumer._source.reader.sweep  # type: ignore[union-attr]
        assert sweep() == 0
        alone.send_signal(signal.SIGKILL)
        alone.wait()
        assert sweep() + sweep() == 1
        crowd.send_signal(signal.SIGKILL)
        crowd.wait()
        assert sweep() == 300
        with Producer(bus_name) as producer:
            producer.put("q", group_size=1, index=0)
            wait_until(lambda: consumer.stats().committed == 1)
