"""A tiny model, its tokenizer, prompts, and a sampling rollout worker. No Ray, no trainer.

    tiny_policy.py PAGE WORDS BUS DIRECTORY [DIES_IN]

The worker is a block of a documentation page. It answers requests until the bus is gone, or kills
itself in its rollout of the given number. Reward: the share of tokens equal to the prompt's word.
"""

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import doc_pages
import torch

import shmbus

VOCABULARY = 16
PAD, EOS, FIRST_WORD = 0, 1, 2
COMPLETION_TOKENS = 6
#: Work of a trainer in the tests: steps, prompts of a step, samples of a prompt.
STEPS, PROMPTS, ROLLOUTS = 3, 4, 4
CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


def make(directory: Path, prompts: int = PROMPTS * STEPS) -> None:
    """Write a model of 8,000 parameters, its tokenizer, and ``prompts.json``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=False, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
    )  # fmt: skip
    Qwen2ForCausalLM(config).save_pretrained(directory / "model")
    words = {"<pad>": PAD, "</s>": EOS} | {f"w{i}": i for i in range(FIRST_WORD, VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", chat_template=CHAT
    )
    fast.save_pretrained(directory / "model")
    rows = [
        {
            "data_source": "words",
            "env_class": "words",
            "prompt": [{"role": "user", "content": f"w{FIRST_WORD + number % 14}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": number},
        }
        for number in range(prompts)
    ]
    (directory / "prompts.json").write_text("\n".join(map(json.dumps, rows)))


@contextmanager
def sampling(
    page: str, words: str, bus: str, directory: Path, count: int, dies_in: int = 0
) -> Iterator[None]:
    """Have processes of this file answer requests by a page, and one more to be killed."""
    command = [sys.executable, "-W", "ignore", __file__, page, words, bus, str(directory)]
    processes = [subprocess.Popen(command) for _ in range(count)]
    if dies_in:
        processes.append(subprocess.Popen([*command, str(dies_in)]))
    try:
        yield
        if dies_in:
            assert processes[-1].poll() == -signal.SIGKILL, "it was not killed in a rollout"
    finally:
        for process in processes:
            process.kill()
            process.wait()


def check_ledger(stats: shmbus.BusStats) -> None:
    """Every sample of every step was trained once, and nothing else was put."""
    count = STEPS * PROMPTS * ROLLOUTS
    assert stats.acknowledged == stats.committed == count, stats
    assert not sum(stats.dropped.values()) and not stats.undelivered, stats


def check_moved(directory: Path, trained: Mapping[str, Any]) -> None:
    """Every parameter of the model is finite, and changed since `make`."""
    from safetensors.torch import load_file

    before = load_file(directory / "model" / "model.safetensors")
    assert set(before) == set(trained)
    for name, tensor in before.items():
        after = trained[name]
        after = (after.full_tensor() if hasattr(after, "full_tensor") else after).float()
        assert torch.isfinite(after).all() and not torch.equal(after, tensor), name


def main() -> None:
    from transformers import AutoModelForCausalLM

    page, words, bus, directory, *dies_in = sys.argv[1:]
    last = int(dies_in[0]) if dies_in else 0
    rollouts = itertools.count(1)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(f"{directory}/model", dtype=torch.float32).eval()

    def rollout(messages: Any, *_: Any) -> tuple[list[int], list[int], list[float], float]:
        if next(rollouts) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        word = int(messages[0]["content"][1:])
        ids, logprobs = torch.tensor([[word]]), [0.0]
        with torch.no_grad():
            for _ in range(COMPLETION_TOKENS):
                logits = model(input_ids=ids).logits[0, -1].log_softmax(-1)
                drawn = int(torch.multinomial(logits.exp(), 1))
                ids = torch.cat([ids, torch.tensor([[drawn]])], 1)
                logprobs.append(float(logits[drawn]))
        tokens = ids[0].tolist()
        right = sum(token == word for token in tokens[1:])
        return tokens, [0] + [1] * COMPLETION_TOKENS, logprobs, right / COMPLETION_TOKENS

    doc_pages.run(page, words, bus, rollout=rollout)


if __name__ == "__main__":
    main()
