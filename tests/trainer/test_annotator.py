"""Annotators in separate processes: each column once, to its own sample, through any death."""

import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import Daemon, Spawner, beside, keys_of, wait_until

import shmbus
from shmbus import Annotator, Bus, Columns, Consumer, Producer, ProtocolError
from shmbus.handles import source
from trainer_adapter import OnlineDataHandler

REFERENCE = {"ref_logprobs": "float32"}
# Allocating the usual size takes long, and no test fills it.
SMALL = {"capacity": "8MiB", "request_capacity": "8MiB"}
# The long form has thousands.
GROUPS = int(os.environ.get("SHMBUS_TEST_ANNOTATED", "80"))
#: Share of an annotator's deaths before a write, by group; after a write less than half.
DEATHS = min(0.05, 400 / GROUPS)


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, capacity=f"{16 + GROUPS // 500}MiB") as handle:
        yield handle
    for writes in ("ref_logprobs", "teacher"):
        try:
            shmbus.unlink(f"{bus_name}.columns.{writes}")
        except shmbus.BusNotFoundError:
            continue


def put(bus: Bus, groups: int, first: int = 0) -> None:
    with Producer(bus.name) as producer:
        for number in range(first, first + groups):
            tokens = [np.arange(n, n + 3 + n, dtype=np.int32) + number for n in range(3)]
            producer.put_group(f"q{number}", [{"tokens": one} for one in tokens], timeout=10)


def reference(group: Any) -> list[Any]:
    return [-sample["tokens"].astype(np.float32) for sample in group]


def taken(annotator: Annotator) -> Any:
    group = annotator.take(60)
    assert group is not None
    return group


@contextmanager
def annotating(
    bus: Bus, writes: Any = REFERENCE, prefetch: int = 0, **options: Any
) -> Iterator[tuple[Columns, OnlineDataHandler, Annotator]]:
    with (
        Columns(bus.name, writes, **{**SMALL, **options}) as columns,
        OnlineDataHandler(
            bus.name, groups_per_batch=1, annotate_group=columns, prefetch=prefetch
        ) as handler,
        Annotator(bus.name, writes) as annotator,
    ):
        yield columns, handler, annotator


def test_a_batch_waits_for_its_column_and_two_passes_see_each_other(bus: Bus) -> None:
    put(bus, 4)
    with (
        Columns(bus.name, {"teacher": "float64"}, **SMALL) as teacher,
        Columns(bus.name, REFERENCE, fields=("tokens", "teacher"), **SMALL) as second,
        OnlineDataHandler(
            bus.name, groups_per_batch=4, annotate_group=[teacher, second]
        ) as handler,
        Annotator(bus.name, {"teacher": "float64"}) as first_pass,
        Annotator(bus.name, writes=REFERENCE) as second_pass,
    ):

        def teach() -> None:
            for _ in range(4):
                group = taken(first_pass)
                assert group.write(teacher=[one["tokens"] * 2.0 for one in group])

        def score() -> None:
            for _ in range(4):
                group = taken(second_pass)
                sums = [one["tokens"] + one["teacher"] for one in group]
                assert group.write(ref_logprobs=[each.astype(np.float32) for each in sums])

        with beside(teach), beside(score):
            batch = handler.next_batch(60)
            assert torch.equal(batch.extra["teacher"], batch.tokens * 2.0)
            assert torch.equal(batch.extra["ref_logprobs"], batch.tokens.float() * 3)
            handler.ack(batch)


def test_one_that_never_writes_is_told_by_a_deadline_and_asked_still(bus: Bus) -> None:
    put(bus, 1)
    with annotating(bus, timeout=0.3) as (_, handler, annotator):
        with pytest.raises(
            TimeoutError,
            match=r"group 'q0': expected within 0\.3 s, got none; columns ref_logprobs: 1 "
            r"annotators are attached, 1 groups wait for one and 0 are in work",
        ):
            handler.next_batch(10)
        assert annotator.give_back(taken(annotator))
        with Annotator(bus.name, REFERENCE) as other:
            group = taken(other)
            assert (group.instance_id, len(group)) == ("q0", 3)
            group.write(ref_logprobs=reference(group))
            batch = handler.next_batch(10)
        assert torch.equal(batch.extra["ref_logprobs"], -batch.tokens.float())


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "group 'q0': expected the columns ref_logprobs, got none"),
        ({"values": [1]}, ValueError, "expected the columns ref_logprobs, got values"),
        ({"ref_logprobs": [np.zeros(3, np.float32)]}, ValueError, "expected 3 arrays, one a sampl"),
        (
            {"ref_logprobs": [np.zeros(3, np.float32)] * 3},
            ValueError,
            r"group 'q0', sample 1: column 'ref_logprobs': expected 4 rows, .* \(3,\)",
        ),
        (
            {"ref_logprobs": [np.zeros(3), np.zeros(4), np.zeros(5)]},
            TypeError,
            "group 'q0', sample 0: column 'ref_logprobs': expected float32, got float64",
        ),
    ],
)
def test_what_an_annotator_writes_wrong_is_named(
    bus: Bus, given: dict[str, Any], error: type[Exception], message: str
) -> None:
    put(bus, 1)
    with annotating(bus) as (_, handler, annotator), beside(handler.next_batch, 60):
        group = taken(annotator)
        with pytest.raises(error, match=message):
            group.write(**given)
        assert group.write(ref_logprobs=reference(group))
        with pytest.raises(ProtocolError, match="group 'q0': it was written before; each"):
            group.write(ref_logprobs=reference(group))


def test_columns_are_named_and_an_annotator_of_others_meets_no_trainer(bus: Bus) -> None:
    with pytest.raises(TypeError, match="writes: expected a mapping of columns to dtypes, got"):
        Annotator(bus.name, ["ref_logprobs"], wait=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="writes: expected names of columns, got 'a b'"):
        Columns(bus.name, {"a b": "float32"})
    with pytest.raises(shmbus.BusNotFoundError, match=r"shmbus\.Columns for values"):
        Annotator(bus.name, {"values": "float32"}, wait=0)
    with pytest.raises(shmbus.BusNotFoundError):  # and leaves none of its own
        Columns(f"{bus.name}-b", {"values": "float32"}, **SMALL)


ANNOTATOR = """
import os, random, signal, sys
import numpy as np, shmbus
rng = random.Random(int(sys.argv[2]))
with shmbus.Annotator(sys.argv[1], {"ref_logprobs": "float32"}) as annotator:
    while True:
        group = annotator.take(1)
        if group is None:
            continue
        if rng.random() < float(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
        group.write(ref_logprobs=[-sample["tokens"].astype(np.float32) for sample in group])
        with open(sys.argv[3], "a") as log:
            log.write(f"{group.instance_id}\\n")
        if rng.random() < 0.4 * float(sys.argv[4]):
            os.kill(os.getpid(), signal.SIGKILL)
"""


RANK = """
import os, random, signal, sys
import torch, shmbus
from trainer_adapter import OnlineDataHandler
bus, log, rank, ranks, life = *sys.argv[1:3], *map(int, sys.argv[3:])
rng = random.Random(1000 * life + rank)
sizes = {"rank": rank, "world_size": ranks}
with shmbus.Columns(bus, {"ref_logprobs": "float32"}, **sizes) as columns, OnlineDataHandler(
    bus, groups_per_batch=1, annotate_group=columns, **sizes
) as handler:
    while True:
        batch = handler.next_batch(60)
        assert torch.equal(batch.extra["ref_logprobs"], -batch.tokens.float())
        if life and rng.random() < 0.2:
            os.kill(os.getpid(), signal.SIGKILL)
        with open(log, "a") as file:
            for group in batch.groups:
                file.write(f"{group.instance_id}\\n")
        handler.ack(batch)
"""


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_trainers_and_annotators_train_each_group_with_its_column_once(
    ranks: int,
    daemon: Callable[..., Daemon],
    bus: Bus,
    spawn: Spawner,
    seed: int,
    tmp_path: Path,
) -> None:
    groups = GROUPS // 2 * 2
    written, trained = tmp_path / "written", tmp_path / "trained"
    for path in (written, trained):
        path.touch()
    if ranks > 1:
        daemon()
        served = daemon(name=f"{bus.name}.columns.ref_logprobs")
    else:
        Columns(bus.name, REFERENCE).close()
    put(bus, groups)
    started = 0

    def annotator() -> Any:
        nonlocal started
        started += 1
        return spawn.script(ANNOTATOR, bus.name, seed + started, written, DEATHS)

    def trainer(rank: int, life: int) -> Any:
        return spawn.script(RANK, bus.name, trained, rank, ranks, life)

    lives = 4
    trainers = {rank: trainer(rank, lives) for rank in range(ranks)}
    left = dict.fromkeys(trainers, lives)
    annotators = [annotator() for _ in range(2)]

    def ended() -> bool:
        for at, one in enumerate(annotators):
            if not one.running:
                assert one.popen.returncode == -signal.SIGKILL, one.output()
                annotators[at] = annotator()
        for rank, one in trainers.items():
            if not one.running:
                assert one.popen.returncode == -signal.SIGKILL, one.output()
                left[rank] -= 1
                trainers[rank] = trainer(rank, left[rank])
        return len(trained.read_text().split()) >= groups

    wait_until(ended, timeout=150 + groups)
    assert min(left.values()) < lives
    for child in (*annotators, *trainers.values()):
        child.kill()
    assert Counter(trained.read_text().split()) == {f"q{n}": 1 for n in range(groups)}
    # The log follows the column: a death in between omits a line, and never adds a line.
    assert Counter(written.read_text().split()).most_common(1)[0][1] == 1
    if ranks > 1:
        served.kill()
        # Only columns of a rank's last group remain: they end with the next.
        with Consumer(served.name, daemon=False) as consumer:
            rest = [consumer.take(timeout=0.5, split=split) for split in ("train", "rank1")]
            assert max(map(len, rest)) <= 1
            assert consumer.stats().balanced


def test_ranks_without_daemon_columns_are_told(
    daemon: Callable[..., Daemon], bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "DAEMON_WAIT_S", 0.1)
    daemon()
    with pytest.raises(shmbus.BusNotFoundError, match=r"columns\.ref_logprobs"):
        Columns(bus.name, REFERENCE, rank=1, world_size=2)
    Columns(bus.name, REFERENCE).close()
    with pytest.raises(shmbus.DaemonUnavailableError, match=r"serve .*columns\.ref_logprobs"):
        Columns(bus.name, REFERENCE, rank=1, world_size=2)
    with pytest.raises(ValueError, match="rank: expected 0 to 1, got 2"):
        Columns(bus.name, REFERENCE, rank=2, world_size=2)


def annotated(handler: OnlineDataHandler, annotator: Annotator, groups: int = 1) -> Any:
    """Return the next batch, after an annotator wrote every group's columns."""
    with pytest.raises(TimeoutError):
        handler.next_batch(0.5)
    for _ in range(groups):
        write_one(annotator)
    return handler.next_batch(30)


def test_a_bus_that_is_made_anew_gets_no_columns_of_the_one_before(bus: Bus) -> None:
    put(bus, 1)
    for first in (0, 5):
        with annotating(bus, timeout=0.2) as (columns, handler, annotator):
            batch = annotated(handler, annotator)
            assert torch.equal(batch.extra["ref_logprobs"], -batch.tokens.float())
        if not first:
            shmbus.unlink(bus.name)
            Bus.ensure(bus.name, capacity="16MiB").close()
            put(bus, 1, first=5)
    shmbus.unlink(bus.name)
    with Consumer(columns.name) as consumer:
        assert [len(group) for group in consumer.take(10, timeout=0.2)] == [1]
        assert consumer.stats().acknowledged == 1


def test_what_was_written_for_a_group_that_has_ended_ends_with_the_next_life(bus: Bus) -> None:
    put(bus, 2)
    with annotating(bus, timeout=0.2) as (columns, handler, annotator):
        handler.ack(annotated(handler, annotator, groups=2))
        columns._used.clear()  # as after a death: ends of written columns go unreported
        columns.close()
    with (
        Columns(bus.name, REFERENCE, **SMALL) as columns,
        Annotator(bus.name, REFERENCE) as annotator,
    ):
        assert columns._consumer.stats().acknowledged == 1
        with OnlineDataHandler(bus.name, groups_per_batch=1, annotate_group=columns) as handler:
            batch = handler.next_batch(30)
            assert torch.equal(batch.extra["ref_logprobs"], -batch.tokens.float())
            assert annotator.take(0) is None


STOPPED = """
import os, sys, time, shmbus
with shmbus.Annotator(sys.argv[1], {"ref_logprobs": "float32"}) as annotator:
    group = annotator.take(60)
    print("took", flush=True)
    while not os.path.exists(sys.argv[2]):
        time.sleep(0.01)
    written = group.write(ref_logprobs=[-one["tokens"].astype("float32") for one in group])
    print("written", written, flush=True)
"""


def test_a_stopped_annotators_group_is_reassigned(bus: Bus, spawn: Spawner, tmp_path: Path) -> None:
    put(bus, 1)
    with (
        Columns(bus.name, REFERENCE, claim_timeout=0.3, **SMALL) as columns,
        OnlineDataHandler(bus.name, groups_per_batch=1, annotate_group=columns) as handler,
    ):
        with pytest.raises(TimeoutError):
            handler.next_batch(0)
        stopped = spawn.script(STOPPED, bus.name, tmp_path / "writes", until="took")
        stopped.send_signal(signal.SIGSTOP)
        (tmp_path / "writes").touch()
        with Annotator(bus.name, REFERENCE) as other, beside(write_one, other):
            batch = handler.next_batch(60)
        assert torch.equal(batch.extra["ref_logprobs"], -batch.tokens.float())
        stopped.send_signal(signal.SIGCONT)
        stopped.expect("written False")
        handler.ack(batch)


def late(handler: OnlineDataHandler) -> bool:
    with pytest.raises(TimeoutError):
        handler.next_batch(0.01)
    return True


def write_one(annotator: Annotator) -> None:
    group = taken(annotator)
    assert group.write(ref_logprobs=reference(group))


@pytest.mark.parametrize("too_large", ["request", "column"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_group_without_an_annotator_is_dropped(bus: Bus, too_large: str, prefetch: int) -> None:
    many = 200_000 if too_large == "request" else 30_000
    with Producer(bus.name) as producer:
        producer.put_group("large", [{"tokens": np.zeros(many, np.int32)}])
    put(bus, 1)
    sizes = {"request_capacity": "256KiB" if too_large == "request" else "8MiB"}
    with annotating(bus, prefetch=prefetch, capacity="256KiB", **sizes) as (_, handler, annotator):

        def work() -> None:
            for _ in range(1 + (too_large == "column")):
                group = taken(annotator)
                try:
                    group.write(ref_logprobs=reference(group))
                except shmbus.RecordTooLargeError:
                    assert group.instance_id == "large"

        with beside(work):
            batch = handler.next_batch(60)
        assert keys_of(batch) == ["q0"]
        wait_until(lambda: handler.stats().dropped == {"filtered": 1} or not late(handler))


@pytest.mark.parametrize(
    ("trainers", "annotators"),
    [
        ("float32", "float64"),
        (("float32", (8,)), ("float32", (16,))),
        (("float32", (8,)), "float32"),
        ("float32", ("float32", ())),
    ],
)
def test_helpers_of_differing_columns_are_refused(bus: Bus, trainers: Any, annotators: Any) -> None:
    with Columns(bus.name, {"ref_logprobs": trainers}, **SMALL) as columns:
        with pytest.raises(ValueError, match="ref_logprobs") as refused:
            Annotator(bus.name, {"ref_logprobs": annotators}, wait=0)
        for one in (trainers, annotators):
            assert (one if isinstance(one, str) else one[0]) in str(refused.value)
        with pytest.raises(shmbus.BusExistsError, match="ref_logprobs"):
            Columns(bus.name, {"ref_logprobs": annotators}, **SMALL)
        Annotator(bus.name, {"ref_logprobs": trainers}, wait=0).close()
        assert columns.name


def test_a_columns_shape_is_checked_when_it_is_written(bus: Bus) -> None:
    put(bus, 1)
    wide = {"ref_logprobs": ("float32", (2,))}
    with annotating(bus, wide) as (_, handler, annotator):
        assert late(handler)
        group = taken(annotator)
        with pytest.raises(ValueError, match="sample 0: column 'ref_logprobs'"):
            group.write(ref_logprobs=reference(group))
        assert group.write(ref_logprobs=[np.stack([one, one], 1) for one in reference(group)])
        assert handler.next_batch(30).extra["ref_logprobs"].shape == (12, 2)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("bits", [False, True])
def test_a_column_of_a_dtype_that_numpy_lacks_keeps_its_values(
    bus: Bus, dtype: str, bits: bool
) -> None:
    hidden = torch.rand(3).to(getattr(torch, dtype))
    with Producer(bus.name) as producer:
        producer.put_group("q", [{"tokens": np.arange(3), "hidden": hidden}] * 2, timeout=10)
    fields = ("tokens", "hidden")
    with annotating(bus, {"teacher": dtype}, fields=fields) as (_, handler, annotator):
        assert late(handler)
        group = taken(annotator)
        assert group[0]["hidden"].dtype.metadata == {"shmbus": dtype}
        drawn = [torch.rand(len(one["tokens"]), requires_grad=True) for one in group]
        values = [one.to(getattr(torch, dtype)) for one in drawn]
        with pytest.raises(TypeError, match=f"expected {dtype}, got float32"):
            group.write(teacher=[one.float() for one in values])
        kind = torch.uint16 if dtype == "bfloat16" else torch.uint8
        same = [one.detach().view(kind).numpy() for one in values]
        assert group.write(teacher=same if bits else values)
        found = handler.next_batch(30).extra["teacher"]
        assert torch.equal(found, torch.cat([one.float() for one in values]))
