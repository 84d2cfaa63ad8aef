"""Admission: an unfit Hello is refused with the expected values and a remedy."""

from typing import Any

import msgspec
import pytest

from shmbus import Bus
from shmbus.control import messages
from shmbus.daemon import admission
from shmbus.daemon.leases import Session
from shmbus.segment import lifecycle

POLICY = {"on_timeout": "wait", "group_timeout": None}


def hello(**changes: Any) -> messages.Hello:
    found = messages.Hello(version=messages.VERSION, bus="run1", pid=7, label="trainer")
    return msgspec.structs.replace(found, **changes)


def rank(number: int, world_size: int = 2) -> Session:
    return Session(number, hello(rank=number, world_size=world_size), lambda *replies: None)


@pytest.mark.parametrize(
    ("changes", "draining", "kind", "said"),
    [
        ({}, False, None, ""),
        ({"version": 99}, False, "version", "version 99, its daemon needs 2; restart"),
        ({"bus": "other"}, False, "not_found", "serves another bus"),
        ({"created_unix_ns": 5}, False, "not_found", "restart the daemon if"),
        ({"policy": {"on_timeout": "wait"}}, False, None, ""),
        ({"policy": {"on_timeout": "drop"}}, False, "value", "asks for on_timeout='drop'"),
        ({}, True, "closed", "is stopping; try again"),
        ({"observer": True}, True, None, ""),
    ],
)
def test_a_client_is_refused_for_what_does_not_fit(
    bus_name: str, changes: dict[str, Any], draining: bool, kind: str | None, said: str
) -> None:
    with Bus.create(bus_name, "1MiB"):
        segment = lifecycle.open_segment(bus_name, read_only=True)
        found = admission.refusal(
            hello(**{"bus": bus_name, **changes}), segment, POLICY, draining=draining
        )
        segment.close()
    assert (found.kind if found else None) == kind
    assert found is None or said in found.message


@pytest.mark.parametrize(
    ("asked", "world_size", "attached", "kind", "said"),
    [
        ((0, 2), None, [], None, ""),
        ((1, 2), 2, [0], None, ""),
        ((2, 2), 2, [0], "value", "rank: expected 0 to 1, got 2"),
        ((0, 4), 2, [0], "value", "rank 0 is pid 7 (trainer)); stop those first"),
        ((0, 2), 2, [0, 1], "busy", "rank 0 of 2 is attached already: rank 0 is pid 7"),
    ],
)
def test_a_rank_is_refused_for_what_does_not_fit_the_others(
    asked: tuple[int, int], world_size: int | None, attached: list[int], kind: str | None, said: str
) -> None:
    found = admission.rank_refusal(
        hello(rank=asked[0], world_size=asked[1], pid=9), world_size, [rank(n) for n in attached]
    )
    assert (found.kind if found else None) == kind
    assert found is None or said in found.message
