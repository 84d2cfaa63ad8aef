"""`varlen_attention` as an attention function of Hugging Face's transformers.

Written for transformers 4.53 (the first with `AttentionMaskInterface`) to 5; docs/compat.md lists
the tested versions.

Invariants:

- No row of the result depends on another sequence of a packed batch, for any mask.
- An unsupported option is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from trainer_adapter.attention.dispatch import Backend
from trainer_adapter.attention.prefixes import prefix_attention
from trainer_adapter.attention.varlen import varlen_attention
from trainer_adapter.compat import pad_input, unpad_input


def register_with_transformers(name: str = "shmbus_varlen", *, backend: Backend = "auto") -> str:
    """Add `varlen_attention` to the attention functions of Hugging Face's transformers.

    Then a stock model trains on packed batches::

        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=register_with_transformers()
        )
        logits = model(**transformers_inputs(batch)).logits[0]

    Parameters
    ----------
    name : str
        Its name for ``attn_implementation``.
    backend : {"auto", "native", "sdpa"}
        As for `varlen_attention`.

    Returns
    -------
    str
        `name`.

    Raises
    ------
    ImportError
        transformers 4.53 or later is missing.

    Notes
    -----
    With a ``prefix_tree`` the function runs `prefix_attention`. Else the borders of sequences come
    from ``cu_seq_lens_q`` and the like, as in transformers' own flash attention. Without borders, a
    single row is split at each 0 of ``position_ids``; without positions, a mask marks padding;
    otherwise each row is a sequence. Causal attention, sliding windows and a cache of keys are
    supported; dropout, soft caps, sinks, chunks and blocks of images are refused.
    """
    try:
        from transformers import AttentionInterface
        from transformers.masking_utils import AttentionMaskInterface
    except ImportError as error:
        raise ImportError(
            f"register_with_transformers: expected transformers 4.53 or later, got {error}; "
            "pip install 'shmbus[examples]'"
        ) from error

    def attend(
        module: torch.nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        **options: Any,
    ) -> tuple[Tensor, None]:
        return _forward(module, query, key, value, attention_mask, backend, options), None

    AttentionInterface.register(name, attend)
    AttentionMaskInterface.register(name, _mask)
    return name


def transformers_inputs(batch: Any) -> dict[str, Any]:
    """Return the arguments of a transformers model for a packed batch.

    Parameters
    ----------
    batch : Batch or MicroBatch
        Packed, with a prefix tree or without.

    Returns
    -------
    dict
        Keyword arguments for the model's call; ``logits[0]`` of its output is [T, vocabulary], or
        [R, vocabulary] with a prefix tree: `trainer_adapter.logprobs` takes either.

    Raises
    ------
    ValueError
        The batch is padded.
    """
    if batch.layout == "padded":
        raise ValueError("batch: expected layout 'packed' or 'prefix', got 'padded'; pack it so")
    tree = batch.prefix_tree
    if tree is not None:
        return {
            "input_ids": tree.tokens[None],
            "position_ids": tree.position_ids[None],
            "prefix_tree": tree,
            "use_cache": False,
        }
    return {
        "input_ids": batch.tokens[None],
        "position_ids": batch.position_ids[None],
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
        "use_cache": False,
    }


def _mask(*arguments: Any, attention_mask: Tensor | None = None, **facts: Any) -> Tensor | None:
    """Pass on a mask of padding [B, K], or None without padding."""
    kv_length = facts.get("kv_length")
    sees: Any = facts.get("mask_function")
    if kv_length is not None and getattr(sees, "__qualname__", "").startswith("or_masks."):
        at = torch.arange(kv_length - 1, device=facts.get("device"))
        ahead = sees(at.new_tensor(range(facts["batch_size"]))[:, None], 0, at, at + 1)
        if ahead.any() and not ahead.all():
            why = "got tokens that see later ones, as of an image"
            raise ValueError(
                f"mask: expected a causal one, {why}; take attn_implementation='eager'"
            )
    if attention_mask is None or attention_mask.dim() != 2:
        return None
    if kv_length is not None:
        attention_mask = attention_mask[:, -kv_length:]
    return None if bool(attention_mask.all()) else attention_mask


def _forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    backend: Backend,
    options: dict[str, Any],
) -> Tensor:
    """Attend: query [B, H, L, D], key and value [B, H_kv, K, D]; the result is [B, L, H, D]."""
    _refuse(options)
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    window = options.get("sliding_window")
    left = -1 if window is None else int(window) - 1
    rows, length = query.shape[0], query.shape[2]
    # [B, L, H, D], the layout of the projections.
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    tree = options.get("prefix_tree")
    if tree is not None:
        _refuse_chunks(module, lambda: int(tree.segments.positions.max()) + 1)
        if not causal:
            raise ValueError("prefix_tree: expected causal attention, got a module without it")
        return prefix_attention(
            q[0], k[0], v[0], tree,
            scale=options.get("scaling"), window=left, enable_gqa=True, backend=backend,
        )[None]  # fmt: skip
    places = None
    if mask is not None:
        k_packed, _, cu_k, max_k, _ = unpad_input(k, mask)
        v_packed, *_ = unpad_input(v, mask)
        q_packed, places, cu_q, max_q, _ = unpad_input(q, mask[:, -length:])
        # A row of padding alone yields no queries, so its keys are never seen.
    else:
        (cu_q, max_q), (cu_k, max_k) = _borders(query, key, options)
        q_packed, k_packed, v_packed = (x.flatten(0, 1) for x in (q, k, v))
    _refuse_chunks(module, lambda: max_k)
    out = varlen_attention(
        q_packed,
        k_packed,
        v_packed,
        cu_q,
        cu_k,
        max_q,
        max_k,
        scale=options.get("scaling"),
        window_size=(left, 0 if causal else left),
        enable_gqa=True,
        backend=backend,
    )
    if places is not None:
        return pad_input(out, places, rows, length)
    return out.unflatten(0, (rows, length))  # type: ignore[no-untyped-call,no-any-return]


def _refuse(options: dict[str, Any]) -> None:
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"{name}: expected None, got a value; varlen_attention has no such thing, take "
                "attn_implementation='eager' for this model"
            )
    if options.get("dropout", 0.0):
        raise ValueError(
            f"dropout: expected 0, got {options['dropout']}; set the model's attention_dropout to 0"
        )


def _refuse_chunks(module: Any, longest: Callable[[], int]) -> None:
    """Refuse sequences beyond a chunk of chunked attention, as in Llama 4."""
    config = getattr(module, "config", None)
    chunk, kinds = (getattr(config, name, None) for name in ("attention_chunk_size", "layer_types"))
    if chunk and kinds and kinds[module.layer_idx] == "chunked_attention" and longest() > chunk:
        raise ValueError(
            f"attention_chunk_size: expected sequences of at most {chunk} tokens, got {longest()}; "
            "take attn_implementation='eager' for this model"
        )


def _borders(
    query: Tensor, key: Tensor, options: dict[str, Any]
) -> tuple[tuple[Tensor, int], tuple[Tensor, int]]:
    """Find where sequences begin, and the longest, for queries and keys."""
    cu_q, cu_k = options.get("cu_seq_lens_q"), options.get("cu_seq_lens_k")
    if cu_q is not None:
        cu_k = cu_q if cu_k is None else cu_k
        return (
            (cu_q, _longest(cu_q, options.get("max_length_q"))),
            (cu_k, _longest(cu_k, options.get("max_length_k"))),
        )
    rows, length, keys = query.shape[0], query.shape[2], key.shape[2]
    positions = options.get("position_ids")
    if rows == 1 and length == keys and positions is not None and positions.numel() == length:
        found = _from_positions(positions)
        return found, found
    return (_even(rows, length, query), length), (_even(rows, keys, query), keys)


def _longest(borders: Tensor, given: Any) -> int:
    return int(borders.diff().max()) if given is None else int(given)


def _even(rows: int, length: int, like: Tensor) -> Tensor:
    return torch.arange(rows + 1, dtype=torch.int32, device=like.device) * length


def _from_positions(positions: Tensor) -> tuple[Tensor, int]:
    """Find the borders of one packed row: a sequence begins at each position 0."""
    # Cached on the tensor, since every layer needs it.
    kept: tuple[int, Tensor, int] | None = getattr(positions, "_shmbus_borders", None)
    version = -1 if positions.is_inference() else positions._version
    if kept is None or kept[0] != version or version < 0:
        flat = positions.flatten()
        starts = (flat == 0).nonzero().flatten()
        if len(starts) == 0 or int(starts[0]) != 0:
            # No sequence begins here: one sequence, as in a model without packing.
            starts = flat.new_zeros(1)
        borders = torch.cat([starts, starts.new_tensor([len(flat)])]).int()
        kept = (version, borders, int(borders.diff().max()))
        positions._shmbus_borders = kept  # type: ignore[attr-defined]
    return kept[1], kept[2]
