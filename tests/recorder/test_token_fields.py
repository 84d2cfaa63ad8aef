"""Routed experts of an engine's answer against NumPy's own, and the refusals of bad ones."""

import base64
import io
from typing import Any

import numpy as np
import pytest

from shmbus.recorder.token_fields import routed_experts

SHAPE = (2, 3)


def routed(rows: int = 4, dtype: Any = np.uint8) -> Any:
    return np.arange(rows * 6).astype(dtype).reshape(rows, *SHAPE)


def npy(array: Any, **how: Any) -> str:
    np.save(stream := io.BytesIO(), array, **how)
    return base64.b64encode(stream.getvalue()).decode()


def headed(head: bytes) -> str:
    padded = head.ljust(54) + b"\n"
    return base64.b64encode(b"\x93NUMPY\1\0" + len(padded).to_bytes(2, "little") + padded).decode()


def flat(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


@pytest.mark.parametrize("rows", [4, 5, 100_000])
@pytest.mark.parametrize("dtype", ["u1", "i2", "<u4", ">i4", "i8"])
def test_experts_are_those_of_numpy(dtype: str, rows: int) -> None:
    array = routed(rows, dtype)
    found = routed_experts(npy(array), max(5, rows), *SHAPE)
    assert found.dtype == array.dtype and (found == array).all()


def test_sglangs_experts_are_plain_int32() -> None:
    assert (routed_experts(flat(routed(4, np.int32)), 5, *SHAPE) == routed()).all()


HUGE = b"{'descr': '<i4', 'fortran_order': False, 'shape': (1%s,)}" % (b"0" * 200)
OBJECTS = np.array([[[{}, {}, {}]] * 2] * 4)
BAD: dict[str, tuple[str, str]] = {
    "none": ("", "expected base64, got none"),
    "cut": (npy(routed())[:-4], "expected integers of.*22 bytes"),
    "cut off": (npy(routed())[:-1], "in base64"),
    "no base64": (npy(routed())[:-6] + "!!" + "AAAA", "in base64"),
    "fewer": (npy(routed(3)), r"\[4 or 5, 2, 3\].*\(3, 2, 3\)"),
    "more": (npy(routed(6)), r"\[4 or 5, 2, 3\].*\(6, 2, 3\)"),
    "other layers": (npy(routed().reshape(4, 3, 2)), r"\(4, 3, 2\)"),
    "floats": (npy(routed(dtype=np.float32)), "integers.*float32"),
    "by columns": (npy(np.asfortranarray(routed())), "integers"),
    "pickled": (npy(OBJECTS, allow_pickle=True), "integers.*object"),
    "a broken npy": (flat(np.frombuffer(b"\x93NUMPY\1", "u1")), "an .npy"),
    "a head that is open": (headed(b"{'descr': ("), "an .npy"),
    "a head of brackets": (headed(b"(" * 200), "an .npy"),
    "a head that is no UTF-8": (headed(b"{'\xff"), "an .npy"),
    "a head of a huge shape": (headed(HUGE), "routed_experts"),
    "int64 of SGLang": (flat(routed(dtype=np.int64)), "expected integers"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_experts_are_refused(name: str) -> None:
    text, said = BAD[name]
    with pytest.raises(ValueError, match=f"routed_experts.*{said}|{said}"):
        routed_experts(text, 5, *SHAPE)
