"""What a gateway says of itself: its access log, and its metrics by route and status."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from gateways import Gateway, serving
from http_requests import scored


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    options = ("--create", "4MiB", "--log-format", "json")
    with serving(tmp_path_factory.mktemp("children"), "watching", *options) as found:
        found.register()
        found.register_env()
        yield found


def lines(gateway: Gateway) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in gateway.child.output().splitlines()]
    return [line for line in found if line["logger"] == "shmbus.gateway.access"]


def test_the_log_has_an_object_for_each_request_but_polls(gateway: Gateway) -> None:
    before = len(lines(gateway))
    body = scored([1, 2], [3])
    gateway.post("/scored_data", body)
    gateway.post("/scored_data", {**body, "scores": [None]})
    for _ in range(3):
        assert gateway.get("/status-env", {"env_id": 0}).status == 200
    assert gateway.get("/status-env", {"env_id": 9}).status == 404
    # Its line follows its answer: this check runs after both.
    gateway.get("/info")
    found = lines(gateway)[before:]
    assert [(line["message"], line["status"]) for line in found][:3] == [
        ("POST /scored_data", 200), ("POST /scored_data", 422), ("GET /status-env", 404)
    ]  # fmt: skip
    first = found[0]
    assert first["bus"] == gateway.name
    assert first["received"] == len(json.dumps(body))
    assert first["sent"] == len('{"status":"received"}')
    assert first["peer"] == "127.0.0.1"
    assert first["ms"] >= 0


def test_a_path_with_the_end_of_a_line_is_one_line(gateway: Gateway) -> None:
    before = len(lines(gateway))
    assert gateway.get("/no%0A2026-01-01%20INFO%20forged").status == 404
    gateway.get("/info")
    assert lines(gateway)[before]["message"] == r"GET /no\n2026-01-01 INFO forged"


def test_metrics_count_by_route_and_status(gateway: Gateway) -> None:
    def counts() -> list[float]:
        route = {"route": "/scored_data"}
        return [
            gateway.metric("requests_total", **route, status="200"),
            gateway.metric("requests_total", **route, status="422"),
            gateway.metric("received_bytes_total", **route),
            gateway.metric("request_seconds_total", **route),
        ]

    good = json.dumps(scored([1, 2], [3])).encode()
    before = counts()
    for body in (good, good, b"{}"):
        gateway.post("/scored_data", body)
    taken, refused, received, seconds = (
        after - earlier for after, earlier in zip(counts(), before, strict=True)
    )
    assert (taken, refused, received) == (2, 1, 2 * len(good) + 2)
    assert seconds > 0
    # Unknown routes share a name, whatever clients ask for.
    others = gateway.metric("requests_total", route="other", status="404")
    for path in ("/a", "/b"):
        gateway.get(path)
    assert gateway.metric("requests_total", route="other", status="404") == others + 2
    assert "/a" not in gateway.get("/metrics").body.decode().replace("/scored", "")
