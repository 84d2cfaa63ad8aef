"""A take whose memory fails half way loses nothing: it goes on, or says that it cannot."""

import pytest
from conftest import Spawner

pytest.importorskip("_testcapi", reason="this interpreter cannot make an allocation fail")

#: Fails one allocation of each take, or all from one on, and audits after each.
TAKES = """
import sys
import _testcapi, numpy as np
from shmbus import Bus, BusClosedError, Consumer, Producer

name, options = sys.argv[1], eval(sys.argv[2])
X = np.arange(5, dtype=np.int32)
failures = closed = quiet = number = 0

with Bus.create(name, "1MiB", max_producers=2) as bus:
    consumer = Consumer(name, daemon=False, **options)
    for once in (True, False):
        quiet = after = 0
        while quiet < 8:
            with Producer(name) as producer:
                wanted = sorted(f"g{number}-{i}" for i in range(3))
                for key in wanted:
                    for index in range(2):
                        producer.put(key, group_size=2, index=index, score=float(index), x=X)
            number += 1
            failed = False
            found = []
            _testcapi.set_nomemory(after, after + 1 if once else 0)
            try:
                found = consumer.take(2, 0)
            except MemoryError:
                failed = True
            finally:
                _testcapi.remove_mem_hooks()
            quiet = 0 if failed else quiet + 1
            failures += failed
            assert consumer.stats().balanced, (after, consumer.stats())
            try:
                while len(found) < len(wanted):
                    more = consumer.take(64, 1)
                    assert more, (after, found, consumer.stats())
                    found += more
            except BusClosedError as error:
                assert "reads no more" in str(error), error
                assert consumer.stats().balanced, (after, consumer.stats())
                consumer.ack(found)
                wanted = [key for key in wanted if key not in [g.instance_id for g in found]]
                consumer.close()
                consumer = Consumer(name, daemon=False, **options)
                found = consumer.take(64, 1)
                closed += 1
            assert sorted(g.instance_id for g in found) == wanted, (after, found)
            for group in found:
                assert all((t["x"] == X).all() for t in group)
                group.ack()
            ledger = consumer.stats()
            assert ledger.balanced and not ledger.undelivered and not ledger.dropped, ledger
            after += 1
    consumer.close()
    bus.unlink()
print("failed", failures, "closed", closed)
assert failures > 20
"""


@pytest.mark.parametrize(
    "options", ["{}", "{'max_policy_lag': 4, 'max_stash_bytes': 1 << 20, 'sample_retries': 1}"]
)
def test_a_take_without_memory_loses_nothing(bus_name: str, spawn: Spawner, options: str) -> None:
    spawn.script(TAKES, bus_name, options).finish()
