"""`ray.util.queue.Queue`: an actor, restarted by Ray, with retried calls."""

import contextlib
import os
import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.contenders import ray_objects
from bench.goodput.adapters import About, Link, QueueEnd, kill
from bench.goodput.party import Stub
from bench.goodput.scenario import Scenario

__all__ = ["ABOUT", "link", "train", "work"]

ABOUT: Final = About(
    title="ray.util.queue.Queue", packages=("ray", "numpy"), environment="ray",
    fairness="a group a message; the actor starts again without end, and Ray repeats its calls; "
    "promises no content after the actor's death",
)  # fmt: skip
ACTOR: Final = "goodput-queue"
#: Seconds of a killed actor's absence; its calls fail meanwhile.
RETRY_S: Final = 0.1


def _queue(scenario: Scenario) -> Any:
    from ray.util.queue import Queue

    options = {
        "name": ACTOR, "get_if_exists": True, "lifetime": "detached", "num_cpus": 0,
        "max_restarts": -1, "max_task_retries": -1, "max_concurrency": 64,
    }  # fmt: skip
    return Queue(scenario.ahead_groups, actor_options=options)


@contextlib.contextmanager
def link(scenario: Scenario, root: Path) -> Iterator[Link]:
    """Run Ray and the queue's actor."""
    with ray_objects.cluster() as address:
        import ray

        made = _queue(scenario)

        def restart(_: int) -> None:
            kill(ray.get(made.actor.__ray_call__.remote(lambda actor: os.getpid())))

        made.qsize()
        yield Link(address, {"transport": restart})


def work(address: Any, stub: Stub) -> None:
    """Put groups."""
    import ray

    ray_objects.attach(address)
    made = _queue(stub.scenario)
    for _, answers in stub.groups():
        while not stub.over:
            try:
                made.put(answers)
                stub.handed(*answers)
                break
            except ray.exceptions.RayActorError:
                time.sleep(RETRY_S)


@contextlib.contextmanager
def train(address: Any, stub: Stub, state: Any) -> Iterator[QueueEnd]:
    """Get groups."""
    import ray

    ray_objects.attach(address)
    made = _queue(stub.scenario)

    def get(timeout_s: float) -> Any:
        from ray.util.queue import Empty

        try:
            return made.get(timeout=timeout_s)
        except (Empty, ray.exceptions.RayActorError) as error:
            raise queue.Empty from error

    yield QueueEnd(get)
