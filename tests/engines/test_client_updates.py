"""Updates by vLLM's four calls alone: whole versions, or the earlier version, by the rows."""

import json
import urllib.request
from typing import Any

import pytest
from small_engine import Running
from trainers import SHORT_S, TIMEOUT_S, Scene, Trainer

from shmbus import Bus
from shmbus.engines import ClientUpdates, EngineError, UpdateRolledBackError
from shmbus.weights import WeightSubscriber

pytest_plugins = ["engine_fixtures"]


def post(url: str, body: dict[str, Any] | None = None, timeout: float = TIMEOUT_S) -> Any:
    request = urllib.request.Request(
        url, data=json.dumps(body or {}).encode(), headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


class Client:
    """vLLM's client over HTTP, which pauses besides."""

    def __init__(self, running: Running, timeout: float = TIMEOUT_S) -> None:
        self.url = running.url
        self.timeout = timeout

    def post(self, path: str, body: dict[str, Any] | None = None) -> None:
        post(f"{self.url}/{path}", body, self.timeout)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self.post("pause?mode=keep&clear_cache=false")
        self.post("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.post("finish_weight_update", {"weight_version": weight_version})


def bring(updates: ClientUpdates, trainer: Trainer, version: int) -> None:
    with WeightSubscriber(updates.bus) as reader, reader.latest(timeout=TIMEOUT_S) as previous:
        trainer.publish(version)
        updates.bring(version, previous.version)


def tokens(running: Running) -> list[float | str]:
    post(f"{running.url}/resume")
    found: list[float | str] = post(f"{running.url}/v1/completions", {"max_tokens": 3})["tokens"]
    return found


def test_ranks_run_what_the_bus_says(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(2)
    trainer.publish(1)
    updates = ClientUpdates(bus.name, Client(running), timeout=TIMEOUT_S)
    assert updates.ranks == 2
    assert tokens(running) == [0.0] * 3, "attaching touches nothing"
    for version in (2, 3, 4):
        bring(updates, trainer, version)
        assert tokens(running) == [float(version)] * 3
        assert bus.policy_version == version


@pytest.mark.parametrize(
    ("step", "kind"),
    [
        ("update", "500"),
        ("update", "lie"),
        ("update", "refuse"),
        ("update", "close"),
        ("finish", "500"),
    ],
)
def test_a_late_failure_brings_all_ranks_back(step: str, kind: str, scene: Scene) -> None:
    running = scene.servers(2)
    scene.trainer.publish(1)
    updates = ClientUpdates(scene.bus.name, Client(running), timeout=SHORT_S)
    bring(updates, scene.trainer, 2)
    post(f"{running.url}/fault", {step: kind})
    with pytest.raises(UpdateRolledBackError, match="runs version 2 again") as caught:
        bring(updates, scene.trainer, 3)
    assert caught.value.in_force == 2
    assert tokens(running) == [2.0] * 3
    assert scene.bus.policy_version == 2
    bring(updates, scene.trainer, 4)
    assert tokens(running) == [4.0] * 3


def test_an_early_failure_touches_nothing(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(1)
    trainer.publish(1)
    client = Client(running)
    updates = ClientUpdates(bus.name, client, timeout=TIMEOUT_S)
    bring(updates, trainer, 2)
    client.url = "http://127.0.0.1:1"
    with pytest.raises(UpdateRolledBackError, match=r"runs version 2 again.*Connection refused"):
        bring(updates, trainer, 3)
    client.url = running.url
    assert tokens(running) == [2.0] * 3


def test_a_server_that_can_go_nowhere_is_named(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(2)
    trainer.publish(1)
    updates = ClientUpdates(bus.name, Client(running), timeout=SHORT_S)
    trainer.publish(2)
    post(f"{running.url}/fault", {"update": "refuse"})
    with pytest.raises(EngineError, match=r"half of it was loaded.*its model is not whole"):
        updates.bring(2, None)


def test_a_dead_trainers_update_is_ended_first(bus: Bus, trainer: Trainer, servers: Any) -> None:
    running = servers(1)
    trainer.publish(1)
    dead = Client(running)
    ClientUpdates(bus.name, dead, timeout=TIMEOUT_S)
    dead.start_weight_update()
    updates = ClientUpdates(bus.name, Client(running), timeout=TIMEOUT_S)
    bring(updates, trainer, 2)
    assert tokens(running) == [2.0] * 3


def test_without_weights_there_is_nothing_to_attach_to(bus: Bus, servers: Any) -> None:
    with pytest.raises(EngineError, match=r"has no weights.*publish a version first"):
        ClientUpdates(bus.name, Client(servers(1)), timeout=TIMEOUT_S)
