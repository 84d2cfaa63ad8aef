"""Make a tiny model of stock architecture, with random weights: ``vllm_model.py FOLDER SEED``."""

import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

WORDS = ["<pad>", "<unk>", "<eos>", *(f"w{i}" for i in range(125))]


SHAPES = {
    "tiny": {
        "vocab_size": len(WORDS), "hidden_size": 128, "intermediate_size": 256,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "tie_word_embeddings": False,
    },
    "0.6b": {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    },
    "4b": {
        "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728,
        "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "tie_word_embeddings": True,
    },
}  # fmt: skip


def build(seed: int, shape: str = "tiny", dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    torch.manual_seed(seed)
    config = Qwen3Config(
        **SHAPES[shape], max_position_embeddings=512, eos_token_id=2, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


def tokenizer() -> PreTrainedTokenizerFast:
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    made = Tokenizer(words)
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def save(folder: str, seed: int, shape: str = "tiny", dtype: torch.dtype = torch.float32) -> None:
    tokenizer().save_pretrained(folder)
    build(seed, shape, dtype).save_pretrained(folder)


if __name__ == "__main__":
    save(sys.argv[1], int(sys.argv[2]))
