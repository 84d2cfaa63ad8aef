"""A thousand sessions at once, with a call of each in flight."""

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from conftest import wait_until
from counted_work import instructions
from recorders import Scene, user

import shmbus
from shmbus.recorder import settings
from shmbus.recorder.recorder import Recorder
from shmbus.recorder.sessions import Place, Session
from shmbus.recorder.settings import SWEEP_SESSIONS, Settings

pytest_plugins = ["recorder_fixtures"]

SESSIONS = 1000


def test_looks_check_sessions_in_turn(bus: shmbus.Bus, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder(Settings(bus=bus.name, engines=("http://127.0.0.1:9",)))
    checked: list[Session] = []
    monkeypatch.setattr(recorder, "_check", lambda session, now_s: checked.append(session))
    place = Place("q", 0, 1)
    count = 2 * SWEEP_SESSIONS + 1
    opened = [recorder.sessions.open(place, None, True, 0.0) for _ in range(count)]
    looks = []
    while len(checked) < count:
        recorder._check_some(1.0)
        looks.append(len(checked))
    assert looks == [SWEEP_SESSIONS, 2 * SWEEP_SESSIONS, count]
    assert checked == opened
    recorder._check_some(2.0)
    assert checked[count:] == opened[:SWEEP_SESSIONS]
    recorder._file.close()
    recorder.producer.close()


def test_a_look_and_a_note_cost_no_more_with_more_sessions(
    bus: shmbus.Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "SWEEP_SESSIONS", 64)
    recorder = Recorder(Settings(bus=bus.name, engines=("http://127.0.0.1:9",)))
    monkeypatch.setattr(recorder, "_is_wanted", lambda session: True)
    costs = []
    for more in (64, 1000):
        for _ in range(more):
            recorder.sessions.open(Place("q", 0, 1), None, True, 0.0)
        costs.append(instructions(lambda: (recorder._check_some(0.0), recorder._write_note())))
    assert costs[1] <= 1.1 * costs[0]
    recorder._file.close()
    recorder.producer.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_thousand_sessions_at_once_are_put_each_with_its_own_tokens(scene: Scene) -> None:
    sessions: list[shmbus.Session] = []
    recorder = scene.recorder
    for number in range(SESSIONS // 50):
        scene.feeder.request(f"q{number}", group_size=50)
        sessions += [scene.producer.session(scene.producer.requests.next(60.0)) for _ in range(50)]
    assert len(recorder.sessions) == SESSIONS
    scene.engine.gate = asyncio.Event()

    async def call(client: aiohttp.ClientSession, session: shmbus.Session) -> None:
        name = f"{session.request.instance_id} {session.request.index}"
        body: Any = {"model": "m", "messages": [user(name)]}
        headers = {"Authorization": f"Bearer {session.api_key}"}
        url = f"{session.base_url}/chat/completions"
        async with client.post(url, json=body, headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            json.loads(await answer.read())

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        calls = [asyncio.ensure_future(call(client, session)) for session in sessions]
        await asyncio.to_thread(wait_until, lambda: scene.engine.calls == SESSIONS, 120)
        assert recorder.calls.running == SESSIONS
        scene.engine.let_go()
        await asyncio.gather(*calls)
    for session in sessions:
        assert session.finish(1.0)
    found: dict[tuple[str, int], list[int]] = {}
    while len(found) < SESSIONS:
        for group in scene.consumer.take(10, timeout=60.0):
            for sample in group:
                (row,) = sample.rows
                found[sample.instance_id, sample.index] = row["tokens"].tolist()
            group.ack()
    sampled = sorted([*one.prompt, *one.output] for one in scene.engine.record)
    assert sorted(found.values()) == sampled
    wait_until(lambda: not len(recorder.sessions))
    assert scene.recorder.sessions.nbytes == 0
