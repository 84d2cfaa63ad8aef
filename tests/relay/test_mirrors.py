"""Weights on every node: a mirror's view for readers, its refusals, and its return."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import wait_until
from relay.local import LocalMailbox, LocalRelay
from relay.mirrors import SOURCE, Trainer, checked, mirrors, remove, version_of

from shmbus.pool import PoolPublisher, PoolReader, PoolSpec, read_pool
from shmbus.pool.pool_file import pool_path
from shmbus.relay.command import show_weights
from shmbus.relay.messages import Message, VersionOffer, VersionPiece
from shmbus.relay.mirror_party import POOL_KIND
from shmbus.segment import room
from shmbus_ext import _core

pytestmark = pytest.mark.slow

SIZE = (1 << 20) + 12_346


@pytest.fixture
def nodes(bus_name: str) -> list[str]:
    return [f"{bus_name}.{each}" for each in "abc"]


@pytest.fixture
def trainer(bus_name: str, seed: int) -> Iterator[Trainer]:
    made = Trainer(f"{bus_name}.t", SIZE, seed)
    yield made
    made.close()


def have(buses: list[str], version: int) -> None:
    wait_until(lambda: all(version_of(bus) == version for bus in buses))


def bring(trainer: Trainer, buses: list[str], version: int, **options: Any) -> None:
    """Publish a version, and wait until the nodes of these buses have it."""
    trainer.publish(version, **options)
    have(buses, version)


def error_of(relay: LocalRelay, address: str) -> str:
    return str(relay.parties[address].error)


class Harming(LocalMailbox):
    """A mailbox with first pieces cut, and next pieces with a wrong byte."""

    left = 6

    def send(self, to: str, message: Message, payload: Any = b"") -> None:
        if isinstance(message, VersionPiece) and len(payload) and Harming.left:
            Harming.left -= 1
            harmed = bytearray(payload)
            harmed[len(harmed) // 2] ^= 1
            payload = harmed[:-1] if Harming.left % 2 else harmed
        super().send(to, message, payload)


class WrongDigest(LocalMailbox):
    """A mailbox with first digests of foreign content."""

    left = 2

    def send(self, to: str, message: Message, payload: Any = b"") -> None:
        if isinstance(message, VersionPiece) and message.digest is not None and WrongDigest.left:
            WrongDigest.left -= 1
            message = message._replace(digest=message.digest ^ 1)
        super().send(to, message, payload)


class AnotherLayout(LocalMailbox):
    """A mailbox with pools of a different layout for the first node."""

    def send(self, to: str, message: Message, payload: Any = b"") -> None:
        if isinstance(message, VersionOffer) and to.endswith(".a"):
            message = message._replace(geometry=message.geometry._replace(layout=99))
        super().send(to, message, payload)


def test_every_node_has_each_version_and_its_facts(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes):
        for version in (3, 4, 7):
            bring(trainer, nodes, version, meta=b"manifest")
            for bus in nodes:
                assert checked(bus, SIZE, trainer.seed) == version
                with PoolReader(bus, POOL_KIND) as reader, reader.latest(timeout=1) as lease:
                    assert (lease.meta(), lease.text) == (b"manifest", f"v{version}")


def test_a_patch_crosses_to_nodes_with_its_base(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes) as relay:
        for version in range(1, 6):
            bring(trainer, nodes, version)
            bases = {relay.parties[bus].state().done.base for bus in nodes}
            assert (bases == {0}) == (version == 1)
        for bus in nodes:
            assert checked(bus, SIZE, trainer.seed) == 5
            with PoolReader(bus, POOL_KIND) as reader, reader.latest(timeout=1) as lease:
                patch = _core.pool_patch_bytes(lease.buffer)
                assert patch is not None and patch[0] == lease.sequence - 1
                lease.check()


def test_blocks_have_digests_where_the_publisher_made_some(bus_name: str, nodes: list[str]) -> None:
    with PoolPublisher(f"{bus_name}.t", POOL_KIND, spec=PoolSpec(slot_bytes=SIZE)) as publisher:
        write = publisher.begin(1, SIZE)
        assert write is not None
        write.view()[:] = 7
        write.finish(digests=True)
        with mirrors(f"{bus_name}.t", nodes):
            have(nodes, 1)
            with PoolReader(nodes[0], POOL_KIND) as reader, reader.latest(timeout=1) as lease:
                assert lease.digests > 0
                lease.check()
        publisher.close(remove=True)


def test_subscribers_of_weights_work_unchanged(bus_name: str, nodes: list[str]) -> None:
    torch = pytest.importorskip("torch")
    from shmbus.weights import ModuleSource, WeightPublisher, WeightSubscriber
    from shmbus.weights.carriers.interface import KIND

    assert KIND == POOL_KIND
    model, other = torch.nn.Linear(256, 256), torch.nn.Linear(256, 256)
    with WeightPublisher(f"{bus_name}.t", ModuleSource(model), patches=True) as publisher:
        publisher.publish(1)
        with mirrors(f"{bus_name}.t", nodes), WeightSubscriber(nodes[1], label="engine") as engine:
            for version in (2, 3):
                with torch.no_grad():
                    model.weight[0, version] += 1.0
                publisher.publish(version)
                engine.wait(newer_than=version - 1, timeout=30)
                with engine.latest(timeout=30) as weights:
                    weights.load_into(other)
                    assert weights.version == version
                assert torch.equal(model.weight, other.weight)


def test_the_trainer_sees_engines_and_versions(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes) as relay:
        bring(trainer, nodes, 1)
        with PoolReader(nodes[2], POOL_KIND, label="vllm:8000") as engine:
            with engine.latest(timeout=1) as lease:
                engine.applied(lease)
            note = relay.parties[SOURCE].note

            def seen() -> bool:
                (mirror,) = (each for each in note().mirrors if each.address == nodes[2])
                return [(it.label, it.alive, it.version) for it in mirror.engines] == [
                    ("vllm:8000", True, 1)
                ]

            wait_until(seen)
            text = show_weights(note())
        assert "vllm:8000" in text and all(bus in text for bus in nodes)
        with PoolReader(trainer.bus, POOL_KIND) as reader:
            wait_until(lambda: reader.newest == 1)


def test_cut_and_damaged_pieces_are_asked_for_again(
    trainer: Trainer, nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Harming, "left", 6)
    with mirrors(trainer.bus, nodes, mailbox=Harming) as relay:
        bring(trainer, nodes, 1)
        assert [checked(bus, SIZE, trainer.seed) for bus in nodes] == [1, 1, 1]
        assert sum(relay.parties[bus].damaged for bus in nodes) == 6


def test_a_version_that_is_not_what_was_sent_is_never_published(
    trainer: Trainer, nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(WrongDigest, "left", 0)
    with mirrors(trainer.bus, nodes[:1], mailbox=WrongDigest) as relay:
        bring(trainer, nodes[:1], 1)
        WrongDigest.left = 2  # of the patch, and of the whole version requested then
        bring(trainer, nodes[:1], 2)
        assert checked(nodes[0], SIZE, trainer.seed) == 2
        party = relay.parties[nodes[0]]
        assert party.damaged == 2 and party.state().done.base == 0


def test_a_pool_of_another_layout_is_refused_by_name(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes, mailbox=AnotherLayout) as relay:
        bring(trainer, nodes[1:], 1)
        wait_until(lambda: "layout version 99" in error_of(relay, nodes[0]))
        assert version_of(nodes[0]) is None


def test_a_foreign_pool_is_left_alone_until_it_is_free(trainer: Trainer, nodes: list[str]) -> None:
    spec = PoolSpec(slot_bytes=SIZE, patch_bytes=SIZE // 4)
    with (
        PoolPublisher(nodes[0], POOL_KIND, spec=spec, label="somebody") as other,
        mirrors(trainer.bus, nodes) as relay,
    ):
        bring(trainer, nodes[1:], 1)
        wait_until(lambda: "somebody" in error_of(relay, nodes[0]))
        assert version_of(nodes[0]) is None
        other.close()
        have(nodes, 1)
        assert error_of(relay, nodes[0]) == ""


def test_a_second_relay_for_a_pool_says_who_has_it(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes):
        bring(trainer, nodes, 1)
        with mirrors(trainer.bus, nodes[:1]) as second:
            wait_until(lambda: "relay's mirror" in error_of(second, nodes[0]))
            bring(trainer, nodes, 2)


def test_a_node_with_too_little_memory_says_so_and_gets_the_version_once_there_is_some(
    trainer: Trainer, nodes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with mirrors(trainer.bus, nodes[:1]) as relay:
        with monkeypatch.context() as small:
            full = room.Limit("/dev/shm", 1 << 20, 2 << 20, "remount")
            small.setattr(room, "limits", lambda: [full])
            trainer.publish(1)
            wait_until(lambda: "do not fit" in error_of(relay, nodes[0]))
        have(nodes[:1], 1)


def test_a_mirror_begins_once_a_readers_row_is_free(trainer: Trainer, nodes: list[str]) -> None:
    spec = PoolSpec(slot_bytes=SIZE, patch_bytes=SIZE // 4)
    PoolPublisher(nodes[0], POOL_KIND, spec=spec, label="before").close()
    with contextlib.ExitStack() as stack:
        for _ in range(_core.POOL_MAX_READERS):
            reader = stack.enter_context(PoolReader(nodes[0], POOL_KIND))
        with mirrors(trainer.bus, nodes[:1]) as relay:
            trainer.publish(1)
            wait_until(lambda: "rows of readers are taken" in error_of(relay, nodes[0]))
            reader.close()
            have(nodes[:1], 1)
            bring(trainer, nodes[:1], 2)


def test_readers_of_one_label_have_a_row_each(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes[:1]):
        bring(trainer, nodes[:1], 1)
        with (
            PoolReader(nodes[0], POOL_KIND, label="worker.py") as late,
            PoolReader(nodes[0], POOL_KIND, label="worker.py") as fast,
        ):
            for version, readers in ((1, (late, fast)), (2, (fast,))):
                have(nodes[:1], version)
                for reader in readers:
                    with reader.latest(timeout=1) as lease:
                        reader.applied(lease)
                trainer.publish(version + 1)
            wait_until(lambda: versions_of(trainer.bus, "worker.py") == [1, 2])


def versions_of(bus: str, label: str) -> list[int | None]:
    rows = read_pool(bus, POOL_KIND).readers
    return [each.applied_version for each in rows if each.label == label and each.state == "alive"]


def test_an_earlier_mirrors_small_pool_is_replaced_under_its_readers(
    trainer: Trainer, nodes: list[str]
) -> None:
    spec = PoolSpec(slot_bytes=SIZE)  # without patches
    PoolPublisher(nodes[0], POOL_KIND, spec=spec, label="before").close()
    with PoolReader(nodes[0], POOL_KIND, label="engine") as engine:
        with mirrors(trainer.bus, nodes[:1]):
            bring(trainer, nodes[:1], 1)
        assert engine.is_removed()


def test_a_version_in_a_devices_memory_is_refused_by_name(trainer: Trainer, bus_name: str) -> None:
    pytest.importorskip("torch")
    from shmbus.weights.carriers.interface import VersionMeta

    node = f"{bus_name}.a"
    with mirrors(trainer.bus, [node]) as relay:
        trainer.publish(1, meta=VersionMeta(b"", "exported").encode())
        wait_until(lambda: "carrier 'shm'" in relay.parties[SOURCE].note().error)
        bring(trainer, [node], 2, meta=VersionMeta(b"").encode())


def test_a_pool_of_a_dead_creator_is_made_again(trainer: Trainer, nodes: list[str]) -> None:
    Path(pool_path(nodes[0], POOL_KIND)).write_bytes(bytes(4096))
    with mirrors(trainer.bus, nodes):
        bring(trainer, nodes, 1)


def test_a_fifo_in_a_pools_place_holds_no_mirror(trainer: Trainer, nodes: list[str]) -> None:
    path = Path(pool_path(nodes[0], POOL_KIND))
    os.mkfifo(path)
    with mirrors(trainer.bus, nodes) as made:
        bring(trainer, nodes[1:], 1)
        wait_until(
            lambda: any(str(path) in each.error for each in made.parties[SOURCE].note().mirrors)
        )
        path.unlink()
        have(nodes, 1)


def test_an_unreachable_node_delays_no_other(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes) as relay:
        bring(trainer, nodes, 1)
        relay.boxes.cut = {nodes[0]}
        for version in range(2, 8):
            bring(trainer, nodes[1:], version)
        assert version_of(nodes[0]) == 1
        relay.boxes.cut = set()
        have(nodes, 7)
        assert checked(nodes[0], SIZE, trainer.seed) == 7


@pytest.mark.parametrize("who", [0, 1, SOURCE])
def test_dead_parties_return_newest(trainer: Trainer, nodes: list[str], who: int | str) -> None:
    with mirrors(trainer.bus, nodes) as relay:
        for version in range(1, 6):
            trainer.publish(version)
            relay.restart(nodes[who] if isinstance(who, int) else who)
        have(nodes, 5)
        assert [checked(bus, SIZE, trainer.seed) for bus in nodes] == [5, 5, 5]


def test_a_reader_with_a_slot_delays_only_its_node(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes):
        bring(trainer, nodes, 1)
        with PoolReader(nodes[0], POOL_KIND, label="slow") as reader:
            lease = reader.latest(timeout=1)
            for version in (2, 3, 4):
                bring(trainer, nodes[1:], version)
            assert version_of(nodes[0]) == 2
            lease.close()
            have(nodes, 4)


def test_a_removed_pool_is_made_again(trainer: Trainer, nodes: list[str]) -> None:
    with mirrors(trainer.bus, nodes):
        bring(trainer, nodes, 1)
        remove(nodes[0])
        have(nodes, 1)  # once more, without a new version
        bring(trainer, nodes, 2)


def test_a_larger_pool_keeps_its_mirror(bus_name: str, nodes: list[str], seed: int) -> None:
    first = Trainer(f"{bus_name}.t", SIZE, seed)
    with mirrors(first.bus, nodes):
        bring(first, nodes, 9)
        first.close()
        with contextlib.closing(Trainer(f"{bus_name}.t", 2 * SIZE, seed)) as second:
            bring(second, nodes, 1)
            assert [checked(bus, 2 * SIZE, seed) for bus in nodes] == [1, 1, 1]
