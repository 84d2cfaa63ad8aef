"""A party whose bus cannot be used says why, and begins once another one is there."""

from pathlib import Path

import pytest
from conftest import Spawner

import shmbus
from shmbus.segment.names import shm_path

PARTY = """
import sys, time
from shmbus.relay.host import Host, PartyPlan

host = Host(PartyPlan(sys.argv[1], "own", "coordinator", sys.argv[2]), lambda *message: None)
host.start()
before = ""
while True:
    said = host.describe()
    found = said.get("error", "it works" if said["ledger"] else "")
    found = "another version" if "layout version 99" in found else found
    if found in ("it works", "another version") and found != before:
        print(found, flush=True)
        before = found
    time.sleep(0.01)
"""


@pytest.mark.parametrize("kind", ["source", "sink"])
def test_a_bus_of_another_version_is_told(bus_name: str, spawn: Spawner, kind: str) -> None:
    shmbus.Bus.create(bus_name, "4MiB").close()
    with Path(shm_path(bus_name)).open("r+b") as segment:
        segment.seek(8)
        segment.write(bytes([99, 0, 0, 0]))
    party = spawn.script(PARTY, kind, bus_name, until="another version")
    shmbus.unlink(bus_name)
    shmbus.Bus.create(bus_name, "4MiB").close()
    party.expect("it works")
    assert party.running
