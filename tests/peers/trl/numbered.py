"""A rollout worker whose samples carry numbers: ``numbered.py BUS PARITY FIRST``."""

import sys

import numpy as np

import shmbus

GROUP_SIZE = 4
#: A sample's number n travels as the logprob -(n + 1) / SCALE of its first sampled token.
SCALE = 65536.0


def number_of(t: shmbus.Trajectory) -> int:
    return round(-float(t["logprobs"][1]) * SCALE) - 1


def put(producer: shmbus.Producer, number: int) -> None:
    group, index = divmod(number, GROUP_SIZE)
    length = 2 + number * 7 % 5
    logprobs = np.full(1 + length, -0.5, np.float32)
    logprobs[:2] = 0, -(number + 1) / SCALE
    tokens = np.full(1 + length, 3 + index, np.int32)
    tokens[0] = 2
    mask = np.ones(1 + length, np.uint8)
    mask[0] = 0
    producer.put(
        f"g{group}",
        group_size=GROUP_SIZE,
        index=index,
        score=float(index % 2),
        policy_version=producer.policy_version,
        tokens=tokens,
        loss_mask=mask,
        logprobs=logprobs,
    )


def main() -> None:
    bus, parity, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with shmbus.Producer(bus, wait=30.0) as producer:
        group = first
        while True:
            for index in range(parity, GROUP_SIZE, 2):
                put(producer, group * GROUP_SIZE + index)
            group += 1


if __name__ == "__main__":
    main()
