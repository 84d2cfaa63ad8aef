"""The handler under torch's own tools: DataLoader, StatefulDataLoader, distributed checkpoints."""

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import keys_of, train_next
from torch.utils.data import DataLoader, IterableDataset

from shmbus import Bus, Producer
from trainer_adapter import OnlineDataHandler


def put(producer: Producer, key: str, metas: list[Any] | None = None, **more: Any) -> None:
    metas = metas or [None, None]
    for index, meta in enumerate(metas):
        given = {
            "tokens": np.full(4, index), "loss_mask": np.array([0, 1, 1, 1]),
            "logprobs": np.full(4, -0.5, np.float32), "score": float(index), **more,
        }  # fmt: skip
        producer.put(key, group_size=len(metas), index=index, meta=meta, timeout=10, **given)


def test_a_data_loader_passes_batches_on_and_refuses_workers(bus: Bus, producer: Producer) -> None:
    keys = [f"k{number}" for number in range(4)]
    for key in keys:
        put(producer, key)
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        assert isinstance(handler, IterableDataset)
        for first, batch in zip((0, 2), DataLoader(handler, batch_size=None), strict=False):
            assert keys_of(batch) == keys[first : first + 2]
            handler.ack(batch)
        loader = DataLoader(handler, batch_size=None, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(RuntimeError, match="pass num_workers=0"):
            next(iter(loader))
        with pytest.raises(TypeError, match="one process reads a bus"):
            pickle.dumps(handler)


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_stateful_data_loader_resumes(bus: Bus, producer: Producer, prefetch: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    keys = [f"k{number}" for number in range(10)]
    for key in keys:
        put(producer, key)
    got: list[str] = []
    state: Any = None
    while len(got) < len(keys):
        with OnlineDataHandler(bus.name, groups_per_batch=2, prefetch=prefetch) as handler:
            loader = stateful.StatefulDataLoader(handler, batch_size=None)
            if state is not None:
                loader.load_state_dict(state)
            for _, batch in zip(range(2), loader, strict=False):
                got += keys_of(batch)
                # The second of each life is trained, saved, and left unacknowledged.
                state = loader.state_dict()
                if len(got) % 4 or len(got) == len(keys):
                    handler.ack(batch)
                if len(got) == len(keys):
                    break
    assert got == keys


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize("acks", [0, 2])
def test_torch_dcp_saves_and_loads(bus: Bus, producer: Producer, tmp_path: Path, acks: int) -> None:
    # Imported late: as slow as torch, in each worker with this file.
    import torch.distributed.checkpoint as dcp

    keys = [f"k{number}" for number in range(8)]
    for key in keys:
        put(producer, key)
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        batches = [handler.next_batch(10) for _ in range(2)]
        handler.set_policy_version(7)
        dcp.save({"data": handler, "weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
        for batch in batches[:acks]:
            handler.ack(batch)
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        # Its batches before the load differ in shape from the saved ones.
        dcp.load({"data": handler, "weight": torch.zeros(2)}, checkpoint_id=tmp_path, no_dist=True)
        assert (handler.step, producer.policy_version) == (2, 7)
        assert [*keys_of(handler.next_batch(10)), *keys_of(handler.next_batch(10))] == keys[4:]


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_sample_may_ask_for_zero_advantage(bus: Bus, producer: Producer, layout: Any) -> None:
    metas = [{"set_advantage_to_zero": True}, {"set_advantage_to_zero": False}, None, "text"]
    put(producer, "a", metas)
    put(producer, "own", [{"set_advantage_to_zero": 1}], advantages=np.full(4, 9.0))
    with OnlineDataHandler(
        bus.name, groups_per_batch=2, advantages="dr_grpo", layout=layout
    ) as handler:
        batch = handler.next_batch(10)
        rows = batch.advantages.reshape(5, 4)
        # Its score still counts: the mean of 0, 1, 2, 3 is 1.5.
        assert rows.tolist() == [[0.0] * 4, [-0.5] * 4, [0.5] * 4, [1.5] * 4, [0.0] * 4]
        assert batch.loss_mask.reshape(5, 4)[0].tolist() == [False, True, True, True]


REASONS = [{"finish_reason": reason} for reason in ("stop", "length", "max_tokens", "abort")]
TYPED_REASONS = [{"finish_reason": {"type": meta["finish_reason"]}} for meta in REASONS]


@pytest.mark.parametrize("reasons", [REASONS, TYPED_REASONS], ids=["plain", "typed"])
@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("truncated", ["keep", "mask", "drop"])
def test_truncated_samples_are_kept_masked_or_dropped_with_their_group(
    bus: Bus, producer: Producer, truncated: Any, prefetch: int, reasons: list[dict[str, Any]]
) -> None:
    put(producer, "cut", reasons)
    put(producer, "whole", [{"finish_reason": "stop"}, {"note": "length finish_reason"}])
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, truncated=truncated, advantages="dr_grpo", prefetch=prefetch
    ) as handler:
        batch = handler.next_batch(10)
        handler.ack(batch)
        ledger = handler.stats()
        if truncated == "drop":
            assert keys_of(batch) == ["whole"]
            assert handler.truncated_groups == 1
            assert (ledger.dropped, ledger.acknowledged) == ({"malformed": 4}, 2)
            return
        assert keys_of(batch) == ["cut"]
        trained = batch.loss_mask.reshape(4, 4).any(dim=1).tolist()
        assert trained == [True, *[truncated == "keep"] * 3]
        assert batch.logprobs.reshape(4, 4).any(dim=1).tolist() == trained
        assert batch.advantages.reshape(4, 4)[:, 0].tolist() == [-1.5, -0.5, 0.5, 1.5]
        assert batch.loss_mask[1] and handler.truncated_groups == 0


@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize(
    ("field", "wrong"),
    [(field, wrong) for field in ("logprobs", "advantages") for wrong in (np.nan, np.inf, -np.inf)]
    + [("logprobs", wrong) for wrong in (0.01, 3.0, 1e30)],
)
@pytest.mark.parametrize("malformed", ["raise", "drop"])
def test_what_no_loss_takes_where_it_is_trained_drops_its_group_alone(
    bus: Bus, producer: Producer, malformed: Any, field: str, wrong: float, dtype: str
) -> None:
    put(producer, "before", logprobs=np.array([1e-7, 0, 9e-4, -1], dtype))  # rounded
    put(producer, "bad", **{field: np.array([0, 0, wrong, 0], dtype)})
    put(producer, "after")
    with OnlineDataHandler(
        bus.name, groups_per_batch=2, malformed=malformed, max_wait=0.05
    ) as handler:
        if malformed == "raise":
            with pytest.raises(ValueError, match=rf"'bad'\[0\].*field '{field}'.*at token 2"):
                handler.next_batch(10)
        assert train_next(handler) == ["before", "after"]
        ledger = handler.stats()
        assert (ledger.dropped, ledger.acknowledged, ledger.balanced) == ({"malformed": 2}, 4, True)


@pytest.mark.parametrize(
    ("wrong", "dtype"),
    [(wrong, dtype) for wrong in (np.nan, np.inf, 0.5, -1, 2, 1e-30) for dtype in ("f4", "f8")]
    + [(2, f"u{size}") for size in (1, 2, 4, 8)]
    + [(-1, f"i{size}") for size in (1, 2, 4, 8)],
)
def test_a_mask_of_other_values_than_0_and_1_drops_its_group_alone(
    bus: Bus, producer: Producer, wrong: float, dtype: str
) -> None:
    put(producer, "bad", loss_mask=np.array([1, 0, wrong, 1], dtype))
    put(producer, "good", loss_mask=np.array([1, 0, 0, 1], dtype))
    with OnlineDataHandler(bus.name, groups_per_batch=1, max_wait=0.05) as handler:
        with pytest.raises(ValueError, match=r"'bad'\[0\].*'loss_mask'.* at token 2") as refused:
            handler.next_batch(10)
        assert f"got {np.array(wrong, dtype).item()} at" in str(refused.value)
        batch = handler.next_batch(10)
        assert keys_of(batch) == ["good"]
        assert batch.loss_mask.tolist()[:4] == [True, False, False, True]


def test_a_long_sequence_is_malformed_and_a_large_group_alone(bus: Bus, producer: Producer) -> None:
    put(producer, "long", tokens=np.arange(11), loss_mask=np.ones(11), logprobs=np.zeros(11))
    put(producer, "large", [None] * 5)
    with OnlineDataHandler(bus.name, tokens_per_batch=10, max_wait=0.05) as handler:
        with pytest.raises(
            ValueError, match=r"'long'\[0\].*field 'tokens': expected at most 10 tokens.*got 11"
        ):
            handler.next_batch(10)
        assert handler.next_batch(10).num_tokens == 20


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
def test_the_progress_line_shows_batches_and_lag(bus: Bus, producer: Producer, stream: Any) -> None:
    written = stream()
    put(producer, "a", policy_version=3)
    producer.put("open", group_size=2, index=0, tokens=np.arange(3))
    with OnlineDataHandler(bus.name, groups_per_batch=1, progress=written) as handler:
        handler.set_policy_version(5)
        handler.ack(handler.next_batch(10))
        line = handler.progress.line
    assert written.getvalue() == (f"\r{line}\x1b[K\n" if stream is Terminal else f"{line}\n")
    for words in ("step 0: 1 group, 2 sequences, 8 tokens", "lag 2.0", "1 group open"):
        assert words in line
