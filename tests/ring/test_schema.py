"""A schema that a bus or a producer declares holds for every sample, in whichever process."""

import os
import pickle
import random
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import SHM_DIR, Spawner

import shmbus
from shmbus import Bus, Consumer, Producer
from shmbus.data.schema import SchemaField, difference, encode, fields_of, mapping_of, parse
from shmbus.inspect.status import read_status
from shmbus.inspect.text import schema_text
from shmbus.store import snapshot
from shmbus_ext import _core

SCHEMA: dict[str, Any] = {
    "tokens": "int32",
    "logprobs": np.float32,
    "loss_mask?": "uint8",
    "experts?": ("uint8", ("T", 4, None)),
    "pairs?": (np.int16, ("N", "N")),
    "notes?": ("float64", ...),
}
SHOWN = {
    "tokens": ("int32", ("T",)),
    "logprobs": ("float32", ("T",)),
    "loss_mask?": ("uint8", ("T",)),
    "experts?": ("uint8", ("T", 4, None)),
    "pairs?": ("int16", ("N", "N")),
    "notes?": ("float64", ...),
}


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, "4MiB", max_producers=8, schema=SCHEMA) as handle:
        yield handle


def sample(n: int = 5, **more: Any) -> dict[str, Any]:
    """Make put's arguments for a sample of n tokens, without fields of None."""
    fields: dict[str, Any] = {"tokens": list(range(n)), "logprobs": [0.0] * n, **more}
    given = {name: value for name, value in fields.items() if value is not None}
    return {"instance_id": "a", "group_size": 1, "index": 0, "timeout": 10.0, **given}


def put(producer: Producer, n: int = 5, **more: Any) -> None:
    producer.put(**sample(n, **more))


# --- checks


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"logprobs": None}, TypeError, "missing the field 'logprobs'.*\"logprobs\\?\""),
        ({"logprobs": None, "logprob": [0.0] * 5}, TypeError, r"logprob: .*did you mean logprobs="),
        ({"completion_ids": [1]}, TypeError, "completion_ids: the schema has no such field, only"),
        ({"reward": np.float32(1)}, TypeError, "reward: .*did you mean score="),
        ({"rewards": [1.0]}, TypeError, "rewards: .*did you mean score="),
        ({"logprobs": [0.0] * 4}, ValueError, r"\('T',\) with T = 5, as tokens has it, got \(4,\)"),
        ({"loss_mask": np.ones(6, np.uint8)}, ValueError, r"loss_mask: .*T = 5.*got \(6,\)"),
        ({"experts": np.zeros((5, 3, 2), np.uint8)}, ValueError, r"experts: .*got \(5, 3, 2\)"),
        ({"experts": np.zeros((5, 4), np.uint8)}, ValueError, r"experts: .*got \(5, 4\)"),
        ({"experts": [[[1], [2], [3]]] * 5}, ValueError, r"experts: .*got \(5, 3, 1\)"),
        ({"experts": [[[1]] * 4] * 4 + [[[1]] * 3]}, ValueError, r"experts\[4\]: expected 4 elem"),
        ({"pairs": np.zeros((2, 3), np.int16)}, ValueError, r"pairs: .*N = 2, as pairs has it"),
        ({"tokens": [[1] * 5]}, ValueError, r"tokens: expected the shape \('T',\), got \(1, 5\)"),
        ({"tokens": 3}, ValueError, r"tokens: expected the shape \('T',\), got \(\)"),
        ({"tokens": np.zeros(5, np.float32)}, TypeError, "tokens: expected an array of int32"),
    ],
)
def test_put_refuses_what_the_schema_does_not_have(
    bus: Bus, fields: dict[str, Any], error: type[Exception], match: str
) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        before = producer.stats()
        with pytest.raises(error, match=match):
            put(producer, **fields)
        assert producer.stats() == before
        with pytest.raises(error, match=match):
            producer.put_many([sample(), sample(**fields)])
        assert producer.stats().committed == 0
        assert consumer.take(1, 0) == []
        put(producer)
        assert len(consumer.take(1, 10.0)) == 1


def test_what_the_schema_allows_is_put(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        put(producer)
        put(producer, n=0)
        put(
            producer,
            notes=[[1.0, 2.0]],
            pairs=[[1, 2], [3, 4]],
            experts=np.zeros((5, 4, 9), np.uint8),
            loss_mask=[True] * 5,
        )
        for names in (2, 2, 6):
            [group] = consumer.take(1, 10.0)
            with group:
                assert len(group[0].keys()) == names


def test_a_report_of_a_failure_needs_no_fields(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        producer.fail(17, 0, "out of time", group_size=1)
        assert consumer.take(1, 0.2) == []
        assert consumer.stats().balanced


# --- declarers


def test_every_process_that_attaches_puts_by_the_schema_of_the_bus(
    bus: Bus, spawn: Spawner
) -> None:
    child = spawn.script(
        """
import sys, shmbus
with shmbus.Producer(sys.argv[1]) as producer:
    print(producer.schema)
    try:
        producer.put("a", group_size=1, index=0, tokens=[1], logprobs=[1.0, 2.0])
    except ValueError as error:
        print("refused:", error)
    producer.put("a", group_size=1, index=0, tokens=[1, 2], logprobs=[1.0, 2.0])
""",
        bus.name,
    )
    with Consumer(bus.name) as consumer:
        printed = child.finish()
        assert str(SHOWN) in printed
        assert "refused: logprobs: expected the shape ('T',) with T = 1" in printed
        [group] = consumer.take(1, 10.0)
        with group:
            assert group[0]["logprobs"].dtype == np.float32
    assert bus.schema == SHOWN
    with Bus.open(bus.name) as again:
        assert again.schema == SHOWN


def test_a_producer_may_have_a_schema_of_its_own(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB") as bus, Producer(bus_name, schema=SCHEMA) as producer:
        assert bus.schema is None
        assert producer.schema == SHOWN
        with pytest.raises(TypeError, match="no such field"):
            put(producer, other=[1])
        with Producer(bus_name) as free:
            assert free.schema is None
            put(free, other=np.zeros(3))
        copy = pickle.loads(pickle.dumps(producer))
        with copy:
            assert copy.schema == SHOWN
            with pytest.raises(TypeError, match="no such field"):
                put(copy, other=[1])


def test_two_schemas_that_differ_are_refused_with_the_field_and_both_sides(bus: Bus) -> None:
    with Producer(bus.name, schema=dict(reversed(SCHEMA.items()))) as producer:
        assert producer.schema == SHOWN
    changes: list[tuple[dict[str, Any], str]] = [
        ({"tokens": "int64"}, r"field 'tokens': schema= has int64 .*, the bus has int32 "),
        ({"logprobs?": "float32"}, "'logprobs': schema= has .*optional, the bus has float32"),
        ({"more": "int8"}, "'more': schema= has int8 any shape, the bus has no such field"),
        ({"experts?": ("uint8", ("T", 5, None))}, r"'experts': .*\('T', 5, None\).*\('T', 4, None"),
    ]
    slots = len(bus.stats().producers)
    for change, match in changes:
        own = {k: v for k, v in SCHEMA.items() if k.rstrip("?") != next(iter(change)).rstrip("?")}
        with pytest.raises(ValueError, match=match):
            Producer(bus.name, schema=own | change)
        with pytest.raises(shmbus.BusExistsError, match=match):
            Bus.ensure(bus.name, schema=own | change)
    assert len(bus.stats().producers) == slots
    with Bus.ensure(bus.name, schema=SCHEMA) as same:
        assert same.schema == SHOWN
    bus.unlink()
    with Bus.ensure(bus.name, "1MiB", schema=SCHEMA) as made:
        assert made.schema == SHOWN


def test_a_producer_goes_on_in_a_successor_of_the_same_schema_only(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB", schema=SCHEMA):
        producer = Producer(bus_name, attach="successor")
    with producer:
        with Bus.create(bus_name, "1MiB", schema=SCHEMA) as second:
            put(producer)
            assert second.stats().committed == 1
        with Bus.create(bus_name, "1MiB", schema=SCHEMA | {"more?": "int8"}) as third:
            with pytest.raises(ValueError, match=r"field 'more'.*make a new Producer"):
                put(producer)
            assert third.stats().committed == 0
        with Bus.create(bus_name, "1MiB"), pytest.raises(ValueError, match="declares none"):
            put(producer)


# --- reservations


def test_a_reservation_takes_its_dtypes_from_the_schema(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        sizes: dict[str, Any] = {"tokens": 4, "logprobs": (4,), "experts": (4, 4, 2)}
        with producer.reserve(3, group_size=1, index=0, fields=sizes) as slot:
            for name in sizes:
                slot[name][...] = 1
                slot.resize(name, 3)
        [group] = consumer.take(1, 10.0)
        with group:
            assert {name: (a.dtype.name, a.shape) for name, a in group[0].items()} == {
                "tokens": ("int32", (3,)), "logprobs": ("float32", (3,)),
                "experts": ("uint8", (3, 4, 2)),
            }  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"tokens": 4, "logprobs": 3}, ValueError, r"logprobs: .*T = 4, as tokens has it"),
        ({"tokens": 4}, TypeError, "missing the field 'logprobs'"),
        ({"tokens": ("int64", 4), "logprobs": 4}, TypeError, "tokens: expected int32.*got int64"),
        ({"tokens": 4, "logprobs": 4, "x": ("i4", 1)}, TypeError, "x: the schema has no such"),
        ({"tokens": 4, "logprobs": 4, "x": 1}, TypeError, "'x'.*no schema says its dtype"),
    ],
)
def test_a_reservation_that_the_schema_does_not_allow_is_refused(
    bus: Bus, fields: dict[str, Any], error: type[Exception], match: str
) -> None:
    with Producer(bus.name) as producer:
        with pytest.raises(error, match=match):
            producer.reserve("a", group_size=1, index=0, fields=fields)
        assert producer.stats().aborted == 0


def test_what_resize_leaves_is_checked_by_the_commit(bus: Bus) -> None:
    with Producer(bus.name) as producer, Consumer(bus.name) as consumer:
        slot = producer.reserve("a", group_size=1, index=0, fields={"tokens": 4, "logprobs": 4})
        slot.resize("tokens", 2)
        with pytest.raises(ValueError, match=r"logprobs: .*T = 2, as tokens has it"):
            slot.commit()
        assert not slot.ended
        slot.resize("logprobs", 2)
        slot.commit()
        with (
            pytest.raises(ValueError, match=r"logprobs: .*T = 2"),
            producer.reserve(
                "b", group_size=1, index=0, fields={"tokens": 4, "logprobs": 4}
            ) as second,
        ):
            second.resize("tokens", 2)
        assert second.ended
        assert (producer.stats().committed, producer.stats().aborted) == (1, 1)
        [group] = consumer.take(2, 10.0)
        with group:
            assert group.instance_id == "a"


def test_without_a_schema_the_standard_fields_are_reserved_by_their_size(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        fields: dict[str, Any] = {"tokens": 4, "loss_mask": 4, "logprobs": 9}
        with producer.reserve("a", group_size=1, index=0, fields=fields) as slot:
            assert [slot[name].dtype.name for name in fields] == ["int32", "uint8", "float32"]


# --- bad schemas


@pytest.mark.parametrize(
    ("schema", "error", "match"),
    [
        ("tokens", TypeError, "schema: expected a mapping"),
        ({}, ValueError, "expected 1 to 64 fields, got 0"),
        ({f"f{i}": "i4" for i in range(65)}, ValueError, "expected 1 to 64 fields, got 65"),
        ({1: "i4"}, TypeError, "expected str names, got int"),
        ({"": "i4"}, ValueError, "names of 1 to 255 bytes"),
        ({"?": "i4"}, ValueError, "names of 1 to 255 bytes"),
        ({"n" * 256: "i4"}, ValueError, "names of 1 to 255 bytes"),
        ({"score": "f4"}, ValueError, "'score' is an argument's name"),
        ({"a": "int33"}, TypeError, "schema: a: expected a dtype, got 'int33'"),
        ({"a": None}, TypeError, "schema: a: expected a dtype, got None"),
        ({"a": object}, TypeError, "schema: a: expected a dtype of fixed size"),
        ({"a": "U"}, TypeError, "schema: a: expected a dtype of fixed size"),
        ({"a": ("i4", (1,), 2)}, TypeError, "schema: a: expected a dtype or"),
        ({"a": ("i4", (1.5,))}, TypeError, "schema: a: expected a size"),
        ({"a": ("i4", (True,))}, TypeError, "schema: a: expected a size"),
        ({"a": ("i4", (-1,))}, ValueError, "schema: a: expected sizes of 0 or more, got -1"),
        ({"a": ("i4", (2**63,))}, ValueError, "schema: a: expected sizes of 0 or more"),
        ({"a": ("i4", ("T, 3",))}, ValueError, "schema: a: expected the name of a dimension"),
        ({"a": ("i4", (1,) * 33)}, ValueError, "schema: a: expected at most 32 dimensions, got 33"),
        ({"a": "i4", "a?": "i4"}, ValueError, r"each field once, got \['a'\] twice"),
        (
            {"a": ("i4", tuple(f"d{i}" for i in range(32))),
             "b": ("i4", tuple(f"e{i}" for i in range(32))), "c": ("i4", ("f",))},
            ValueError, "at most 64 names of dimensions, got 65",
        ),
        ({f"{i:0255}": "i4" for i in range(64)}, ValueError, "at most 16376 bytes"),
    ],
)  # fmt: skip
def test_a_bad_schema_is_refused_and_makes_no_bus(
    bus_name: str, schema: Any, error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        Bus.create(bus_name, "1MiB", schema=schema)
    assert not (SHM_DIR / f"shmbus.{bus_name}").exists()


def test_random_schemas_are_read_back_as_they_were_declared(seed: int) -> None:
    rng = random.Random(seed)
    dtypes = ["int8", "uint64", "float16", "bool", ">i4", "<U7", "bfloat16", "complex64", "M8[s]"]
    for _ in range(200):
        sizes = [0, 1, 48, 2**62, None, "T", "N", "\N{GREEK SMALL LETTER LAMDA}"]
        fields = [
            SchemaField(
                f"f{i}\N{SNOWMAN}" * rng.randint(1, 3),
                rng.choice(dtypes),
                rng.choice([None, tuple(rng.choices(sizes, k=rng.randint(0, 4)))]),
                rng.random() < 0.5,
            )
            for i in range(rng.randint(1, 20))
        ]
        declared = encode(fields)
        again = parse(mapping_of(declared))
        assert fields_of(again) == fields_of(declared)
        assert [(f.name, f.shape, f.required) for f in fields_of(declared)] == [
            (f.name, f.shape, f.required) for f in fields
        ]
        assert difference(declared, again, "a", "b") is None
        assert _core.DeclaredSchema(declared.encoded).names == tuple(f.name for f in fields)


def test_random_changes_of_an_encoded_schema_are_refused_or_bounded(seed: int) -> None:
    rng = random.Random(seed)
    encoded = parse(SCHEMA).encoded
    for _ in range(3000):
        changed = bytearray(encoded)
        for _ in range(rng.randint(1, 4)):
            changed[rng.randrange(len(changed))] = rng.choice([0, 1, 255, rng.randrange(256)])
        cut = bytes(changed[: rng.choice([len(changed), rng.randrange(len(changed) + 1)])])
        try:
            declared = _core.DeclaredSchema(cut)
        except (ValueError, TypeError):
            continue
        assert 1 <= len(declared.fields()) <= _core.MAX_FIELDS


# --- place


@pytest.mark.parametrize(
    ("offset", "value"),
    [(0, struct.pack("<I", 2**31)), (0, struct.pack("<I", 5)), (4, b"\xff" * 4), (20, b"\xff")],
)
def test_a_damaged_schema_is_refused_by_producers_and_shown_to_operators(
    bus: Bus, offset: int, value: bytes
) -> None:
    with Producer(bus.name) as producer:
        put(producer)
        with (SHM_DIR / f"shmbus.{bus.name}").open("r+b") as file:
            part = file.read().index(parse(SCHEMA).encoded) - 8
            os.pwrite(file.fileno(), value, part + offset)
        with pytest.raises(shmbus.LayoutMismatchError, match="damaged declared schema"):
            Producer(bus.name)
        put(producer)  # owns a copy
    status = read_status(bus.name)
    assert status.schema is None and "damaged" in status.schema_problem
    assert "cannot be read" in schema_text(status.schema, status.schema_problem)
    with Consumer(bus.name) as consumer:
        assert len(consumer.take(2, 10.0)) == 2


def test_status_and_a_snapshot_have_the_schema(bus: Bus, tmp_path: Path) -> None:
    found = read_status(bus.name)
    assert found.schema is not None and found.schema_problem == ""
    assert found.schema == list(fields_of(parse(SCHEMA)))
    text = schema_text(found.schema, "")
    assert "tokens" in text and "[T, 4, *]" in text and "may be missing" in text
    pytest.importorskip("safetensors")
    with Producer(bus.name) as producer:
        put(producer)
    assert snapshot.take(bus.name, tmp_path / "snapshot").schema == list(fields_of(parse(SCHEMA)))
    restored = f"{bus.name}.again"
    snapshot.restore(tmp_path / "snapshot", restored)
    try:
        with Bus.open(restored) as again, Producer(restored) as producer:
            assert again.schema == SHOWN
            with pytest.raises(TypeError, match="no such field"):
                put(producer, other=[1])
    finally:
        shmbus.unlink(restored)


# --- meta


def test_meta_takes_what_workers_have_at_hand(bus_name: str) -> None:
    torch = pytest.importorskip("torch")

    class Model:
        def model_dump(self) -> dict[str, Any]:
            return {"a": np.float32(0.5), "b": [Path("x")]}

    given: dict[str, tuple[Any, Any]] = {
        "scalar": (np.float32(1.5), 1.5), "flag": (np.True_, True), "text": (np.str_("a"), "a"),
        "array": (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]), "point": (np.asarray(2.0), 2.0),
        "tensor": (torch.tensor(3), 3), "row": (torch.ones(2, requires_grad=True), [1.0, 1.0]),
        "half": (torch.tensor([0.5], dtype=torch.bfloat16), [0.5]),
        "path": (Path("/a/b"), "/a/b"), "set": ({1}, [1]),
        "model": (Model(), {"a": 0.5, "b": ["x"]}),
    }  # fmt: skip
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:
        producer.put("a", group_size=1, index=0, meta={k: v for k, (v, _) in given.items()})
        for wrong in (1j, np.array([None]), object(), [np.longdouble(1)]):
            with pytest.raises(TypeError, match="meta: expected what msgspec can encode"):
                producer.put("a", group_size=1, index=0, meta=wrong)
        with Consumer(bus_name) as consumer:
            [group] = consumer.take(2, 10.0)
            with group:
                assert group[0].meta == {k: v for k, (_, v) in given.items()}
