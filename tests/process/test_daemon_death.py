"""A daemon that dies between its grant of groups and the client's use of the grant."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import Daemon, client_of, wait_until

from shmbus import Consumer, Producer


def test_what_a_dead_daemon_had_granted_last_is_not_taken_for_the_next_ones(
    daemon: Callable[..., Daemon], bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = daemon("--capacity", "8MiB")
    with Producer(bus_name) as producer, Consumer(bus_name) as consumer:
        for key in ("a", "b", "c"):
            producer.put(key, group_size=1, index=0, tokens=np.arange(8, dtype=np.int32))
        client = client_of(consumer)
        borrow, wires = client.borrow, [client.connection.wire]

        def late(*arguments: Any) -> Any:
            # The watcher reaches the next daemon before the thread with the reply goes on.
            if len(wires) == 1:
                served.kill()
                served.start()
                wires.append(wait_until(lambda: client.connection.wire not in (None, wires[0])))
            return borrow(*arguments)

        monkeypatch.setattr(client, "borrow", late)
        taken = [consumer.take(1, timeout=10)[0] for _ in range(3)]
        assert [group.instance_id for group in taken] == ["a", "b", "c"]
        consumer.ack(taken)
        assert wait_until(lambda: consumer.stats().acknowledged == 3)
