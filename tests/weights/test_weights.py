"""Weights from a publisher to subscribers: every bit equal, all faults named, nothing half."""

import functools
import os
import threading
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conftest import Spawner, beside, wait_until
from weight_models import MakePublisher, Odd, Unwritable, bits, fill, many, publishing

from shmbus import BusBusyError, BusClosedError, DamagedError, WaitTimeoutError
from shmbus.pool import read_pool
from shmbus.weights import (
    LocalPiece,
    ManifestError,
    ModuleSource,
    Slice,
    WeightPublisher,
    WeightsError,
    WeightSubscriber,
    probe_carriers,
)


@pytest.fixture
def publishers(bus_name: str) -> Iterator[MakePublisher]:
    with publishing(bus_name) as make:
        yield make


@pytest.fixture(params=["shm", "memfd"])
def by_each(request: pytest.FixtureRequest, publishers: MakePublisher) -> MakePublisher:
    """Make publishers by each carrier of slots; what a reader sees is the same."""
    return functools.partial(publishers, carrier=request.param)


@pytest.fixture
def subscriber(bus_name: str) -> Iterator[WeightSubscriber]:
    with WeightSubscriber(bus_name, label="replica") as made:
        yield made


def test_views_copy_nothing(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    model = Odd(3)
    publishers(model).publish(version=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with subscriber.latest(timeout=5) as weights:
            state = model.state_dict()
            assert set(weights) == state.keys() and len(weights) == len(state)
            assert all(bits(weights[name]) == bits(state[name]) for name in weights)
            assert weights["head.weight"].data_ptr() == weights["embed.weight"].data_ptr()
            starts = sorted(place.offset for place in weights.manifest.tensors)
            assert all(start % 256 == 0 for start in starts)
            with pytest.raises(KeyError):
                weights["no.such"]


def test_a_view_outlives_its_lease(by_each: MakePublisher, subscriber: WeightSubscriber) -> None:
    model = many(5)
    publisher = by_each(model, when_held="skip")
    publisher.publish(version=1)
    with subscriber.latest(timeout=5) as weights:
        view = weights["p3"]
    before = bits(view)
    with torch.no_grad():
        model.p3.zero_()  # type: ignore[operator]
    assert not publisher.publish(version=2).skipped
    assert publisher.publish(version=3).skipped
    assert bits(view) == before
    del view
    assert not publisher.publish(version=4).skipped


def test_masters_are_cast_while_they_are_copied(
    bus_name: str, publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    masters = many(40, dtype=torch.float32)
    masters.register_buffer("count", torch.arange(5))
    publishers(ModuleSource(masters, dtype=torch.bfloat16)).publish(version=1)
    with subscriber.latest(timeout=5) as weights:
        for name, value in masters.state_dict().items():
            wanted = value.bfloat16() if value.is_floating_point() else value
            assert bits(weights[name]) == bits(wanted)


def test_a_model_that_does_not_fit_has_all_its_faults_named_and_no_byte_changed(
    bus_name: str, publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    publishers(many(6)).publish(version=4)
    replica = {name: torch.zeros_like(value) for name, value in many(6).state_dict().items()}
    del replica["p0"]
    replica["p1"] = torch.zeros(9, 9, dtype=torch.bfloat16)
    replica["p2"] = replica["p2"].float()
    replica["extra"] = torch.zeros(2)
    with subscriber.latest(timeout=5) as weights:
        with pytest.raises(ManifestError, match="the model is unchanged") as raised:
            weights.load_into(replica)
        assert raised.value.faults == [
            "missing: 'extra'",
            "unexpected: 'p0'",
            "shape of 'p1': expected [9, 9], got [2, 8]",
            "dtype of 'p2': expected float32, got bfloat16",
        ]
        # A report that prints locals would read views of unmapped memory.
        frames = [frame for frame, _ in traceback.walk_tb(raised.value.__traceback__)]
        assert not any("views" in frame.f_locals for frame in frames)
        assert all(not value.any() for value in replica.values())
        (row,) = read_pool(bus_name, "weights").readers
        assert (row.applied_version, row.refused_version) == (None, 4)
        assert "missing: 'extra'" in row.error
        del replica["p1"]
        weights.load_into(replica, strict=False, cast=True)
        (row,) = read_pool(bus_name, "weights").readers
        assert (row.applied_version, row.refused_version) == (4, None)
    assert replica["p2"].any() and not replica["extra"].any()


def test_a_copy_that_fails_says_that_the_model_is_torn(
    bus_name: str, publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    publishers(many(4)).publish(version=4)
    replica = {name: torch.zeros_like(value) for name, value in many(4).state_dict().items()}
    transposed = torch.zeros(replica["p2"].t().shape, dtype=torch.bfloat16).t()
    replica["p2"] = transposed.as_subclass(Unwritable)
    with subscriber.latest(timeout=5) as weights:
        with pytest.raises(DamagedError, match=r"copying it failed: .* The model is torn"):
            weights.load_into(replica)
        (row,) = read_pool(bus_name, "weights").readers
        assert row.refused_version == 4


def test_part_names_lead_to_parts(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    model = torch.nn.Module()
    model.register_parameter("qkv", torch.nn.Parameter(torch.randn(12, 8)))
    model.register_parameter("experts", torch.nn.Parameter(torch.randn(3, 10, 4)))
    slices = {
        "q": Slice("qkv", 0, 0, 4),
        "k": Slice("qkv", 0, 4, 4),
        "v": Slice("qkv", 0, 8, 4),
        **{f"e{i}": Slice("experts", 0, i, 1, drop_dim=True) for i in range(3)},
        "e2.gate": Slice("e2", 0, 0, 5),
    }
    publishers(ModuleSource(model, slices=slices)).publish(version=1)
    names = [*slices.keys() - {"e2.gate"}]
    with subscriber.latest(timeout=5) as weights:
        assert torch.equal(weights["k"], model.qkv[4:8])  # type: ignore[index]
        assert torch.equal(weights["e2.gate"], model.experts[2, :5])  # type: ignore[index]
        plain = {name: torch.zeros_like(weights[name]) for name in names}
        weights.load_into(plain)
        assert all(torch.equal(plain[name], weights[name]) for name in names)


def test_parts_load_into_a_fusion(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    model = torch.nn.ModuleDict({n: torch.nn.Linear(6, 4, bias=False) for n in "qkv"})
    publishers(model).publish(version=1)
    fused = {"qkv.weight": torch.zeros(12, 6)}
    slices = {f"{n}.weight": Slice("qkv.weight", 0, 4 * i, 4) for i, n in enumerate("qkv")}
    with subscriber.latest(timeout=5) as weights:
        weights.load_into(fused, slices=slices)
        rows = [model[n].weight for n in "qkv"]
        assert torch.equal(fused["qkv.weight"], torch.cat(rows))  # type: ignore[arg-type]
        del slices["v.weight"]
        with pytest.raises(ManifestError, match=r"slices of 'qkv.weight' are 8 of 12 rows"):
            weights.load_into(fused, slices=slices)


def test_negative_versions_work(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    publisher = publishers(many(2))
    for version in (-5, 0, 7):
        publisher.publish(version=version, text=f"step {version}")
        assert subscriber.wait(timeout=5) == version
        with subscriber.latest(timeout=5) as weights:
            assert (weights.version, weights.text) == (version, f"step {version}")


def test_a_wait_takes_newer_only(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    publisher = publishers(many(2))
    publisher.publish(version=7)
    with pytest.raises(WaitTimeoutError, match=r"newest: 7|newest is 7"):
        subscriber.wait(newer_than=7, timeout=0.05)
    threading.Timer(0.1, publisher.publish, (8,)).start()
    assert subscriber.wait(newer_than=7, timeout=20) == 8


def test_a_subscriber_outlives_its_publisher(bus_name: str, publishers: MakePublisher) -> None:
    with WeightSubscriber(bus_name) as early:
        with beside(early.wait, timeout=20) as got:
            first = publishers(many(2))
            first.publish(version=1)
        assert got.result() == 1
        first.close()  # removes its weights
        publishers(many(3)).publish(version=2)
        assert early.wait(newer_than=1, timeout=20) == 2
        with early.latest(timeout=5) as weights:
            assert len(weights) == 3


def test_weights_stay(by_each: MakePublisher, subscriber: WeightSubscriber) -> None:
    by_each(many(2)).publish(version=1)
    assert subscriber.wait(timeout=5) == 1
    with pytest.raises(BusBusyError, match="is rank 0 already"):
        by_each(many(2))


def test_a_repeated_cell_that_makes_its_publisher_again_gets_advice(bus_name: str) -> None:
    make = "publisher = WeightPublisher(name, source, carrier='shm')"
    scope = {"WeightPublisher": WeightPublisher, "name": bus_name, "source": ModuleSource(many(2))}
    exec(make, scope)
    with pytest.raises(BusBusyError, match=r"have its first line close\(\) the one before"):
        exec(make, scope)
    exec(f"publisher.close()\n{make}", scope)
    exec("publisher.publish(version=1)\npublisher.close()", scope)


def test_publishing_beside_a_step(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    model = many(300)
    publisher = publishers(model)
    publication = publisher.publish_async(version=1)
    publication.wait_copied(timeout=20)
    before = {name: bits(value) for name, value in model.state_dict().items()}
    fill(model, 0)
    assert publication.wait(timeout=20).version == 1 and publication.done
    with subscriber.latest(timeout=5) as weights:
        assert {name: bits(weights[name]) for name in weights} == before
    several = [publisher.publish_async(version=v) for v in (2, 3, 4)]
    assert sorted(each.wait(timeout=20).version for each in several) == [2, 3, 4]


@pytest.mark.parametrize("last", ["publish", "publish_async"])
def test_versions_keep_the_order_of_their_calls(
    publishers: MakePublisher, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    publisher, begun = publishers(many(3)), threading.Thread.start
    held: list[threading.Thread] = []
    monkeypatch.setattr(threading.Thread, "start", lambda thread: held.append(thread))
    first = publisher.publish_async(version=1)
    second = publisher.publish_async(version=2) if last == "publish_async" else None
    monkeypatch.setattr(threading.Thread, "start", begun)
    later = threading.Timer(0.2, held[0].start)
    later.start()
    for thread in held[1:]:
        thread.start()
    if second is None:
        assert publisher.publish(version=2).version == 2
    else:
        assert second.wait(timeout=20).version == 2
    assert first.wait(timeout=20).version == 1
    later.join()


def test_a_failing_source_undoes(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    class Failing(ModuleSource):
        fails = False

        def iter_local(self, rank: int, world_size: int) -> Iterator[LocalPiece]:
            for number, piece in enumerate(super().iter_local(rank, world_size)):
                if self.fails and number == 3:
                    raise ConnectionError("gone")
                yield piece

    source = Failing(many(6))
    publisher = publishers(source)
    publisher.publish(version=1)
    source.fails = True
    with pytest.raises(ConnectionError):
        publisher.publish(version=2)
    with pytest.raises(ConnectionError):
        publisher.publish_async(version=2).wait(timeout=20)
    with subscriber.latest(timeout=5) as weights:
        assert weights.version == 1
    source.fails = False
    assert not publisher.publish(version=3).skipped


@pytest.mark.parametrize("kind", ["late", "shape", "gone", "tied", "tied to another"])
def test_each_rank_refuses_a_changed_model(kind: str, publishers: MakePublisher) -> None:
    model = many(3)
    model.register_parameter("head", model.p0)
    publisher = publishers(ModuleSource(model))
    wider = torch.nn.Parameter(torch.zeros(50, 50))
    changes = {"late": wider, "shape": wider, "tied": model.p0, "tied to another": model.p2}
    name = {"late": "late", "tied to another": "head"}.get(kind, "p1")
    setattr(model, name, changes.get(kind))
    with pytest.raises(ManifestError) as caught:
        publisher.publish(version=1)
    assert [fault.split(":")[0] for fault in caught.value.faults] == [repr(name)]
    for rank in range(2):
        with pytest.raises(ManifestError):
            list(publisher._source.iter_local(rank, 2))


def test_what_is_closed_says_so(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    publisher = publishers(many(1))
    publisher.publish(version=1)
    weights = subscriber.latest(timeout=5)
    weights.close()
    with pytest.raises(BusClosedError, match="version 1 is closed"):
        weights["p0"]
    subscriber.close()
    publisher.close()
    for call in (
        subscriber.latest,
        lambda: publisher.publish(2),
        lambda: publisher.publish_async(2),
        publisher.new_life,
    ):
        with pytest.raises(BusClosedError):
            call()


def test_a_probe_asks_and_changes_nothing(tmp_path: Path) -> None:
    before = (sorted(os.listdir("/dev/shm")), torch.cuda.is_initialized())
    choice = probe_carriers("cpu")
    assert choice.name == "shm" and "no directory" in choice.refused["checkpoint"]
    assert probe_carriers("cpu", directory=tmp_path).name == "checkpoint"
    choice = probe_carriers("cpu", size=1 << 60, directory=tmp_path)
    assert choice.name == "checkpoint" and "/dev/shm has" in choice.refused["shm"]
    with pytest.raises(WeightsError, match=r"no carrier can serve here: shm: .*; checkpoint: no"):
        probe_carriers("cpu", size=1 << 60)
    new = [name for name in sorted(os.listdir("/dev/shm")) if name not in before[0]]
    assert not [name for name in new if str(os.getpid()) in name]
    assert torch.cuda.is_initialized() == before[1]


def test_rows_tell_readers_versions(bus_name: str, by_each: MakePublisher, spawn: Spawner) -> None:
    by_each(many(2)).publish(version=5)
    child = spawn.holder(
        "import sys, torch\nfrom shmbus.weights import *\n"
        'reader = WeightSubscriber(sys.argv[1], label="vllm-0")\n'
        "with reader.latest(timeout=20) as weights:\n"
        "    weights.load_into({name: torch.empty_like(weights[name]) for name in weights})",
        bus_name,
    )
    (row,) = read_pool(bus_name, "weights").readers
    assert (row.label, row.applied_version, row.holds) == ("vllm-0", 5, [])
    child.kill()
    wait_until(lambda: read_pool(bus_name, "weights").readers[0].state == "dead")


def test_a_leased_version_stays(publishers: MakePublisher, subscriber: WeightSubscriber) -> None:
    publisher = publishers(Odd(seed=1))
    publisher.publish(version=1)
    with subscriber.latest(timeout=5.0) as old:
        publisher.publish(version=2)
        assert subscriber.wait(newer_than=1, timeout=5.0) == 2
        with subscriber.at(1) as again, subscriber.at(2) as newest:
            assert (again.version, newest.version) == (1, 2)
            assert again.sequence == old.sequence
    publisher.publish(version=3)
    with pytest.raises(WaitTimeoutError, match="no slot has version 1; there are: "):
        subscriber.at(1)


def test_a_subscriber_knows_that_its_weights_were_removed(
    bus_name: str, publishers: MakePublisher, subscriber: WeightSubscriber
) -> None:
    publisher = publishers(Odd(seed=1))
    publisher.publish(version=1)
    leased = subscriber.latest(timeout=5.0)
    assert not subscriber.removed
    publisher.close()
    assert subscriber.removed
    assert list(leased) == list(leased.manifest.names())
    leased.close()


def test_a_wait_in_vain_is_said_in_the_seconds_that_were_given(bus_name: str) -> None:
    with (
        WeightSubscriber(bus_name) as subscriber,
        pytest.raises(WaitTimeoutError, match=r" in 0\.1 s: there is no pool"),
    ):
        subscriber.latest(timeout=0.1)
