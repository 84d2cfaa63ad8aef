"""Values that frameworks hand over to adapters, and interrupted calls: named, or kept."""

import asyncio
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from answering import answering
from conftest import SHM_DIR, Spawner, wait_until

import shmbus
from shmbus.channel import unlink_channel
from trainer_adapter.adapters.atropos import AtroposTrainer, ShmbusEnv
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
    child = spawn.script(SENDER, run, until="step 2")
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
@pytest.mark.parametrize("take", ["atropos", "slime"])
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
    }
    trainer = make[take]()
    ask: Callable[[], Any] = {
        "atropos": lambda: trainer.get_batch(10.0)["batch"],
        "slime": lambda: trainer.take(1, 10.0),
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
    with pytest.raises((TypeError, ValueError, shmbus.RecordTooLargeError), match=says):
        asyncio.run(env._send_scored_data_to_api([TWO, second]))
    env._shmbus().close()
    assert bus.stats().committed == 0


OF_ADAPTERS: list[tuple[Callable[[str], object], str]] = [
    (lambda bus: AtroposTrainer(bus, 2.0), "batch_size: expected an int, got float"),
    (lambda bus: AtroposTrainer(bus, True), "batch_size: expected an int, got bool"),
    (lambda bus: AtroposTrainer(bus, 0), "batch_size: expected 1 or more"),
    (lambda bus: AtroposTrainer(bus, 2, keep_batches="1"), "keep_batches: expected an int"),
    (lambda bus: AtroposTrainer(bus, 1, keep_batches=-1), "keep_batches: expected 0 or more"),
    (lambda bus: AtroposTrainer(bus, 2, minimums={1: math.nan}), "share of 0 to 1 for env"),
    (lambda bus: AtroposTrainer(bus, 2, minimums=5), "minimums: expected the shares"),
    (lambda bus: AtroposTrainer(bus, 2, url="host:1"), "url: expected http://HOST:PORT"),
    (lambda bus: ShmbusRollouts(bus, timeout=math.nan), "timeout: expected 0 or more seconds"),
    (lambda bus: ShmbusRollouts(bus, timeout=None), "timeout: expected seconds, got NoneType"),
    (lambda bus: ShmbusRollouts(bus, timeout="5"), "timeout: expected seconds, got str"),
    (lambda bus: ShmbusRollouts(bus, split="eval"), "split: training and evaluation"),
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
