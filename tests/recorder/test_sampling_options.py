"""Sampling options of a sample's calls: in its meta, forced or required; tokens under a grammar."""

from typing import Any

import numpy as np
import pytest
from recorders import Scene, ask, refused, user

import shmbus
from shmbus.cli import main
from shmbus.recorder.sampling import has_grammar

pytest_plugins = ["recorder_fixtures"]

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
STRICT = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
ONE = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}


def call(session: shmbus.Session, path: str = "chat/completions", **more: Any) -> Any:
    head = {"prompt": "x"} if path == "completions" else {"messages": [user("x")]}
    if path == "responses":
        head = {"input": "x"}
    body = {"model": "m", "max_tokens": 64, **head, **more}
    return ask(f"{session.base_url}/{path}", body, session.api_key)


def opened(scene: Scene, **options: Any) -> shmbus.Session:
    scene.start_recorder(scene.engine, **options)
    return scene.open()


def sample(session: shmbus.Session, scene: Scene) -> shmbus.Trajectory:
    assert session.finish(1.0)
    return scene.taken()[0]


def test_least_and_largest_value_of_each_option_are_in_the_samples_meta(scene: Scene) -> None:
    session = opened(scene)
    assert call(session, temperature=0.3, top_p=0.9)[0] == 200
    assert call(session, "messages", temperature=1, top_k=40)[0] == 200
    assert call(session, "responses", temperature=0.5)[0] == 200
    assert call(session, "completions", temperature=None, top_p=True, top_k="x")[0] == 200
    assert sample(session, scene).meta["sampling"] == {
        "temperature": [0.3, 1.0], "top_p": [0.9, 0.9], "top_k": [40.0, 40.0],
    }  # fmt: skip


@pytest.mark.parametrize("path", ["chat/completions", "completions", "messages", "responses"])
def test_a_recorder_forces_its_own_options(path: str, scene: Scene) -> None:
    session = opened(scene, force_sampling=ONE)
    assert call(session, path, temperature=0.1)[0] == 200
    assert {name: scene.engine.record[0].body[name] for name in ONE} == ONE
    found = sample(session, scene).meta["sampling"]
    assert found == {name: [value, value] for name, value in ONE.items()}


def test_a_recorder_refuses_other_options_than_it_requires(scene: Scene) -> None:
    session = opened(scene, require_sampling=ONE)
    for other in ({"temperature": 0.1}, {"top_p": "1"}, {"top_k": 10**400}):
        assert refused(call(session, **other)) == (400, "sampling")
    assert scene.engine.calls == 0
    assert call(session, temperature=1, top_p=None)[0] == 200
    assert scene.engine.record[0].body["top_k"] == -1
    assert sample(session, scene).meta["sampling"]["temperature"] == [1.0, 1.0]


@pytest.mark.parametrize("trained", [False, True])
def test_tokens_under_a_grammar_are_counted_and_masked(trained: bool, scene: Scene) -> None:
    recorder = scene.start_recorder(scene.engine, train_grammar=trained)
    session = scene.open()
    assert call(session)[0] == 200
    assert call(session, response_format={"type": "json_object"})[0] == 200
    found = sample(session, scene)
    free, limited = (one.output for one in scene.engine.record)
    assert found.meta["grammar_tokens"] == recorder.sessions.grammar == len(limited)
    masked = [np.asarray(row["loss_mask"]).sum() for row in found.rows]
    assert masked == [len(free), trained * len(limited)]


def test_a_sample_of_nothing_but_grammar_is_put_with_its_score(scene: Scene) -> None:
    session = opened(scene)
    assert call(session, tools=[TOOL], tool_choice="required")[0] == 200
    found = sample(session, scene)
    assert (found.score, found.rows[0]["loss_mask"].sum()) == (1.0, 0)
    assert found.meta["grammar_tokens"] == len(scene.engine.record[0].output)


@pytest.mark.parametrize(
    ("body", "is_limited"),
    [
        ({}, False),
        ({"response_format": {"type": "text"}}, False),
        ({"response_format": {"type": "json_object"}}, True),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, True),
        ({"tools": [TOOL]}, False),
        ({"tools": [TOOL], "tool_choice": "auto"}, False),
        ({"tools": [TOOL], "tool_choice": "required"}, True),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, True),
        ({"tools": [], "tool_choice": "required"}, False),
        ({"tools": [STRICT], "tool_choice": "none"}, False),
        ({"tools": [STRICT]}, True),
        ({"tools": ["x"]}, False),
        ({"structured_outputs": {"regex": "a"}}, True),
        ({"guided_choice": ["a", "b"]}, True),
        ({"ebnf": "a"}, True),
        ({"regex": None}, False),
    ],
)
def test_what_limits_tokens_by_a_grammar(body: dict[str, Any], is_limited: bool) -> None:
    assert has_grammar(body, strict_tools=True) == is_limited


def test_schemas_of_tools_are_a_grammar_where_the_engine_enforces_them() -> None:
    assert not has_grammar({"tools": [STRICT]}, strict_tools=False)


INVALID = (
    "temperature",
    "heat=1",
    "top_p=x",
    "top_k=nan",
    "",
    "temperature=-1",
    "top_p=0",
    "top_k=.5",
)


@pytest.mark.parametrize("value", INVALID)
def test_an_invalid_option_is_refused(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["proxy", "x", "--engine", "http://127.0.0.1:9", "--force-sampling", value])
    assert ended.value.code == 2
    assert repr(value) in capsys.readouterr().err
