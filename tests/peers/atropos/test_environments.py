"""Two real BaseEnvs give equal batches by their server, the gateway, the ring and both."""

import json
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from conftest import Spawner, wait_until
from environment import group_of
from http_requests import free_port
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

import shmbus
from trainer_adapter.adapters.atropos import AtroposTrainer

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
SIZES = (4, 2)
BATCH_SIZE = 8
BATCHES = 12
REGISTRATION = {
    "wandb_group": "g", "wandb_project": "p", "batch_size": BATCH_SIZE, "max_token_len": 64,
    "checkpoint_dir": "", "save_checkpoint_interval": 0, "starting_step": 0, "num_steps": 100_000,
}  # fmt: skip
#: Importing their package takes ten seconds, and an environment waits five before it begins.
PATIENCE_S = 60.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tokenizer of our own: theirs would come from the network."""
    directory = tmp_path_factory.mktemp("tokenizer")
    model = Tokenizer(WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=model).save_pretrained(directory)
    return str(directory)


def answers(url: str) -> bool:
    try:
        return requests.get(f"{url}/info", timeout=5).ok
    except requests.ConnectionError:
        return False


class Place:
    def __init__(self, spawner: Spawner, bus: str | None) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.bus = bus
        self._spawn = spawner
        environment = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(HERE)])}
        self._environment = {**environment, "HF_HUB_OFFLINE": "1", "SHMBUS_BUS": ""}
        if bus is None:
            arguments = ("atroposlib.cli.run_api", "--host", "127.0.0.1", "--port", self.port)
        else:
            where = f"127.0.0.1:{self.port}"
            arguments = ("shmbus", "gateway", bus, "--create", "16MiB", "--http", where)
        spawner.module(*arguments, env=self._environment)
        wait_until(lambda: answers(self.url), PATIENCE_S, f"the server at {self.url}")

    def environment(self, number: int, tokenizer: str, *, ring: bool) -> None:
        more = {"SHMBUS_BUS": str(self.bus)} if ring else {}
        self._spawn.file(
            HERE / "environment.py",
            *(self.url, number, SIZES[number], tokenizer),
            env={**self._environment, **more},
        )

    def ask(self) -> Any:
        return requests.get(f"{self.url}/batch", timeout=10).json()["batch"]


def collect(ask: Callable[[], Any]) -> list[Any]:
    found: list[Any] = []
    deadline = time.monotonic() + PATIENCE_S
    while len(found) < BATCHES:
        assert time.monotonic() < deadline, f"{len(found)} batches came"
        batch = ask()
        if batch is None:
            time.sleep(0.05)
        else:
            found.append(batch)
    return found


def check(batches: list[Any]) -> set[tuple[int, ...]]:
    seen: dict[int, list[int]] = defaultdict(list)
    for batch in batches:
        for group in batch:
            number, item = group["tokens"][0][:2]
            expected = group_of(number, item, SIZES[number])
            told = {key: group[key] for key in expected}
            assert json.dumps(told, sort_keys=True) == json.dumps(expected, sort_keys=True)
            seen[number].append(item)
        assert sum(len(group["tokens"]) for group in batch) == BATCH_SIZE
    assert sorted(seen) == [0, 1]
    for items in seen.values():
        assert len(set(items)) == len(items)
    return {tuple(len(group["tokens"]) for group in batch) for batch in batches}


#: Possible parts of batches of 8: packs are as large as the largest waiting group.
PATTERNS = {(4, 4), (2, 2, 2, 2), (4, 2, 2), (2, 2, 4)}


@pytest.fixture
def place_of(spawn: Spawner, bus_name: str) -> Iterator[Callable[[bool], Place]]:
    yield lambda ours: Place(spawn, bus_name if ours else None)


@pytest.mark.parametrize(
    ("ours", "rings"),
    [(False, (False, False)), (True, (False, False)), (True, (True, True)), (True, (False, True))],
    ids=["their server", "gateway", "ring", "both"],
)
def test_batches_over_http(
    place_of: Callable[[bool], Place], tokenizer: str, ours: bool, rings: tuple[bool, bool]
) -> None:
    place = place_of(ours)
    requests.post(f"{place.url}/register", json=REGISTRATION, timeout=10)
    assert place.ask() is None
    for number, ring in enumerate(rings):
        place.environment(number, tokenizer, ring=ring)
    batches = collect(place.ask)
    assert check(batches) <= PATTERNS
    if place.bus is not None:
        committed = shmbus.Bus.open(place.bus).stats().producers
        labels = {each.label for each in committed if each.committed}
        assert labels == {
            "counting0" if rings[0] else "shmbus gateway",
            "counting1" if rings[1] else "shmbus gateway",
        }


def test_batches_bypass_http(place_of: Callable[[bool], Place], tokenizer: str) -> None:
    place = place_of(True)
    assert place.bus is not None
    with AtroposTrainer(place.bus, BATCH_SIZE, url=place.url) as trainer:
        trainer.register(max_token_len=64, num_steps=100_000)
        for number in range(2):
            place.environment(number, tokenizer, ring=True)
        batches = collect(lambda: trainer.get_batch(timeout=1.0)["batch"])
        assert check(batches) <= PATTERNS
        trainer.ack()
        assert trainer._consumer.stats().balanced
        # Throttled by the gateway's queue alone: it stops before a full bus.
        size = f"{place.url}/status-env"
        wait_until(lambda: settled(trainer), 60.0, "environments that wait for the trainer")
        told = requests.get(size, json={"env_id": 0}, timeout=5).json()["queue_size"]
        assert told * SIZES[0] >= 4 * BATCH_SIZE


def settled(trainer: AtroposTrainer) -> bool:
    before = trainer._consumer.stats().committed
    time.sleep(2.0)
    return before == trainer._consumer.stats().committed
