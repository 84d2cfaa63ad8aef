"""What a stack's own hand-over takes, beside an adapter's; each needs its stack installed."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

__all__ = ["GROUP_SIZE", "PROMPT_SHARE", "numbers", "put_group", "report", "sample_of"]

GROUP_SIZE = 8
ROUNDS = 3
#: Tokens of a sample for each of its prompt.
PROMPT_SHARE = 8


def numbers(*defaults: int) -> list[int]:
    """Return the numbers of the command line, with defaults for those that are left out."""
    given = [int(word) for word in sys.argv[1:]]
    return [*given, *defaults[len(given) :]]


def sample_of(tokens: int) -> dict[str, Any]:
    """Return the fields of a sample of so many tokens."""
    return {
        "tokens": np.arange(tokens, dtype=np.int32),
        "loss_mask": (np.arange(tokens) >= tokens // PROMPT_SHARE).astype(np.uint8),
        "logprobs": np.full(tokens, -0.25, np.float32),
    }


def put_group(producer: Any, instance_id: str, fields: dict[str, Any]) -> None:
    """Put a group, sample by sample."""
    for index in range(GROUP_SIZE):
        producer.put(instance_id, group_size=GROUP_SIZE, index=index, score=index % 2, **fields)


def report(own: Callable[[int], float], bus: Callable[[int], float]) -> None:
    """Print the microseconds of both ways, the least of rounds that alternate."""
    rounds = [(own(2 * number), bus(2 * number + 1)) for number in range(ROUNDS)]
    own_us, bus_us = (min(each[which] for each in rounds) for which in (0, 1))
    print(json.dumps({"own_us": round(own_us, 1), "bus_us": round(bus_us, 1),
                      "ratio": round(bus_us / own_us, 3), "rounds": rounds}))  # fmt: skip
