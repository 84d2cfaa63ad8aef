"""Lists, tuples and tensors of any kind become NumPy's arrays of them, or nothing."""

from __future__ import annotations

import array
import random
from typing import Any

import numpy as np
import pytest

import shmbus
from shmbus import Bus, Consumer, Producer
from shmbus.batch.gather import FieldNames
from shmbus_ext import _core

INTS = ("int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")


class Ends:
    def __init__(self, bus: Bus, schema: Any = None) -> None:
        self.producer = Producer(bus.name, schema=schema)
        self.consumer = Consumer(bus.name)

    def sent(self, **fields: Any) -> dict[str, np.ndarray[Any, Any]]:
        self.producer.put("a", group_size=1, index=0, timeout=10.0, **fields)
        [group] = self.consumer.take(1, 10.0)
        with group:
            return {name: np.array(group[0][name]) for name in group[0].keys()}  # noqa: SIM118

    def refuse(self, error: type[Exception], match: str, **fields: Any) -> None:
        before = self.producer.stats()
        with pytest.raises(error, match=match):
            self.producer.put("a", group_size=1, index=0, timeout=10.0, **fields)
        assert self.producer.stats() == before
        assert self.consumer.take(1, 0) == []
        assert list(self.sent(**{"x": [1]})) == ["x"]

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *error: object) -> None:
        self.producer.close()
        self.consumer.close()


def same(got: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> None:
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    assert got.tobytes() == expected.tobytes()


def nested(rng: random.Random, shape: tuple[int, ...], element: Any) -> Any:
    if not shape:
        return element()
    rows = [nested(rng, shape[1:], element) for _ in range(shape[0])]
    return tuple(rows) if rng.random() < 0.3 else rows


def int_element(rng: random.Random, dtype: str) -> Any:
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max

    def element() -> Any:
        value = rng.choice([low, high, 0, rng.randint(low, high), min(high, rng.getrandbits(20))])
        kind = rng.random()
        if kind < 0.05:
            return np.dtype(dtype).type(value)
        return np.asarray(value, dtype) if kind < 0.07 else value

    return element


def float_element(rng: random.Random, dtype: str) -> Any:
    edge = float(np.finfo(dtype).max)

    def element() -> Any:
        value = rng.choice(
            [0.0, -0.0, edge, -edge, float("inf"), float("nan"), rng.gauss(0, 1),
             rng.gauss(0, 1) * 2.0 ** rng.randint(-26, 14), 3, -1, float(rng.randint(0, 2**12)) / 4]
        )  # fmt: skip
        return np.dtype(dtype).type(value) if rng.random() < 0.05 else value

    return element


@pytest.mark.parametrize("dtype", INTS + FLOATS)
def test_random_lists_become_what_numpy_makes_of_them(bus: Bus, dtype: str, seed: int) -> None:
    rng = random.Random(f"{seed} {dtype}")
    make = (int_element if dtype in INTS else float_element)(rng, dtype)
    with Ends(bus, {"x": (dtype, ...)}) as ends:
        for _ in range(60):
            shape = tuple(rng.randint(1, 7) for _ in range(rng.randint(1, 4)))
            value = nested(rng, shape, make)
            same(ends.sent(x=value)["x"], np.asarray(value, dtype))


@pytest.mark.parametrize("dtype", INTS + FLOATS)
@pytest.mark.parametrize("given", INTS + FLOATS)
def test_arrays_of_another_dtype_are_converted_or_refused_and_never_wrapped(
    bus: Bus, dtype: str, given: str, seed: int
) -> None:
    rng = np.random.default_rng([seed, INTS.index(given) if given in INTS else 9])
    with Ends(bus, {"x": (dtype, ...)}) as ends:
        values = rng.integers(0, 100, (3, 4)).astype(given)
        if given in FLOATS and dtype in INTS:
            ends.refuse(TypeError, f"x: expected an array of {dtype}, got one of {given}", x=values)
            return
        for layout in (
            values,
            values.T,
            values[:, ::2],
            values.astype(values.dtype.newbyteorder()),
        ):
            same(ends.sent(x=layout)["x"], np.ascontiguousarray(layout).astype(dtype))
        if given in INTS and dtype in INTS:
            edge = np.array([[0, np.iinfo(given).max]], given)
            if np.iinfo(given).max > np.iinfo(dtype).max:
                ends.refuse(ValueError, rf"x\[0\]\[1\]: .*{dtype} holds", x=edge)
            else:
                same(ends.sent(x=edge)["x"], edge.astype(dtype))


@pytest.mark.parametrize(
    ("dtype", "value", "error", "match"),
    [
        ("int32", [1, True], TypeError, r"x\[1\]: expected an int for int32, got bool"),
        ("int32", [1, np.True_], TypeError, r"x\[1\]: expected an int for int32, got numpy.bool"),
        ("int32", [1, None], TypeError, r"x\[1\]: .* got None"),
        ("float32", [[0.5], [None]], TypeError, r"x\[1\]\[0\]: .* got None; put nan"),
        ("int32", [0, 2**31], ValueError, r"x\[1\]: .*int32 holds, got 2147483648"),
        ("uint8", [0, -1], ValueError, r"x\[1\]: .*uint8 holds, got -1"),
        ("uint64", [2**64], ValueError, r"x\[0\]: .*uint64 holds"),
        ("int64", [10**400], ValueError, r"x\[0\]: .*int64 holds"),
        ("float32", [10**400], ValueError, r"x\[0\]: .*float32 holds"),
        ("float32", [1e39], ValueError, r"x\[0\]: .*float32 holds, got 1e\+39"),
        ("float16", [65520.0], ValueError, r"x\[0\]: .*float16 holds"),
        ("bool", [2], ValueError, r"x\[0\]: .*bool holds, got 2"),
        ("int32", [1.0], TypeError, r"x\[0\]: expected an int for int32, got float"),
        ("int32", [np.float32(1)], TypeError, r"x\[0\]: expected an int .* got numpy.float32"),
        ("float32", ["1"], TypeError, r"x\[0\]: expected a number for float32, got str"),
        ("float32", [1j], TypeError, r"x\[0\]: expected a number for float32, got complex"),
        ("float32", [b"1"], TypeError, r"x\[0\]: expected a number for float32, got bytes"),
        ("float32", [True], TypeError, r"x\[0\]: expected a number for float32, got bool"),
        ("int32", [[1, 2], [3]], ValueError, r"x\[1\]: expected 2 elements.* got 1"),
        ("int32", [[1, 2], 3], TypeError, r"x\[1\]: expected a list of 2, got int"),
        ("int32", [1, [2]], TypeError, r"x\[1\]: expected a number.* got list"),
        ("int32", [[1, 2], np.zeros(3, np.int32)], ValueError, r"x\[1\]: expected an array of the"),
        ("int32", [[1, 2], np.zeros(2)], TypeError, r"x\[1\]: expected an array of int32"),
        ("int32", [1, {}], TypeError, r"x\[1\]: expected an int for int32, got dict"),
        ("<U4", ["a"], TypeError, r"x: expected an array of <U4, got list"),
        ("int32", {1: 2}, TypeError, r"x: expected an array, got dict"),
    ],
)  # fmt: skip
def test_a_bad_element_is_refused_with_its_place(
    bus: Bus, dtype: str, value: Any, error: type[Exception], match: str
) -> None:
    with Ends(bus, {"x?": ("int64", ...), "y?": (dtype, ...)}) as ends:
        ends.refuse(error, match.replace("x", "y", 1), y=value)


def test_bools_are_welcome_in_masks_alone(bus: Bus) -> None:
    with Ends(bus, {"x?": "int64", "flags?": "bool", "mask?": "uint8"}) as ends:
        got = ends.sent(flags=[True, 0, 1, np.False_], mask=[True, False, 7, np.True_])
        assert got["flags"].tolist() == [True, False, True, False]
        assert got["mask"].tolist() == [1, 0, 7, 1]
        assert ends.sent(mask=np.array([True, False]))["mask"].tolist() == [1, 0]
        ends.refuse(TypeError, "x: expected an array of int64, got one of bool", x=np.ones(2, bool))


class Grows:
    """A number that lengthens its own list, and frees the list's old memory."""

    def __init__(self, victim: list[Any], how: str) -> None:
        self.victim, self.how = victim, how

    def __index__(self) -> int:
        if self.how == "grow":
            self.victim.extend([0] * 10_000)
        elif self.how == "clear":
            self.victim.clear()
        else:
            self.victim[:] = [str(n) for n in range(len(self.victim))]
        return 7

    def __float__(self) -> float:
        return float(self.__index__())


@pytest.mark.parametrize("dtype", ["int32", "float32"])
@pytest.mark.parametrize("how", ["grow", "clear", "replace"])
def test_a_list_that_changes_while_it_is_converted_is_refused(
    bus: Bus, dtype: str, how: str
) -> None:
    with Ends(bus, {"x?": "int64", "y?": dtype}) as ends:
        value: list[Any] = [1, 2, 3, 4]
        value[1] = Grows(value, how)
        ends.refuse(
            TypeError if how == "replace" else ValueError,
            r"y\[2\]: .* got str" if how == "replace" else "y: .*changed while it was converted",
            y=value,
        )


def test_an_element_that_puts_on_the_same_producer_leaves_both_records_whole(bus: Bus) -> None:
    with Ends(bus) as ends:

        class Puts:
            def __index__(self) -> int:
                ends.producer.put("inner", group_size=1, index=0, tokens=[9] * 50, logprobs=[0.5])
                return 5

        ends.producer.put("outer", group_size=1, index=0, tokens=[1, Puts(), 3], logprobs=[1.5])
        items = [
            {"instance_id": f"m{i}", "group_size": 1, "index": 0, "tokens": [i, Puts(), i]}
            for i in range(4)
        ]
        assert ends.producer.put_many(items) == 4
        found = {}
        for _ in range(10):
            [group] = ends.consumer.take(1, 10.0)
            with group:
                found.setdefault(group.instance_id, group[0]["tokens"].tolist())
        assert found.pop("inner") == [9] * 50
        assert found == {"outer": [1, 5, 3], **{f"m{i}": [i, 5, i] for i in range(4)}}
        assert ends.consumer.stats().balanced


def test_without_a_schema_the_standard_names_have_their_dtypes(bus: Bus) -> None:
    with Ends(bus) as ends:
        got = ends.sent(tokens=[1, 2], loss_mask=[0, True], logprobs=[-1, 0.5], advantages=(1, 2))
        assert {name: field.dtype for name, field in got.items()} == {
            "tokens": np.int32, "loss_mask": np.uint8,
            "logprobs": np.float32, "advantages": np.float32,
        }  # fmt: skip
        with pytest.raises(TypeError, match=r"extra: .*declare its dtype.*schema=\{'extra'"):
            ends.producer.put("a", group_size=1, index=0, extra=[1])
    assert set(_core.STANDARD_DTYPES) == set(FieldNames().as_tuple())


def test_empty_lists_have_the_declared_shape(bus: Bus) -> None:
    schema = {"tokens": "int32", "experts": ("uint8", ("T", 48, 8)), "free": ("float32", (None, 3))}
    with Ends(bus, schema) as ends:
        got = ends.sent(tokens=[], experts=[], free=[])
        assert [got[name].shape for name in schema] == [(0,), (0, 48, 8), (0, 3)]


def test_other_sequences_and_tensors_of_any_kind_are_taken(bus: Bus) -> None:
    torch = pytest.importorskip("torch")
    schema = {"tokens": "int32", "more?": ("float32", (None, None))}
    grid = torch.arange(12.0).reshape(3, 4).requires_grad_()
    with Ends(bus, schema) as ends:
        for tokens in (
            array.array("h", [1, 2, 3]), torch.tensor([1, 2, 3]), memoryview(b"\1\2\3"),
            [torch.tensor(1), np.int8(2), 3], torch.tensor([1, 0, 2, 0, 3])[::2],
        ):  # fmt: skip
            assert ends.sent(tokens=tokens)["tokens"].tolist() == [1, 2, 3]
        for more in (grid, grid.T.contiguous().T, [row for row in grid], grid.bfloat16(),
                     [grid[0].tolist(), grid[1], grid[2].detach().numpy()]):  # fmt: skip
            assert np.array_equal(ends.sent(tokens=[1], more=more)["more"], grid.detach().numpy())


def test_bfloat16_comes_back_bit_by_bit(bus: Bus) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.randn(5, 3, dtype=torch.float32).bfloat16()[::2].requires_grad_()
    numbers = [1.0, 1 / 3, -2.5e-40, 3.0e38, float("inf")]
    with Ends(bus) as plain:
        assert torch.equal(_as_bfloat16(plain.sent(hidden=tensor)["hidden"]), tensor)
        rows = [{"hidden": tensor[:1]}, {"hidden": tensor[1:]}]
        assert torch.equal(_as_bfloat16(plain.sent(rows=rows)["hidden"]), tensor)
    with Ends(bus, {"hidden": ("bfloat16", ...)}) as ends:
        assert torch.equal(_as_bfloat16(ends.sent(hidden=tensor)["hidden"]), tensor)
        assert torch.equal(_as_bfloat16(ends.sent(rows=rows)["hidden"]), tensor)
        expected = torch.tensor(numbers).bfloat16()
        for value in (numbers, np.array(numbers), torch.tensor(numbers)):
            assert torch.equal(_as_bfloat16(ends.sent(hidden=value)["hidden"]), expected)


def _as_bfloat16(field: np.ndarray[Any, Any]) -> Any:
    import torch

    try:
        import ml_dtypes
    except ImportError:
        assert field.dtype == np.uint16
        assert field.dtype.metadata == {"shmbus": "bfloat16"}
    else:
        assert field.dtype == ml_dtypes.bfloat16
    return torch.from_numpy(field.view(np.int16)).view(torch.bfloat16)


def test_every_half_and_bfloat16_is_rounded_as_pytorch_rounds_it(bus: Bus, seed: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(seed)
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float64)
    # Each half, its close neighbours, and the middles themselves.
    with np.errstate(invalid="ignore"):
        middles = (halves[:-1] + halves[1:]) / 2
    finite = np.concatenate([halves, middles, middles * (1 + 2**-40), rng.normal(size=4096)])
    finite = finite[np.isfinite(finite) & (np.abs(finite) < 65520)]
    with Ends(bus, {"h": "float16", "b": "bfloat16"}) as ends:
        for part in np.array_split(finite, 8):
            got = ends.sent(h=part.tolist(), b=part.tolist())
            same(got["h"], part.astype(np.float16))
            assert torch.equal(_as_bfloat16(got["b"]), torch.tensor(part.tolist()).bfloat16())


def test_numbers_go_into_fields_without_a_dimension(bus: Bus) -> None:
    with Ends(bus, {"temperature": ("float32", ()), "seed": ("int64", ...)}) as ends:
        for value in (0.5, np.float64(0.5), np.asarray(0.5)):
            got = ends.sent(temperature=value, seed=17)
            assert (got["temperature"].shape, got["temperature"].item(), got["seed"].item()) == (
                (), 0.5, 17,
            )  # fmt: skip


def test_an_id_may_be_an_int_and_a_score_a_tensor(bus: Bus) -> None:
    torch = pytest.importorskip("torch")
    with Ends(bus) as ends:
        ends.producer.put(17, group_size=2, index=0, score=torch.tensor([0.5], requires_grad=True))
        ends.producer.put("17", group_size=2, index=1, score=np.array(0.25))
        [group] = ends.consumer.take(1, 10.0)
        with group:
            assert (group.instance_id, [t.score for t in group]) == ("17", [0.5, 0.25])
        ends.producer.put(np.int64(-3), group_size=1, index=0)
        [group] = ends.consumer.take(1, 10.0)
        with group:
            assert group.instance_id == "-3"
        for wrong in (True, 1.0, None, 10**300):
            with pytest.raises((TypeError, ValueError), match="instance_id"):
                ends.producer.put(wrong, group_size=1, index=0)
        for wrong in (torch.zeros(2), np.zeros(0), torch.tensor(1j)):
            with pytest.raises(TypeError, match="score"):
                ends.producer.put("a", group_size=1, index=0, score=wrong)


def test_a_list_that_is_larger_than_any_record_is_refused_at_once(bus: Bus) -> None:
    value: Any = [0] * 1024
    for _ in range(5):
        value = [value] * 1024
    with Ends(bus, {"x?": ("int8", ...)}) as ends, pytest.raises(shmbus.RecordTooLargeError):
        ends.producer.put("a", group_size=1, index=0, x=value)
    loop: list[Any] = []
    loop.append(loop)
    with Ends(bus, {"x?": ("int8", ...)}) as ends, pytest.raises(ValueError, match="32 dimensions"):
        ends.producer.put("a", group_size=1, index=0, x=loop)


def test_a_refused_list_begins_no_group_where_groups_are_bounded(bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB", max_lead=1) as bus, Ends(bus) as ends:
        for bad in ([1, None], [1, 2**40]):
            with pytest.raises((TypeError, ValueError)):
                ends.producer.put("bad", group_size=1, index=0, tokens=bad, timeout=0)
            with pytest.raises((TypeError, ValueError)):
                ends.producer.put_many(
                    [{"instance_id": "bad", "group_size": 1, "index": 0, "tokens": bad}], timeout=0
                )
        # By the careful way: gives up its room and claims it again.
        for value in ([np.int64(1), 2], [1, 2]):
            ends.producer.put("good", group_size=2, index=len(value) - 2, tokens=value, timeout=0)
            ends.producer.put("good", group_size=2, index=1, tokens=value, timeout=0)
            [group] = ends.consumer.take(1, 10.0)
            group.ack()


# --- dtypes unknown to NumPy, and arrays with more than their data


class Tagged(np.ndarray):
    """An array of a foreign class."""


FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu")


@pytest.mark.parametrize("name", FLOAT8)
def test_float8_comes_back_bit_by_bit_under_its_name(bus: Bus, name: str) -> None:
    torch = pytest.importorskip("torch")
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip("this torch has no such dtype")
    bits = torch.arange(256, dtype=torch.uint8).view(64, 4)[::2]
    for schema in (None, {"scale": (name, ("T", 4))}):
        with Ends(bus, schema) as ends:
            got = ends.sent(scale=bits.view(dtype))["scale"]
            assert (got.dtype.metadata or {"shmbus": got.dtype.name}) == {"shmbus": name}
            assert np.array_equal(got.view(np.uint8), bits.numpy())


def test_bits_are_no_numbers_of_a_field_that_stands_in_for_another_dtype(bus: Bus) -> None:
    torch = pytest.importorskip("torch")
    half, e4m3 = torch.ones(4, dtype=torch.bfloat16), torch.ones(4).to(torch.float8_e4m3fn)
    integers = np.ones(4, np.uint8)
    for declared, wrong, got in (
        ("float8_e4m3fn", torch.ones(4).to(torch.float8_e5m2), "float8_e5m2"),
        ("float8_e4m3fn", integers, "uint8"),
        ("uint8", e4m3, "float8_e4m3fn"),
        ("float32", e4m3, "float8_e4m3fn"),
        ("uint16", half, "bfloat16"),
    ):
        with Ends(bus, {"x?": declared, "y?": "int32"}) as ends:
            with pytest.raises(TypeError, match=f"x: expected an array of {declared}, got.*{got}"):
                ends.producer.put("a", group_size=1, index=0, x=wrong)
            assert list(ends.sent(y=[1])) == ["y"]


@pytest.mark.parametrize("said", ["odd", "bfloat16", "", 5, None])
def test_what_a_user_writes_beside_a_dtype_stands_for_nothing(bus: Bus, said: object) -> None:
    dtype = np.dtype(np.float32, metadata={"shmbus": said})
    with Ends(bus, None) as ends:
        got = ends.sent(values=np.arange(3).astype(dtype))["values"]
        assert got.dtype == np.float32 and got.tolist() == [0, 1, 2]


def test_a_masked_array_is_refused_wherever_it_stands(bus: Bus) -> None:
    masked = np.ma.array([1, 2, 3], mask=[0, 1, 0], dtype=np.int32)
    given = (masked, masked[:0], masked.astype(np.int64), np.ma.array(1), np.ma.masked)
    with Ends(bus, {"x": ("int32", ...)}) as ends:
        for one in (*given, [masked, masked]):
            ends.refuse(TypeError, "x: .*Masked.*filled", x=one)
    with Ends(bus) as ends:
        for one in given:
            with pytest.raises(TypeError, match=r"x: .*Masked.*filled"):
                ends.producer.put("a", group_size=1, index=0, x=one)
        with pytest.raises(TypeError, match=r"row 0: x: .*MaskedArray"):
            ends.producer.put("a", group_size=1, index=0, rows=[{"x": masked}])
        with shmbus.Feeder(bus.name) as feeder, pytest.raises(TypeError, match=r"prompt.*Masked"):
            feeder.request("p", group_size=1, prompt=masked)
        same(ends.sent(x=np.arange(2).view(Tagged))["x"], np.arange(2))
