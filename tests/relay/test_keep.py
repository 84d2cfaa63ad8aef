"""A trainer's side on disk, and its return after a loss of memory."""

import contextlib
import errno
import logging
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import answering
from conftest import Spawner, take_groups, wait_until
from relay.local import COORDINATOR, put_group, relay, relayed, stats

import shmbus
from shmbus.inspect.status import read_status
from shmbus.relay import keep as keep_module
from shmbus.relay.host import check_keep
from shmbus.relay.keep import Keep
from shmbus.stash.stash import StashPolicy
from shmbus_ext import _core
from trainer_adapter import OnlineDataHandler

pytest_plugins = ["relay.relay_fixtures"]


def lose_memory(buses: dict[str, str], which: str = "abt") -> None:
    """Have buses as after a reboot: new and empty."""
    for each in which:
        shmbus.unlink(buses[each])
        shmbus.Bus.create(buses[each], "4MiB").close()


def numbers(groups: list[shmbus.Group]) -> list[int]:
    """Return the numbers of groups put by `put_group`, after a comparison of every value."""
    for group in groups:
        assert [t.index for t in group] == [0, 1, 2, 3]
        assert all((t["tokens"] == int(group.instance_id[1:])).all() for t in group)
    return sorted(int(group.instance_id[1:]) for group in groups)


def test_an_evaluation_survives_another_number(buses: dict[str, str], tmp_path: Path) -> None:
    policy = StashPolicy(group_timeout_s=0.3, on_timeout="partial")
    options: Any = {"policy": policy, "keep": str(tmp_path)}
    for name, label in ((buses["a"], "warmup"), (buses["t"], "eval")):
        with shmbus.Producer(name) as producer:
            producer.cancelled("none", round=0, split=label)
    with relay([buses["a"]], [buses["t"]], **options), shmbus.Producer(buses["a"]) as producer:
        producer.put("part", group_size=2, index=0, split="eval", tokens=[1])
        put_group([buses["a"]], 1, split="eval")
        put_group([buses["a"]], 2, split="warmup")
        put_group([buses["a"]], 3)
        wait_until(lambda: stats(buses["t"]).committed == 10)
    lose_memory(buses)
    with shmbus.Producer(buses["t"]) as producer:
        producer.cancelled("none", round=0, split="other")
    with relayed(buses, "a", **options, taking={"on_failure": "partial"}) as (_, consumer, _):
        assert numbers(take_groups(consumer, 1)) == [3]
        found: list[shmbus.Group] = []
        while len(found) < 2:
            groups = consumer.take(split="eval", timeout=30.0)
            assert groups, "it was not brought back"
            found += groups
        assert {(group.instance_id, len(group)) for group in found} == {("part", 1), ("q1", 4)}
        assert {t.split for group in found for t in group} == {"eval"}
        assert {each.split for each in read_status(buses["t"]).splits} == {"train", "other", "eval"}


@pytest.mark.parametrize("lost", ["abt", "t"])
def test_only_unacknowledged_groups_survive_a_reboot(
    buses: dict[str, str], tmp_path: Path, lost: str
) -> None:
    sources = [buses["a"], buses["b"]]
    with relay(sources, [buses["t"]], keep=str(tmp_path)), shmbus.Consumer(buses["t"]) as consumer:
        for number in range(40):
            put_group(sources, number)
        groups = sorted(take_groups(consumer, 40), key=lambda group: int(group.instance_id[1:]))
        for group in groups[:15]:
            group.ack()
        wait_until(lambda: stats(buses["a"]).acknowledged == 30)
        del groups, group
    lose_memory(buses, lost)
    with relay(sources, [buses["t"]], keep=str(tmp_path)):
        with shmbus.Consumer(buses["t"]) as consumer:
            back = take_groups(consumer, 25)
            assert numbers(back) == list(range(15, 40))
            put_group(sources, 40)
            (new,) = take_groups(consumer, 1)
            for group in [*back, new]:
                group.ack()
            ended = 2 if "a" in lost else 82
            wait_until(lambda: stats(buses["a"]).acknowledged == ended)
        assert read_status(buses["t"]).ledger.balanced
    lose_memory(buses, lost)
    with relay(sources, [buses["t"]], keep=str(tmp_path)), shmbus.Consumer(buses["t"]) as consumer:
        time.sleep(0.5)
        assert consumer.take(timeout=0.5) == []


def test_a_restarted_sink_returns_nothing(buses: dict[str, str], tmp_path: Path) -> None:
    with relayed(buses, "a", keep=str(tmp_path)) as (running, consumer, _):
        for number in range(10):
            put_group([buses["a"]], number)
        groups = take_groups(consumer, 10)
        for group in groups[:5]:
            group.ack()
        wait_until(lambda: stats(buses["a"]).acknowledged == 20)
        running.restart(buses["t"])
        put_group([buses["a"]], 10)
        assert numbers(take_groups(consumer, 1)) == [10]
        wait_until(lambda: running.parties[buses["t"]].records == 4)


@pytest.mark.parametrize("fails", [True, False])
def test_reduced_groups_return_reduced(buses: dict[str, str], tmp_path: Path, fails: bool) -> None:
    policy = StashPolicy(on_failure="partial", on_timeout="partial", group_timeout_s=0.5)
    how: dict[str, Any] = {"policy": policy, "keep": str(tmp_path)}
    taking = {"on_failure": "partial"}
    with relayed(buses, "a", taking, **how) as (_, consumer, producer):
        for index in range(3):
            producer.put("q", group_size=4, index=index, score=1.0, tokens=[index])
        if fails:
            producer.fail("q", 3, "it broke", group_size=4)
        (group,) = take_groups(consumer, 1)
        assert len(group) == 3
        del group
    lose_memory(buses)
    with relayed(buses, "a", taking, **how) as (_, consumer, _):
        (group,) = take_groups(consumer, 1)
        assert [t.index for t in group] == [0, 1, 2]
        group.ack()


def test_a_checkpoint_and_kept_groups_resume_a_run(buses: dict[str, str], tmp_path: Path) -> None:
    prompts = [(f"q{n}", {"prompt": np.full(4, n, np.int32)}) for n in range(60)]
    trained: Counter[str] = Counter()
    made: Counter[str] = Counter()

    def answer(producer: shmbus.Producer, request: shmbus.Request) -> None:
        made[request.instance_id] += 1
        tokens = [*request["prompt"].tolist(), request.index]
        producer.requests.answer(request, score=float(request.index), tokens=tokens)

    def train(state: Any, steps: int) -> Any:
        handler = OnlineDataHandler(buses["t"], groups_per_batch=4)
        with handler:
            if state is not None:
                handler.load_state_dict(state)
            handler.offer(prompts, ahead=12, group_size=2)
            for _, batch in zip(range(steps), handler, strict=False):
                trained.update(batch.instance_ids)
                state = handler.state_dict()
                handler.ack(batch)
                if len(trained) == len(prompts):
                    break
        return state

    sources = [buses["a"], buses["b"]]
    with relay(sources, [buses["t"]], keep=str(tmp_path)), answering(sources, answer):
        state = train(None, 6)
        wait_until(lambda: stats(buses["t"]).undelivered > 4)  # made, and not trained
    kept = stats(buses["t"]).undelivered
    lose_memory(buses)
    with relay(sources, [buses["t"]], keep=str(tmp_path)):
        wait_until(lambda: stats(buses["t"]).undelivered >= kept)
        with answering(sources, answer):
            train(state, 100)
    assert set(trained) == {name for name, _ in prompts}
    assert set(trained.values()) == {trained["q0"]}, "each prompt as often as any other"


def test_a_checkpoint_names_what_was_acknowledged_while_no_relay_wrote_its_end(
    buses: dict[str, str], tmp_path: Path
) -> None:
    with (
        relay([buses["a"]], [buses["t"]], keep=str(tmp_path)) as running,
        OnlineDataHandler(buses["t"], groups_per_batch=1) as handler,
    ):
        for number in range(3):
            put_group([buses["a"]], number)
        wait_until(lambda: stats(buses["t"]).committed == 12)
        running.end(buses["t"])
        first = handler.next_batch(30)
        trained = {*first.instance_ids}
        handler.ack(first)
        trained |= {*handler.next_batch(30).instance_ids}
        state = handler.state_dict()
    lose_memory(buses)
    with (
        relay([buses["a"]], [buses["t"]], keep=str(tmp_path)),
        OnlineDataHandler(buses["t"], groups_per_batch=1) as handler,
    ):
        handler.load_state_dict(state)
        third = handler.next_batch(30)
        assert {*third.instance_ids} == {"q0", "q1", "q2"} - trained
        handler.ack(third)
        wait_until(lambda: stats(buses["t"]).committed == stats(buses["t"]).acknowledged == 12)


def test_its_size_is_bounded_by_what_is_needed(
    buses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keep_module, "_SPARE_BYTES", 200_000)
    file = tmp_path / f"{buses['t']}.kept"
    with relayed(buses, "a", keep=str(tmp_path)) as (_, consumer, _):
        for number in range(3):
            put_group([buses["a"]], number, values=1000)
        old = take_groups(consumer, 3)
        largest = 0
        for number in range(3, 200):
            put_group([buses["a"]], number, values=1000)
            (group,) = take_groups(consumer, 1)
            group.ack()
            largest = max(largest, file.stat().st_size)
        assert 200_000 < largest < 600_000
        wait_until(lambda: stats(buses["a"]).acknowledged == 4 * 197)
        del old, group
    lose_memory(buses)
    with relayed(buses, "a", keep=str(tmp_path)) as (_, consumer, _):
        assert set(numbers(take_groups(consumer, 3))) == {0, 1, 2}


def kept(buses: dict[str, str], directory: Path, count: int = 6) -> Path:
    """Return the file of a lost run with unacknowledged groups."""
    with relay([buses["a"]], [buses["t"]], keep=str(directory)):
        for number in range(count):
            put_group([buses["a"]], number)
            wait_until(lambda n=number: stats(buses["t"]).undelivered == 4 * (n + 1))
    lose_memory(buses)
    return directory / f"{buses['t']}.kept"


def records(buses: dict[str, str], directory: Path) -> int:
    with contextlib.closing(Keep(str(directory), buses["t"], 1.0, "another life")) as opened:
        return len(list(opened.records(())))


def test_a_file_that_is_cut_anywhere_gives_what_is_whole_of_it(
    buses: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    file = kept(buses, tmp_path)
    whole = file.read_bytes()
    assert records(buses, tmp_path) == 24
    at = sorted(int(each) for each in np.random.default_rng(seed).integers(60, len(whole), 40))
    found = []
    for size in at:
        file.write_bytes(whole[:size])
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            found.append(records(buses, tmp_path))
        assert found[-1] % 4 == 0
        assert caplog.text == "" or "cut or damaged" in caplog.text
    assert found == sorted(found) and found[-1] < 24 and len(set(found)) > 0
    opened = Keep(str(tmp_path), buses["t"], 0.0)
    opened.end({record.origin for record in opened.records(())})
    opened.close()
    assert records(buses, tmp_path) == 0


def test_a_wrong_byte_costs_its_frame_and_nothing_wrong_is_brought_back(
    buses: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    file = kept(buses, tmp_path)
    whole = file.read_bytes()
    body = 128  # first byte behind the frame of the bus
    for place in np.random.default_rng(seed).integers(body, len(whole), 40):
        harmed = bytearray(whole)
        harmed[place] ^= 0x10
        file.write_bytes(harmed)
        caplog.clear()
        with caplog.at_level(logging.ERROR):
            assert 20 <= records(buses, tmp_path) < 24, f"byte {place}"
        assert "damaged" in caplog.text


def frames(file: Path) -> list[tuple[int, int]]:
    data, found, at = file.read_bytes(), [], 0
    while at < len(data):
        _, kind, nbytes, _ = keep_module._HEAD.unpack_from(data, at)
        found.append((at, kind))
        at += keep_module._STEP + nbytes
    return found


def test_a_damaged_head_costs_its_own_frame(buses: dict[str, str], tmp_path: Path) -> None:
    file = kept(buses, tmp_path)
    whole = file.read_bytes()
    for at, kind in frames(file):
        for place in (0, 5, 9, 17, 21):
            harmed = bytearray(whole)
            harmed[at + place] ^= 0x10
            file.write_bytes(harmed)
            left = 24 if kind == keep_module._RUN else 20
            assert records(buses, tmp_path) == left, (at, kind, place)


def test_a_frame_within_a_record_is_data(buses: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    inner = np.frombuffer(kept(buses, tmp_path / "from").read_bytes(), np.uint8)
    with relayed(buses, "a", keep=str(tmp_path)) as (_, _, producer):
        producer.put("q", group_size=1, index=0, tokens=inner)
        wait_until(lambda: stats(buses["t"]).undelivered == 1)
    file = tmp_path / f"{buses['t']}.kept"
    (block,) = [at for at, kind in frames(file) if kind == keep_module._BLOCK]
    harmed = bytearray(file.read_bytes())
    harmed[block] ^= 0x10
    file.write_bytes(harmed)
    assert records(buses, tmp_path) == 0


FORGED = {
    "labels": (keep_module._SPLITS, b"\xc1"),
    "labels of another type": (keep_module._SPLITS, b"\x81\x01\x02"),
    "a put that says nothing": (keep_module._PUT, b""),
    "a block of text": (keep_module._BLOCK, b"text"),
    "another file's run": (keep_module._RUN, b"\x93\x02\xa5other\xa0"),
    "a run of numbers": (keep_module._RUN, b"\x93\x01\x02\x03"),
    "words of no put": (keep_module._ENDS, b"123"),
    "an unknown kind": (99, b"text"),
}


@pytest.mark.parametrize("frame", FORGED.values(), ids=FORGED)
def test_forgery_is_alone(buses: dict[str, str], tmp_path: Path, frame: tuple[int, bytes]) -> None:
    kept(buses, tmp_path)
    opened = Keep(str(tmp_path), buses["t"], 1.0)
    assert opened._append([frame])
    opened.close()
    with relay([buses["a"]], [buses["t"]], keep=str(tmp_path)) as running:
        assert running.parties[buses["t"]].records == 24


PUTS = {
    "a split that no bus has": ((), ()),
    "half an origin": (("train",), b"\x92\xc4\x03abc\x90"),
    "a missing sample of no group": (
        ("train",),
        b"\x92\xc4\x00\x91\x96\x93\xa0\xc0\xa0\x01\x01\x05\x00\xa0",
    ),
}


@pytest.mark.parametrize("how", PUTS.values(), ids=PUTS)
def test_a_forged_put_ends_no_actor(
    buses: dict[str, str], tmp_path: Path, how: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept(buses, tmp_path)
    labels, put = how
    opened = Keep(str(tmp_path), buses["t"], 1.0)
    first = next(opened.records(()))
    if put:
        assert opened._append([(keep_module._ENDS, bytes(8)), (keep_module._PUT, put)])
    else:
        assert opened.put([(bytes(first.payload), labels)], [first.origin], ())
    opened.close()
    with relay([buses["a"]], [buses["t"]], keep=str(tmp_path)) as running:
        party = running.parties[buses["t"]]
        assert (party.records, party.refused) == ((24, 0) if put else (23, 1))
        assert len(list(_core.relay_notes(party._segment))) == party.records


def as_link(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"")
    path.symlink_to(path.parent / "elsewhere")


def as_second_name(path: Path) -> None:
    (path.parent / "elsewhere").write_bytes(b"")
    path.hardlink_to(path.parent / "elsewhere")


@pytest.mark.parametrize("suffix", ["kept", "kept.lock", "kept.new"])
@pytest.mark.parametrize("make", [as_link, as_second_name, os.mkfifo, Path.mkdir])
def test_what_is_no_file_of_its_own_is_refused_and_left_as_it_was(
    buses: dict[str, str], tmp_path: Path, suffix: str, make: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    path = tmp_path / f"{buses['t']}.{suffix}"
    if suffix != "kept.new":
        make(path)
        with pytest.raises(shmbus.LayoutMismatchError, match=path.name):
            Keep(str(tmp_path), buses["t"], 1.0)
    else:
        file = kept(buses, tmp_path)
        make(path)
        monkeypatch.setattr(keep_module, "_SPARE_BYTES", 1)
        opened = Keep(str(tmp_path), buses["t"], 1.0)
        opened.end({record.origin for record in [*opened.records(())][4:]})
        opened.round()
        assert path.name in opened.error and file.exists()
        opened.close()
    assert path.is_symlink() or path.is_fifo() or path.is_dir() or path.stat().st_nlink == 2


@contextlib.contextmanager
def full_disk(size: int) -> Iterator[None]:
    """Limit files to so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize(
    ("dies", "loses_memory"), [("t", False), ("t", True), ("a", False), (COORDINATOR, False)]
)
def test_a_full_disk_and_a_death_train_nothing_twice(
    buses: dict[str, str], tmp_path: Path, dies: str, loses_memory: bool
) -> None:
    how: dict[str, Any] = {"keep": str(tmp_path)}
    dies = buses.get(dies, dies)
    file = tmp_path / f"{buses['t']}.kept"
    with relay([buses["a"]], [buses["t"]], **how) as running:
        with shmbus.Consumer(buses["t"]) as consumer:
            for number in range(10):
                put_group([buses["a"]], number)
            groups = sorted(take_groups(consumer, 10), key=lambda group: int(group.instance_id[1:]))
            with full_disk(file.stat().st_size):
                for group in groups[:8]:
                    group.ack()
                if dies == buses["t"]:
                    wait_until(lambda: stats(buses["a"]).acknowledged == 32)
                running.end(dies)
                del groups, group
        if loses_memory:
            lose_memory(buses)
        running.start_again(dies)
        if not loses_memory:
            wait_until(lambda: stats(buses["a"]).acknowledged == 32)
        assert not running.parties[buses["t"]].keep.owed
        with shmbus.Consumer(buses["t"]) as consumer:
            assert numbers(take_groups(consumer, 2)) == [8, 9]
            assert consumer.take(timeout=0.3) == []


@pytest.mark.parametrize("dies", [False, True])
def test_a_source_keeps_what_has_ended_until_the_end_is_on_the_disk(
    buses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dies: bool
) -> None:
    monkeypatch.setattr(keep_module, "_AGAIN_S", 0.05)
    write = os.pwrite

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    policy = StashPolicy(skip_zero_variance=True)
    options: Any = {"keep": str(tmp_path), "policy": policy}
    with relayed(buses, "a", **options) as (running, consumer, producer):
        for number in range(5):
            put_group([buses["a"]], number)
        groups = take_groups(consumer, 5)
        monkeypatch.setattr(os, "pwrite", fail)
        for group in groups:
            group.ack()
        wait_until(lambda: len(running.parties[buses["t"]].keep.owed) == 20)
        if dies:
            running.restart(buses["t"])
            wait_until(lambda: len(running.parties[buses["t"]].keep.owed) == 20)
        keep = running.parties[buses["t"]].keep
        wait_until(lambda: os.strerror(errno.EIO) in keep.error)
        assert "20 ends" in keep.error
        for index in range(2):
            producer.put("equal", group_size=2, index=index, score=1.0)
        wait_until(lambda: sum(stats(buses["a"]).dropped.values()) == 2)
        assert stats(buses["a"]).acknowledged == 0
        monkeypatch.setattr(os, "pwrite", write)
        wait_until(lambda: stats(buses["a"]).acknowledged == 20)
        assert keep.error == "" and not keep.owed
        assert consumer.take(timeout=0.3) == []
    assert records(buses, tmp_path) == 0


@pytest.mark.parametrize(("life", "count"), [("first", 0), ("second", 24), ("", 24)])
def test_records_want_a_life(buses: dict[str, str], tmp_path: Path, life: str, count: int) -> None:
    found = kept(buses, tmp_path)
    opened = Keep(str(tmp_path), buses["t"], 0.0, "first")
    assert len([*opened.records(())]) == 24
    assert opened.adopt() and [*opened.records(())] == []
    opened.close()
    assert found.exists()
    opened = Keep(str(tmp_path), buses["t"], 0.0, life)
    assert len([*opened.records(())]) == count
    opened.close()


def test_a_foreign_file_is_refused_and_kept(buses: dict[str, str], tmp_path: Path) -> None:
    file = kept(buses, tmp_path)
    other = tmp_path / f"{buses['a']}.kept"
    for content in (file.read_bytes(), b"somebody's text, of more bytes than a head has"):
        other.write_bytes(content)
        with pytest.raises(shmbus.LayoutMismatchError, match="another directory"):
            Keep(str(tmp_path), buses["a"], 1.0)
        assert other.read_bytes() == content


def test_a_second_relay_does_not_write_there(buses: dict[str, str], tmp_path: Path) -> None:
    with (
        contextlib.closing(Keep(str(tmp_path), buses["t"], 1.0)),
        pytest.raises(shmbus.BusBusyError, match="another relay"),
    ):
        Keep(str(tmp_path), buses["t"], 1.0)
    Keep(str(tmp_path), buses["t"], 1.0).close()


def test_a_disk_that_is_full_stops_nothing_and_is_gone_on_with(
    buses: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    file = kept(buses, tmp_path)
    monkeypatch.setattr(keep_module, "_AGAIN_S", 0.05)
    opened = Keep(str(tmp_path), buses["t"], 0.0)
    first, second, *others = list(opened.records(()))
    size = file.stat().st_size
    with full_disk(size + 10), caplog.at_level(logging.ERROR):
        opened.end({first.origin})
        assert not opened.put([(first.payload, first.splits)], [first.origin], ())
    assert os.strerror(27) in opened.error and caplog.text.count("not kept") == 1
    assert file.stat().st_size == size
    assert not opened.owed
    wait_until(lambda: opened.put([(second.payload, second.splits)], [second.origin], ()))
    assert opened.error == ""
    opened.end({others[0].origin})
    opened.close()
    assert records(buses, tmp_path) == 22


def test_a_shorter_file_that_has_no_room_leaves_the_disk_as_it_was(
    buses: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = kept(buses, tmp_path)
    monkeypatch.setattr(keep_module, "_SPARE_BYTES", 1)
    opened = Keep(str(tmp_path), buses["t"], 0.0)
    opened.end({record.origin for record in [*opened.records(())][4:]})
    whole = file.read_bytes()
    with full_disk(100):
        opened.round()
    assert opened.error and file.read_bytes() == whole
    assert sorted(each.name for each in tmp_path.iterdir()) == [file.name, f"{file.name}.lock"]
    opened.close()
    assert records(buses, tmp_path) == 4


@pytest.mark.parametrize(
    ("keep", "release", "error"),
    [(7, "acknowledged", TypeError), ("/tmp", "put", ValueError)],
)
def test_options_that_say_nothing_are_refused(keep: Any, release: str, error: Any) -> None:
    with pytest.raises(error, match="keep"):
        check_keep(keep, 1.0, release)


LIFE = """
import sys

sys.path.insert(0, sys.argv[1])
from relay.keep_life import main

main(*sys.argv[2:])
"""


def test_reboots_are_safe(buses: dict[str, str], tmp_path: Path, spawn: Spawner, seed: int) -> None:
    random = np.random.default_rng(seed)
    for life in range(5):
        directory, log = tmp_path / str(life), tmp_path / f"log{life}"
        names = [buses["a"], buses["t"]]
        process = spawn.script(LIFE, Path(__file__).parents[1], *names, directory, log)
        wait_until(lambda path=log: path.exists() and path.stat().st_size > 300)
        time.sleep(float(random.uniform(0.0, 0.4)))
        process.kill()
        killed_s = time.monotonic()
        with shmbus.Consumer(buses["t"]) as consumer:
            there = {group.instance_id for group in consumer.take(timeout=1.0)}
        lose_memory(buses)
        said = [line.split() for line in log.read_text().splitlines()]
        long_done = {name for name, at in said if killed_s - float(at) > 1.0}
        with relayed(buses, "a", keep=str(directory)) as (_, consumer, _):
            back = {group.instance_id for group in consumer.take(timeout=2.0)}
        assert there - {name for name, _ in said} <= back, "put, and lost"
        assert not back & long_done, "acknowledged long ago, and back"
        lose_memory(buses)
