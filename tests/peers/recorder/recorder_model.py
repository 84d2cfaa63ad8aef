"""Make a tiny chat model with random weights: ``recorder_model.py FOLDER SEED``."""

import json
import random
import sys
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen3Config

SPECIAL = ["<|pad|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>"]
THOUGHT = ["<think>", "</think>"]
PAIRS = 150

TEMPLATE = """\
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% endif %}
{%- for call in message.tool_calls or [] %}<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer(seed: int) -> PreTrainedTokenizerFast:
    letters = [chr(code) for code in range(33, 127)] + ["\u0120", "\u010a"]  # space, line feed
    rng = random.Random(seed)
    lower = [letter for letter in letters if letter.isalnum()]
    pairs = sorted({(rng.choice(lower), rng.choice(lower)) for _ in range(PAIRS)})
    words = [*SPECIAL, *letters, *(a + b for a, b in pairs), *THOUGHT]
    found = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=pairs))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(SPECIAL[:3])
    found.add_tokens([AddedToken(word, normalized=False) for word in [*SPECIAL[3:], *THOUGHT]])
    return PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token=SPECIAL[0], eos_token=SPECIAL[2],
        chat_template=TEMPLATE, clean_up_tokenization_spaces=False,
    )  # fmt: skip


def save(folder: Path, seed: int) -> None:
    words = tokenizer(seed)
    words.save_pretrained(folder)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=-(-len(words) // 64) * 64, hidden_size=128, intermediate_size=256,
        num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=32768, tie_word_embeddings=False, eos_token_id=2, pad_token_id=0,
        bos_token_id=None,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight[len(words) :] = 0
        # Spread enough that sampled logprobs differ, and ends come.
        model.lm_head.weight *= 40
    model.save_pretrained(folder)
    generation = {"eos_token_id": 2, "pad_token_id": 0, "do_sample": True}
    (folder / "generation_config.json").write_text(json.dumps(generation))


if __name__ == "__main__":
    save(Path(sys.argv[1]), int(sys.argv[2]))
