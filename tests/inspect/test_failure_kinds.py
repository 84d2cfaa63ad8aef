"""A reason that anybody may write is one of a few kinds."""

import random
import string

import pytest

from shmbus.inspect.failure_kinds import KINDS, kind_of


@pytest.mark.parametrize(
    ("reason", "kind"),
    [
        ("", "none"),
        ("sandbox timed out", "timeout"),
        ("ConnectionRefusedError(111, 'Connection refused')", "connection"),
        ("ClientConnectorError: Cannot connect to host 127.0.0.1:8000", "connection"),
        ("RateLimitError: Error code: 429", "rate_limit"),
        ("CUDA out of memory", "memory"),
        ("producer 3 died while it had it", "died"),
        ("This model's maximum context length is 4096 tokens", "length"),
        ("ZeroDivisionError('division by zero')", "other"),
    ],
)
def test_what_fails_often_has_a_kind(reason: str, kind: str) -> None:
    assert kind_of(reason) == kind


def test_no_reason_makes_another_kind(seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(2000):
        assert kind_of("".join(dice.choices(string.printable, k=dice.randrange(40)))) in KINDS
