"""Values that frameworks hand over to adapters, and interrupted calls: named, or kept."""

import asyncio
import math
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from answering import answering
from conftest import SHM_DIR, Spawner, wait_until

import shmbus
from shmbus.channel import unlink_channel
from trainer_adapter.adapters.atropos import AtroposTrainer, ShmbusEnv
from trainer_adapter.adapters.skyrl import GenerateByBus
from trainer_adapter.adapters.torchtitan import ShmbusBatches
from trainer_adapter.adapters.trl import ShmbusRollouts, scored

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
sys.path.insert(0, EXAMPLES)

from prime_rl_transport import ShmbusBatchReceiver, ShmbusBatchSender  # noqa: E402
from slime_rollouts import SlimeRollouts, put_sample  # noqa: E402

GOOD: dict[str, Any] = {
    "tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "logprobs": [0.0, -1.0, -2.0],
}  # fmt: skip


@pytest.fixture
def run(bus_name: str) -> Iterator[str]:
    yield bus_name
    for path in SHM_DIR.glob(f"shmbus-channel.{bus_name}.*"):
        unlink_channel(path.name.partition(".")[2])


class Micro(msgspec.Struct, array_like=True):
    input_ids: list[int]


def prompts_of(*names: str) -> dict[str, Any]:
    ids = [SimpleNamespace(instance_id=n, repetition_id=i) for n in names for i in range(2)]
    return {
        "prompts": [n for n in names for _ in range(2)], "env_classes": ["echo"] * len(ids),
        "trajectory_ids": ids,
    }  # fmt: skip


def test_a_cancelled_skyrl_call_takes_only_its_own_groups(bus: shmbus.Bus, seed: int) -> None:
    """A thread waits for groups; its groups are filed despite a cancelled call."""
    dice = random.Random(seed)

    def answer(producer: Any, request: Any) -> None:
        time.sleep(0.002)  # lets groups come singly
        producer.requests.answer(request, score=1.0, **GOOD)

    async def rounds(generator: GenerateByBus) -> None:
        for number in range(20):
            cut, kept = (
                asyncio.create_task(
                    generator.generate(prompts_of(*(f"{side}{number}{n}" for n in "xy")))
                )
                for side in "ab"
            )
            await asyncio.sleep(dice.uniform(0.0, 0.02))
            cut.cancel()
            await asyncio.gather(cut, return_exceptions=True)
            assert (await kept)["rewards"] == [1.0] * 4

    generator = GenerateByBus(bus.name, timeout=30.0)
    with answering(bus.name, answer):
        asyncio.run(rounds(generator))
        generator.close()


def test_a_generator_of_skyrl_outlives_its_event_loop(bus: shmbus.Bus) -> None:
    async def both(generator: GenerateByBus) -> list[Any]:
        return await asyncio.gather(*(generator.generate(prompts_of(name)) for name in "ab"))

    generator = GenerateByBus(bus.name, timeout=30.0)
    with answering(bus.name, lambda p, r: p.requests.answer(r, score=1.0, **GOOD)):
        for _ in range(2):
            assert len(asyncio.run(both(generator))) == 2
        generator.close()


SENDER = """
import asyncio, sys, msgspec
sys.path.insert(0, {examples!r})
from prime_rl_transport import ShmbusBatchSender
class Micro(msgspec.Struct, array_like=True):
    input_ids: list[int]
async def main():
    sender = ShmbusBatchSender(sys.argv[1], 1)
    for step in range(3):
        print("step", step, flush=True)
        await sender.send([[Micro([1, 2, 3])]])
asyncio.run(main())
""".replace("{examples!r}", repr(EXAMPLES))


def test_ctrl_c_ends_an_orchestrator_that_waits_for_its_trainer(run: str, spawn: Spawner) -> None:
    """It may be two steps ahead; the third waits for an hour."""
    child = spawn.script(SENDER, run)
    child.expect("step 2")
    child.send_signal(signal.SIGINT)
    wait_until(lambda: not child.running, what="its end")
    assert "KeyboardInterrupt" in child.output()


def test_a_send_that_was_cancelled_is_made_again_once(run: str) -> None:
    async def rounds() -> None:
        sender = ShmbusBatchSender(run, 1)
        for step in range(2):
            await sender.send([[Micro([step])]])
        waiting = asyncio.create_task(sender.send([[Micro([2])]]))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        receiver = ShmbusBatchReceiver(run, 0, micro_batch=Micro)
        got = [(await asyncio.to_thread(receiver.receive))[0].input_ids]
        for step in (2, 3):
            sending = asyncio.create_task(sender.send([[Micro([step])]]))
            got.append((await asyncio.to_thread(receiver.receive))[0].input_ids)
            await sending
        got.append((await asyncio.to_thread(receiver.receive))[0].input_ids)
        assert [list(each) for each in got] == [[0], [1], [2], [3]]
        receiver.close()
        sender.close()

    asyncio.run(rounds())


@pytest.mark.parametrize("done", [False, True], ids=["before", "behind"])
@pytest.mark.parametrize("take", ["atropos", "slime", "torchtitan"])
def test_an_interrupted_ack_is_repeated_once(take: str, done: bool, bus: shmbus.Bus) -> None:
    """Ctrl-C came right at the call that acknowledges; the trainer catches it and goes on."""
    with shmbus.Producer(bus.name) as producer:
        for number in range(2):
            if take == "slime":
                put_sample(producer, {"instance_id": number, "tokens": [1], "reward": 1.0})
            else:
                producer.put(f"q{number}", group_size=1, index=0, score=1.0, **GOOD)
    make: dict[str, Callable[[], Any]] = {
        "atropos": lambda: AtroposTrainer(bus.name, 1),
        "slime": lambda: SlimeRollouts(bus.name, 1, make_sample=SlimeSample),
        "torchtitan": lambda: ShmbusBatches(bus.name, Packer(), types=TYPES),
    }
    trainer = make[take]()
    ask: Callable[[], Any] = {
        "atropos": lambda: trainer.get_batch(10.0)["batch"],
        "slime": lambda: trainer.take(1, 10.0),
        "torchtitan": lambda: trainer.next(10.0),
    }[take]
    assert ask()
    real = trainer._consumer.ack

    def cut(groups: Any) -> None:
        if done:
            real(groups)
        raise KeyboardInterrupt

    trainer._consumer.ack = cut
    with pytest.raises(KeyboardInterrupt):
        trainer.ack()
    del trainer._consumer.ack
    trainer.ack()
    assert ask()
    trainer.ack()
    assert trainer._consumer.stats().acknowledged == 2
    trainer.close()


def test_a_call_of_trl_that_ends_by_an_error_holds_no_other_group(bus: shmbus.Bus) -> None:
    """Groups beside the bad group, from the same look, belong to an abandoned call."""
    trainer = SimpleNamespace(
        model=SimpleNamespace(training=True), num_generations=1, max_completion_length=8,
        accelerator=SimpleNamespace(num_processes=1), processing_class=None,
    )  # fmt: skip
    bad = {**GOOD, "logprobs": [0.0, math.nan, 0.0]}
    answered: list[str] = []
    go = threading.Event()

    def answer(producer: Any, request: Any) -> None:
        go.wait(30.0)
        fields = bad if request.meta["prompt"] == "p0" else GOOD
        producer.requests.answer(request, score=0.0, **fields)
        answered.append(request.meta["prompt"])

    rollouts = ShmbusRollouts(bus.name, timeout=30.0, tokenize=False)
    consumer = rollouts._consumers.consumer
    take = rollouts._consumers.take

    def take_all(split: str, count: int, timeout: float) -> Any:
        go.set()
        wait_until(lambda: len(answered) >= 6, what="all answers")
        return take(split, count, timeout)

    rollouts._consumers.take = take_all  # type: ignore[method-assign]
    with answering(bus.name, answer):
        with pytest.raises(ValueError, match="expected finite numbers"):
            rollouts([f"p{number}" for number in range(6)], trainer)
        ledger = consumer.stats()
        assert (ledger.leased, ledger.dropped) == (0, {"malformed": 6})
        rollouts.close()


class Env(ShmbusEnv):
    """What the mix-in uses of a BaseEnv."""


TWO: dict[str, Any] = {"tokens": [[1], [2]], "masks": [[1], [2]], "scores": [0.0, 1.0]}


@pytest.mark.parametrize(
    ("second", "says"),
    [
        ({"tokens": [[1]], "masks": [[1]]}, "scores: expected"),
        ({"masks": [[1]], "scores": [1.0]}, "tokens: expected a list"),
        ({"tokens": [[1]], "scores": [1.0]}, "masks: expected a list"),
        ({"tokens": [[1]], "masks": [[1]], "scores": [1.0], "messages": [object()]}, "meta: "),
        ({"tokens": [[1] * 99_999], "masks": [[1] * 99_999], "scores": [1.0]}, "at most"),
        ({**TWO, "tokens": [[1.5], [2]]}, r"tokens\[0\]: expected .* 64-bit"),
        ({**TWO, "scores": [math.nan, 1.0]}, "scores: expected .*finite"),
        ({**TWO, "masks": [[1]]}, "masks: expected 2"),
        ({**TWO, "advantages": [[math.inf], []]}, r"advantages\[0\]: expected .*finite"),
        (None, "expected a ScoredDataGroup, a dict, got NoneType"),
    ],
)
def test_groups_put_together_are_put_all_or_none(second: Any, says: str, bus: shmbus.Bus) -> None:
    env = Env()
    env.shmbus_bus = bus.name  # type: ignore[misc]
    errors = (TypeError, ValueError, shmbus.RecordTooLargeError)
    with pytest.raises(errors, match=says):
        asyncio.run(env._send_scored_data_to_api([TWO, second]))
    env._shmbus().close()
    assert bus.stats().committed == 0


class Packer:
    def add_training_samples(self, *, training_sample_group: Any) -> Any:
        return training_sample_group


TYPES: Any = ModuleType("types")
for _name in ("RolloutTurnID", "TrainingSample", "TrainingSampleGroup"):
    setattr(TYPES, _name, type(_name, (SimpleNamespace,), {}))


OF_ADAPTERS: list[tuple[Callable[[str], object], str]] = [
    (lambda bus: AtroposTrainer(bus, 2.0), "batch_size: expected an int, got float"),
    (lambda bus: AtroposTrainer(bus, True), "batch_size: expected an int, got bool"),
    (lambda bus: AtroposTrainer(bus, 0), "batch_size: expected 1 or more"),
    (lambda bus: AtroposTrainer(bus, 2, keep_batches="1"), "keep_batches: expected an int"),
    (lambda bus: AtroposTrainer(bus, 1, keep_batches=-1), "keep_batches: expected 0 or more"),
    (lambda bus: AtroposTrainer(bus, 2, minimums={1: math.nan}), "share of 0 to 1 for env"),
    (lambda bus: AtroposTrainer(bus, 2, minimums=5), "minimums: expected the shares"),
    (lambda bus: AtroposTrainer(bus, 2, url="host:1"), "url: expected http://HOST:PORT"),
    (lambda bus: GenerateByBus(bus, timeout=math.nan), "timeout: expected 0 or more seconds"),
    (lambda bus: GenerateByBus(bus, timeout=None), "timeout: expected seconds, got NoneType"),
    (lambda bus: GenerateByBus(bus, logprobs="no"), "logprobs: expected True or False"),
    (lambda bus: GenerateByBus(bus, split="eval"), "split: training and evaluation"),
    (lambda bus: ShmbusRollouts(bus, timeout="5"), "timeout: expected seconds, got str"),
    (lambda bus: ShmbusRollouts(bus, split="eval"), "split: training and evaluation"),
    (lambda bus: ShmbusBatches(bus, Packer(), advantages="x", types=TYPES), "'rloo' or 'none'"),
    (lambda bus: ShmbusBatches(bus, None, types=TYPES), "batcher: expected torchtitan's Batch"),
    (lambda bus: scored("1e"), "reward: expected a finite number, NaN or None, got '1e'"),
    (lambda bus: scored(None, [1]), "meta: expected a mapping or None, got list"),
]


@pytest.mark.parametrize(("make", "match"), OF_ADAPTERS)
def test_wrong_arguments_fail(make: Callable[[str], object], match: str, bus: shmbus.Bus) -> None:
    with pytest.raises((TypeError, ValueError), match=match):
        make(bus.name)


class SlimeSample:
    Status = staticmethod(str)

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.reward = 0.0


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        (
            "tokens",
            np.array([1.5, 2.0, 3.0]),
            r"expected whole numbers .*got float64",
        ),
        ("tokens", np.array([b"a", b"b", b"c"]), "expected whole numbers"),
        (
            "tokens",
            np.array([1, 2**64 - 1, 3], np.uint64),
            "expected whole .*got 18446744073709551615",
        ),
        ("logprobs", np.array([0, 1j, 2]), "expected real numbers, got complex128"),
        ("advantages", [1.0], r"expected a finite number for each of 3 tokens, got .*\(1,\)"),
        (
            "advantages",
            [0.0, math.nan, 1.0],
            "expected a finite number .* got others",
        ),
    ],
)
def test_torchtitan_refuses_lossy_ids(field: str, value: Any, says: str, bus: shmbus.Bus) -> None:
    with shmbus.Producer(bus.name) as producer:
        producer.put("q", group_size=2, index=0, score=0.0, **GOOD)
        producer.put("q", group_size=2, index=1, score=1.0, **{**GOOD, field: value})
    batches = ShmbusBatches(bus.name, Packer(), types=TYPES)
    with pytest.raises(ValueError, match=f"group 'q', sample 1, field '{field}': {says}"):
        batches.next(10.0)
    batches.close()


@pytest.mark.parametrize(
    ("experts", "got"),
    [
        (np.full((3, 2, 2), 1.7), r"float64 in shape \(3, 2, 2\)"),
        (np.full((3, 2, 2), 70_000), "0 to 70000"),
        (np.full((3, 2, 2), -1), "-1 to 0"),
        (np.ones((5, 2, 2), np.uint8), r"uint8 in shape \(5, 2, 2\)"),
        (np.ones(3, np.uint8), r"uint8 in shape \(3,\)"),
    ],
)
def test_experts_changed_by_a_cast_are_refused(experts: Any, got: str, bus: shmbus.Bus) -> None:
    """As verl and SkyRL replay them: 16 bits each."""
    generator = GenerateByBus(bus.name, timeout=30.0)
    fields = {**GOOD, "routed_experts": experts}
    says = f"group 'a', sample 0, field 'routed_experts': expected the numbers .*got {got}"
    with answering(bus.name, lambda p, r: p.requests.answer(r, score=1.0, **fields)):
        with pytest.raises(ValueError, match=says):
            asyncio.run(generator.generate(prompts_of("a")))
        generator.close()


def test_samples_and_batches_that_are_none_are_named(bus: shmbus.Bus, run: str) -> None:
    with shmbus.Producer(bus.name) as producer:
        for item, says in (
            ([1], "item: expected a mapping, got list"),
            ({"instance_id": 1, "reward": 10**400}, "reward: expected a finite number"),
        ):
            with pytest.raises((TypeError, ValueError), match=says):
                put_sample(producer, item)  # type: ignore[arg-type]
    sender = ShmbusBatchSender(run, 1)
    with pytest.raises(TypeError, match=r"micro batch 0: expected prime-rl's MicroBatch .*got int"):
        asyncio.run(sender.send([[1]]))
    sender.close()
    batch = prompts_of("a")
    batch["prompts"] = ["one", "other"]
    generator = GenerateByBus(bus.name)
    with pytest.raises(ValueError, match="group 'a': expected the same prompt for its samples"):
        asyncio.run(generator.generate(batch))
    generator.close()
