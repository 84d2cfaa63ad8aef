"""Metrics and health over real HTTP: a scrape's report, and limits of bad clients."""

import contextlib
import itertools
import json
import re
import resource
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import Daemon, Spawner, next_request, wait_until
from operators import WORKER, cli, header_offset, put_group, write_at
from prometheus_client.parser import text_string_to_metric_families

import shmbus
from shmbus.daemon import metrics
from shmbus.daemon.metrics import MAX_SLOTS_LABELLED, MetricsServer
from shmbus.http.server import AddressError
from shmbus.inspect.tables import HISTOGRAMS
from shmbus.pool import PoolPublisher, PoolReader, PoolSpec
from shmbus_ext import _core
from trainer_adapter import LogprobMismatch, OnlineDataHandler

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"
ALERTS = DASHBOARD.with_name("alerts.yml")

Served = Callable[..., Daemon]


@pytest.fixture
def server(bus_name: str) -> Iterator[MetricsServer]:
    with MetricsServer(bus_name, 0) as serving:
        yield serving


def get(server: MetricsServer, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{server.url}{path}", timeout=20) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def scrape(server: MetricsServer) -> dict[tuple[str, tuple[str, ...]], float]:
    status, text = get(server, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(v for k, v in sample.labels.items() if k != "bus")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_scrape_says_what_the_ledger_says(
    bus_name: str, server: MetricsServer, spawn: Spawner
) -> None:
    assert scrape(server) == {("shmbus_up", ()): 0}
    with shmbus.Bus.create(bus_name, "4MiB"):
        worker = spawn.script(WORKER, bus_name, 6, "w", until="ready")
        with shmbus.Consumer(bus_name) as consumer:
            groups = consumer.take(4, timeout=10)
            groups[0].ack()
            groups[1].drop()
            found = scrape(server)
            assert found["shmbus_up", ()] == 1
            assert found["shmbus_committed_total", ()] == 25
            assert found["shmbus_acknowledged_total", ()] == 4
            assert found["shmbus_dropped_total", ("malformed",)] == 4
            assert found["shmbus_trajectories", ("leased",)] == 8
            assert found["shmbus_groups", ("leased",)] == 2
            assert found["shmbus_producers", ("alive",)] == 1
            assert found["shmbus_producer_committed_total", ("0",)] == 25
            assert found["shmbus_collector_up", ()] == 1
            assert found["shmbus_paused", ()] == 0
            undelivered = sum(
                value for (name, _), value in found.items() if name == "shmbus_trajectories"
            )
            assert undelivered == 25 - 8
        worker.kill()
        assert cli("pause", bus_name).status == 0
        found = scrape(server)
        assert found["shmbus_paused", ()] == 1
        assert found["shmbus_producers", ("dead",)] == 1
        assert found["shmbus_collector_up", ()] == 0
    assert scrape(server) == {("shmbus_up", ()): 0}


def histogram(found: dict[tuple[str, tuple[str, ...]], float], name: str) -> list[float]:
    rows = [(float(le[0]), count) for (n, le), count in found.items() if n == f"{name}_bucket"]
    totals = [0.0, *(count for _, count in sorted(rows))]
    return [after - before for before, after in itertools.pairwise(totals)]


def bucket_of(values: list[float], bounds: tuple[float, ...]) -> list[float]:
    places = np.searchsorted(np.array(bounds), values, side="left")
    return np.bincount(places, minlength=len(bounds) + 1).astype(float).tolist()


@pytest.mark.parametrize("served", [False, True])
@pytest.mark.parametrize("options", [{}, {"max_policy_lag": 500}])
def test_histograms_say_what_was_delivered_once(
    bus_name: str, server: MetricsServer, daemon: Served, served: bool, options: dict[str, int]
) -> None:
    lags = [0, 1, 7, 128, 129]
    scores = [-11.0, -10.0, 0.3, 1.0, 1e9]
    lengths = [1, 64, 65, 5000, 2_000_000]
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    with contextlib.ExitStack() as stack:
        if served:
            daemon("--capacity", "64MiB", *flags)
            options = {}
        else:
            stack.enter_context(shmbus.Bus.create(bus_name, "64MiB"))
        producer = stack.enter_context(shmbus.Producer(bus_name))
        consumer = stack.enter_context(shmbus.Consumer(bus_name, **options))
        consumer.policy_version = 200
        for index, (lag, score, length) in enumerate(zip(lags, scores, lengths, strict=True)):
            producer.put(
                "a", group_size=5, index=index, score=score, policy_version=200 - lag,
                mask=np.ones(3), tokens=np.zeros(length, np.uint8),
            )  # fmt: skip
        # Given back, and delivered again: counted once.
        (group,) = consumer.take(1, timeout=10)
        group.give_back()
        (group,) = consumer.take(1, timeout=10)
        group.ack()
        found = scrape(server)
        bounds = dict(zip(HISTOGRAMS, _core.FIGURE_BOUNDS, strict=True))
        assert histogram(found, "shmbus_policy_lag") == bucket_of(lags, bounds["lag"])
        assert histogram(found, "shmbus_sample_tokens") == bucket_of(lengths, bounds["length"])
        assert histogram(found, "shmbus_score") == bucket_of(scores, bounds["score"])
        assert found["shmbus_policy_lag_sum", ()] == sum(lags)
        assert found["shmbus_sample_tokens_sum", ()] == sum(lengths)
        assert found["shmbus_policy_lag_count", ()] == 5
        assert sum(histogram(found, "shmbus_group_age_seconds")) == 1
        part = sum(score >= 0.5 for score in scores) / len(scores)
        assert histogram(found, "shmbus_group_solved_ratio") == bucket_of([part], bounds["solved"])
        assert 0 <= found["shmbus_group_age_seconds_sum", ()] < 60
        # Scores may be negative, so their sum may fall.
        assert ("shmbus_score_sum", ()) not in found


@pytest.mark.parametrize("served", [False, True])
def test_useless_groups_are_counted_for_who_samples_more(
    bus_name: str, server: MetricsServer, daemon: Served, served: bool
) -> None:
    with contextlib.ExitStack() as stack:
        if served:
            daemon("--capacity", "1MiB", "--skip-zero-variance")
        else:
            stack.enter_context(shmbus.Bus.create(bus_name, "1MiB"))
        producer = stack.enter_context(shmbus.Producer(bus_name))
        options = {} if served else {"skip_zero_variance": True}
        consumer = stack.enter_context(shmbus.Consumer(bus_name, **options))
        for number in range(5):
            for index in range(2):
                # Two of the groups lack variance.
                score = 1.0 if number < 2 else float(index)
                producer.put(f"k{number}", group_size=2, index=index, score=score, x=np.zeros(3))
        taken: list[shmbus.Group] = []
        wait_until(lambda: taken.extend(consumer.take()) or len(taken) == 3)
        consumer.drop(taken[:1], reason="filtered")
        taken[1].drop()
        taken[2].ack()
        wait_until(lambda: consumer.stats().acknowledged == 2)
        ledger = consumer.stats()
        assert ledger.groups_dropped == producer.groups_dropped == 4
        assert ledger.dropped == {"zero_variance": 4, "filtered": 2, "malformed": 2}
        found = scrape(server)
        assert found["shmbus_groups_dropped_total", ()] == 4
        assert found["shmbus_dropped_total", ("filtered",)] == 2


def test_the_number_of_series_is_bounded_whatever_is_on_the_bus(
    bus_name: str, server: MetricsServer
) -> None:
    with shmbus.Bus.create(bus_name, "8MiB", max_producers=200):
        producers = [shmbus.Producer(bus_name, label=f"w{n}") for n in range(100)]
        for number, producer in enumerate(producers):
            put_group(producer, f"g{number}")
        found = scrape(server)
        slots = [key for key in found if key[0] == "shmbus_producer_committed_total"]
        assert len(slots) == MAX_SLOTS_LABELLED + 1
        assert found["shmbus_producer_committed_total", ("other",)] == 4 * 36
        assert sum(found[key] for key in slots) == 400
        # Of those 85 of five histograms with fixed buckets.
        assert len(found) < 360
        for producer in producers:
            producer.close()


def test_healthz_is_200_while_the_bus_can_be_read_and_503_with_a_reason_otherwise(
    bus_name: str, server: MetricsServer
) -> None:
    status, text = get(server, "/healthz")
    assert status == 503
    assert "there is no bus" in json.loads(text)["problem"]
    with shmbus.Bus.create(bus_name, "1MiB"):
        status, text = get(server, "/healthz")
        assert (status, json.loads(text)["healthy"]) == (200, True)
        write_at(bus_name, header_offset("layout_version"), (99).to_bytes(4, "little"))
        status, text = get(server, "/healthz")
        assert status == 503
        assert "layout version 99" in json.loads(text)["problem"]


@pytest.fixture
def many_files() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, before[1]), before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("sent", [b"", b"GET /healthz HTTP/1.1\r\nX: "])
def test_a_thousand_slow_clients_keep_nobody_from_being_answered(
    bus_name: str, server: MetricsServer, sent: bytes
) -> None:
    with shmbus.Bus.create(bus_name, "1MiB"), contextlib.ExitStack() as stack:
        for number in range(1000):
            client = stack.enter_context(socket.create_connection((server.host, server.port)))
            with contextlib.suppress(ConnectionError):  # a newer connection took its place
                client.sendall(sent)
            if number % 50 == 0:
                assert get(server, "/healthz")[0] == 200
        assert get(server, "/healthz")[0] == 200


def test_a_client_that_sends_a_byte_now_and_then_has_the_time_of_one_request(
    bus_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "IDLE_S", 0.3)

    def ended() -> bool:
        try:
            client.sendall(b"x")
        except ConnectionError:
            return True
        return False

    with (
        MetricsServer(bus_name, 0) as server,
        socket.create_connection((server.host, server.port)) as client,
    ):
        wait_until(ended, what="the end of a slow client")


def ask(server: MetricsServer, *head: str) -> str:
    with socket.create_connection((server.host, server.port), timeout=20) as client:
        client.sendall("\r\n".join(head).encode() + b"\r\n\r\n")
        return b"".join(iter(lambda: client.recv(65536), b"")).decode()


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200), ("localhost:1", 200), ("127.0.0.1:{port}", 200), ("[::1]:9464", 200),
        ("127.8.8.8", 200), ("evil.example", 403), ("evil.example:{port}", 403),
        ("localhost.evil.example", 403), ("192.168.1.7", 403), ("", 403), ("[", 403),
    ],
)  # fmt: skip
def test_bound_to_loopback_it_answers_loopback_names_only(
    bus_name: str, server: MetricsServer, host: str, status: int
) -> None:
    said = ask(server, "GET /metrics HTTP/1.1", f"Host: {host.format(port=server.port)}")
    assert said.split()[1] == str(status)
    if status == 403:
        assert "expected Host: 127.0.0.1 or localhost" in said and "--metrics-host" in said
    assert "shmbus_up" in said or status != 200


def test_bound_to_all_addresses_it_answers_every_name(bus_name: str) -> None:
    with MetricsServer(bus_name, 0, "0.0.0.0") as server:
        assert ask(server, "GET /metrics HTTP/1.1", "Host: node7").startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (["GET /metrics HTTP/1.0"], 200),
        (["HEAD /metrics HTTP/1.0"], 200),
        (["GET /metrics"], 200),
        (["\x00\x01"], 400),
        (["GET http://[ HTTP/1.1"], 400),
        (["GET /metrics HTTP/1.1", "Host: localhost", "Host: evil.example"], 400),
        (["GET http://evil.example/metrics HTTP/1.0"], 403),
        (["DELETE /metrics HTTP/1.0"], 501),
        (["POST /metrics HTTP/1.0"], 501),
        (["GET / HTTP/1.0"], 404),
        (["GET /metrics/../../etc/passwd HTTP/1.0"], 404),
        (["GET /metrics?name[]=shmbus_up HTTP/1.0"], 200),
        (["GET / HTTP/1.1", "X: " + "y" * (64 << 10)], 400),
        (["GET /metrics HTTP/1.1", "no colon"], 400),
    ],
)
def test_what_is_no_request_is_answered_with_what_was_expected(
    bus_name: str, server: MetricsServer, head: list[str], status: int
) -> None:
    said = ask(server, *head)
    assert said.split()[1] == str(status), said
    assert "# TYPE" not in said or head[0].startswith("GET")


def test_a_port_in_use_is_a_clear_message(bus_name: str, server: MetricsServer) -> None:
    with pytest.raises(AddressError, match="choose another"):
        MetricsServer(bus_name, server.port)
    result = cli("metrics", bus_name, "--port", str(server.port))
    assert result.status == 1
    assert "choose another" in result.err
    assert cli("metrics", bus_name, "--port", "70000").status == 2


@pytest.mark.parametrize("up", [False, True])
def test_a_bus_has_one_name_in_all_lines(bus_name: str, up: bool) -> None:
    name = f"{bus_name}\n"
    with MetricsServer(name, 0) as server, contextlib.ExitStack() as stack:
        if up:
            stack.enter_context(shmbus.Bus.create(name, "1MiB"))
        families = list(text_string_to_metric_families(get(server, "/metrics")[1]))
        names = {sample.labels["bus"] for each in families for sample in each.samples}
        assert names == {f"{bus_name}\\n"} == {json.loads(get(server, "/healthz")[1])["bus"]}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_command_serves_until_a_signal(
    bus_name: str, spawn: Spawner, number: signal.Signals
) -> None:
    child = spawn.module("shmbus.cli", "metrics", bus_name, "--port", "0")
    wait_until(lambda: "/metrics\n" in child.output(), what="its address")
    with urllib.request.urlopen(child.output().strip(), timeout=20) as reply:
        assert "shmbus_up" in reply.read().decode()
    child.send_signal(number)
    assert child.wait() == 0


def test_without_the_client_library_there_is_a_message_that_names_the_extra(bus_name: str) -> None:
    code = (
        "import importlib.util, sys; importlib.util.find_spec = lambda name: None;"
        f"from shmbus.cli import main; sys.exit(main(['metrics', {bus_name!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "pip install 'shmbus[metrics]'" in done.stderr


def names_in(expressions: Iterable[str]) -> set[str]:
    return set(re.findall(r"\bshmbus_\w+", " ".join(expressions)))


def test_dashboard_and_alerts_ask_only_for_metrics_that_exist(
    bus_name: str, server: MetricsServer, daemon: Served
) -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = [panel for panel in board["panels"] if panel["type"] != "row"]
    wanted = names_in(target["expr"] for panel in panels for target in panel["targets"])
    wanted |= names_in(re.findall(r"expr: (.*?) for:", ALERTS.read_text(), re.DOTALL))
    daemon("--capacity", "1MiB", "--sample-retries", "1")
    with (
        shmbus.Producer(bus_name) as producer,
        shmbus.Feeder(bus_name) as feeder,
        OnlineDataHandler(bus_name, groups_per_batch=1) as handler,
        PoolPublisher(bus_name, "weights", spec=PoolSpec(slot_bytes=4096)) as publisher,
        PoolReader(bus_name, "weights", label="http://127.0.0.1:1 rank 0") as reader,
    ):
        feeder.request("b", group_size=2, prompt=[1])
        with publisher.begin(1, 4096) as write:  # type: ignore[union-attr]
            write.view()[:] = 1
        with reader.latest(timeout=5) as lease:
            reader.applied(lease)
        put_group(producer, "a")
        handler.note_mismatch(LogprobMismatch(*torch.ones(7)))
        names = {name for name, _ in scrape(server)}
        publisher.close(remove=True)
    assert wanted <= names, wanted - names


def test_panels_of_the_dashboard_have_places_and_numbers_of_their_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    ids = [panel["id"] for panel in panels]
    assert len(ids) == len(set(ids))
    places = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(places) == len(set(places))
    assert max(x for x, _ in places) < 24


def test_requests_are_counted_by_split_and_failures_by_kind(
    bus_name: str, server: MetricsServer, daemon: Served
) -> None:
    daemon("--capacity", "4MiB", "--sample-retries", "5")
    with (
        shmbus.Feeder(bus_name) as feeder,
        shmbus.Producer(bus_name) as producer,
        shmbus.Consumer(bus_name, label="train.py") as consumer,
    ):
        feeder.request("a", group_size=4, prompt=[1])
        feeder.request("b", group_size=2, prompt=[1], split="eval")
        request = next_request(producer)
        assert request.split == "train"
        found = scrape(server)
        assert found["shmbus_split_requests", ("train", "open")] == 3
        assert found["shmbus_split_requests", ("train", "claimed")] == 1
        assert found["shmbus_split_requests", ("eval", "open")] == 2
        assert found["shmbus_requested_groups", ()] == 2
        assert found["shmbus_lane_paused", ()] == 0
        producer.requests.fail(request, "sandbox timed out after 30 s, pid 4711")
        wait_until(
            lambda: scrape(server)["shmbus_failed_attempts_total", ("timeout",)] == 1,
            what="the failed attempt",
        )
        wait_until(
            lambda: scrape(server)["shmbus_wanted_samples_by_reason", ("timeout",)] == 1,
            what="the retry",
        )
        found = scrape(server)
        assert found["shmbus_wanted_samples_by_reason", ("connection",)] == 0
        assert not any("4711" in label for _, labels in found for label in labels)
        assert consumer.take(timeout=0.3) == []
        wait_until(
            lambda: scrape(server)["shmbus_trainer_waited_seconds_total", ("none", "train")] > 0.2,
            what="what the trainer waited",
        )
        assert scrape(server)["shmbus_producer_waited_seconds_total", ("0",)] >= 0


def test_weights_are_told_by_version_age_and_who_runs_what(
    bus_name: str, server: MetricsServer
) -> None:
    with (
        shmbus.Bus.create(bus_name, "1MiB"),
        PoolPublisher(bus_name, "weights", spec=PoolSpec(slot_bytes=4096)) as publisher,
    ):
        for version in (11, 12):
            with publisher.begin(version, 4096) as write:  # type: ignore[union-attr]
                write.view()[:] = 1
            if version == 11:
                reader = PoolReader(bus_name, "weights", label="replica")
                with reader.latest(timeout=5) as lease:
                    reader.applied(lease)
        found = scrape(server)
        assert found["shmbus_weights_version", ("weights",)] == 12
        assert found["shmbus_weights_published_total", ("weights",)] == 2
        assert found["shmbus_weights_skipped_total", ("weights",)] == 0
        assert 0 <= found["shmbus_weights_age_seconds", ("weights",)] < 60
        assert found["shmbus_weights_reader_version", ("weights", "0")] == 11
        with reader.latest(timeout=5) as lease:
            reader.refused(lease, 3, "no room")
        assert scrape(server)["shmbus_weights_readers", ("weights", "refused")] == 1
        reader.close()
        found = scrape(server)
        assert ("shmbus_weights_reader_version", ("weights", "0")) not in found
        publisher.close(remove=True)
        assert not any(name.startswith("shmbus_weights") for name, _ in scrape(server))


def test_each_alert_says_what_to_do() -> None:
    # No dependency of shmbus itself: transformers and ray bring it.
    yaml = pytest.importorskip("yaml")
    rules = [
        rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]
    ]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        assert set(rule) == {"alert", "expr", "for", "labels", "annotations"}, rule
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert set(rule["annotations"]) == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule["for"])
        assert "{{ $labels.bus }}" in rule["annotations"]["summary"]
        for pair in ("()", "{}", "[]"):
            assert rule["expr"].count(pair[0]) == rule["expr"].count(pair[1]), rule
