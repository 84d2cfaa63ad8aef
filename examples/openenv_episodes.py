"""Episodes of a real OpenEnv server on a bus: turns become a row, the steps' rewards the score.

    pip install shmbus openenv-core==0.3.0
    python examples/openenv_episodes.py            # --quick: fewer groups

The environment hides a number; each guess is answered by "higher" or "lower". The policy here is a
table of which half it guesses in next, where a model would be; its token ids are the words
themselves. One episode of each group is broken off: it is asked for again, alone.
"""

from __future__ import annotations

import argparse
import os
import random
import socket
import threading
import time
from typing import Any

from openenv.core import GenericEnvClient
from openenv.core.env_server.http_server import create_fastapi_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.types import Action, Observation, State

import shmbus
from trainer_adapter.adapters.openenv import EpisodeRecord, put_episode

NUMBERS = 16
GROUP_SIZE = 4
TURNS = 4
#: Token ids of what the environment says; numbers are their own.
WORDS = {"guess": 20, "higher": 21, "lower": 22, "right": 23}


class Guess(Action):
    """A number that the policy guesses."""

    number: int


class Hint(Observation):
    """What the environment says about it."""

    text: str = ""


class Hidden(Environment):
    """A hidden number, and a few guesses."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.turns = 0, 0

    def reset(self, seed: int | None = None, **options: Any) -> Hint:
        """Hide the number of a seed."""
        self.hidden, self.turns = random.Random(seed).randrange(NUMBERS), 0
        return Hint(text="guess")

    def step(self, action: Guess, **options: Any) -> Hint:
        """Answer a guess; only the right one is rewarded."""
        self.turns += 1
        if action.number == self.hidden:
            return Hint(text="right", done=True, reward=1.0)
        text = "higher" if action.number < self.hidden else "lower"
        return Hint(text=text, done=self.turns == TURNS, reward=0.0)

    @property
    def state(self) -> State:
        """How many guesses there were."""
        return State(step_count=self.turns)


def serve() -> str:
    """Serve the environment from a thread; return its address."""
    import uvicorn

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Hidden, Guess, Hint, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", port, log_level="critical"))
    threading.Thread(target=server.run, daemon=True).start()
    while not server.started:
        time.sleep(0.01)
    return f"http://127.0.0.1:{port}"


def play(env: Any, record: EpisodeRecord, seed: int, dice: random.Random) -> None:
    """Play one episode, and note each turn with its tokens."""
    result = env.reset(seed=seed)
    context: list[int] = []
    low, high = 0, NUMBERS - 1
    while not result.done:
        context.append(WORDS[result.observation["text"]])
        number = dice.randint(low, high)
        record.turn(context, [number], [-1.0])  # a model's own logprob
        context.append(number)
        result = env.step({"number": number})
        record.result(result)
        if result.observation["text"] == "higher":
            low = number + 1
        elif result.observation["text"] == "lower":
            high = number - 1


def work(bus: str, address: str, broken: set[str]) -> None:
    """Answer requests until the bus is gone."""
    dice = random.Random(0)
    with (
        shmbus.Producer(bus, wait=30.0) as producer,
        GenericEnvClient(base_url=address).sync() as env,
    ):
        while True:
            try:
                request = producer.requests.next()
            except (shmbus.BusClosedError, shmbus.BusRemovedError):
                return
            record = EpisodeRecord("hidden-number")
            if request.index == 0 and request.instance_id not in broken:
                broken.add(request.instance_id)  # it ends here: the environment was not done
            else:
                play(env, record, int(request.instance_id[1:]), dice)
            put_episode(producer, record, request=request)


def main() -> None:
    """Offer prompts, take their groups, and say what came."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer groups")
    groups = 8 if parser.parse_args().quick else 64
    name, address = f"openenv-{os.getpid()}", serve()
    broken: set[str] = set()
    scores: list[float] = []
    tokens = 0
    with shmbus.Bus.create(name, capacity="4MiB"):
        worker = threading.Thread(target=work, args=(name, address, broken))
        worker.start()
        with shmbus.Consumer(name, sample_retries=1) as consumer:
            for number in range(groups):
                consumer.request(f"n{number}", group_size=GROUP_SIZE)
            for group in consumer:
                with group:
                    scores += [t.score for t in group]
                    tokens += sum(int(t["loss_mask"].sum()) for t in group)
                if len(scores) == groups * GROUP_SIZE:
                    break
            failed = consumer.stats().dropped["failed"]
    worker.join()
    print(f"{len(scores)} episodes, mean score {sum(scores) / len(scores):.2f}, {tokens} sampled "
          f"tokens, {failed} asked for again")  # fmt: skip


if __name__ == "__main__":
    main()
