"""The adapters of Atropos and slime over real buses, with stand-ins for both stacks."""

import asyncio
import dataclasses
import enum
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmbus
from trainer_adapter.adapters.atropos import AtroposTrainer, ShmbusEnv

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import slime_rollouts
from slime_rollouts import SlimeRollouts, generate_rollout, put_sample


def scored(*rows: list[int], **more: Any) -> dict[str, Any]:
    return {
        "tokens": list(rows), "masks": [[-100, *row[1:]] for row in rows],
        "scores": [float(n) for n in range(len(rows))], **more,
    }  # fmt: skip


class Env(ShmbusEnv):
    env_id = 3
    name = "math"


@pytest.fixture
def env(bus: shmbus.Bus, monkeypatch: pytest.MonkeyPatch) -> Iterator[Env]:
    monkeypatch.setenv("SHMBUS_BUS", bus.name)
    found = Env()
    yield found
    if found._shmbus_producer is not None:
        found._shmbus_producer.close()


async def test_groups_of_differing_sizes_come_in_packs(bus: shmbus.Bus, env: Env) -> None:
    with AtroposTrainer(bus.name, batch_size=4) as trainer:
        assert trainer.get_batch() == {"batch": None}
        await env._send_scored_data_to_api(scored([1]))
        await env._send_scored_data_to_api([scored([2], [3])])
        # A pack is as large as the largest group: a group of 1 waits for company.
        assert trainer.get_batch() == {"batch": None}
        await env._send_scored_data_to_api(scored([4]))
        batch = trainer.get_batch()["batch"]
    assert [group["tokens"] for group in batch] == [[[2], [3]], [[1]], [[4]]]


async def test_everything_of_a_group_is_in_the_batch(bus: shmbus.Bus, env: Env) -> None:
    group = scored(
        [1, 2**40], [3, 4], inference_logprobs=[[1.0, -0.1], np.array([0.5, -1 / 3])],
        group_overrides={"a": 1}, generation_params={"temperature": 1.0},
    )  # fmt: skip
    with AtroposTrainer(bus.name, batch_size=2) as trainer:
        await env._send_scored_data_to_api(group)
        [found] = trainer.get_batch()["batch"]
    assert found["env_id"] == 3
    assert found["tokens"] == group["tokens"]
    assert found["inference_logprobs"] == [[1.0, -0.1], [0.5, -1 / 3]]
    assert found["group_overrides"] == {"a": 1}
    assert found["images"] is None


async def test_a_full_bus_holds_the_environment_and_its_loop_goes_on(bus_name: str) -> None:
    with shmbus.Bus.create(bus_name, "1MiB", max_producers=2):
        env = Env()
        env.shmbus_bus = bus_name  # type: ignore[misc]
        row = list(range(2000))
        with AtroposTrainer(bus_name, batch_size=2) as trainer:
            sending = [
                asyncio.create_task(env._send_scored_data_to_api(scored(row, row)))
                for _ in range(30)
            ]
            await asyncio.sleep(0.05)
            held = [task for task in sending if not task.done()]
            assert held
            # Cancelled during a hold: the group is put whole still.
            held[0].cancel()
            count = 0
            while count < 30:
                batch = await asyncio.to_thread(trainer.get_batch, 10.0)
                count += len(batch["batch"] or ())
            trainer.ack()
            await asyncio.gather(*sending, return_exceptions=True)
            assert trainer._consumer.stats().balanced
            assert trainer._consumer.stats().undelivered == 0
        env._shmbus().close()


def test_a_batch_that_was_not_acknowledged_comes_again(bus: shmbus.Bus, env: Env) -> None:
    for number in range(3):
        asyncio.run(env._send_scored_data_to_api(scored([number], [number])))
    with AtroposTrainer(bus.name, batch_size=2) as trainer:
        assert [trainer.get_batch()["batch"][0]["tokens"][0][0] for _ in range(2)] == [0, 1]
    with AtroposTrainer(bus.name, batch_size=2) as trainer:
        assert trainer.get_batch()["batch"][0]["tokens"][0][0] == 1
        trainer.ack()
    with AtroposTrainer(bus.name, batch_size=2, keep_batches=0) as trainer:
        groups = trainer.take()
        assert groups is not None
        assert groups[0][1]["loss_mask"].tolist() == [0]
        trainer.ack()
        assert trainer.get_batch(timeout=0.01) == {"batch": None}


def test_a_group_that_atropos_cannot_have_costs_no_other(
    bus: shmbus.Bus, env: Env, producer: shmbus.Producer, caplog: pytest.LogCaptureFixture
) -> None:
    with AtroposTrainer(bus.name, batch_size=2, keep_batches=2) as trainer:
        asyncio.run(env._send_scored_data_to_api(scored([1])))
        bad: dict[str, dict[str, Any]] = {
            "no tokens": {},
            "mask": {"loss_mask": np.ones(1)},
            "mark": {"meta": {"atropos": {}}},
        }
        for name, more in bad.items():
            fields: dict[str, Any] = {"tokens" if more else "prompt": np.arange(2), **more}
            producer.put(name, group_size=1, index=0, score=1.0, **fields)
        asyncio.run(env._send_scored_data_to_api(scored([2])))
        batch = trainer.get_batch(timeout=10.0)["batch"]
        assert sorted(group["tokens"] for group in batch) == [[[1]], [[2]]]
        # A waiting call turns any rest into a batch.
        asyncio.run(env._send_scored_data_to_api(scored([3])))
        assert trainer.get_batch() == {"batch": None}
        named = [record.args for record in caplog.records if "cannot be given" in record.msg]
        assert {args[0] for args in named if isinstance(args, tuple)} == {*bad}
        trainer.ack()
        ledger = trainer._consumer.stats()
        assert (ledger.acknowledged, ledger.undelivered, ledger.balanced) == (2, 1, True)


def test_useless_groups_extend_no_timeout(bus: shmbus.Bus, producer: shmbus.Producer) -> None:
    stop = threading.Event()

    def put_on() -> None:
        number = 0
        while not stop.wait(0.005):
            producer.put(f"g{number}", group_size=1, index=0, score=1.0, tokens=[1])
            number += 1

    putting = threading.Thread(target=put_on)
    with AtroposTrainer(bus.name, batch_size=1 << 40) as trainer:
        putting.start()
        # The call would go on with the flow of groups: otherwise the watchdog ends it.
        taken = trainer.get_batch(timeout=0.2)
        stop.set()
        putting.join()
    assert taken == {"batch": None}


def test_without_a_bus_the_mix_in_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHMBUS_BUS", raising=False)
    with pytest.raises(ValueError, match="shmbus_bus: expected the name of a bus"):
        asyncio.run(Env()._send_scored_data_to_api(scored([1])))


@dataclasses.dataclass
class SlimeSample:
    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"

    group_index: int | None = None
    index: int | None = None
    prompt: str = ""
    tokens: list[int] = dataclasses.field(default_factory=list)
    response_length: int = 0
    reward: float | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    status: Status = Status.PENDING


def item(group: str, number: int, **more: Any) -> dict[str, Any]:
    return {
        "instance_id": group, "uid": f"{group}/{number}", "reward": number / 4,
        "tokens": [1, 2, 3 + number], "loss_mask": [1, 1], "rollout_log_probs": [-0.5, -0.1],
        "prompt": f"solve {group}", **more,
    }  # fmt: skip


def test_the_next_slime_call_acks_whole_groups(bus: shmbus.Bus, producer: shmbus.Producer) -> None:
    rollouts = SlimeRollouts(bus.name, 2, SlimeSample)
    for number in range(2):
        for group in ("a", "b", "c"):
            put_sample(producer, item(group, number, status="truncated" if number else "completed"))
    first = rollouts.take(2, timeout=10)
    assert [[sample.prompt for sample in group] for group in first] == [
        ["solve a"] * 2,
        ["solve b"] * 2,
    ]
    sample = first[0][1]
    assert (sample.group_index, sample.index, sample.response_length) == (0, 1, 2)
    assert sample.tokens == [1, 2, 4]
    assert sample.rollout_log_probs == [-0.5, -0.1]
    assert (sample.reward, sample.status) == (0.25, SlimeSample.Status.TRUNCATED)
    assert bus.stats().acknowledged == 0
    assert len(rollouts.take(1, timeout=10)) == 1
    assert bus.stats().acknowledged == 4
    rollouts.close()
    again = SlimeRollouts(bus.name, 2, SlimeSample)
    assert again.take(1, timeout=10)[0][0].prompt == "solve c"
    again.ack()
    assert again.take(1, timeout=0.01) == []
    again.close()


def test_a_sample_that_slime_refuses_is_dropped(bus: shmbus.Bus, producer: shmbus.Producer) -> None:
    rollouts = SlimeRollouts(bus.name, 2, SlimeSample)
    put_sample(producer, item("a", 0))
    put_sample(producer, item("b", 0, status="nearly"))
    marked = {"slime": {}, "order": ["instance_id"]}
    producer.put("mark", group_size=1, index=0, score=1.0, tokens=[1], meta=marked)
    # What an item calls itself is no member of a Sample.
    put_sample(producer, item("a", 1, __class__="x", __dict__={}, Status="y"))
    with pytest.raises(ValueError, match="group 'b', uid 'b/0': 'nearly'"):
        rollouts.take(1, timeout=10)
    [group] = rollouts.take(1, timeout=10)
    assert [sample.reward for sample in group] == [0.0, 0.25]
    assert group[1].Status is SlimeSample.Status
    rollouts.ack()
    ledger = rollouts._consumer.stats()
    assert (ledger.acknowledged, ledger.undelivered, ledger.balanced) == (2, 0, True)
    rollouts.close()


def test_the_rollout_function_answers_as_slime_calls_it(
    bus: shmbus.Bus, producer: shmbus.Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dataclasses.dataclass
    class RolloutFnTrainOutput:
        samples: list[list[SlimeSample]]
        metrics: dict[str, Any] | None = None

    names = {
        "slime": {}, "slime.utils": {}, "slime.utils.types": {"Sample": SlimeSample},
        "slime.rollout": {},
        "slime.rollout.base_types": {"RolloutFnTrainOutput": RolloutFnTrainOutput},
    }  # fmt: skip
    for name, members in names.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(slime_rollouts, "_rollouts", None)
    args = types.SimpleNamespace(rollout_batch_size=1, n_samples_per_prompt=2)
    monkeypatch.delenv("SHMBUS_BUS", raising=False)
    with pytest.raises(KeyError, match="SHMBUS_BUS"):
        generate_rollout(args, 0, None)
    args.shmbus_bus = bus.name
    for number in range(2):
        put_sample(producer, item("a", number))
    output = generate_rollout(args, 0, None, evaluation=False)
    assert [sample.reward for sample in output.samples[0]] == [0.0, 0.25]
    with pytest.raises(ValueError, match="--eval-function-path"):
        generate_rollout(args, 0, None, evaluation=True)
    assert slime_rollouts._rollouts is not None
    slime_rollouts._rollouts.close()
