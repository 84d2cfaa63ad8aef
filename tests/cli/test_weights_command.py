"""``shmbus weights``: versions, readers, and obstacles."""

import os
from pathlib import Path

from operators import cli

from shmbus.pool import PoolPublisher, PoolReader, PoolSpec
from shmbus.pool.pool_file import pool_path


def test_versions_ranks_and_readers_are_shown(bus_name: str) -> None:
    spec = PoolSpec(slot_bytes=5000, slots=2)
    with (
        PoolPublisher(bus_name, "weights", spec=spec, label="trainer") as publisher,
        PoolReader(bus_name, "weights", label="replica\x1b[31m", device="cpu") as reader,
    ):
        assert "no version yet" in cli("weights", bus_name).out
        for version in (41, 42):
            with publisher.begin(version, 5000) as write:  # type: ignore[union-attr]
                write.view()[:] = 1
            lease = reader.latest(timeout=5)
            if version == 41:
                reader.applied(lease)
        reader.refused(lease, 3, "missing: lm_head.weight")
        shown = cli("weights", bus_name)
        assert shown.status == 0
        assert "version 42, 2 published, 0 skipped" in shown.out
        assert "trainer" in shown.out and "42: missing: lm_head.weight" in shown.out
        assert "\x1b" not in shown.out and "replica\\x1b[31m" in shown.out
        status = cli("weights", bus_name, "--json").json()
        assert status["version"] == 42
        assert [slot["held_by"] for slot in status["slots"]][1] == [
            f"replica\\x1b[31m (pid {os.getpid()})"
        ]
        (row,) = status["readers"]
        assert (row["applied_version"], row["refused_version"], row["error_code"]) == (41, 42, 3)
        del lease
        publisher.close(remove=True)


def test_a_bus_without_weights_says_so(bus_name: str) -> None:
    shown = cli("weights", bus_name)
    assert shown.status == 1 and shown.out == ""
    assert "there is no pool 'weights'" in shown.err and "start the publisher" in shown.err


def test_a_file_that_is_no_pool_is_named(bus_name: str) -> None:
    path = Path(pool_path(bus_name, "weights"))
    path.write_bytes(b"x" * 65536)
    shown = cli("weights", bus_name)
    assert shown.status == 1 and "is no pool, or its header" in shown.err
    path.unlink()
