"""Images beside the tokens, with any number of patches, once a group.

    python examples/images.py                  # 25 seconds on two cores; --quick for less

Requests carry the image to the workers. The first sample of a group carries the image on to the
trainer; its siblings put an array of no rows: a group of eight puts a single image into the ring.
``extra_fields={"pixel_values": "ragged"}`` joins the patches of a batch into one tensor, with the
borders in ``batch.extra_offsets``, in the pass that packs the tokens.

Task: name the colour of an image, out of four. The vision tower, a mean over patches and a linear
layer, runs once an image, and its result serves every sample of the group.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import secrets
import sys

import numpy as np
import torch

import shmbus
from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
from trainer_adapter import Batch, OnlineDataHandler
from trainer_adapter.losses import policy_loss

COLOURS, QUESTION, PATCH = 4, 4, 12
GROUP_SIZE, GROUPS_PER_BATCH = 8, 16
SCHEMA = {
    "tokens": ("int32", ("T",)),
    "logprobs": ("float32", ("T",)),
    "loss_mask": ("uint8", ("T",)),
    "pixel_values": ("float32", ("P", PATCH)),
}


def tower() -> torch.nn.Linear:
    """Make the policy: from the mean of an image's patches to logits of colours."""
    model = torch.nn.Linear(PATCH, COLOURS)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    return model


def picture(rng: np.random.Generator) -> tuple[np.ndarray, int]:
    """Make an image, float32 [patches, PATCH], and its colour."""
    colour = int(rng.integers(COLOURS))
    patches = rng.normal(size=(rng.integers(4, 33), PATCH)).astype(np.float32)
    patches[:, colour] += 2.0
    return patches, colour


def work(bus: str, seed: int) -> None:
    """Answer requests with the newest weights, until killed."""
    rng, version, model = np.random.default_rng(seed), -1, tower()
    nothing = np.empty((0, PATCH), np.float32)
    with shmbus.Producer(bus, wait=60.0) as producer, WeightSubscriber(bus) as weights:
        while (request := producer.requests.next()) is not None:
            if producer.policy_version != version:
                with weights.latest(timeout=60.0) as newest:
                    newest.load_into(model)
                    version = newest.version
            image = request["pixel_values"]
            with torch.no_grad():
                logprobs = model(torch.tensor(image).mean(0)).log_softmax(-1).numpy()
            answer = int(np.argmax(logprobs + rng.gumbel(size=COLOURS)))
            producer.requests.answer(
                request,
                score=answer == request.meta["colour"],
                policy_version=version,
                tokens=[QUESTION, answer],
                logprobs=[0.0, logprobs[answer]],
                loss_mask=[0, 1],
                pixel_values=image if request.index == 0 else nothing,
            )


def loss_of(model: torch.nn.Linear, batch: Batch) -> torch.Tensor:
    """Run the tower once an image, and compare the answers of the image's group."""
    offsets = batch.extra_offsets["pixel_values"]
    counts = offsets[1:] - offsets[:-1]  # patches of a sequence: 0 but for a group's first
    has_image = counts > 0
    which = torch.arange(int(has_image.sum())).repeat_interleave(counts[has_image])
    sums = torch.zeros(int(has_image.sum()), PATCH).index_add(0, which, batch.extra["pixel_values"])
    logits = model(sums / counts[has_image, None])
    of_sequence = logits[has_image.cumsum(0) - 1].log_softmax(-1)  # a group's are neighbours
    answers = batch.cu_seqlens[1:].long() - 1
    logprobs = torch.zeros(len(batch.tokens)).index_put(
        (answers,), of_sequence.gather(1, batch.tokens[answers, None])[:, 0]
    )
    return policy_loss(logprobs, batch.logprobs, batch.advantages, batch.loss_mask).loss


def train(bus: str, steps: int) -> list[float]:
    """Offer prompts without end, and train."""
    model, rewards, rng = tower(), [], np.random.default_rng(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    pictures = (picture(rng) for _ in itertools.count())
    prompts = ({"pixel_values": image, "colour": colour} for image, colour in pictures)
    with (
        WeightPublisher(bus, ModuleSource(model)) as publisher,
        OnlineDataHandler(
            bus, groups_per_batch=GROUPS_PER_BATCH, extra_fields={"pixel_values": "ragged"}
        ) as handler,
    ):
        publisher.publish(version=0)
        handler.offer(prompts, ahead=2, group_size=GROUP_SIZE)
        for step in range(1, steps + 1):
            batch = handler.next_batch(60.0)
            optimizer.zero_grad()
            loss_of(model, batch).backward()
            optimizer.step()
            publisher.publish(version=step)
            handler.set_policy_version(step)
            handler.ack(batch)
            rewards.append(float(batch.scores.mean()))
            patches = len(batch.extra["pixel_values"])
            print(f"step {step}: reward {rewards[-1]:.2f}, {patches} patches", flush=True)
    return rewards


def main() -> int:
    """Run a worker's process and the trainer; return 0 after a rise of the reward."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    steps = 12 if parser.parse_args().quick else 60
    bus = f"images-{os.getpid()}-{secrets.token_hex(3)}"
    torch.set_num_threads(1)
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(bus, 0), daemon=True)
    with shmbus.Bus.create(bus, "16MiB", schema=SCHEMA):
        worker.start()
        try:
            rewards = train(bus, steps)
        finally:
            worker.kill()
            worker.join()
    first, last = np.mean(rewards[:3]), np.mean(rewards[-3:])
    print(f"reward {first:.2f} -> {last:.2f}")
    return 0 if last > first else 1


if __name__ == "__main__":
    sys.exit(main())
