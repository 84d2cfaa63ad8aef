"""Which engine answers: a session stays at one, and goes elsewhere while nothing has gone out."""

import pytest
from conftest import wait_until
from recorders import CALL, Scene, ask, call, chat, refused, user

pytest_plugins = ["recorder_fixtures"]


def test_a_session_stays_at_its_engine_and_sessions_are_spread(scene: Scene) -> None:
    import asyncio
    from concurrent.futures import ThreadPoolExecutor

    engines = [scene.start_engine(), scene.start_engine()]
    scene.start_recorder(*engines)
    sessions = [scene.open(f"q{number}") for number in range(4)]
    for engine in engines:
        engine.gate = asyncio.Event()
    with ThreadPoolExecutor(4) as pool:
        first = [pool.submit(chat, session, [user("hello")]) for session in sessions]
        wait_until(lambda: sum(engine.calls for engine in engines) == 4)
        for engine in engines:
            engine.let_go()
        for each in first:
            each.result(60)
    assert [engine.calls for engine in engines] == [2, 2]
    for session in sessions:
        for _ in range(3):
            chat(session, [user("hello")])
    assert [engine.calls for engine in engines] == [8, 8]
    for session in sessions:
        session.release()


@pytest.mark.parametrize("fault", ["die", "503", "abort", "nothing", "307", "401", "429"])
def test_an_engine_that_fails_before_any_output_is_replaced(fault: str, scene: Scene) -> None:
    engines = [scene.start_engine(), scene.start_engine()]
    scene.start_recorder(*engines)
    session = scene.open()
    engines[0].faults = [fault]
    chat(session, [user("hello")])
    assert [engine.calls for engine in engines] == [1, 1]
    assert session.finish(1.0)
    assert scene.taken()[0].meta["turns"] == 1


def test_an_empty_answer_in_place_of_a_stream_is_none(scene: Scene) -> None:
    session = scene.open()
    scene.engine.faults = ["nothing"] * 2
    body = {"model": "m", "messages": [user("hello")], "stream": True}
    answer = ask(f"{session.base_url}/chat/completions", body, session.api_key)
    assert refused(answer) == (503, "engine")
    session.release()


@pytest.mark.parametrize("healthy", [True, False])
def test_only_its_health_check_marks_an_engine_down(healthy: bool, scene: Scene) -> None:
    engines = [scene.start_engine(), scene.start_engine()]
    recorder = scene.start_recorder(*engines)
    session = scene.open()
    for engine in engines:
        engine.faults = ["503"] * 9
        engine.healthy = healthy
    assert call(session)[0] == 503
    assert sorted(engine.calls for engine in engines) == [1, 2]
    if healthy:
        assert [engine.state for engine in recorder.engines.all] == ["up", "up"]
    else:
        wait_until(lambda: [each.state for each in recorder.engines.all] == ["down", "down"])
    session.release()


def test_where_no_engine_answers_a_call_is_503_and_the_sample_is_not_to_blame(scene: Scene) -> None:
    recorder = scene.start_recorder("http://127.0.0.1:9")
    session = scene.open()
    assert refused(call(session)) == (503, "engine")
    status, health = ask(f"{recorder.url}/healthz")
    assert (status, health["engines"][0]["state"]) == (503, "down")
    session.release()


def test_an_engine_with_another_key_is_named(scene: Scene) -> None:
    scene.engine.key = "secret"
    status, health = ask(f"{scene.recorder.url}/healthz")
    assert status == 503 and "SHMBUS_ENGINE_KEY" in health["engines"][0]["why"]


@pytest.mark.parametrize("client", ["openai", "urllib"])
def test_an_outage_releases_samples_of_raising_agents(client: str, scene: Scene) -> None:
    import openai

    scene.start_recorder("http://127.0.0.1:9")
    session = scene.open()
    with pytest.raises(openai.APIError if client == "openai" else LookupError), session:
        if client == "openai":
            made = openai.OpenAI(base_url=session.base_url, api_key=session.api_key, max_retries=0)
            made.chat.completions.create(**CALL)
        assert call(session)[0] == 503
        raise LookupError("an agent of another process")
    assert "released" in repr(session) and "engine" in session.why
    assert scene.consumer.take(timeout=0.05) == [] and scene.consumer.stats().committed == 0


def test_an_agent_that_raises_after_an_outage_is_over_fails_its_sample(scene: Scene) -> None:
    engine = scene.start_engine()
    scene.start_recorder(engine.url)
    session = scene.open()
    with pytest.raises(LookupError), session:
        engine.faults = ["503"] * 9
        assert call(session)[0] == 503
        engine.faults = []
        assert call(session)[0] == 200
        raise LookupError("of the agent")
    assert "failed" in repr(session)


def test_an_engine_that_comes_back_is_used_again(scene: Scene) -> None:
    engine = scene.start_engine()
    recorder = scene.start_recorder(engine)
    session = scene.open()
    engine.faults = ["die", "die"]
    assert call(session)[0] == 503
    assert recorder.engines.all[0].failures == 2
    wait_until(lambda: ask(f"{recorder.url}/healthz")[0] == 200)
    chat(session, [user("hello")])
    session.release()


def test_metrics_and_health_say_how_engines_and_sessions_are(scene: Scene) -> None:
    import urllib.request

    recorder = scene.start_recorder(scene.engine)
    session = scene.open()
    chat(session, [user("hello")])
    status, health = ask(f"{recorder.url}/healthz")
    assert (status, health["sessions"], health["engines"][0]["state"]) == (200, 1, "up")
    with urllib.request.urlopen(f"{recorder.url}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    name = recorder.settings.bus
    assert f'shmbus_recorder_sessions{{bus="{name}"}} 1' in lines
    assert f'shmbus_recorder_turns_total{{bus="{name}"}} 1' in lines
    assert f'shmbus_recorder_engine_up{{bus="{name}",engine="{scene.engine.url}"}} 1' in lines
    route = 'route="/v1/chat/completions",status="200"'
    assert f'shmbus_recorder_requests_total{{bus="{name}",{route}}} 1' in lines
    sent = f'shmbus_recorder_sent_bytes_total{{bus="{name}",route="/v1/chat/completions"}}'
    assert int(next(line for line in lines if line.startswith(sent)).split()[-1]) > 100
    assert session.api_key not in "".join(lines)
    session.release()


def test_models_are_the_engines(scene: Scene) -> None:
    scene.start_recorder(scene.engine)
    session = scene.open()
    status, models = ask(f"{session.base_url}/models", None, session.api_key)
    assert (status, models["data"][0]["id"]) == (200, "m")
    session.release()
