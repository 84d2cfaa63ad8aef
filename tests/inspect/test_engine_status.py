"""Inference servers are parties of a run: status, sentence, metrics and page name each of them."""

import urllib.request
from collections.abc import Iterator

import msgspec
import pytest
from operators import cli

from shmbus import Bus
from shmbus.daemon.metrics import MetricsServer
from shmbus.data.status_types import EngineStatus, Finding
from shmbus.inspect.rates import Watcher
from shmbus.inspect.status import read_status
from shmbus.inspect.text import status_text
from shmbus.inspect.verdict import STILL_S, judge
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec
from shmbus.segment.recorder_files import EngineNote, RecorderFile, RecorderNote
from shmbus.web.picture import picture

GOOD, OLD, DEAD, OTHER = (f"http://127.0.0.1:{port}" for port in (1, 2, 3, 4))


def rank_of(bus: str, url: str) -> PoolReader:
    return PoolReader(bus, "weights", label=f"{url} rank 0", keeps_row=True)


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    """A bus with a server of each state: newest version, older one, dead, a recorder's."""
    with (
        Bus.create(bus_name, "1MiB") as bus,
        PoolPublisher(bus_name, "weights", spec=PoolSpec(slot_bytes=4096)) as publisher,
        rank_of(bus_name, GOOD) as good,
        rank_of(bus_name, OLD) as old,
        rank_of(bus_name, DEAD) as dead,
    ):
        for version in (6, 7):
            publisher.begin(version, 1).finish()  # type: ignore[union-attr]
            for rank in (good, *([old, dead] if version == 6 else [])):
                with rank.latest(timeout=5.0) as newest:
                    rank.applied(newest)
        dead.close()
        file = RecorderFile(bus_name)
        engines = [
            EngineNote(url=GOOD, state="up", calls=3, version=7, version_by="rows"),
            EngineNote(url=OTHER, state="up", calls=1, version=2, version_by="trainer"),
        ]
        file.write(RecorderNote(url="http://127.0.0.1:9", pid=1, engines=engines))
        yield bus
        file.close()
        publisher.close(remove=True)


def test_a_status_has_a_row_for_each_server_by_rows_and_recorders(bus: Bus) -> None:
    status = read_status(bus.name)
    found = {each.address: each for each in status.engines}
    assert {at: (each.state, each.version, each.calls) for at, each in found.items()} == {
        GOOD: ("serving", 7, 3),
        OLD: ("behind", 6, None),
        DEAD: ("unknown", None, None),
        OTHER: ("assumed", 2, 1),
    }
    assert (found[GOOD].answers, found[OTHER].ranks, found[GOOD].ranks) == ("up", 0, 1)
    assert found[GOOD].updated_s is not None and found[OLD].behind_s is not None
    assert found[DEAD].why and not found[GOOD].why
    lives = [found[at].life for at in (GOOD, OLD, DEAD)]
    assert lives[0] and lives[1] and lives[0] != lives[1] and not lives[2]
    assert status.verdict is not None
    (finding,) = [each for each in status.verdict.findings if each.kind == "engine_unknown"]
    assert finding.who == [DEAD] and DEAD in finding.what
    told = status_text(status)
    assert all(at in told for at in found)
    (shown,) = cli("status", bus.name, "--json").json()["engines"][:1]
    assert shown["address"] == GOOD


def of(*engines: EngineStatus, bus: Bus) -> dict[str, Finding]:
    status = msgspec.structs.replace(read_status(bus.name), engines=[*engines])
    return {each.kind: each for each in judge(status).findings if each.kind.startswith("engine")}


def test_the_sentence_names_unknown_servers_before_those_behind(bus: Bus) -> None:
    unknown = EngineStatus(address=DEAD, state="unknown", why="it ended")
    assert set(of(unknown, bus=bus)) == {"engines_unknown"}
    good = EngineStatus(address=GOOD, state="serving", version=7)
    assert of(good, bus=bus) == {}
    for behind_s, kinds in ((STILL_S - 1, set()), (STILL_S, {"engine_behind"})):
        old = EngineStatus(address=OLD, state="behind", version=6, behind_s=behind_s)
        assert set(of(good, old, bus=bus)) == kinds


def test_a_sleeper_is_a_fault_only_for_a_waiting_or_missing_trainer(bus: Bus) -> None:
    asleep = EngineStatus(address=GOOD, state="asleep", why="asleep", asleep_s=STILL_S)
    status = read_status(bus.name)
    for alive, waits, since_s, level in (
        (True, False, STILL_S, "note"),
        (True, True, STILL_S - 1, "note"),
        (True, True, STILL_S, "trouble"),
        (False, False, 1.0, "trouble"),
    ):
        collector = msgspec.structs.replace(status.collector, alive=alive, waits=waits)
        engine = msgspec.structs.replace(asleep, asleep_s=since_s)
        found = judge(msgspec.structs.replace(status, engines=[engine], collector=collector))
        (finding,) = [each for each in found.findings if each.kind == "engines_asleep"]
        assert finding.who == [GOOD] and (finding.cost >= 0.6) == (level == "trouble")
        assert bool(finding.advice) == (level == "trouble")


def test_metrics_and_page_name_each_server(bus: Bus) -> None:
    with MetricsServer(bus.name, 0) as server:
        url = f"http://{server.host}:{server.port}/metrics"
        with urllib.request.urlopen(url, timeout=20) as answer:
            text = answer.read().decode()
    states = {GOOD: "serving", OLD: "behind", DEAD: "unknown", OTHER: "assumed"}
    for at, state in states.items():
        labels = f'bus="{bus.name}",engine="{at}",state="{state}"'
        assert f"shmbus_engine_state{{{labels}}} 1.0" in text
    assert f'shmbus_engine_version{{bus="{bus.name}",engine="{OLD}"}} 6.0' in text
    assert f'shmbus_engine_version{{bus="{bus.name}",engine="{DEAD}"}}' not in text
    watcher = Watcher(bus.name)
    watcher.poll()
    rows = picture(watcher, 1000.0)["engines"]["rows"]
    assert {at: row["state"] for at, row in rows.items()} == states
    assert (rows[GOOD]["version"], rows[GOOD]["calls"]) == (7, 3)
    assert "version" not in rows[DEAD] and rows[DEAD]["why"]
