"""A tiny model, tokenizer and task, and TRL's asynchronous trainer on a CPU."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

VOCABULARY = 16
PAD, EOS = 0, 1
FIRST_WORD = 2
COMPLETION_TOKENS = 6


def make_model(directory: Path, seed: int = 0, vocabulary: int = VOCABULARY) -> Path:
    """Write a missing model with its tokenizer; return the folder."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    if (directory / "config.json").exists():
        return directory
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).save_pretrained(directory)
    words = {"<pad>": PAD, "</s>": EOS} | {f"w{i}": i for i in range(FIRST_WORD, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", padding_side="left"
    )
    fast.save_pretrained(directory)
    return directory


def sample(
    model: Any, word: int, count: int, generator: torch.Generator
) -> tuple[np.ndarray, np.ndarray, list[float]]:
    """Sample completions of a prompt: tokens [count, n], logprobs [count, n], rewards."""
    ids = torch.full((count, 1), word)
    logprobs = torch.zeros(count, 1)
    with torch.no_grad():
        for _ in range(COMPLETION_TOKENS):
            logits = model(input_ids=ids).logits[:, -1].float().log_softmax(-1)
            drawn = torch.multinomial(logits.exp(), 1, generator=generator)
            ids = torch.cat([ids, drawn], 1)
            logprobs = torch.cat([logprobs, logits.gather(1, drawn)], 1)
    rewards = (ids[:, 1:] == word).float().mean(1).tolist()
    return ids.numpy().astype(np.int32), logprobs.numpy(), rewards


def tree_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, *, tree_kv_index: Any,
    tree_cu_seqlens_q: Any, tree_cu_seqlens_k: Any, scaling: float | None = None, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """What TRL's kernel for Hopper computes, segment by segment."""
    out = torch.empty_like(query)
    keys, values = key[:, :, tree_kv_index], value[:, :, tree_kv_index]
    q_borders, k_borders = tree_cu_seqlens_q.tolist(), tree_cu_seqlens_k.tolist()
    for i in range(len(q_borders) - 1):
        q = query[:, :, q_borders[i] : q_borders[i + 1]]
        k = keys[:, :, k_borders[i] : k_borders[i + 1]]
        v = values[:, :, k_borders[i] : k_borders[i + 1]]
        rows, columns = q.shape[2], k.shape[2]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
        out[:, :, q_borders[i] : q_borders[i + 1]] = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
    return out.transpose(1, 2), None


def on_a_cpu() -> Any:
    """Import TRL's asynchronous trainer with a CPU's device name and attention kernel."""
    import trl.experimental.async_grpo.async_grpo_trainer as module
    import trl.experimental.async_grpo.packing as packing
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    module.get_peak_flops_per_device = lambda *a, **k: None

    def register() -> None:
        AttentionInterface.register(packing.TREE_ATTENTION, tree_attention)
        AttentionMaskInterface.register(packing.TREE_ATTENTION, lambda **k: None)

    module.register_tree_attention = register
    return module


class NoWeights:
    """A WeightTransferProtocol without effect."""

    def init_weight_transfer(self) -> None: ...
    def pause(self) -> None: ...
    def send_weights(self, iterator: Any) -> None:
        for _ in iterator:
            pass

    def resume(self) -> None: ...
    def destroy(self) -> None: ...


def write_line(path: str | Path, value: Any) -> None:
    """Append a line that a kill leaves whole or away."""
    with open(path, "a") as file:
        file.write(json.dumps(value) + "\n")


if __name__ == "__main__":
    make_model(Path(sys.argv[1]))
