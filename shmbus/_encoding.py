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
    """Return the array of an exporter (torch CPU tensor, memoryview); a dtype is never guessed."""
    if isinstance(value, np.generic) or (
        not isinstance(value, (bytes, bytearray, str, list, tuple, dict))
        and (hasattr(value, "__array__") or _exports_buffer(value))
    ):
        try:
            return np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise TypeError(
                f"{name}: {type(value).__name__} gives no NumPy array: {error}; convert it to a "
                "contiguous CPU array first"
            ) from error
    raise TypeError(
        f"{name}: expected an array, got {type(value).__name__}; wrap it with its dtype, such as "
        f"np.asarray({name}, dtype=np.int32)"
    )


def _exports_buffer(value: object) -> bool:
    try:
        memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
