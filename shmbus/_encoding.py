"""Meta and dtypes as bytes. Nothing here, or elsewhere in shmbus, unpickles.

A dtype travels as its NumPy string (``<i4``), or, for structured ones, as the literal that the .npy
format uses for it (numpy.lib.format.dtype_to_descr).
"""

from __future__ import annotations

import ast
from typing import Any

import msgspec
import numpy as np
from numpy.lib import format as npy_format

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder()


def encode_meta(meta: object) -> bytes:
    """Encode meta as MessagePack; a TypeError says what msgspec cannot encode."""
    try:
        return _encoder.encode(meta)
    except (TypeError, OverflowError, RecursionError) as error:
        raise TypeError(
            f"meta: expected what msgspec can encode as MessagePack, got {type(meta).__name__}: "
            f"{error}; put arrays into fields of their own, and convert the rest"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"meta: expected text that UTF-8 can encode, got surrogates: {error}; encode it with "
            "errors='replace' first"
        ) from error


def decode_meta(raw: bytes) -> Any:
    """Decode meta; ValueError where the bytes are not MessagePack."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"meta: its {len(raw)} bytes are damaged: {error}") from error


def encode_dtype(name: str, dtype: np.dtype[Any]) -> bytes:
    """Describe a dtype of fixed size; TypeError for one that holds Python objects."""
    if dtype.hasobject:
        raise TypeError(
            f"{name}: expected a dtype of fixed size, got {dtype}; objects cannot be shared, "
            "put them into meta"
        )
    if dtype.names is not None or dtype.subdtype is not None:
        return repr(npy_format.dtype_to_descr(dtype)).encode()
    if dtype.kind == "V" and dtype.type is not np.void:
        return str(dtype.name).encode()  # a registered extension such as bfloat16
    return str(dtype.str).encode()


def decode_dtype(name: str, described: bytes) -> np.dtype[Any]:
    """Rebuild a dtype; TypeError where this process does not know it."""
    text = described.decode("utf-8", "replace")
    try:
        if text[:1] in "[({":
            dtype = npy_format.descr_to_dtype(ast.literal_eval(text))
        else:
            dtype = np.dtype(text)
    except Exception as error:  # hostile text makes literal_eval and dtype raise almost anything
        raise TypeError(
            f"field {name!r}: this process knows no dtype {text!r}; import what defines it "
            "(ml_dtypes for bfloat16) before reading"
        ) from error
    if dtype.hasobject:
        raise TypeError(f"field {name!r}: dtype {text!r} holds Python objects")
    return dtype


def as_array(name: str, value: object) -> np.ndarray[Any, Any]:
    """Take what exports an array (torch CPU tensor, memoryview, array.array) without a guess.

    One number under a name that is nearly one of put's arguments is refused: it is meant for that.
    """
    if isinstance(value, np.generic) or (
        not isinstance(value, (bytes, bytearray, str, list, tuple, dict))
        and (hasattr(value, "__array__") or _exports_buffer(value))
    ):
        try:
            array = np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name}: {type(value).__name__} gives no NumPy array: {error}; "
                f"{_tensor_advice(value)}"
            ) from error
        if array.ndim == 0:
            _refuse_near(name, value)
        return array
    if not isinstance(value, (list, tuple)):
        _refuse_near(name, value)
    raise TypeError(
        f"{name}: expected an array, got {type(value).__name__}; {_value_advice(name, value)}"
    )


def _refuse_near(name: str, value: object) -> None:
    # Only where a value is no array: a producer does not load it.
    from shmbus._near_names import near_argument

    near = near_argument(name)
    if near == "advantages":
        near = "advantages=, an array with a number for each token"
    elif near is not None:
        near += "="
    if near is not None:
        raise TypeError(
            f"{name}: expected an array, got {type(value).__name__}; did you mean {near}?"
        )


def _tensor_advice(value: object) -> str:
    """Say what makes an array of a tensor that NumPy cannot take."""
    if getattr(value, "is_cuda", False):
        return "copy it to the host first: .detach().cpu()"
    if getattr(value, "requires_grad", False):
        return "take it out of the graph first: .detach()"
    if "float" in str(getattr(value, "dtype", "")):
        return "convert it to a dtype that NumPy has first: .float()"
    return "convert it to a contiguous CPU array first"


def _value_advice(name: str, value: object) -> str:
    """Say where a value that is no array belongs."""
    if isinstance(value, str):
        return f"text goes into the meta: meta={{{name!r}: ...}}"
    if isinstance(value, (bytes, bytearray)):
        return f"put it as np.frombuffer({name}, dtype=np.uint8), or into the meta"
    if value is None:
        return "leave it out where there is none"
    if isinstance(value, (list, tuple)):
        first = value[0] if value else 0
    elif isinstance(value, (bool, int, float)):
        first = value
    else:
        return f"put it into the meta: meta={{{name!r}: ...}}"
    dtype = "float32" if isinstance(first, float) else "int32"
    return f"wrap it with its dtype, such as np.asarray({name}, dtype=np.{dtype})"


def _exports_buffer(value: object) -> bool:
    try:
        memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
