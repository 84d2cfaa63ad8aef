"""What a scrape reads of a server's counters."""

from shmbus.http.metrics import Metrics


def test_a_counter_grows_by_each_byte_however_large_it_is() -> None:
    metrics = Metrics("shmbus_test")
    line = 'shmbus_test_received_bytes_total{bus="run1",route="/x"} '
    metrics.note("/x", 200, 0.25, 10**12, 0)
    assert line + "1000000000000\n" in metrics.expose("run1", {})
    metrics.note("/x", 200, 0.25, 1, 0)
    text = metrics.expose("run1", {"rate": 0.1, "bytes": 2**40 + 1})
    assert line + "1000000000001\n" in text
    assert 'shmbus_test_request_seconds_total{bus="run1",route="/x"} 0.5\n' in text
    assert 'shmbus_test_rate{bus="run1"} 0.1\n' in text
    assert f'shmbus_test_bytes{{bus="run1"}} {2**40 + 1}\n' in text


def test_lines_of_a_family_stand_together() -> None:
    values = {f'{name}{{engine="{engine}"}}': 1.0 for engine in "ab" for name in ("up", "slow")}
    text = Metrics("shmbus_test").expose("run1", values, {"ended_total": 1.0, **values})
    families = [line.split("{")[0] for line in text.splitlines() if line[0] != "#"]
    assert families == ["shmbus_test_slow"] * 2 + ["shmbus_test_up"] * 2 + families[4:]
