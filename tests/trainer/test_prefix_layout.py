"""The prefix layout: what a group shares once, and everything else as if packed plainly."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from conftest import train_next

from shmbus import Bus, Consumer, Producer
from trainer_adapter import Batch, OnlineDataHandler, pack
from trainer_adapter.attention import (
    prefix_attention,
    register_with_transformers,
    transformers_inputs,
)
from trainer_adapter.batches import prefix_tree
from trainer_adapter.logprobs import logit_rows, token_logprobs
from trainer_adapter.losses import policy_loss
from trainer_adapter.microbatch import micro_batches

pytestmark = pytest.mark.usefixtures("one_thread")

PLAIN = ("tokens", "position_ids", "cu_seqlens", "loss_mask", "logprobs", "advantages", "scores")


def answers(rng: np.random.Generator, prompt: np.ndarray[Any, Any], count: int) -> list[Any]:
    found = []
    for _ in range(count):
        more = rng.integers(0, 30, int(rng.integers(1, 20)))
        tokens = np.concatenate([prompt, more]).astype(np.int32)
        mask = np.arange(len(tokens)) >= len(prompt)
        found.append(
            {
                "tokens": tokens,
                "loss_mask": mask,
                "logprobs": np.where(mask, -rng.random(len(tokens)), 0).astype(np.float32),
                "score": float(rng.random()),
            }
        )
    return found


def put_groups(producer: Producer, rng: np.random.Generator, groups: int) -> None:
    for number in range(groups):
        prompt = rng.integers(0, 30, int(rng.integers(20, 57)))  # a sequence: at most 90 tokens
        samples = answers(rng, prompt, 4)
        if number % 2:  # a tree: rows of each sample branch off its first row
            samples = [
                {"score": one.pop("score"), "rows": [one, *branches(rng, one)]} for one in samples
            ]
        producer.put_group(f"q{number}", samples, timeout=10)


def branches(rng: np.random.Generator, row: dict[str, Any]) -> list[dict[str, Any]]:
    kept = len(row["tokens"]) - int(rng.integers(0, 3))
    more = rng.integers(0, 30, 15).astype(np.int32)
    mask = np.arange(kept + 15) >= kept
    return [
        {
            "tokens": np.concatenate([row["tokens"][:kept], more]),
            "loss_mask": mask,
            "logprobs": np.where(mask, -1.0, 0.0).astype(np.float32),
            "prefix_length": kept,
        }
    ]


def model_of(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        vocab_size=30, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
        head_dim=8, sliding_window=9, pad_token_id=0,
    )  # fmt: skip
    name = register_with_transformers()
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=name)
    return made.double()


def losses(model: Any, batch: Any, keep: bool) -> torch.Tensor:
    inputs = transformers_inputs(batch)
    rows = logit_rows(batch) if keep else None
    if rows is not None:
        inputs["logits_to_keep"] = rows
    logprobs = token_logprobs(model(**inputs).logits[0], batch, rows=rows)
    return policy_loss(
        logprobs, batch.logprobs.double(), batch.advantages.double(), batch.loss_mask,
        normalisation="sequence", cu_seqlens=batch.cu_seqlens,
    ).loss  # fmt: skip


@pytest.mark.parametrize("kind", ["Llama", "Qwen3", "Mistral"])
def test_the_loss_is_plain(bus: Bus, kind: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "LEAST_SAVED", 8)
    rng = np.random.default_rng(seed)
    model = model_of(kind)
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        put_groups(producer, rng, 4)
        groups = consumer.take(4, 10)
        plain, shared = pack(groups), pack(groups, layout="prefix")
        for name in PLAIN:
            assert torch.equal(getattr(plain, name), getattr(shared, name)), name
        tree = shared.prefix_tree
        assert tree is not None
        assert tree.num_rows < 0.7 * plain.num_tokens
        assert torch.equal(tree.of_tokens(tree.tokens), plain.tokens)
        assert torch.equal(tree.of_tokens(tree.position_ids), plain.position_ids)
        assert torch.equal(tree.of_rows(plain.tokens), tree.tokens)
        assert torch.equal(tree.rows[tree.sources], torch.arange(tree.num_rows))
        wanted = losses(model, plain, keep=False)
        right = torch.autograd.grad(wanted, model.parameters())
        for keep in (False, True):
            got = losses(model, shared, keep)
            torch.testing.assert_close(got, wanted)
            for mine, theirs in zip(
                torch.autograd.grad(got, model.parameters()), right, strict=True
            ):
                torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_micro_batches_keep_groups(bus: Bus, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_tree, "LEAST_SAVED", 8)
    rng = np.random.default_rng(seed)
    model = model_of("Llama")
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        put_groups(producer, rng, 6)
        batch = pack(consumer.take(6, 10), layout="prefix")
        assert batch.prefix_tree is not None

        def total(parts: list[Any]) -> torch.Tensor:
            found = torch.zeros((), dtype=torch.float64)
            for part in parts:
                logprobs = token_logprobs(model(**transformers_inputs(part)).logits[0], part)
                found = found + policy_loss(
                    logprobs, part.logprobs.double(), part.advantages.double(), part.loss_mask,
                    denominator=part.batch_loss_tokens,
                ).loss  # fmt: skip
            return found

        (whole,) = micro_batches(batch, count=1)
        wanted = total([whole])
        for cut in ({"max_tokens": 200}, {"max_tokens": 90}, {"count": 3}, {"count": 20}):
            parts = micro_batches(batch, **cut)
            assert sorted(at for part in parts for at in part.sequence_indices.tolist()) == list(
                range(batch.num_sequences)
            )
            for part in parts:
                assert part.prefix_tree is not None
                assert part.prefix_tree.num_rows <= cut.get("max_tokens", 10**9)
                rows = part.prefix_tree
                assert torch.equal(rows.of_tokens(rows.tokens), part.tokens)
            torch.testing.assert_close(total(parts), wanted)
        in_three = micro_batches(batch, count=3)
        assert sum(part.prefix_tree.num_rows for part in in_three) == batch.prefix_tree.num_rows  # type: ignore[union-attr]


def test_a_handler_yields_it_and_a_copy_and_a_pickle_have_it(bus: Bus, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 30, 300)
    with (
        Producer(bus.name) as producer,
        OnlineDataHandler(bus.name, groups_per_batch=1, layout="prefix", prefetch=1) as handler,
    ):
        producer.put_group("q", answers(rng, prompt, 4))
        batch = handler.next_batch(10)
        assert batch.layout == "prefix"
        assert batch.prefix_tree is not None
        assert batch.num_tokens - batch.prefix_tree.num_rows == 3 * 300
        for other in (batch.to("cpu"), pickle.loads(pickle.dumps(batch))):
            assert isinstance(other, Batch)
            assert other.prefix_tree is not None
            assert torch.equal(other.prefix_tree.rows, batch.prefix_tree.rows)
            (part,) = micro_batches(other, count=1)
            assert part.layout == "prefix"
        handler.ack(batch)


@pytest.mark.parametrize("lengths", [[0], [0, 0], [3, 0], [0, 3, 3]])
def test_an_empty_sequence_has_no_row(bus: Bus, lengths: list[int]) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        arrays = [np.arange(length, dtype=np.int32) for length in lengths]
        producer.put_group("q", [{"tokens": each, "score": 1.0} for each in arrays])
        batch = pack(consumer.take(1, 10), layout="prefix")
        for part in (batch, *micro_batches(batch, count=1)):
            tree = part.prefix_tree
            assert tree is not None and tree.num_rows == sum(lengths)
            assert torch.equal(tree.of_tokens(tree.tokens), part.tokens)
            q = torch.randn(sum(lengths), 2, 8, requires_grad=True)
            prefix_attention(q, q, q, tree).sum().backward()
            assert q.grad is not None and q.grad.isfinite().all()


def test_answers_that_begin_alike_are_no_segments(bus: Bus, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 30, 300)
    samples = answers(rng, prompt, 4)
    for one in samples:
        one["tokens"][300] = 7
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", samples)
        producer.put_group("short", answers(rng, prompt[:30], 4))
        batch = pack(consumer.take(2, 10), layout="prefix")
        assert batch.prefix_tree is not None
        segments = batch.prefix_tree.segments
        # The first one's common word is part of the prompt's segment; 90 rows save nothing.
        assert segments.lengths[0] == 301
        assert (segments.parents[:5] <= 0).all()
        assert (segments.parents[5:] == -1).all()


def test_images_that_differ_are_not_shared(bus: Bus, seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 30, 300)
    samples = answers(rng, prompt, 4)
    images = rng.random((2, 5, 3)).astype(np.float32)
    for number, one in enumerate(samples):
        one["pixels"] = images[number // 2]
        one["tokens"][300] = number  # else answers that begin alike would share one token more
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", samples)
        batch = pack(consumer.take(1, 10), layout="prefix", extra_fields={"pixels": "ragged"})
        assert batch.prefix_tree is not None
        assert batch.num_tokens - batch.prefix_tree.num_rows == 2 * 300


@pytest.mark.parametrize("malformed", ["raise", "drop"])
def test_a_prompt_unequal_in_one_token_costs_its_group(
    bus: Bus, producer: Producer, malformed: Any, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, 30, 300)
    wrong, right = answers(rng, prompt, 4), answers(rng, prompt, 4)
    wrong[2]["tokens"][123] += 1
    with OnlineDataHandler(
        bus.name, groups_per_batch=1, layout="prefix", malformed=malformed
    ) as handler:
        producer.put_group("wrong", wrong)
        producer.put_group("right", right)
        if malformed == "raise":
            with pytest.raises(
                ValueError,
                match=r"'wrong'\[2\] of producer \d+: field 'tokens': expected the prompt of "
                r"sample 0 of its group, got \d+ at token 123 in place of \d+; give all samples",
            ):
                handler.next_batch(10)
        assert train_next(handler) == ["right"]
        assert handler.stats().dropped["malformed"] == 4


def test_a_row_without_the_prefix_that_it_names_is_an_error(bus: Bus, seed: int) -> None:
    rng = np.random.default_rng(seed)
    first = answers(rng, rng.integers(0, 30, 50), 1)[0]
    (second,) = branches(rng, first)
    second["tokens"][17] += 1
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", [{"score": first.pop("score"), "rows": [first, second]}])
        groups = consumer.take(1, 10)
        pack(groups)
        with pytest.raises(
            ValueError,
            match=r"'q'\[0\] of producer \d+: field 'tokens': expected row 1 to share its "
            r"prefix_length=\d+ with another row, got 17 tokens that any has",
        ):
            pack(groups, layout="prefix")


def test_logprobs_refuse_padded_rows_a_wrong_number_and_no_temperature(bus: Bus, seed: int) -> None:
    rng = np.random.default_rng(seed)
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", answers(rng, rng.integers(0, 30, 5), 2))
        groups = consumer.take(1, 10)
        padded, plain = pack(groups, layout="padded"), pack(groups)
        with pytest.raises(ValueError, match="expected layout 'packed' or 'prefix', got 'padded'"):
            logit_rows(padded)
        with pytest.raises(ValueError, match=r"logits: expected \[\d+, vocabulary\], one row"):
            token_logprobs(torch.zeros(3, 30), plain)
        for temperature in (0, -1.0, torch.nan, torch.inf):
            with pytest.raises(ValueError, match="temperature: expected a finite number above 0"):
                token_logprobs(torch.zeros(len(plain.tokens), 30), plain, temperature=temperature)


def test_logprobs_are_plain_softmax(bus: Bus, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer_adapter import logprobs as room

    monkeypatch.setattr(room, "CHUNK_LOGITS", 70)
    rng = np.random.default_rng(seed)
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.put_group("q", answers(rng, rng.integers(0, 30, 5), 3))
        batch = pack(consumer.take(1, 10))
    logits = torch.randn(batch.num_tokens, 30, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(batch.num_tokens, dtype=torch.float64)
    picked = (logits[:-1] / 0.7).log_softmax(-1).gather(1, batch.tokens[1:, None]).squeeze(1)
    wanted = torch.nn.functional.pad(picked, (1, 0)) * batch.loss_mask
    got = token_logprobs(logits, batch, temperature=0.7)
    torch.testing.assert_close(got, wanted)
    (right,) = torch.autograd.grad(wanted, logits, upstream)
    (mine,) = torch.autograd.grad(got, logits, upstream)
    torch.testing.assert_close(mine, right)
