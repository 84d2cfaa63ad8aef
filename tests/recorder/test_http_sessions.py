"""Sessions that a harness of any language opens, scores and fails over HTTP."""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import doc_pages
import numpy as np
import pytest
from conftest import beside, wait_until
from recorders import CALL, Scene, ask, refused, user

import shmbus
from shmbus.recorder.recorder import Recorder

pytest_plugins = ["recorder_fixtures"]


def opened(recorder: Recorder, feeder: shmbus.Feeder, **request: Any) -> dict[str, Any]:
    feeder.request("q", **{"group_size": 1, **request})
    status, answer = ask(f"{recorder.url}/sessions", {"timeout": 30})
    assert status == 200, answer
    return answer


def call(answer: dict[str, Any]) -> None:
    status, body = ask(f"{answer['base_url']}/chat/completions", CALL, answer["api_key"])
    assert status == 200, body


def end(recorder: Recorder, answer: dict[str, Any], how: str, body: Any) -> Any:
    return ask(f"{recorder.url}/session/{how}", body, answer["api_key"])


def test_the_prompt_comes_with_the_session_and_the_score_puts_the_sample(scene: Scene) -> None:
    prompt = np.arange(3, dtype=np.int32)
    answer = opened(scene.recorder, scene.feeder, prompt=prompt, meta={"ask": "hello"})
    assert answer["meta"] == {"ask": "hello"}
    assert answer["fields"] == {"prompt": [0, 1, 2]}
    assert (answer["instance_id"], answer["index"], answer["group_size"]) == ("q", 0, 1)
    call(answer)
    status, told = ask(f"{scene.recorder.url}/session", None, answer["api_key"])
    assert (status, told["turns"], told["running"]) == (200, 1, 0)
    body = {"score": 0.5, "meta": {"env": "x"}}
    assert end(scene.recorder, answer, "score", body) == (200, {"put": True})
    (group,) = scene.consumer.take(1, timeout=30.0)
    assert group.scores == [0.5]
    assert group[0].meta["env"] == "x"
    (row,) = group[0].rows
    assert row["tokens"].tolist() == scene.engine.record[0].prompt + scene.engine.record[0].output


def test_a_key_in_the_address_does_for_harnesses_that_take_no_other(scene: Scene) -> None:
    url = opened(scene.recorder, scene.feeder)["url_with_key"]
    assert ask(f"{url}/chat/completions", CALL, "anything")[0] == 200
    assert ask(f"{url}/v1/chat/completions", CALL)[0] == 200
    root = url.removesuffix("/v1")
    assert ask(f"{root}/session/score", {"score": 1})[0] == 200


def test_no_prompt_in_time_is_204(recorder: Recorder) -> None:
    assert ask(f"{recorder.url}/sessions", {"timeout": 0.05}) == (204, {})
    assert ask(f"{recorder.url}/sessions", {}) == (204, {})
    assert refused(ask(f"{recorder.url}/sessions", {"timeout": "soon"})) == (400, "invalid_call")


@pytest.mark.parametrize("score", [b'{"score": NaN}', b'{"score": Infinity}', {"score": "1"}, {}])
def test_a_score_that_is_no_finite_number_fails_the_sample(score: Any, scene: Scene) -> None:
    answer = opened(scene.recorder, scene.feeder)
    call(answer)
    assert refused(end(scene.recorder, answer, "score", score)) == (422, "bad_score")
    assert refused(end(scene.recorder, answer, "score", {"score": 1.0})) == (404, "bad_score")

    def again() -> shmbus.Request | None:
        assert not scene.consumer.take(1, timeout=0.02)
        return scene.producer.requests.next(0)

    assert "expected a number within 1e38" in wait_until(again).reason


def test_the_same_score_again_is_the_same_answer_and_another_one_is_refused(scene: Scene) -> None:
    answer = opened(scene.recorder, scene.feeder)
    call(answer)
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda _: end(scene.recorder, answer, "score", {"score": 1.0}), range(4))
        )
    assert (200, {"put": True}) in found
    assert all(status == 200 or refused((status, b)) == (404, "scored") for status, b in found)
    assert refused(end(scene.recorder, answer, "score", {"score": 0.0})) == (404, "scored")
    assert [sample.score for sample in scene.taken()] == [1.0]
    assert not scene.consumer.take(1, timeout=0.05)


def test_a_score_that_waits_for_room_is_the_only_end(scene: Scene) -> None:
    answer = opened(scene.recorder, scene.feeder)
    call(answer)
    scene.bus.pause()
    with ThreadPoolExecutor(1) as pool:
        scored = pool.submit(end, scene.recorder, answer, "score", {"score": 1.0})
        wait_until(lambda: any(each.putting for each in scene.recorder.sessions))
        for what, body in (("fail", {"reason": "late"}), ("score", {"score": "x"})):
            assert refused(end(scene.recorder, answer, what, body)) == (409, "scored")
        scene.bus.resume()
        assert scored.result() == (200, {"put": True})


def test_a_failure_is_reported_and_the_sample_comes_again(scene: Scene) -> None:
    answer = opened(scene.recorder, scene.feeder)
    assert end(scene.recorder, answer, "fail", {"reason": "the tool broke"})[0] == 200
    assert refused(end(scene.recorder, answer, "score", {"score": 1.0})) == (404, "failed")

    def again() -> dict[str, Any] | None:
        assert not scene.consumer.take(1, timeout=0.02)
        status, found = ask(f"{scene.recorder.url}/sessions", {"timeout": 0})
        return found if status == 200 else None

    found = wait_until(again)
    assert (found["attempt"], found["reason"]) == (1, "failed: the tool broke")


def test_a_harness_that_dies_has_its_sample_fail_after_a_while(scene: Scene) -> None:
    call(opened(scene.start_recorder(scene.engine, idle_s=0.2), scene.feeder))

    def again() -> shmbus.Request | None:
        assert not scene.consumer.take(1, timeout=0.02)
        return scene.producer.requests.next(0)

    assert "no call" in wait_until(again).reason


def test_an_engine_without_the_recorded_experts_is_named(scene: Scene) -> None:
    answer = opened(scene.start_recorder(scene.engine, experts=(1, 1)), scene.feeder)
    status, body = ask(f"{answer['base_url']}/chat/completions", CALL, answer["api_key"])
    assert (status, body["error"]["code"]) == (404, "bad_answer")
    assert "--enable-return-routed-experts" in body["error"]["message"]


def test_sessions_are_opened_with_the_recorders_token(scene: Scene) -> None:
    recorder = scene.start_recorder(scene.engine, token="secret")
    assert refused(ask(f"{recorder.url}/sessions", {})) == (401, "token")
    assert refused(ask(f"{recorder.url}/sessions", {}, "other")) == (401, "token")
    assert ask(f"{recorder.url}/sessions", {}, "secret")[0] == 204
    scene.feeder.request("q", group_size=1)
    # A worker finds the token where it finds the recorder.
    scene.producer.session(scene.producer.requests.next(30.0)).release()


def test_a_route_that_there_is_not_names_those_that_there_are(recorder: Recorder) -> None:
    status, body = ask(f"{recorder.url}/v1/embeddings", {})
    assert status == 404
    assert "/v1/chat/completions" in body["error"]["message"]
    assert ask(f"{recorder.url}/v1/chat/completions")[0] == 405


def test_the_agents_page_runs_an_agent_over_http_and_in_python(scene: Scene) -> None:
    """Stand-ins: the engine is a stub, the agent asks once, and the port is the recorder's own."""
    url = scene.recorder.url
    for name in ("q1", "q2"):
        scene.feeder.request(name, group_size=1, meta={"ask": name})

    def run_agent(meta: dict[str, Any], base_url: str, key: str) -> str:
        body = {"model": "m", "messages": [user(meta["ask"])]}
        return str(ask(f"{base_url}/chat/completions", body, key)[0])

    opened, scored, failed = doc_pages.block("docs/agents.md", "curl -s").splitlines()

    def curl(line: str, key: str) -> Any:
        line = line.replace("http://127.0.0.1:8080", url)
        done = subprocess.run(
            ["bash", "-c", line], env=os.environ | {"KEY": key}, capture_output=True, check=True
        )
        return json.loads(done.stdout)

    for ends in (scored, failed):
        session = curl(opened, "")
        assert run_agent(session["meta"], session["base_url"], session["api_key"]) == "200"
        assert "error" not in curl(ends, session["api_key"])
    scene.feeder.request("q3", group_size=1, meta={"ask": "q3"})
    space = doc_pages.run(
        "docs/agents.md",
        "def run_worker",
        scene.bus.name,
        swap={"timeout=60.0)) is": "timeout=2)) is"},
    )
    parts = (run_agent, lambda meta, answer: float(answer == "200"))
    with beside(space["run_worker"], *parts):
        samples = [sample for _ in range(3) for sample in scene.taken()]
    assert [sample.score for sample in samples] == [1.0] * 3
    assert {sample.instance_id for sample in samples} == {"q1", "q2", "q3"}
