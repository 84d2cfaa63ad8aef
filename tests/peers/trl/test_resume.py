"""A killed and resumed trainer trains each group once, by its loss (`trainer.py`)."""

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from numbered import GROUP_SIZE, number_of

import shmbus
from trainer_adapter.adapters.trl import last_whole_checkpoint

HERE = Path(__file__).parent
STEPS = 16
#: Holds the groups trained between two saves; the workers fill the rest.
CAPACITY = "2MiB"
#: A worker's lead in groups: otherwise the first to start fills the bus with its halves.
MAX_LEAD = 32
#: A slower trainer process hangs; importing TRL takes most of the time.
DEADLINE_S = 240.0

pytestmark = pytest.mark.timeout(900)


@contextmanager
def workers(bus: str) -> Iterator[None]:
    processes = [
        subprocess.Popen([sys.executable, str(HERE / "numbered.py"), bus, str(parity), "0"])
        for parity in range(2)
    ]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def train(bus: str, directory: Path, acknowledge: str, **options: object) -> int:
    """Run a trainer process to its end, or kill it at a random step."""
    kill_after_lines = options.pop("kill_after_lines", None)
    delay_s = options.pop("delay_s", 0.0)
    command = [sys.executable, "-W", "ignore", str(HERE / "trainer.py"), bus, str(directory)]
    process = subprocess.Popen([*command, str(STEPS), acknowledge, json.dumps(options)])
    lines = directory / "trained.jsonl"
    before = len(lines.read_text().splitlines()) if lines.exists() else 0
    deadline = time.monotonic() + DEADLINE_S
    try:
        while process.poll() is None:
            assert time.monotonic() < deadline, "the trainer hangs"
            time.sleep(0.005)
            if kill_after_lines is None or not lines.exists():
                continue
            if len(lines.read_text().splitlines()) - before > int(str(kill_after_lines)):
                time.sleep(float(str(delay_s)))
                process.send_signal(signal.SIGKILL)
                kill_after_lines = None
    finally:
        process.kill()
        process.wait()
    return process.returncode


def survived(directory: Path) -> list[int]:
    """The numbers that the weights of the last process were trained on, in order."""
    steps: list[tuple[int, list[int]]] = []
    for line in (directory / "trained.jsonl").read_text().splitlines():
        step, value = json.loads(line)
        if step == "resumed":
            steps = [each for each in steps if each[0] <= value]
        else:
            steps.append((step, value))
    # After a resume from the last step transformers makes an extra step.
    assert [step for step, _ in steps] in [list(range(1, last + 1)) for last in (STEPS, STEPS + 1)]
    return [number for _, numbers in steps for number in numbers]


def left_on_bus(bus: str) -> dict[int, tuple[int, int]]:
    """What a next trainer would get, complete groups or not: numbers and identities."""
    left = {}
    with shmbus.Consumer(bus, group_timeout=0.1, on_timeout="partial") as consumer:
        while consumer.stats().undelivered:
            groups = consumer.take(64, 0.5)
            for group in groups:
                left |= {number_of(t): (t.producer_id, t.sequence) for t in group}
            consumer.ack(groups)
        ledger = consumer.stats()
    assert ledger.balanced and not sum(ledger.dropped.values()), ledger
    return left


def check_once(bus: str, directory: Path) -> None:
    with shmbus.Bus.open(bus) as handle:
        committed = handle.stats().committed
    left = left_on_bus(bus)
    trained = survived(directory)
    assert len(trained) == len(set(trained)), "a sample was trained twice"
    put = sorted(set(trained) | set(left))
    assert len(put) == committed, "a sample was neither trained nor left"
    state = json.loads(
        (Path(str(last_whole_checkpoint(directory / "out"))) / "trainer_state.json").read_text()
    )
    rows = state["stateful_callbacks"]["ShmbusCallback"]["attributes"]["saved"]["trained"]
    listed = {(producer, sequence) for *_, producer, sequence, _row in rows}
    for number, identity in left.items():
        assert (number in trained) == (identity in listed), number


def kill_plan(dice: random.Random) -> list[dict[str, object]]:
    saves = [4, 8, 12]
    return [
        {"die_at": f"step-{dice.randint(1, 7)}"},
        {"die_at": f"{dice.choice(['saving', 'saved'])}-{dice.choice(saves[1:])}"},
        # At least four steps remain; a trainer done with them waits for its death.
        {"kill_after_lines": dice.randint(1, 4), "delay_s": dice.random() * 0.2, "linger": True},
    ]


@pytest.mark.slow
@pytest.mark.parametrize("number", range(3))
def test_kills_train_each_group_once(number: int, seed: int, bus_name: str, tmp_path: Path) -> None:
    dice = random.Random(seed + number)
    with shmbus.Bus.create(bus_name, capacity=CAPACITY, max_lead=MAX_LEAD):
        with workers(bus_name):
            for plan in kill_plan(dice):
                more = {**plan, "gradient_accumulation_steps": 1 + number}
                assert train(bus_name, tmp_path, "save", **more) == -signal.SIGKILL, plan
            assert train(bus_name, tmp_path, "save", gradient_accumulation_steps=1 + number) == 0
        check_once(bus_name, tmp_path)


@pytest.mark.slow
def test_groups_without_an_ack_are_acked_untrained(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity=CAPACITY, max_lead=MAX_LEAD):
        with workers(bus_name):
            for plan in ({"die_at": "saved-4"}, {"die_at": "saving-8"}, {"die_at": "saved-8"}, {}):
                train(bus_name, tmp_path, "save", **plan)
        check_once(bus_name, tmp_path)


def test_without_kills_each_mode_leaves_what_was_not_trained(bus_name: str, tmp_path: Path) -> None:
    with shmbus.Bus.create(bus_name, capacity=CAPACITY, max_lead=MAX_LEAD):
        with workers(bus_name):
            assert train(bus_name, tmp_path, "version") == 0
        check_once(bus_name, tmp_path)
        assert len(survived(tmp_path)) >= STEPS * GROUP_SIZE
