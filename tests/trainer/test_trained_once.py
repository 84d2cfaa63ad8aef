"""Groups trained by a checkpoint never train again, over killed trainer processes."""

import functools
import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import Child, Daemon, Spawner, beside, wait_until

import shmbus
from shmbus import Bus, Producer
from shmbus.store import snapshot as store
from trainer_adapter import OnlineDataHandler

Served = Callable[..., Daemon]
LIFE = Path(__file__).with_name("trainer_life.py")
JOB = Path(__file__).with_name("rank_of_a_job.py")


def put(producer: Producer, instance_id: str, index: int, **more: Any) -> None:
    more = {"group_size": 2, **more}
    producer.put(
        instance_id, index=index, score=float(index), tokens=np.arange(8, dtype=np.int32), **more
    )


def put_groups(name: str, numbers: range) -> set[str]:
    with Producer(name) as producer:
        for number in numbers:
            for index in range(2):
                put(producer, f"g{number}", index)
    return {f"g{number}/{index}" for number in numbers for index in range(2)}


def begin(spawn: Spawner, bus: str, **told: Any) -> Child:
    told.setdefault("options", {"groups_per_batch": 1})
    return spawn.file(LIFE, json.dumps({"bus": bus, **told}))


def trained(*lives: Child) -> list[str]:
    names: list[str] = []
    for life in lives:
        life.expect("over")
        wait_until(lambda life=life: not life.running)
        for line in life.output().splitlines():
            names += json.loads(line) if line.startswith("[") else []
    return names


def rank_options(rank: int, world_size: int, **more: Any) -> dict[str, Any]:
    if world_size == 1:
        return {"groups_per_batch": 1, **more}
    return {"groups_per_batch": 1, "rank": rank, "world_size": world_size, **more}


def live(
    spawn: Spawner, bus: str, world_size: int, folder: Path, steps: int, **told: Any
) -> list[str]:
    """Run a life of every rank: train, meet, save on demand, get killed."""
    folder.mkdir()
    saves = told.pop("saves", range(world_size))
    acks = told.pop("acks", [0] * world_size)
    options = told.pop("options", {})
    lives = [
        begin(
            spawn, bus, steps=steps, meet=str(folder) if world_size > 1 else None, acks=acks[rank],
            options=rank_options(rank, world_size, **options),
            save=str(folder / f"state{rank}.json") if rank in saves else None, **told,
        )
        for rank in range(world_size)
    ]  # fmt: skip
    return trained(*lives)


@pytest.mark.parametrize(
    ("world_size", "saved", "daemon_dies"),
    [
        (world_size, saved, (number + at) % 2 == 0)
        for number, world_size in enumerate((1, 2, 3))
        for at, saved in enumerate(("alone", "each", "together"))
    ],
)
def test_what_any_rank_had_trained_is_not_trained_again(
    spawn: Spawner, daemon: Served, bus_name: str, tmp_path: Path,
    world_size: int, saved: str, daemon_dies: bool,
) -> None:  # fmt: skip
    served = daemon("--capacity", "4MiB")
    everything = put_groups(bus_name, range(10))
    saves = [0] if saved == "alone" else [0, 1]
    first = live(spawn, bus_name, 2, tmp_path / "a", 2, saves=saves, acks=[2, 1])
    assert len(first) == 8
    if daemon_dies:
        served.restart()
    states = [str(tmp_path / "a" / f"state{rank}.json") for rank in saves]
    load: Any = states if saved == "together" else states[-1]
    second = live(spawn, bus_name, world_size, tmp_path / "b", 6 // world_size, load=load)
    assert Counter(first + second) == Counter(everything)


def test_an_older_state_names_what_was_trained_when_it_was_saved(
    spawn: Spawner, daemon: Served, bus_name: str, tmp_path: Path
) -> None:
    served = daemon("--capacity", "4MiB")
    everything = put_groups(bus_name, range(12))
    first = live(spawn, bus_name, 2, tmp_path / "a", 2)  # no acks
    state = str(tmp_path / "a" / "state0.json")
    second = live(spawn, bus_name, 2, tmp_path / "b", 1, load=state, saves=[])
    served.restart()
    # The second life was in vain: its unacknowledged groups train again.
    third = live(spawn, bus_name, 2, tmp_path / "c", 4, load=state, saves=[])
    assert Counter(first + third) == Counter(everything)
    assert set(second) < set(third)


def test_a_rank_counts_others_batches_up_to_its_own_step(daemon: Served, bus_name: str) -> None:
    daemon("--capacity", "4MiB")
    put_groups(bus_name, range(8))
    with (
        OnlineDataHandler(bus_name, groups_per_batch=1, rank=0, world_size=2) as zero,
        OnlineDataHandler(bus_name, groups_per_batch=1, rank=1, world_size=2, prefetch=2) as one,
    ):
        mine, theirs = zero.next_batch(20), [one.next_batch(20) for _ in range(2)]
        state = json.loads(json.dumps(zero.state_dict()))
        assert {tuple(pair) for _, pairs in state["trained"] for pair in pairs} == {
            (t.producer_id, t.sequence)
            for batch in (mine, theirs[0])
            for group in batch.groups
            for t in group
        }
        one.give_back(theirs[1])
        one.give_back(theirs[0])
        wait_until(lambda: sum(len(pairs) for _, pairs in zero.state_dict()["trained"]) == 2)


RANK_1 = """
import sys, time
from trainer_adapter import OnlineDataHandler
with OnlineDataHandler(sys.argv[1], groups_per_batch=1, rank=1, world_size=2) as handler:
    batch = handler.next_batch(60)
    print("has its batch", flush=True)
    time.sleep(600)
"""


def test_a_new_daemon_waits_for_every_rank(spawn: Spawner, daemon: Served, bus_name: str) -> None:
    served = daemon("--capacity", "4MiB")
    put_groups(bus_name, range(2))
    with OnlineDataHandler(bus_name, groups_per_batch=1, rank=0, world_size=2) as zero:
        one = spawn.script(RANK_1, bus_name, until="has its batch")
        zero.ack(zero.next_batch(20))
        wait_until(lambda: names_of(zero) == 2)  # holds nothing that needs a claim
        one.send_signal(signal.SIGSTOP)
        served.restart()
        with beside(names_of, zero) as asked:
            wait([asked], timeout=0.3)
            one.send_signal(signal.SIGCONT)
        assert asked.result() == 2


def names_of(handler: OnlineDataHandler) -> int:
    return sum(len(pairs) for _, pairs in handler.state_dict()["trained"])


def test_a_prompt_trained_after_rank_0_saved_is_not_offered(daemon: Served, bus_name: str) -> None:
    """The states of a step agree, even without a batch of rank 1 at rank 0's save."""
    daemon("--capacity", "4MiB")

    def ranks() -> list[OnlineDataHandler]:
        return [
            OnlineDataHandler(bus_name, groups_per_batch=1, rank=rank, world_size=2)
            for rank in range(2)
        ]

    zero, one = ranks()
    with zero, one, Producer(bus_name) as producer:
        zero.offer([(f"q{number}", np.arange(4)) for number in range(4)], group_size=1)
        for request in producer.requests.next_many(4, timeout=20):
            producer.requests.answer(request, tokens=np.arange(8, dtype=np.int32))
        batches = [zero.next_batch(20)]
        states = [zero.state_dict()]
        batches.append(one.next_batch(20))
        states.append(one.state_dict())
        states = json.loads(json.dumps(states))
        zero.ack(batches[0])
        one.ack(batches[1])
        assert wait_until(lambda: zero.stats().requests.groups == 2)
    zero, one = ranks()
    with zero, one:
        for handler in (zero, one):
            handler.load_state_dict(states)
        found = zero.restored_requests
        assert found is not None
        assert (found.offered, found.kept, found.ended) == (0, 2, 0)


def test_states_of_different_steps_are_refused(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        state = handler.state_dict()
        with pytest.raises(ValueError, match="of one step, got steps 0 and 3"):
            handler.load_state_dict([state, {**state, "step": 3}])
        with pytest.raises(ValueError, match="one state or more, got none"):
            handler.load_state_dict([])
        with pytest.raises(ValueError, match="expected version 2, got 1"):
            handler.load_state_dict({**state, "version": 1})
        with pytest.raises(ValueError, match=r"expected version 2, got 3.*newer"):
            handler.load_state_dict({**state, "version": 3})


@pytest.mark.parametrize("served", [False, True])
def test_a_late_sample_does_not_bring_trained_ones_back(
    spawn: Spawner, daemon: Served, bus_name: str, tmp_path: Path, served: bool
) -> None:
    process = daemon("--capacity", "1MiB") if served else None
    bus = None if served else Bus.create(bus_name, capacity="1MiB")
    state = str(tmp_path / "state.json")
    with Producer(bus_name) as early, Producer(bus_name) as late:
        for index in (1, 2):
            put(late, "q", index, group_size=3, need=2, round=0)
        first = trained(begin(spawn, bus_name, steps=1, save=state))
        assert sorted(first) == ["q/1", "q/2"]
        put(early, "q", 0, group_size=3, need=2, round=0)
        for index in range(2):
            put(early, "r", index)
        if process is not None:
            process.restart()
        second = trained(begin(spawn, bus_name, steps=3, load=state, timeout=2))
    assert sorted(first + second) == ["q/1", "q/2", "r/0", "r/1"]
    with shmbus.Consumer(bus_name) as consumer:
        ledger = consumer.stats()
        assert ledger.balanced and ledger.acknowledged == 2
        assert ledger.dropped["surplus"] == 1
    if bus is not None:
        bus.close()


HOLDER = """
import sys, time
import shmbus
consumer = shmbus.Consumer(sys.argv[1], group_timeout=0.2, on_timeout=sys.argv[2])
(group,) = consumer.take(1, timeout=30)
print(",".join(str(t.index) for t in group), flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("kind, round", [("need", 0), ("partial", 0), ("partial", None)])
@pytest.mark.parametrize("dies", ["consumer", "client and daemon", "daemon and then client"])
def test_a_leased_group_comes_again_with_the_same_members(
    spawn: Spawner, daemon: Served, bus_name: str, kind: str, dies: str, round: int | None
) -> None:
    options = {"need": 2} if kind == "need" else {}
    on_timeout = "wait" if kind == "need" else "partial"
    flags = ["--group-timeout", "0.2", "--on-timeout", on_timeout]
    process = None if dies == "consumer" else daemon("--capacity", "1MiB", *flags)
    bus = Bus.create(bus_name, capacity="1MiB") if process is None else None
    with Producer(bus_name) as early, Producer(bus_name) as late:
        for index in (1, 2):
            put(late, "q", index, group_size=4, round=round, **options)
        child = spawn.script(HOLDER, bus_name, on_timeout, until="1,2")
        for index in (0, 3):
            put(early, "q", index, group_size=4, round=round, **options)
        if dies == "consumer":
            child.kill()
        else:
            assert process is not None
            if dies == "client and daemon":
                child.kill()
            process.restart()
            child.kill()
        with shmbus.Consumer(bus_name, group_timeout=0.2, on_timeout=on_timeout) as consumer:
            (group,) = consumer.take(1, timeout=30)
            assert [t.index for t in group] == [1, 2]
            group.give_back()
            (group,) = consumer.take(1, timeout=30)
            assert [t.index for t in group] == [1, 2]
            group.ack()
            if round is not None:
                assert not consumer.take(4, timeout=0.01)
                wait_until(lambda: consumer.stats().dropped.get("surplus") == 2)
            assert wait_until(lambda: consumer.stats().acknowledged == 2)
            assert consumer.stats().balanced
    if bus is not None:
        bus.close()


def test_a_restored_bus_skips_trained_groups(spawn: Spawner, bus_name: str, tmp_path: Path) -> None:
    state, restored, again = str(tmp_path / "state.json"), f"{bus_name}-b", f"{bus_name}-c"
    with Bus.create(bus_name, capacity="1MiB"):
        put_groups(bus_name, range(4))
        first = trained(begin(spawn, bus_name, steps=2, save=state))
        store.take(bus_name, tmp_path / "one")
    store.restore(tmp_path / "one", restored)
    everything = {f"g{number}/{index}" for number in range(4) for index in range(2)}
    # The first bus gave out its new producers' numbers, too: different samples.
    everything |= put_groups(restored, range(4, 6))
    second = trained(begin(spawn, restored, steps=1, load=state, save=state))
    store.take(restored, tmp_path / "two")
    shmbus.unlink(restored)
    store.restore(tmp_path / "two", again)
    everything |= put_groups(again, range(6, 7))
    third = trained(begin(spawn, again, steps=9, load=state, timeout=2))
    assert Counter(first + second + third) == Counter(everything)
    shmbus.unlink(again)


WORKER = """
import random, sys, time
import numpy as np
import shmbus
rng = random.Random(int(sys.argv[2]))
with shmbus.Producer(sys.argv[1], wait=60) as producer:
    while True:
        request = producer.requests.next(timeout=1)
        if request is None:
            continue
        time.sleep(rng.random() * 0.01)
        tokens = np.arange(rng.randrange(4, 40), dtype=np.int32)
        producer.requests.answer(request, score=rng.random(), tokens=tokens)
"""

LIVES = (2, 3, 2, 1)


@pytest.mark.parametrize("number", range(int(os.environ.get("SHMBUS_ONCE_ROUNDS", "1"))))
def test_jobs_of_any_size_train_each_prompt_once_over_kills_and_old_checkpoints(
    spawn: Spawner, daemon: Served, bus_name: str, tmp_path: Path, seed: int, number: int
) -> None:
    run_job(spawn, daemon, bus_name, tmp_path, random.Random(seed + number))


def has_saved(rank: Child, saves: int) -> bool:
    return rank.output().count("saved") >= saves or "dry" in rank.output()


def run_job(spawn: Spawner, daemon: Served, bus: str, folder: Path, rng: random.Random) -> None:
    served = daemon("--capacity", "4MiB", name=bus)
    workers = [spawn.script(WORKER, bus, rng.randrange(1000)) for _ in range(2)]
    prompts, load = 40, None
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir()
    for life, world_size in enumerate(LIVES):
        (folder / str(life)).mkdir()
        told = {
            "bus": bus, "world_size": world_size, "prompts": prompts, "load": load,
            "folder": str(folder / str(life)), "checkpoints": str(checkpoints),
            "seed": rng.randrange(1000),
        }  # fmt: skip
        ranks = [spawn.file(JOB, json.dumps({**told, "rank": rank})) for rank in range(world_size)]
        if world_size == 1:
            assert ranks[0].wait(120) == 0, ranks[0].output()
            assert (checkpoints / "over").exists(), ranks[0].output()
            break
        wait_until(functools.partial(has_saved, ranks[0], rng.randrange(2, 5)))
        time.sleep(rng.random() * 0.05)  # any instant of a step
        killed = [*ranks, *([served.child] if rng.random() < 0.6 else [])]
        if rng.random() < 0.4:
            killed.append(workers.pop())
            workers.append(spawn.script(WORKER, bus, rng.randrange(1000)))
        rng.shuffle(killed)
        for child in killed:
            assert child.running, child.output()
            child.kill()
        if served.child in killed:
            served.start()
        saved = sorted(checkpoints.glob("*.json"))
        at = -1 if rng.random() < 0.6 else rng.randrange(len(saved))
        load = str(saved[at])
        for later in saved[at:][1:]:
            later.unlink()
    history = json.loads((checkpoints / "over").read_text())
    samples = Counter((name, index) for name, index, *_ in history)
    twice = [entry for entry in history if samples[entry[0], entry[1]] > 1]
    assert not twice, f"trained twice: {twice}"
    found = Counter(name for name, _ in samples)
    expected = {f"q{n}": 2 + n % 2 for n in range(prompts)}
    assert found == expected, f"skipped or in part: {Counter(expected) - found}"
    with shmbus.Consumer(bus) as consumer:
        assert consumer.stats().balanced
    for child in workers:
        child.kill()
    served.stop()
