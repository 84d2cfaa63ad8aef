"""Real agent harnesses, unmodified, by base URL and key: sampled tokens equal trained tokens."""

import random
from pathlib import Path

import pytest
from agent_fixtures import Engine, Proxy
from engine_log import check
from test_clients import Agent, record

import shmbus

pytest_plugins = ["agent_fixtures"]


def smolagents_agent(session: shmbus.Session, rng: random.Random) -> None:
    """A ToolCallingAgent; by a random model, so most of its calls are broken."""
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool

    @tool
    def look(place: str) -> str:
        """Look somewhere.

        Args:
            place: Where to look.
        """
        return f"nothing at {place}"

    model = OpenAIServerModel(
        model_id="m", api_base=session.base_url, api_key=session.api_key, max_tokens=48,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    agent = ToolCallingAgent(tools=[look], model=model, max_steps=2, verbosity_level=0)
    agent.run(f"Find it, number {rng.random()}.")


def mini_swe_agent(session: shmbus.Session, rng: random.Random) -> None:
    """mini-swe-agent over LiteLLM, until its limit of steps."""
    from minisweagent.agents.default import DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.models.litellm_model import LitellmModel

    options = {"api_base": session.base_url, "api_key": session.api_key, "max_tokens": 32}
    options["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    agent = DefaultAgent(
        LitellmModel(model_name="openai/m", model_kwargs=options, cost_tracking="ignore_errors"),
        LocalEnvironment(),
        system_template="You fix things.", instance_template="{{ task }}", step_limit=3,
    )  # fmt: skip
    agent.run(f"Fix it, number {rng.random()}.")


def agents_sdk_agent(session: shmbus.Session, rng: random.Random) -> None:
    """OpenAI's Agents SDK, over responses."""
    import agents
    import openai

    client = openai.AsyncOpenAI(base_url=session.base_url, api_key=session.api_key)
    model = agents.OpenAIResponsesModel("m", client)
    agents.set_tracing_disabled(True)
    # The harness refuses cut answers; a random model ends at one of these.
    ends = {"stop": ["a", "e", "1", "7"], "include_stop_str_in_output": True}
    body = {"chat_template_kwargs": {"enable_thinking": False}, **ends}
    settings = agents.ModelSettings(max_tokens=2000, extra_body=body)
    agent = agents.Agent("helper", instructions="Be brief.", model=model, model_settings=settings)
    agents.Runner.run_sync(agent, f"Say something, number {rng.random()}.", max_turns=2)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("agent", [smolagents_agent, mini_swe_agent, agents_sdk_agent])
def test_a_harness_becomes_a_rollout_worker_by_its_base_url(
    agent: Agent, bus: shmbus.Bus, engine: Engine, proxy: Proxy, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    engine.log.since_last()
    samples = record(bus.name, agent, 4)
    assert len(samples) == 4
    tokens = check(samples, engine.log)
    turns = [sample.meta["turns"] for sample in samples]
    print(f"{agent.__name__}: turns {turns}, {tokens} tokens")
    assert min(turns) >= 1
