"""A rollout worker with the tiny model: ``trl_answering.py BUS MODEL SEED``."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from tiny import sample
from transformers import AutoModelForCausalLM

import shmbus
from shmbus.weights import WeightSubscriber

torch.set_num_threads(1)


def main() -> None:
    bus, directory, seed = sys.argv[1:4]
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(int(seed))
    version = -1
    with shmbus.Producer(bus, wait=60.0) as producer, WeightSubscriber(bus) as subscriber:
        while True:
            request = producer.requests.next(timeout=None)
            assert request is not None
            if producer.policy_version != version and producer.policy_version > 0:
                version = newest(subscriber, model, version)
            word = int(request["prompt"][-1])
            tokens, logprobs, rewards = sample(model, word, 1, generator)
            producer.requests.answer(
                request,
                score=rewards[0],
                policy_version=max(version, 0),
                tokens=tokens[0],
                loss_mask=[0] + [1] * (len(tokens[0]) - 1),
                logprobs=logprobs[0],
                meta=request.meta,
            )


def newest(subscriber: WeightSubscriber, model: torch.nn.Module, version: int) -> int:
    try:
        with subscriber.latest(timeout=0.0) as weights:
            if weights.version != version:
                weights.load_into(model, strict=False)
            return weights.version
    except shmbus.ShmbusError:
        return version


if __name__ == "__main__":
    main()
