"""Random groups of samples, and the batch that numpy makes of them: the oracle of `pack`."""

from typing import Any

import numpy as np
import torch
from conftest import keys_of

from shmbus import Producer
from trainer_adapter import Batch

Sample = dict[str, Any]

DTYPES = {
    "tokens": torch.int64, "position_ids": torch.int64, "cu_seqlens": torch.int32,
    "loss_mask": torch.bool, "logprobs": torch.float32, "advantages": torch.float32,
    "scores": torch.float32, "policy_versions": torch.int64, "group_sizes": torch.int64,
}  # fmt: skip
PER_TOKEN = ("tokens", "position_ids", "loss_mask", "logprobs", "advantages")


def sample(rng: np.random.Generator, length: int, **more: Any) -> Sample:
    return {
        "tokens": rng.integers(0, 150_000, length, np.int32),
        "loss_mask": rng.integers(0, 2, length, np.uint8),
        "logprobs": -rng.random(length, np.float32),
        "score": float(rng.random()),
        "policy_version": int(rng.integers(0, 9)),
        **more,
    }


def put(producer: Producer, key: str, group: list[Sample]) -> None:
    for index, arguments in enumerate(group):
        producer.put(key, group_size=len(group), index=index, timeout=10, **arguments)


def put_random(producer: Producer, seed: int, count: int, longest: int = 50) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    groups = {
        f"k{n}": [sample(rng, int(rng.integers(1, longest))) for _ in range(rng.integers(1, 9))]
        for n in range(count)
    }
    for key, group in groups.items():
        put(producer, key, group)
    return groups


def by_kind(scores: np.ndarray[Any, Any], kind: Any) -> np.ndarray[Any, Any]:
    if kind == "none":
        return scores
    if kind not in ("grpo", "dr_grpo", "rloo"):
        return np.asarray(kind(scores))
    n = len(scores)
    if n == 1 or np.all(scores == scores[0]):
        return np.zeros(n)
    if kind == "rloo":
        return np.array([scores[i] - np.delete(scores, i).mean() for i in range(n)])
    centred = scores - scores.mean()
    return centred / (scores.std(ddof=1) + 1e-6) if kind == "grpo" else centred


def expected(groups: list[list[Sample]], kind: Any = "grpo") -> dict[str, Any]:
    samples = [s for group in groups for s in group]
    lengths = [len(s["tokens"]) for s in samples]
    advantages = np.concatenate([by_kind(np.array([s["score"] for s in g]), kind) for g in groups])
    masks = [np.asarray(s.get("loss_mask", np.ones(len(s["tokens"])))) != 0 for s in samples]
    columns = list(zip(samples, lengths, masks, advantages, strict=True))
    return {
        "tokens": np.concatenate([s["tokens"] for s in samples]),
        "position_ids": np.concatenate([np.arange(n) for n in lengths]),
        "cu_seqlens": np.cumsum([0, *lengths]),
        "loss_mask": np.concatenate(masks),
        "logprobs": np.concatenate([np.where(m, s["logprobs"], 0) for s, _, m, _ in columns])
        if "logprobs" in samples[0] else None,
        "advantages": np.concatenate(
            [s.get("advantages", np.full(n, a)) for s, n, _, a in columns]
        ),
        "scores": np.array([s["score"] for s in samples]),
        "policy_versions": np.array([s.get("policy_version", 0) for s in samples]),
        "group_sizes": np.array([len(group) for group in groups]),
    }  # fmt: skip


def assert_batch(batch: Batch, groups: dict[str, Any], kind: Any = "grpo") -> None:
    want = expected([groups[key] for key in keys_of(batch)], kind)
    for name, dtype in DTYPES.items():
        tensor = getattr(batch, name)
        if want[name] is None:
            assert tensor is None, name
            continue
        assert tensor.dtype == dtype, name
        assert tensor.is_contiguous() and tensor.device.type == "cpu", name
        got = tensor.numpy()
        if batch.layout == "padded" and name in PER_TOKEN:
            inside = np.arange(batch.max_seqlen) < np.diff(want["cu_seqlens"])[:, None]
            assert got.shape == inside.shape
            assert not got[~inside].any(), f"{name}: filler is not 0"
            got = got[inside]
        assert got.shape == want[name].shape, name
        exact = want[name].astype(got.dtype)
        tolerance = 2e-6 if name == "advantages" else 0
        assert np.allclose(got, exact, rtol=tolerance, atol=tolerance, equal_nan=True), name
    ids = [key for key in keys_of(batch) for _ in groups[key]]
    assert batch.instance_ids == ids
    assert batch.max_seqlen == max(np.diff(want["cu_seqlens"]))
    assert (batch.num_sequences, batch.num_tokens) == (len(ids), len(want["tokens"]))
