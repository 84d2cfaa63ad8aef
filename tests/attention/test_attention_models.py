"""Attention inside of models: compiled without a graph break, and as transformers calls it."""

import itertools
import os
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer_adapter.attention import (
    arguments,
    dispatch,
    native,
    register_with_transformers,
    transformers_inputs,
    varlen_attention,
)
from trainer_adapter.attention import compiled as compiled_attention
from trainer_adapter.batches.batch import Batch

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTHS = [5, 1, 9, 9, 0, 30]
WINDOWS = [(-1, 0), (3, 1), (-1, -1)]


def borders(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)


def operands(seed: int, lengths: list[int], heads: tuple[int, int] = (4, 2)) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(sum(lengths), n, 16, generator=generator).requires_grad_()
        for n in (heads[0], heads[1], heads[1])
    ]


#: Batches of a run. The first two differ in every length, sequences, tokens and longest: torch
#: leaves a size open after two values.
MANY_BATCHES = [
    [5, 2, 9], [4, 4, 4, 5], [30, 7], [11, 3, 0, 8, 2], [6, 6], [17, 2, 2], [3, 40, 5, 5],
    [8, 9, 10, 11, 12], [2, 2, 2], [25, 1, 13], [7, 7, 7, 7, 7, 7], [50, 4], [19, 21, 5], [3, 14],
]  # fmt: skip


def native_on_the_host(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have an operator of the CPU, opaque like torch's own, stand for the native kernel."""
    calls: list[int] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, rest: list[Any]) -> tuple[Tensor, Tensor]:
        cu_q, cu_k, max_q, max_k, scale, left, right = rest
        calls.append(max_q)
        call = arguments.Call(cu_q, cu_k, max_q, max_k, scale, (left, right))
        found: Any = dispatch.run_backend("sdpa", q, k, v, call, True)
        return found

    # Its schema comes from the types, required here.
    @torch.library.custom_op("shmbus_tests::varlen_attn", mutates_args=())
    def kernel(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        scale: float, left: int, right: int,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        with torch.no_grad():
            out, lse = attend(q, k, v, [cu_q, cu_k, max_q, max_k, scale, left, right])
        return out.contiguous(), lse.contiguous()

    @kernel.register_fake
    def _(q: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(q), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)

    @torch.library.custom_op("shmbus_tests::varlen_attn_backward", mutates_args=())
    def back(
        grad: Tensor, q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int,
        max_k: int, scale: float, left: int, right: int,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        with compiled_attention._recording():
            given = [x.detach().requires_grad_() for x in (q, k, v)]
            out, _ = attend(*given, [cu_q, cu_k, max_q, max_k, scale, left, right])
            grads = torch.autograd.grad(out, given, grad)
        return tuple(x.contiguous() for x in grads)  # type: ignore[return-value]

    @back.register_fake
    def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, ...]:
        return tuple(torch.empty_like(x) for x in (q, k, v))

    def setup(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:5])
        ctx.facts = inputs[5:]

    def backward(ctx: Any, grad: Tensor, _: Tensor) -> Any:
        return (*back(grad, *ctx.saved_tensors, *ctx.facts), *(None,) * 7)

    kernel.register_autograd(backward, setup_context=setup)

    def varlen_attn(
        q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, max_q: int, max_k: int,
        *, return_aux: Any, scale: float, window_size: tuple[int, int], enable_gqa: bool = False,
    ) -> Any:  # fmt: skip
        return kernel(q, k, v, cu_q, cu_k, max_q, max_k, scale, *window_size)

    names = frozenset({"return_aux", "scale", "window_size", "enable_gqa"})
    entry = native.NativeEntry(varlen_attn, None, names)
    monkeypatch.setattr(native, "native_entry", lambda: entry)
    monkeypatch.setattr(dispatch, "native_obstacle", lambda *args: None)
    return calls


#: Each window with SDPA, two with a native kernel; SHMBUS_TEST_LONG=1 takes all.
COMPILED = [
    (kernel, window, return_lse)
    for number, window in enumerate(WINDOWS)
    for place, kernel in enumerate(("sdpa", "native", "native, borders on the host"))
    for return_lse in (False, True)
    if (number % 2 == return_lse and place in (0, number)) or "SHMBUS_TEST_LONG" in os.environ
]


def compile_counting(model: Any) -> tuple[Any, Any]:
    # Imported late: over a second of imports, unnecessary for a collection.
    from torch._dynamo.testing import CompileCounterWithBackend

    torch.compiler.reset()
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, fullgraph=True, backend=counter), counter


@pytest.mark.parametrize(("kernel", "window", "return_lse"), COMPILED, ids=str)
def test_batches_of_any_lengths_share_two_graphs(
    monkeypatch: pytest.MonkeyPatch,
    kernel: str,
    window: tuple[int, int],
    return_lse: bool,
    seed: int,
) -> None:
    calls = [] if kernel == "sdpa" else native_on_the_host(monkeypatch)
    backend: Any = "sdpa" if kernel == "sdpa" else "auto"
    if kernel == "native":  # as if the borders lay on the device
        monkeypatch.setattr(dispatch, "_is_readable", lambda borders: False)

    def model(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        return attend_in_a_model(q, k, v, cu, longest, window, return_lse, backend)

    compiled, counter = compile_counting(model)
    for turn, lengths in enumerate(MANY_BATCHES):
        given = operands(seed + turn, lengths)
        cu, longest = borders(lengths), max(lengths)
        wanted = attend_in_a_model(*given, cu, longest, window, return_lse, "sdpa")
        upstream = torch.randn_like(wanted)
        right = torch.autograd.grad(wanted, given, upstream)
        before = len(calls)
        got = compiled(*given, cu, longest)
        torch.testing.assert_close(got, wanted)
        for mine, theirs in zip(torch.autograd.grad(got, given, upstream), right, strict=True):
            torch.testing.assert_close(mine, theirs)
        assert kernel == "sdpa" or len(calls) > before
    assert counter.frame_count <= 2
    with torch.no_grad():
        torch.testing.assert_close(compiled(*given, cu, longest), wanted)


def attend_in_a_model(
    q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int, window: Any, return_lse: bool,
    backend: Any,
) -> Tensor:  # fmt: skip
    found: Any = varlen_attention(
        q * 2, k, v, cu, cu, longest, longest,
        window_size=window, enable_gqa=True, return_lse=return_lse, backend=backend,
    )  # fmt: skip
    if not return_lse:
        return found.sin()
    out, lse = found
    return out.sin() + torch.where(lse.isfinite(), lse, 0).t()[:, :, None]


@pytest.mark.parametrize("window", [(-1, 0), (3, 1), (3, -1)], ids=str)
def test_queries_and_keys_of_any_lengths_share_two_graphs(
    monkeypatch: pytest.MonkeyPatch, window: tuple[int, int], seed: int
) -> None:
    native_on_the_host(monkeypatch)
    # The real function, but for the device: some windows depend on the longer side.
    monkeypatch.setattr(
        dispatch, "native_obstacle", lambda q, k, a, b, *rest: "longer" if a > b else None
    )

    def model(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Tensor:
        return varlen_attention(q, k, v, *rest, window_size=window, enable_gqa=True).sin()

    compiled, counter = compile_counting(model)
    for turn, (mine, theirs) in enumerate(itertools.pairwise(MANY_BATCHES)):
        count = min(len(mine), len(theirs))
        rows, keys = mine[:count], theirs[:count]
        q, (_, k, v) = operands(seed + turn, rows)[0], operands(seed + turn, keys)
        rest = borders(rows), borders(keys), max(rows), max(keys)
        got = compiled(q, k, v, *rest)
        wanted = varlen_attention(
            q, k, v, *rest, window_size=window, enable_gqa=True, backend="sdpa"
        ).sin()
        torch.testing.assert_close(got, wanted)
        got.sum().backward()
    assert counter.frame_count <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("place", ["device", "host"])
@pytest.mark.parametrize("return_lse", [False, True], ids=["out", "lse"])
@pytest.mark.parametrize("window", [*WINDOWS, (8, 0)], ids=str)
@pytest.mark.parametrize("backend", ["native", "sdpa"])
def test_on_a_gpu_batches_of_any_lengths_share_two_graphs(
    backend: Any, window: tuple[int, int], return_lse: bool, place: str, seed: int
) -> None:
    def model(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, longest: int) -> Tensor:
        return attend_in_a_model(q, k, v, cu, longest, window, return_lse, backend)

    compiled, counter = compile_counting(model)
    for turn, lengths in enumerate(MANY_BATCHES):
        given = [x.detach().cuda().bfloat16() for x in operands(seed + turn, lengths)]
        exact = [x.double().requires_grad_() for x in given]
        given = [x.requires_grad_() for x in given]
        cu, longest = borders(lengths), max(lengths)
        wanted = attend_in_a_model(*exact, cu, longest, window, return_lse, "sdpa")
        upstream = torch.randn_like(wanted)
        right = torch.autograd.grad(wanted, exact, upstream)
        got = compiled(*given, cu.cuda() if place == "device" else cu, longest)
        torch.testing.assert_close(got.double(), wanted, rtol=3e-2, atol=5e-2)
        mine = torch.autograd.grad(got, given, upstream.to(got.dtype))
        for one, other in zip(mine, right, strict=True):
            assert (one - other).norm() <= 0.03 * other.norm()
    assert counter.frame_count <= 2


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_on_a_gpu_it_compiles_without_a_graph_break_or_a_warning(backend: Any, seed: int) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Any = varlen_attention(
            q, k, v, cu, cu, max(LENGTHS), max(LENGTHS),
            window_size=(-1, 0), enable_gqa=True, backend=backend,
        )  # fmt: skip
        return found

    cu = borders(LENGTHS).cuda()
    given = [x.detach().cuda().bfloat16().requires_grad_() for x in operands(seed, LENGTHS)]
    wanted = attend(*given)
    upstream = torch.randn_like(wanted)
    right = torch.autograd.grad(wanted, given, upstream)
    torch.compiler.reset()
    got = torch.compile(attend, fullgraph=True, backend="aot_eager")(*given)
    torch.testing.assert_close(got, wanted)
    for mine, theirs in zip(torch.autograd.grad(got, given, upstream), right, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("compiles", [False, True])
def test_autocast_casts_every_operand_first(compiles: bool, seed: int) -> None:
    q, k, v = operands(seed, LENGTHS)
    cu = borders(LENGTHS)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        found: Any = varlen_attention(
            q, k, v, cu, cu, max(LENGTHS), max(LENGTHS), window_size=(-1, 0), enable_gqa=True
        )
        return found

    half = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    wanted = attend(*half)
    upstream = torch.randn_like(wanted)
    right = torch.autograd.grad(wanted, half, upstream)
    torch.compiler.reset()
    model = torch.compile(attend, fullgraph=True, backend="aot_eager") if compiles else attend
    mixed = (q, k, half[2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = model(*mixed)
    assert torch.equal(got, wanted)
    for operand, mine, theirs in zip(
        mixed, torch.autograd.grad(got, mixed, upstream), right, strict=True
    ):
        assert mine.dtype == operand.dtype
        torch.testing.assert_close(mine, theirs.to(mine.dtype))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="v: expected"):
        attend(q, k, v.double())


# Of the check's own copies; torch 2.15 hides the warning at display, too late for an error.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_the_operator_is_what_torch_expects_of_one(seed: int) -> None:
    from trainer_adapter.attention.compiled import varlen_operator

    given = operands(seed, LENGTHS)
    cu = borders(LENGTHS)
    for return_lse in (False, True):
        torch.library.opcheck(
            varlen_operator, (*given, cu, cu, 30, 30, 0.25, -1, 0, return_lse, "sdpa")
        )


def tiny(kind: str, seed: int, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers", minversion="4.53")
    shape = {
        "vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
        "pad_token_id": 0, **more,
    }  # fmt: skip
    torch.manual_seed(seed)
    config = {
        "llama": transformers.LlamaConfig,
        "qwen2": transformers.Qwen2Config,
        "qwen3": transformers.Qwen3Config,
        "mistral": transformers.MistralConfig,
    }[kind](**shape)
    return transformers.AutoModelForCausalLM.from_config(config)


def attend_by(model: Any, name: str) -> None:
    """Change a model's varlen, a public name since transformers 4.54."""
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation(name)
    else:
        model.config._attn_implementation = name


def packed_batch(seed: int, lengths: list[int]) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    zeros = torch.zeros(total)
    return Batch(
        tokens=torch.randint(1, 50, (total,), generator=generator),
        position_ids=torch.cat([torch.arange(n) for n in lengths]),
        cu_seqlens=borders(lengths), max_seqlen=max(lengths), loss_mask=zeros.bool(),
        logprobs=zeros, advantages=zeros, scores=torch.zeros(len(lengths)),
        instance_ids=["a"] * len(lengths), policy_versions=torch.zeros(len(lengths)).long(),
        group_sizes=torch.tensor([len(lengths)]), groups=[],
    )  # fmt: skip


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(logits[:-1], tokens[1:], reduction="sum")


def one_by_one(model: Any, batch: Batch) -> tuple[Tensor, list[Tensor]]:
    """Losses and gradients of single sequences, with transformers' own eager attention."""
    model.zero_grad()
    total = torch.zeros(())
    for tokens in batch.tokens.split(batch.cu_seqlens.diff().tolist()):
        loss = loss_of(model(input_ids=tokens[None], use_cache=False).logits[0], tokens)
        loss.backward()
        total = total + loss.detach()
    return total, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("by", ["borders", "positions"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "mistral"])
def test_packed_training_equals_training_by_single_sequences(kind: str, by: str, seed: int) -> None:
    lengths = [9, 2, 30, 9]
    model = tiny(kind, seed, **({"sliding_window": 5} if kind == "mistral" else {}))
    batch = packed_batch(seed, lengths)
    attend_by(model, "eager")
    wanted, right = one_by_one(model, batch)
    attend_by(model, register_with_transformers())
    model.zero_grad()
    inputs = transformers_inputs(batch)
    if by == "positions":
        inputs = {name: inputs[name] for name in ("input_ids", "position_ids", "use_cache")}
    logits = model(**inputs).logits[0]
    loss = sum(
        loss_of(part, tokens)
        for part, tokens in zip(logits.split(lengths), batch.tokens.split(lengths), strict=True)
    )
    loss.backward()
    torch.testing.assert_close(loss, wanted)
    for parameter, gradient in zip(model.parameters(), right, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-5)


def test_padded_rows_and_generation_give_what_transformers_own_attention_gives(seed: int) -> None:
    model = tiny("llama", seed).eval()
    tokens = torch.randint(1, 50, (3, 12), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(tokens)
    mask[0, :5] = 0
    mask[2, :1] = 0
    name = register_with_transformers()
    outs = []
    for implementation in ("eager", name):
        attend_by(model, implementation)
        with torch.no_grad():
            logits = model(input_ids=tokens, attention_mask=mask).logits
            outs.append((
                torch.where(mask[..., None] != 0, logits, 0),
                model(input_ids=tokens).logits,
                model.generate(
                    tokens, attention_mask=mask, max_new_tokens=6, do_sample=False
                ),
            ))  # fmt: skip
    for mine, theirs in zip(outs[1], outs[0], strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_what_it_has_not_is_refused(seed: int) -> None:
    model = tiny("llama", seed, attention_dropout=0.1)
    attend_by(model, register_with_transformers())
    model.train()
    with pytest.raises(ValueError, match=r"dropout: expected 0, got 0\.1"):
        model(input_ids=torch.ones(1, 4, dtype=torch.long))
    with pytest.raises(ValueError, match="layout 'packed' or 'prefix', got 'padded'"):
        batch = packed_batch(seed, [3])
        batch.layout = "padded"
        transformers_inputs(batch)


def test_a_mask_beyond_causal_and_window_is_refused(seed: int) -> None:
    model = tiny("llama", seed)
    attend_by(model, register_with_transformers())
    inputs = transformers_inputs(packed_batch(seed, [3, 5]))
    config = model.config
    config.attention_chunk_size, config.layer_types = 5, ["chunked_attention"] * 2
    model(**inputs)
    config.attention_chunk_size = 4
    with pytest.raises(ValueError, match="attention_chunk_size: expected"):
        model(**inputs)
    masks = pytest.importorskip("transformers.masking_utils")
    if hasattr(masks, "blockwise_overlay"):  # images, where -1 is text
        given = config, torch.ones(1, 4, 32), None, None
        masks.create_causal_mask(*given, block_sequence_ids=torch.tensor([[-1] * 4]))
        with pytest.raises(ValueError, match="mask: expected a causal one"):
            masks.create_causal_mask(*given, block_sequence_ids=torch.tensor([[-1, 0, 0, -1]]))


def test_an_old_transformers_is_refused_with_a_version(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    if tuple(int(part) for part in transformers.__version__.split(".")[:2]) >= (4, 53):
        monkeypatch.setitem(sys.modules, "transformers.masking_utils", None)
    with pytest.raises(ImportError, match=r"expected transformers 4\.53 or later, got"):
        register_with_transformers()
