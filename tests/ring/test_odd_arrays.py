"""Arrays of a dtype that NumPy lacks, or that are more than their data, come as they are or not."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from test_lists import Ends, same

import shmbus
from shmbus import Bus


@pytest.fixture
def bus(bus_name: str) -> Iterator[Bus]:
    with Bus.create(bus_name, capacity="1MiB", max_producers=8) as handle:
        yield handle


class Tagged(np.ndarray):
    """An array of a class that is not NumPy's own."""


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
