"""Seconds at the command line: one message for a bad value, whichever command it is."""

import argparse
import math

import pytest
from operators import usage

from shmbus.relay import command

# The command line up to the value, and the bound that its message says.
OPTIONS = {
    "top": (("top", "run1", "--interval"), "0.1 or more"),
    "gateway": (("gateway", "run1", "--http", "127.0.0.1:0", "--hold"), "more than 0"),
    "relay": (("relay", "run1", "--trainer", "run2", "--group-timeout"), "more than 0"),
    "relay retries": (("relay", "run1", "--trainer", "run2", "--retry-timeout"), "more than 0"),
}


BAD = ("0", "-1", "nan", "soon", "", "1e999")


@pytest.mark.parametrize(
    ("option", "value"),
    [(o, v) for o in OPTIONS for v in BAD if not (o.startswith("relay") and v == "1e999")],
)
def test_seconds_that_are_none_are_a_usage_error_in_one_form(option: str, value: str) -> None:
    line, bound = OPTIONS[option]
    ended = usage(*line[:-1], f"{line[-1]}={value}")
    assert ended.status == 2
    end = "" if option.startswith("relay") else ", with an end"
    assert f"argument {line[-1]}: expected seconds, {bound}{end}, got {value!r}" in ended.err


def test_a_relays_seconds_may_be_without_end() -> None:
    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    line = ["relay", "run1", "--trainer", "run2", "--group-timeout", "inf", "--retry-timeout", "2"]
    given = parser.parse_args(line)
    assert (given.group_timeout, given.retry_timeout) == (math.inf, 2.0)
