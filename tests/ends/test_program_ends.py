"""Ends of programs: a daemon and a gateway, signalled twice, and a third life.

A cell is (signal, holdings, action of the other side), as in cells.py.
"""

import contextlib
import itertools
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bus_parties import GROUPS, LeaserParty
from cells import LONG, OTHER_SIDES, SIGNALS, Cell, cells, why_not
from conftest import Daemon, Spawner
from endings import Task

HERE = Path(__file__).parent
#: Each signal with every action of the other side; in the short form with a single action.
ENDS = [
    (how, other)
    for (m, how), (n, other) in itertools.product(enumerate(SIGNALS), enumerate(OTHER_SIDES))
    if LONG or m == n
]
#: Holds a daemon's lease until told, then acknowledges; "closed" leaves before.
CLIENT = f"""
import json, os, sys, time
sys.path.insert(0, {str(HERE)!r})
from bus_parties import members
import shmbus
name, held, directory = sys.argv[1:]
consumer = shmbus.Consumer(name, daemon=True)
groups = consumer.take(1, 30.0) if held == "lease" else []
print(json.dumps({{group.instance_id: members(group) for group in groups}}))
print("holds", flush=True)
while not os.path.exists(directory + "/close") and not os.path.exists(directory + "/ack"):
    time.sleep(0.003)
if os.path.exists(directory + "/ack"):
    for group in groups:
        members(group)
        group.ack()
consumer.close()
"""


def signalled(how: str, child: Any) -> None:
    child.send_signal(getattr(signal, how))
    assert child.wait() == (-signal.SIGKILL if how == "SIGKILL" else 0), child.output()
    assert "Traceback" not in child.output(), child.output()


@pytest.mark.parametrize(("how", "other"), ENDS)
def test_what_a_daemon_had_is_found_by_its_successors(
    how: str,
    other: str,
    spawn: Spawner,
    bus_name: str,
    tmp_path: Path,
    daemon: Callable[..., Daemon],
) -> None:
    for held in (
        cell.held for cell in programs("daemon") if (cell.how, cell.other) == (how, other)
    ):
        task = Task(0, "leaser", held, other, f"{bus_name}.{held}")
        directory = tmp_path / held
        directory.mkdir()
        party = LeaserParty(how)
        party.prepare(task)
        served = daemon("--drain-timeout", 0, name=task.name)
        client = spawn.script(CLIENT, task.name, held, directory, until="holds")
        leased = json.loads(client.output().splitlines()[0])
        facts = [{"put": [f"group{number}" for number in range(GROUPS)], "leased": leased}]
        if other == "dead":
            client.kill()
        elif other == "closed":
            (directory / "close").touch()
            client.finish()
        for life in range(2):
            signalled(how, served.child)
            facts.append({"put": party.press(task, f"press{life}")})
            served.start()
        if other == "open":
            # The lease outlived two daemons.
            (directory / "ack").touch()
            client.finish()
            facts.append({"acked": [*leased]})
        party.audit(task, facts)
        served.stop()


def programs(who: str) -> list[Cell]:
    return [cell for cell in cells() if cell.who == who and not why_not(cell)]


@pytest.mark.parametrize(("how", "other"), ENDS)
def test_what_a_gateway_had_is_found_by_its_successors(
    how: str,
    other: str,
    spawn: Spawner,
    bus_name: str,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    pytest.importorskip("aiohttp")
    monkeypatch.syspath_prepend(HERE.parent / "gateway")
    stack = contextlib.ExitStack()
    request.addfinalizer(stack.close)
    from gateways import Gateway
    from http_answers import read_answer
    from http_requests import request_bytes, reset, scored

    for held in (c.held for c in programs("gateway") if (c.how, c.other) == (how, other)):
        gateway = Gateway(spawn, f"{bus_name}.{held}", ("--create", "1MiB"))
        for prefix in ("shmbus.", "shmbus-gateway."):
            stack.callback(Path(f"/dev/shm/{prefix}{gateway.name}").unlink, missing_ok=True)
        gateway.register(batch_size=2)
        awaited: list[int] = []
        given: list[int] = []
        connection = stack.enter_context(gateway.connect())
        for life in range(2):
            for number in (2 * life, 2 * life + 1):
                body = scored([number] * 50, [number] * 50)
                assert gateway.post("/scored_data", body).status == 200
                awaited.append(number)
            if held == "batch" and life == 0:
                # Read whole, hence the trainer's.
                connection.sendall(request_bytes("GET", "/batch"))
                batch = read_answer(connection, has_body=True).json()["batch"]
                given = [group["tokens"][0][0] for group in batch]
                awaited = [number for number in awaited if number not in given]
            if life == 0 and other != "open":
                reset(connection) if other == "dead" else connection.close()
            signalled(how, gateway.child)
            gateway.start()
        found = []
        while (batch := gateway.batch()) is not None:
            found += [group["tokens"][0][0] for group in batch]
        # In any order: each life puts by its own producer. A batch with a reset connection comes
        # again, if the gateway lived to see the reset.
        assert sorted(found) in ([awaited, given + awaited] if other == "dead" else [awaited])
        connection.close()
        gateway.stop()
