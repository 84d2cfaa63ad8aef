"""Blocks of the guides run as printed, with stand-ins for what a page leaves to its reader.

Stand-ins: models are tables of logits, engines and fleets keep the real signatures, a CUDA device
is host memory (`swap`), and an endless loop ends by `Enough`.
"""

import asyncio
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, MagicMock, create_autospec

import doc_pages
import numpy as np
import pytest
import torch
from answering import answering
from conftest import ends_of, segments_named, wait_until

import shmbus
import shmbus.engines
import shmbus.weights
from shmbus import Bus, Producer, Request
from shmbus.cli import main
from shmbus.inspect.status import read_status
from trainer_adapter import OnlineDataHandler, ScoredGroup, attention, corrections, losses

SCHEMA = {"tokens": "int32", "logprobs": "float32", "loss_mask": "uint8"}
PEFT = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["x"]}
N = 4
SMALL_BATCHES = partial(OnlineDataHandler, groups_per_batch=1)


class Enough(Exception):
    """Ends an endless loop of a page."""


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, "64MiB", schema=SCHEMA | {"prompt?": "int32"}) as bus:
        yield bus


def put(producer: Producer, key: str, size: int = 2, length: int = N, **more: Any) -> None:
    for index in range(size):
        sample = {"score": float(index % 2), "tokens": np.arange(length, dtype=np.int32) % 9} | more
        sample |= {"logprobs": np.full(length, -1, np.float32)}
        producer.put(
            key, group_size=size, index=index, loss_mask=np.ones(length, np.uint8), **sample
        )


def answer(producer: Producer, request: Request) -> None:
    fields = {"tokens": [1, 2], "logprobs": [-1.0, -1.0], "loss_mask": [0, 1]}
    producer.requests.answer(request, score=request.index % 2, **fields)


def stops_after(calls: int, call: Callable[..., Any] = lambda *_: None) -> Callable[..., None]:
    """A function that raises Enough at its last call."""
    left = [calls]

    def step(*arguments: Any) -> None:
        call(*arguments)
        left[0] -= 1
        if not left[0]:
            raise Enough

    return step


def test_the_loop_of_the_readme_trains(bus: Bus, producer: Producer) -> None:
    for number in range(6):
        put(producer, f"q{number}", 8, 4096)
    seen: list[int] = []
    step = stops_after(2, lambda batch: seen.append(batch.num_tokens))
    with pytest.raises(Enough):
        doc_pages.run("README.md", "train_step(batch)", bus.name, train_step=step)
    assert seen == [65_536] * 2


def test_the_loop_of_the_trainers_page_trains(bus: Bus, producer: Producer) -> None:
    for number in range(6):
        put(producer, f"q{number}", 8, 4096)
    parts: list[Any] = []

    def model(part: Any) -> torch.Tensor:
        parts.append(part)
        return part.logprobs.clone().requires_grad_()

    with pytest.raises(Enough):
        doc_pages.run(
            "docs/trainer.md", "micro_batches(batch", bus.name, model=model,
            optimizer=SimpleNamespace(step=stops_after(2)),
            swap={"logprobs = ...": "logprobs = model(part)"},
        )  # fmt: skip
    assert sum(part.num_tokens for part in parts) == 2 * 65_536


def test_prompts_of_a_data_set_are_trained_once(bus: Bus) -> None:
    trained: list[str] = []
    rows = [{"prompt": [number], "question": str(number)} for number in range(5)]
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, answering(bus.name, answer):
        doc_pages.run(
            "docs/trainer.md", "load_dataset(", bus.name, handler=handler,
            checkpoint={"handler": handler.state_dict()},
            load_dataset=lambda *_: {"train": rows},
            train=lambda batch: trained.extend(batch.instance_ids[::8]),
        )  # fmt: skip
    assert len(trained) == len(set(trained)) == 5


def test_held_out_prompts_are_evaluated(bus: Bus) -> None:
    with OnlineDataHandler(bus.name) as handler, answering(bus.name, answer):
        space = doc_pages.run(
            "docs/trainer.md", "handler.evaluate(", bus.name, handler=handler, step=3,
            held_out=[np.int32([1]), np.int32([2])],
        )  # fmt: skip
    assert space["figures"]["eval/reward/mean"] == 0.5


def test_extra_fields_and_sampling_masks_reach_a_batch(bus_name: str) -> None:
    fields = doc_pages.run("docs/trainer.md", "ExtraField(", bus_name)["extra_fields"]
    with Bus.create(bus_name, "16MiB"), Producer(bus_name) as producer:
        OnlineDataHandler(bus_name, extra_fields=fields).close()
        names = {"producer": producer, "np": np, "ids": [1, 2]}
        doc_pages.run(
            "docs/trainer.md", "support_counts=counts", bus_name, allowed=[1, 2, 3], counts=[0, 3],
            swap={"group_size=8": "group_size=1"}, **names,
        )  # fmt: skip
        extra = {"support": "support"}
        with SMALL_BATCHES(bus_name, extra_fields=extra) as handler:
            batch = handler.next_batch(30)
            assert batch.extra["support"].tolist() == [1, 2, 3]
            handler.ack(batch)


def test_shared_prefixes_give_a_logprob_a_token(bus: Bus, producer: Producer) -> None:
    put(producer, "q1", 8)

    def model(logits_to_keep: torch.Tensor, **_: Any) -> Any:
        return SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), 9))

    space = doc_pages.run(
        "docs/trainer.md", 'layout="prefix"', bus.name, model=model,
        OnlineDataHandler=SMALL_BATCHES,
        transformers_inputs=attention.transformers_inputs,
    )  # fmt: skip
    assert len(space["logprobs"]) == space["batch"].num_tokens
    space["handler"].close()


def test_advantages_and_filters_of_the_page_judge_a_group(bus_name: str) -> None:
    metas = [{"format": 1.0, "exact": 1.0}, {"format": 0.0, "exact": 0.0}]
    group = ScoredGroup([1.0, 0.0], [N, N], metas=metas)
    space = doc_pages.run("docs/trainer.md", "def advantages(", bus_name)
    assert space["advantages"](group) == pytest.approx([1, -1], abs=1e-3)


def test_a_judge_scores_and_annotators_write_columns(bus: Bus, producer: Producer) -> None:
    async def ask(*_: Any) -> Any:
        return SimpleNamespace(reward=0.25)

    put(producer, "q1", score=None, meta={"question": "?"})
    space = doc_pages.run(
        "docs/trainer.md", "async def score_group", bus.name, openai=MagicMock(), ask=ask,
        asyncio=asyncio, OnlineDataHandler=SMALL_BATCHES,
    )  # fmt: skip
    with space["handler"] as handler:
        batch = handler.next_batch(30)
        assert batch.scores.tolist() == [0.25, 0.25]
        handler.ack(batch)

    put(producer, "q2")
    names = {"reference": lambda tokens: np.zeros(len(tokens), np.float32)}
    space = doc_pages.run("docs/trainer.md", "def annotate(", bus.name, **names)
    with SMALL_BATCHES(bus.name, annotate_group=space["annotate"]) as handler:
        batch = handler.next_batch(30)
        assert batch.extra["ref_logprobs"].shape == (2 * N,)
        handler.ack(batch)

    put(producer, "q3")
    trainer, annotator = doc_pages.halves("docs/trainer.md", "# in each annotator's process")
    names |= {"swap": {"for sample in group])": "for sample in group])\n        break"}}
    helper = threading.Thread(
        daemon=True, target=doc_pages.execute, args=(annotator, bus.name), kwargs=names
    )
    helper.start()

    def check(batch: Any) -> None:
        assert batch.extra["ref_logprobs"].shape == (2 * N,)
        raise Enough

    with pytest.raises(Enough):
        doc_pages.execute(
            trainer, bus.name, check=check, OnlineDataHandler=SMALL_BATCHES,
            swap={"        ...": "        check(batch)"},
        )  # fmt: skip
    helper.join(60)


def test_corrections_mismatch_and_metrics_are_numbers(bus: Bus, producer: Producer) -> None:
    put(producer, "q1")
    said: list[dict[str, float]] = []
    log = SimpleNamespace(
        log=lambda d, **_: said.append(d), log_metrics=lambda d, **_: said.append(d)
    )
    names = {name: getattr(m, name) for m in (losses, corrections) for name in m.__all__}
    names |= {"torch": torch, "wandb": log, "mlflow": log, "writer": MagicMock()}
    with SMALL_BATCHES(bus.name) as handler:
        part = batch = handler.next_batch(30)
        names |= {"logprobs": batch.logprobs, "old_logprobs": batch.logprobs, "part": part}
        doc_pages.run("docs/trainer.md", "importance_correction(", bus.name, **names)
        doc_pages.run(
            "docs/trainer.md", "logprob_mismatch(", bus.name, swap={'"cuda"': '"cpu"'},
            handler=handler, model=None, logprobs_of=lambda _, part: part.logprobs, **names,
        )  # fmt: skip
        doc_pages.run(
            "docs/trainer.md", "mlflow.log_metrics", bus.name, handler=handler, batch=batch, **names
        )
        handler.ack(batch)
    assert {name.split("/")[0] for each in said for name in each} >= {"mismatch", "reward", "drops"}


def test_a_sample_of_several_rows_is_put(bus_name: str) -> None:
    with Bus.create(bus_name, "4MiB"), Producer(bus_name) as producer:
        masks = {name: np.ones(200, np.uint8) for name in ("mask", "mask2")}
        rows = {name: np.arange(200, dtype=np.int32) for name in ("first", "second")}
        doc_pages.run(
            "docs/trainer.md", '"prefix_length": 120', bus_name, producer=producer, **masks, **rows
        )


# -- operating, fields, tuning ------------------------------------------------------------------


class SandboxError(Exception):
    """As of a worker's sandbox."""


def test_workers_of_the_operating_page_answer_fail_and_release(bus_name: str) -> None:
    prompt = np.int32([1])
    bus = Bus.create(bus_name, "8MiB")
    with ends_of(bus, sample_retries=1, retry_backoff=(0.01, 0.01)) as (producer, consumer):
        consumer.request("r1", group_size=1, prompt=prompt, meta={"answer": 1})
        doc_pages.run(
            "docs/operating.md", "request := producer", bus_name, producer=producer,
            swap={"=60": "=0.5"}, sample=lambda prompt, meta: (prompt, meta["answer"]),
        )  # fmt: skip
        (group,) = consumer.take(timeout=30)
        assert (group[0].score, group[0]["tokens"].tolist()) == (1.0, [1])
        consumer.request("r2", group_size=1, prompt=prompt)
        consumer.request("r3", group_size=1, prompt=prompt)
        for error in (ConnectionError("away"), SandboxError("no judge")):
            doc_pages.run(
                "docs/operating.md", "except ConnectionError", bus_name, producer=producer,
                request=producer.requests.next(timeout=30), JudgeError=SandboxError,
                engine=MagicMock(**{"complete.side_effect": error}),
            )  # fmt: skip
        roll_out = MagicMock(side_effect=SandboxError("no sandbox"))
        names = {"producer": producer, "SandboxError": SandboxError, "prompt": "q1"}
        doc_pages.run(
            "docs/operating.md", "except SandboxError", bus_name, roll_out=roll_out, **names
        )
        consumer.take(timeout=0)
        assert sum(failed.failed for failed in read_status(bus_name).producers) >= 1


def test_a_snapshot_is_read_by_another_program(
    bus: Bus, producer: Producer, tmp_path: Path
) -> None:
    pytest.importorskip("safetensors")
    put(producer, "q1")
    assert main(["snapshot", bus.name, str(tmp_path / "s")]) == 0
    assert doc_pages.run(
        "docs/operating.md", "load_file(", bus.name, swap={"DIR/": f"{tmp_path}/s/"}
    )["first"].tolist() == list(range(N))


def test_a_schema_takes_what_fits_and_tells_what_does_not(bus_name: str) -> None:
    space = doc_pages.run("docs/schema.md", '"pixel_values?"', bus_name, swap={"256MiB": "8MiB"})
    space["bus"].close()
    shmbus.unlink(bus_name)
    schema = {"tokens": "int32", "logprobs": "float32"}
    shown = doc_pages.block("docs/schema.md", "did you mean logprobs=?").splitlines()
    wrong: tuple[dict[str, Any], ...] = ({"logprob": [0.0]}, {"logprobs": [0.0] * 4}, {})
    with Bus.create(bus_name, "4MiB", schema=schema), Producer(bus_name) as producer:
        for line, fields in zip(shown, wrong, strict=True):
            with pytest.raises((TypeError, ValueError)) as caught:
                producer.put("q", group_size=1, index=0, tokens=[1] * 5, **fields)
            said = f"{caught.type.__name__}: {caught.value}"
            assert said.startswith(line.removesuffix("...")), said


def test_lists_and_bits_become_samples(bus_name: str) -> None:
    swap = {"group_size=8": "group_size=1"}
    with ends_of(Bus.create(bus_name, "4MiB")) as (producer, consumer):
        names = {"producer": producer, "swap": swap}
        doc_pages.run("docs/schema.md", "tokens=[1, 2, 3],", bus_name, **names)
        assert consumer.take(timeout=30)[0][0]["tokens"].tolist() == [1, 2, 3]
        hidden = torch.tensor([1.5, -2.0], dtype=torch.bfloat16)
        producer.put("q", group_size=1, index=0, hidden=hidden)
        names = {"trajectory": consumer.take(timeout=30)[0][0], "torch": torch, "np": np}
        space = doc_pages.run("docs/schema.md", "view(np.int16)", bus_name, **names)
        assert torch.equal(space["hidden"], hidden)


# -- weights, channels, nodes -------------------------------------------------------------------


def test_weights_cross_from_trainer_to_engine(bus_name: str) -> None:
    trained, served = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).to(torch.bfloat16)
    trainer, engine = doc_pages.halves("docs/weights.md", "# an inference process")
    reader = threading.Thread(
        daemon=True, target=doc_pages.execute, args=(engine, bus_name), kwargs={"model": served}
    )

    def follow(publisher: Any) -> None:
        reader.start()
        wait_until(lambda: torch.equal(served.weight, trained.weight.to(torch.bfloat16)))
        publisher.publish(version=8)
        reader.join(60)

    swap = {"publish(version=7)": "publish(version=7); follow(publisher)"}
    doc_pages.execute(trainer, bus_name, swap=swap, model=trained, torch=torch, follow=follow)
    assert not reader.is_alive()


@pytest.mark.parametrize(
    ("block", "swap"),
    [
        (
            ("docs/weights.md", "world_size=world_size,\n)\n"),
            {'    device=f"cuda:{rank}",\n': "", "cuda_vmm": "memfd"},
        ),
        (("docs/weights.md", "# finds what"), {', device="cuda:0"': "", "cuda_vmm": "memfd"}),
    ],
)
def test_publishers_on_a_device_take_these_arguments(
    block: tuple[str, str], swap: dict[str, str], bus_name: str
) -> None:
    swap |= {"WeightPublisher(": "kept = WeightPublisher("}
    names = {name: getattr(shmbus.weights, name) for name in shmbus.weights.__all__}
    names |= {"model": torch.nn.Linear(2, 2), "rank": 0, "world_size": 1}
    doc_pages.run(*block, bus_name, swap=swap, **names)["kept"].close()


def test_fleets_take_these_calls(
    bus_name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleets = {
        name: create_autospec(getattr(shmbus.engines, name))
        for name in ("EngineFleet", "LoraFleet")
    }
    for name, fleet in fleets.items():
        monkeypatch.setattr(shmbus.engines, name, fleet)
    doc_pages.run(
        "docs/weights.md", "from shmbus.engines import EngineFleet", bus_name, publisher=object()
    )
    fleets["EngineFleet"].return_value.update.assert_awaited_once()
    monkeypatch.setattr(
        shmbus.weights, "lora_state", lambda _: {"x.lora_A.weight": torch.ones(2, 2)}
    )
    doc_pages.run(
        "docs/weights.md", "LoraFiles(", bus_name, model=None,
        peft_config=MagicMock(**{"to_dict.return_value": PEFT}),
        swap={"/dev/shm/run1-adapters": f"{tmp_path}/adapters"},
    )  # fmt: skip
    fleets["LoraFleet"].return_value.update.assert_awaited_once()
    fleet = AsyncMock()
    doc_pages.run(
        "docs/weights.md", 'carrier="checkpoint"', bus_name, fleet=fleet,
        model=torch.nn.Linear(2, 2),
        WeightPublisher=shmbus.weights.WeightPublisher, ModuleSource=shmbus.weights.ModuleSource,
        swap={"/ckpt/run1": str(tmp_path / "checkpoints")},
    )  # fmt: skip
    fleet.reload.assert_awaited_once_with(str(tmp_path / "checkpoints"))


def test_one_copy_is_stepped_and_read(bus_name: str) -> None:
    trainer, server = doc_pages.halves("docs/weights.md", "with attach_model(")
    model = torch.nn.Linear(2, 2)
    names = {
        "model": model,
        "tokens": torch.ones(1, 2),
        "optimizer": torch.optim.SGD(model.parameters()),
    }

    def serve() -> None:
        attach = shmbus.weights.attach_model
        doc_pages.execute(
            server, bus_name, attach_model=attach, **names | {"model": torch.nn.Linear(2, 2)}
        )

    swap = {"        optimizer.step()\n": "        optimizer.step()\n    serve()\n"}
    doc_pages.execute(trainer, bus_name, swap=swap, serve=serve, **names)


def test_the_copy_of_a_server_is_attached(bus_name: str) -> None:
    engine, model = (torch.nn.Linear(2, 2, dtype=torch.bfloat16) for _ in range(2))
    with shmbus.weights.share_model(bus_name, engine, writes=False):
        space = doc_pages.run(
            "docs/weights.md", "from_pretrained(folder", bus_name, swap={'"cuda"': '"cpu"'},
            torch=torch, folder="", attach_model=shmbus.weights.attach_model,
            AutoModelForCausalLM=MagicMock(**{"from_pretrained.return_value": model}),
        )  # fmt: skip
        assert torch.equal(model.weight, engine.weight)
        space["shared"].close()


def remove_files(bus_name: str) -> None:
    """Remove what blocks leave: their processes would serve on."""
    for path in segments_named(bus_name):
        path.unlink()


def test_tensors_cross_a_channel(bus_name: str) -> None:
    seen = []
    engine, trainer = doc_pages.halves("docs/colocation.md", "# In the trainer's")
    names = {"hidden": torch.ones(3, 4096, dtype=torch.bfloat16), "ids": torch.arange(3)}
    names |= {name: getattr(shmbus.tensors, name) for name in shmbus.tensors.__all__}
    reader = threading.Thread(
        daemon=True, target=doc_pages.execute, args=(trainer, bus_name),
        kwargs={"head": lambda hidden, ids: seen.append(hidden.shape), **names},
    )  # fmt: skip
    reader.start()
    doc_pages.execute(engine, bus_name, **names)
    reader.join(60)
    assert seen == [(3, 4096)]
    specs = {"hidden": ("bfloat16", (None, 4096))}
    space = doc_pages.run(
        "docs/colocation.md", "TensorChannel.group(", bus_name, rank=0, specs=specs, **names
    )
    space["rx"].close()
    space["tx"].close()
    remove_files(bus_name)


def test_a_relay_and_its_weights_take_these_calls(
    bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import shmbus.relay

    start = create_autospec(shmbus.relay.start)
    monkeypatch.setattr(shmbus.relay, "start", start)
    doc_pages.run("docs/relay.md", "shmbus.relay.start(", bus_name)
    start.return_value.status.assert_called_once()
    names = {name: getattr(shmbus.weights, name) for name in shmbus.weights.__all__}
    names["source"] = shmbus.weights.ModuleSource(torch.nn.Linear(2, 2))
    doc_pages.run("docs/relay.md", "# on the trainer's node\nWeight", bus_name, **names)
    remove_files(bus_name)
