"""prime-rl's sender and receiver over shared memory, by the interfaces of two of its commits."""

import asyncio
import contextlib
import importlib
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import doc_pages
import msgspec
import numpy as np
import pytest
from published_prime_rl import PUBLISHED, PayloadSegment, RoutedExperts, SamplingMask, installed

import shmbus
from shmbus.channel import StepOrderError, unlink_channel

EXAMPLES = str(Path(__file__).resolve().parents[2] / "examples")
sys.path.insert(0, EXAMPLES)

import prime_rl_transport as prime_rl  # noqa: E402

RANKS = 2


@pytest.fixture(params=sorted(PUBLISHED))
def commit(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def run(bus_name: str) -> Iterator[str]:
    yield bus_name
    for rank in range(RANKS):
        for reader in range(2):
            with contextlib.suppress(shmbus.BusNotFoundError):
                unlink_channel(f"{bus_name}.rank{rank}.{reader}")


def micro_batch(kind: Any, dice: random.Random, commit: str) -> Any:
    tokens = dice.randint(1, 700)
    floats = [[dice.gauss(0, 1) for _ in range(tokens)] for _ in range(4)]
    experts = bytes(dice.randrange(256) for _ in range(tokens * 6))
    cut = dice.randint(0, tokens)
    more: dict[str, Any] = {}
    if commit == "0f59b24":
        counts = np.array([tokens, *[0] * (tokens - 1)], np.int32)
        more = {
            "sampling_mask": SamplingMask(bytes(4 * tokens), counts.tobytes()),
            "trace_ids": ["t"] * tokens, "branch_indices": [0] * tokens,
            "payload": [PayloadSegment("routed_experts", "/f", 0, 0, 1, "uint8", [3, 2])],
        }  # fmt: skip
    return kind(
        input_ids=[dice.randrange(2**40) for _ in range(tokens)],
        loss_mask=[dice.random() < 0.5 for _ in range(tokens)],
        advantages=floats[0], inference_logprobs=floats[1], position_ids=list(range(tokens)),
        sequence_lengths=[cut, tokens - cut], temperatures=[1.0] * tokens,
        env_names=["gsm8k"] * tokens, seq_lens=[1] * tokens,
        ref_logprobs=floats[2] if dice.random() < 0.5 else None,
        routed_experts=RoutedExperts(experts, [tokens, 3, 2], "uint8"),
        mm_refs={"pixels": bytes(dice.choice([10, 5000]))},
        # What is said in whole numbers is read as floats too.
        rl_weights=dice.choice([[1, *floats[3][1:]], [1] * tokens]),
        **more,
    )  # fmt: skip


def as_lists(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        assert not value.flags.writeable
        return value.tobytes() if value.dtype == np.uint8 else value.tolist()
    if isinstance(value, msgspec.Struct):
        return type(value)(**{n: as_lists(getattr(value, n)) for n in value.__struct_fields__})
    if isinstance(value, dict):
        return {key: as_lists(each) for key, each in value.items()}
    return value


def theirs_received(batches: list[Any]) -> bytes:
    """What prime-rl's receiver has of what its sender wrote, as bytes."""
    own = msgspec.msgpack.Decoder(list[type(batches[0])])  # type: ignore[misc]
    return msgspec.msgpack.encode(own.decode(msgspec.msgpack.encode(batches)))


def test_prime_rls_own_receiver_gives_the_same_bytes(commit: str, run: str, seed: int) -> None:
    dice = random.Random(seed)
    with installed(commit) as theirs:
        package, middle, _ = PUBLISHED[commit]
        assert prime_rl.install(run) == package
        trainer = sys.modules["prime_rl.trainer.data"]
        sender = getattr(theirs, f"setup_{middle}_sender")("out", RANKS, 5, None)
        receivers = [
            getattr(trainer, f"setup_{middle}_receiver")("out", rank, 5, None)
            for rank in range(RANKS)
        ]
        for _ in range(4):
            assert not receivers[0].can_receive()
            grid = [[micro_batch(theirs.MicroBatch, dice, commit) for _ in range(3)]
                    for _ in range(RANKS)]  # fmt: skip
            by_theirs = [theirs_received(row) for row in grid]
            asyncio.run(sender.send(grid))
            for receiver, wire in zip(receivers, by_theirs, strict=True):
                receiver.wait()
                assert receiver.can_receive()
                found = receiver.receive()
                assert all(isinstance(each.input_ids, np.ndarray) for each in found)
                assert all(isinstance(each.routed_experts.data, np.ndarray | bytes)
                           for each in found)  # fmt: skip
                assert msgspec.msgpack.encode([as_lists(each) for each in found]) == wire
        for end in (sender, *receivers):
            end.close()


def small(kind: Any, number: int) -> Any:
    return kind([number], [True], [0.5], [-1.0], [0], [1], [1.0], ["e"], [1])


def test_processes_that_share_a_data_rank_all_get_its_batches(run: str) -> None:
    with installed("0f59b24") as theirs:
        sender = prime_rl.ShmbusBatchSender(run, 1, readers_per_rank=2)
        readers = [
            prime_rl.ShmbusBatchReceiver(run, 0, micro_batch=theirs.MicroBatch, reader=reader)
            for reader in range(2)
        ]
        asyncio.run(sender.send([[small(theirs.MicroBatch, 7)]]))
        assert [int(each.receive()[0].input_ids[0]) for each in readers] == [7, 7]
        for end in (sender, *readers):
            end.close()


def test_a_step_that_was_not_followed_by_another_comes_again(run: str) -> None:
    with installed("0f59b24") as theirs:
        kind = theirs.MicroBatch
        sender = prime_rl.ShmbusBatchSender(run, 1)
        for step in range(2):
            asyncio.run(sender.send([[small(kind, step)]]))
        first = prime_rl.ShmbusBatchReceiver(run, 0, micro_batch=kind)
        [kept], [again] = first.receive(), first.receive()
        first.close()
        assert (int(kept.input_ids[0]), int(again.input_ids[0])) == (0, 1)
        second = prime_rl.ShmbusBatchReceiver(run, 0, 1, micro_batch=kind)
        assert int(second.receive()[0].input_ids[0]) == 1
        with pytest.raises(ValueError, match=r"expected 1 ranks with equally many .* got \[1, 1\]"):
            asyncio.run(sender.send([[small(kind, 2)], [small(kind, 2)]]))
        asyncio.run(sender.send([[small(kind, 2)]]))
        second.close()
        behind = prime_rl.ShmbusBatchReceiver(run, 0, 0, micro_batch=kind)
        with pytest.raises(StepOrderError, match="resume the sender from the checkpoint"):
            behind.receive()
        behind.close()
        sender.close()


def receiver(run: str, kind: Any, rank: int, reader: int = 0) -> Any:
    return prime_rl.ShmbusBatchReceiver(run, rank, micro_batch=kind, reader=reader)


def test_a_trainer_that_asks_for_a_slice_that_is_not_sent_is_refused(run: str) -> None:
    with installed("0f59b24") as theirs:
        kind = theirs.MicroBatch
        early = receiver(run, kind, 2)
        assert not early.can_receive(), "nobody says yet what is sent"
        sender = prime_rl.ShmbusBatchSender(run, RANKS, readers_per_rank=1, micro_batch=kind)
        wrong = [early, receiver(run, kind, 2), receiver(run, kind, 1, reader=1)]
        for each in wrong:
            with pytest.raises(ValueError, match="sends to 2 data ranks with 1 readers each"):
                each.wait()
        with pytest.raises(ValueError, match="data_rank, reader: expected 0 or more, got -1 and 0"):
            receiver(run, kind, -1)
        right = [receiver(run, kind, rank) for rank in range(RANKS)]
        asyncio.run(sender.send([[small(kind, rank)] for rank in range(RANKS)]))
        assert [int(each.receive()[0].input_ids[0]) for each in right] == [0, 1]
        for end in (sender, *right, *wrong):
            end.close()


def test_micro_batches_of_another_version_are_refused_by_their_fields(run: str) -> None:
    kinds = []
    for commit in ("0f59b24", "559b447"):
        with installed(commit) as theirs:
            kinds.append(theirs.MicroBatch)
    sender = prime_rl.ShmbusBatchSender(run, 1, micro_batch=kinds[0])
    other = receiver(run, kinds[1], 0)
    with pytest.raises(
        ValueError, match="has branch_indices, payload, sampling_mask, trace_ids; run both"
    ):
        other.wait()
    for end in (sender, other):
        end.close()


def test_the_page_replaces_the_transport(commit: str, run: str) -> None:
    _package, middle, _ = PUBLISHED[commit]
    with installed(commit) as theirs:
        doc_pages.run("prime-rl.md", "prime_rl_transport.install(", run)
        sender = getattr(theirs, f"setup_{middle}_sender")("out", 1, 0, None)
        assert isinstance(sender, prime_rl.ShmbusBatchSender)
        sender.close()


def test_a_transport_by_the_name_of_its_module_needs_no_install(run: str) -> None:
    transport = SimpleNamespace(module="prime_rl_transport", options={"bus": run})
    with installed("0f59b24") as theirs:
        module = importlib.import_module(transport.module)
        sender = module.setup_batch_sender("out", 1, 5, transport)
        receiver = module.setup_batch_receiver("out", 0, 5, transport)
        asyncio.run(sender.send([[small(theirs.MicroBatch, 7)]]))
        receiver.wait()
        assert [each.input_ids for each in receiver.receive()] == [[7]]
        for end in (sender, receiver):
            end.close()


def test_another_version_is_refused_by_the_names_it_lacks() -> None:
    with pytest.raises(ImportError, match=r"transports\.batch is not there.*559b447"):
        prime_rl.install("none")
    with installed("0f59b24") as theirs:
        del theirs.setup_batch_receiver
        with pytest.raises(ImportError, match="has no setup_batch_receiver"):
            prime_rl.install("none")
