"""The exception that ends a ``with`` block reaches the caller, whatever became of the handle."""

import os
import re
import shutil
import subprocess
import sys

import numpy as np
import pytest
from conftest import DEFAULT_DEADLINE_S, Spawner

from shmbus import Bus, BusClosedError, Consumer, Producer

_CHILD_LEAVES = """
import os, sys
import numpy as np
import shmbus

name = sys.argv[1]
with (
    shmbus.Bus.create(name, "1MiB", max_producers=4),
    shmbus.Producer(name) as producer,
    shmbus.Consumer(name) as consumer,
):
    producer.put("a", group_size=1, index=0, tokens=np.arange(3))
    [group] = consumer.take(timeout=30.0)
    with producer.reserve("b", group_size=1, index=0, fields={"x": ("int32", 3)}) as slot, group:
        child = os.fork()
        if child == 0:
            sys.exit(7)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        slot["x"][:] = 5
    assert os.path.exists("/dev/shm/shmbus." + name)
    [second] = consumer.take(timeout=30.0)
    assert second[0]["x"].tolist() == [5, 5, 5]
    second.ack()
    ledger = consumer.stats()
    assert ledger.balanced and ledger.acknowledged == 2, ledger
print(status)
"""


def test_a_forked_child_leaves_its_parents_blocks_with_its_own_status(
    bus_name: str, spawn: Spawner
) -> None:
    assert spawn.script(_CHILD_LEAVES, bus_name, fresh=True).finish() == "7\n"


def test_an_exception_in_a_block_whose_handle_was_closed_there_is_the_one_that_comes_out(
    bus: Bus,
) -> None:
    consumer, producer = Consumer(bus.name), Producer(bus.name)
    producer.put("a", group_size=1, index=0, tokens=np.arange(3))
    [group] = consumer.take(timeout=30.0)
    with pytest.raises(KeyError, match="mine"), group:
        consumer.close()
        raise KeyError("mine")
    slot = producer.reserve("b", group_size=1, index=0, fields={"x": ("int32", 3)})
    with pytest.raises(KeyError, match="mine"), slot:
        producer.close()
        raise KeyError("mine")
    # Leased groups come again; nothing was committed.
    with Consumer(bus.name) as successor:
        [again] = successor.take(timeout=30.0)
        assert again.instance_id == "a"
        again.ack()
        assert successor.stats().committed == 1


def test_a_block_that_ends_well_after_its_handle_was_closed_says_that_nothing_was_done(
    bus: Bus,
) -> None:
    with Producer(bus.name) as producer:
        producer.put("a", group_size=1, index=0, tokens=np.arange(3))
    consumer = Consumer(bus.name)
    [group] = consumer.take(timeout=30.0)
    with pytest.raises(BusClosedError, match="closed"), group:
        consumer.close()


def _may_unshare() -> bool:
    return (
        os.geteuid() == 0
        and shutil.which("unshare") is not None
        and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
    )


#: Maker of a segment of its kind, and its file.
MAKING = {
    "bus": ("shmbus.Bus.create({name!r}, '64KiB', max_producers=2)", "shmbus.{name}"),
    "pool": (
        "from shmbus.pool import *; create_pool({name!r}, 'things', PoolSpec(slot_bytes=4096))",
        "shmbus-things.{name}",
    ),
    "channel": (
        "from shmbus.channel import *; ChannelSender({name!r}, max_bytes=4096)",
        "shmbus-channel.{name}",
    ),
}


@pytest.mark.skipif(not _may_unshare(), reason="needs root and mount namespaces")
@pytest.mark.parametrize("kind", MAKING)
def test_a_container_without_proc_says_what_it_lacks_and_leaves_no_segment(
    bus_name: str, kind: str
) -> None:
    making, file = (each.format(name=bus_name) for each in MAKING[kind])
    ended = subprocess.run(
        ["unshare", "-m", "sh", "-c", 'mount -t tmpfs tmpfs /proc && exec "$@"', "sh",
         sys.executable, "-c", f"import shmbus; {making}"],
        capture_output=True, text=True, timeout=2 * DEFAULT_DEADLINE_S,
    )  # fmt: skip
    said = rf"OSError: {kind} '{bus_name}[^']*': this process needs /proc/self/fd, to map a {kind} "
    assert re.search(said, ended.stderr), ended.stderr
    assert not os.path.exists(f"/dev/shm/{file}")
