"""Groups of foreign producers: answered whole, or dropped by name. None blocks."""

from typing import Any

import numpy as np
import pytest
from gateways import REGISTRATION, Gateway
from http_requests import scored

import shmbus

TOKENS = np.arange(4, dtype=np.int32)
NAN = np.full(4, np.nan, np.float32)
ROWS = [{"tokens": TOKENS}, {"tokens": TOKENS}]

UNUSABLE: dict[str, tuple[dict[str, Any], str]] = {
    "mask of another length": ({"tokens": TOKENS, "loss_mask": TOKENS[:3]}, "loss_mask[0]"),
    "table of tokens": ({"tokens": TOKENS.reshape(2, 2)}, "one dimension"),
    "tokens of float": ({"tokens": TOKENS.astype(np.float32)}, "whole numbers"),
    "tokens of complex": ({"tokens": TOKENS.astype(np.complex64)}, "whole numbers"),
    "no tokens": ({"prompt": TOKENS}, "no tokens"),
    "logprobs of NaN": ({"tokens": TOKENS, "logprobs": NAN}, "logprobs[0]: expected finite"),
    "several rows": ({"rows": ROWS}, "one row"),
    "no score yet": ({"tokens": TOKENS, "score": None}, "score"),
    "mark of Atropos alone": ({"tokens": TOKENS, "meta": {"atropos": {}}}, "samples_of"),
}


def test_what_cannot_be_answered_is_dropped_by_name_and_the_others_go_on(gateway: Gateway) -> None:
    gateway.register(batch_size=4)
    with shmbus.Producer(gateway.name) as producer:
        producer.put_group("before", [{"tokens": TOKENS, "score": 1.0}] * 2)
        for name, (sample, _) in UNUSABLE.items():
            producer.put_group(name, [{"score": 1.0, **sample}] * 2)
    assert gateway.post("/scored_data", scored([7], [8])).status == 200
    batch = gateway.batch()
    assert sorted(group["tokens"] for group in batch) == [[TOKENS.tolist()] * 2, [[7], [8]]]
    assert gateway.batch() is None
    log = gateway.child.output()
    for name, (_, why) in UNUSABLE.items():
        [line] = [line for line in log.splitlines() if f"group {name!r} cannot be" in line]
        assert why in line


@pytest.mark.parametrize("count", [1, 3])
def test_a_batch_is_made_of_what_is_left(gateway: Gateway, count: int) -> None:
    assert gateway.post("/register", {**REGISTRATION, "batch_size": 2}).status == 200
    with shmbus.Producer(gateway.name) as producer:
        for number in range(count):
            producer.put_group(f"bad-{number}", [{"tokens": TOKENS, "logprobs": NAN, "score": 1.0}])
    for number in range(4):
        assert gateway.post("/scored_data", scored([number])).status == 200
    assert [group["tokens"] for group in gateway.batch()] == [[[0]], [[1]]]
    assert [group["tokens"] for group in gateway.batch()] == [[[2]], [[3]]]
    assert gateway.batch() is None
