"""Meta and dtypes as bytes. shmbus never unpickles.

A dtype travels as its NumPy string (``<i4``). A structured dtype travels as the literal of the .npy
format (numpy.lib.format.dtype_to_descr). A dtype without a NumPy name, like bfloat16, travels by
its own name. The reader takes the dtype from ml_dtypes. Without that package the reader uses
unsigned integers of the same bits, with the dtype's name in ``dtype.metadata["shmbus"]``.
"""

from __future__ import annotations

import ast
import functools
import importlib
import itertools
import os
import sys
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.lib import format as npy_format

_T = TypeVar("_T")

#: Tensor dtypes missing from NumPy, and stand-ins of as many bits.
_STAND_INS: Final = {
    "bfloat16": "<u2",
    "float8_e4m3fn": "|u1",
    "float8_e4m3fnuz": "|u1",
    "float8_e5m2": "|u1",
    "float8_e5m2fnuz": "|u1",
    "float8_e8m0fnu": "|u1",
}
#: Metadata key of a stand-in: the name of the original dtype.
_STANDS_FOR: Final = "shmbus"


def decodable(kind: type[_T]) -> type[_T]:
    """Build msgspec's tables of a class at import: threads that meet in a first decode crash."""
    msgspec.msgpack.Decoder(kind)
    return kind


def _encode_other(value: Any) -> Any:
    """Convert a value of meta to a type known to msgspec."""
    if isinstance(value, np.generic):
        return _plain(value.item(), value)
    if isinstance(value, np.ndarray):
        return _plain(value.tolist(), value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "model_dump"):
        return value.model_dump()
    if hasattr(value, "detach") and hasattr(value, "tolist"):
        return value.detach().tolist()  # a tensor on the CPU or an accelerator
    raise TypeError(f"objects of type {type(value).__name__} are not supported")


def _plain(converted: Any, value: Any) -> Any:
    if type(converted) is type(value) or getattr(value, "dtype", None) == np.dtype(object):
        raise TypeError(f"{type(value).__name__} of {value.dtype} is not supported")
    return converted


#: Most lists and maps inside each other in a meta: every reader decodes as many, however deep its
#: own calls are.
MOST_META_DEPTH: Final = 128
_CONTAINERS: Final = (dict, list, tuple)
#: Bytes of MessagePack that begin no list or map.
_NO_CONTAINERS: Final = bytes({*range(256)} - {*range(0x80, 0xA0), *range(0xDC, 0xE0)})


def _is_too_deep(encoded: bytes, decoded: Any) -> bool:
    """Tell if a value nests deeper than the limit; most encodings hold too few containers."""
    if len(encoded.translate(None, _NO_CONTAINERS)) <= MOST_META_DEPTH:
        return False
    level: list[Any] = [decoded]
    for _ in range(MOST_META_DEPTH):
        level = [
            inner
            for each in level
            if isinstance(each, _CONTAINERS)
            for inner in (itertools.chain(each, each.values()) if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, _CONTAINERS) for each in level)


_encoder = msgspec.msgpack.Encoder(enc_hook=_encode_other)
_decoder = msgspec.msgpack.Decoder()


def encode_meta(meta: object) -> bytes:
    """Encode meta as MessagePack; a TypeError names an unsupported or unreadable value."""
    try:
        encoded = _encoder.encode(meta)
        too_deep = not isinstance(meta, str) and _is_too_deep(encoded, _decoder.decode(encoded))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        # For example a dataclass as a key, which becomes a map, or a Raw without valid MessagePack.
        raise TypeError(
            f"meta: expected what other processes can read, got {type(meta).__name__}: {error}; "
            "use strings or numbers for keys, and put raw bytes as bytes"
        ) from error
    except (TypeError, OverflowError, RuntimeError) as error:
        # RuntimeError: too deep nesting, or PyTorch's error for tensors without readable numbers.
        raise TypeError(
            f"meta: expected what msgspec can encode as MessagePack, got {type(meta).__name__}: "
            f"{error}; put arrays into fields of their own, and convert the rest"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(
            f"meta: expected text that UTF-8 can encode, got surrogates: {error}; encode it with "
            "errors='replace' first"
        ) from error
    if too_deep:
        raise ValueError(
            f"meta: expected at most {MOST_META_DEPTH} lists and maps inside each other, got more, "
            "which a reader may be unable to decode; flatten it, or put it as a JSON string"
        )
    return encoded


def decode_meta(raw: bytes) -> Any:
    """Decode meta; ValueError for bytes outside of MessagePack."""
    try:
        return _decoder.decode(raw)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"meta: its {len(raw)} bytes are damaged: {error}") from error


def encode_dtype(name: str, dtype: np.dtype[Any]) -> bytes:
    """Describe a dtype of fixed size; TypeError for a dtype with Python objects."""
    if dtype.metadata is not None:
        stands_for = dtype.metadata.get(_STANDS_FOR)
        # A user's own text under this key counts for nothing.
        if isinstance(stands_for, str) and _STAND_INS.get(stands_for) == dtype.str:
            return stands_for.encode()
    if dtype.hasobject:
        raise TypeError(
            f"{name}: expected a dtype of fixed size, got {dtype}; objects cannot be shared, "
            "put them into meta"
        )
    if dtype.names is not None or dtype.subdtype is not None:
        return repr(npy_format.dtype_to_descr(dtype)).encode()
    if dtype.kind == "V" and dtype.type is not np.void:
        return str(dtype.name).encode()  # a registered extension like bfloat16
    return str(dtype.str).encode()


#: What literal_eval and dtype raise for a hostile text; a signal's handler may raise anything else.
_OF_A_TEXT = (
    ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, SyntaxError,
    TypeError, ValueError, Warning,
)  # fmt: skip


def decode_dtype(name: str, described: bytes) -> np.dtype[Any]:
    """Rebuild a dtype; TypeError for a dtype unknown to this process."""
    text = described.decode("utf-8", "replace")
    try:
        if text[:1] in "[({":
            dtype = npy_format.descr_to_dtype(ast.literal_eval(text))
        elif text in _STAND_INS:
            dtype = _extension_dtype(text)
        else:
            dtype = np.dtype(text)
    except _OF_A_TEXT as error:
        raise TypeError(
            f"field {name!r}: unknown dtype {text!r} in this process; import the defining package "
            "(ml_dtypes for bfloat16) before reading"
        ) from error
    if dtype.hasobject:
        raise TypeError(f"field {name!r}: dtype {text!r} holds Python objects")
    return dtype


@functools.cache
def _extension_dtype(name: str) -> np.dtype[Any]:
    """Return the dtype of ml_dtypes, or its stand-in; the same object for every use of a name."""
    try:
        known = getattr(importlib.import_module("ml_dtypes"), name, None)
    except ImportError:
        known = None
    # An older ml_dtypes may lack the dtype.
    stand_in = np.dtype(_STAND_INS[name], metadata={_STANDS_FOR: name})
    return stand_in if known is None else np.dtype(known)


def parse_dtype(what: str, given: object) -> np.dtype[Any]:
    """Return the dtype a user means, or raise a TypeError that begins with `what`."""
    try:
        if type(given) is str:
            dtype = _named_dtype(given)
        elif isinstance(given, np.dtype):
            dtype = given
        elif given is None:
            raise TypeError("NumPy takes it for float64")
        else:
            name = str(given)
            dtype = _named_dtype(name) if name.startswith("torch.") else _given_dtype(name, given)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{what}: expected a dtype, got {given!r}: {error}") from error
    if dtype.hasobject or dtype.itemsize == 0:
        raise TypeError(
            f"{what}: expected a dtype of fixed size, got {dtype}; objects cannot be shared"
        )
    return dtype


# NumPy parses a name anew every time, at the cost of all further work on a field.
@functools.lru_cache(maxsize=256)
def _named_dtype(given: str) -> np.dtype[Any]:
    name = given.removeprefix("torch.")
    return _given_dtype(name, name)


def _given_dtype(name: str, given: object) -> np.dtype[Any]:
    return _extension_dtype(name) if name in _STAND_INS else np.dtype(given)  # type: ignore[call-overload]


def dtype_name(dtype: np.dtype[Any]) -> str:
    """Name a dtype readably, in a form `parse_dtype` accepts."""
    if dtype.kind in "biuf" and dtype.isnative and dtype.metadata is None:
        return str(dtype.name)
    return encode_dtype("dtype", dtype).decode()


def as_array(name: str, value: object, declared: bool = False) -> np.ndarray[Any, Any]:
    """Take what exports an array (torch CPU tensor, memoryview, array.array) without a guess."""
    refuse_masked(name, value)
    if isinstance(value, np.generic) or (
        not isinstance(value, (bytes, bytearray, str, list, tuple, dict))
        and (hasattr(value, "__array__") or _exports_buffer(value))
    ):
        try:
            array = _tensor_array(value) if _is_tensor(value) else np.asarray(value)
        except (TypeError, ValueError, RuntimeError) as error:
            advice = "convert it to a contiguous CPU array first"
            if getattr(value, "is_cuda", False):
                advice = "copy it to the host first: .detach().cpu()"
            raise TypeError(
                f"{name}: {type(value).__name__} gives no NumPy array: {error}; {advice}"
            ) from error
        if array.ndim == 0 and not declared:
            _refuse_near(name, value)
        return array
    if not declared:
        _refuse_near(name, value)
    raise TypeError(
        f"{name}: expected an array, got {type(value).__name__}; {_value_advice(name, value)}"
    )


def refuse_masked(name: str, value: object) -> None:
    """Raise TypeError for a masked array: masked elements would count as data."""
    # An array of NumPy itself needs no look at a module that most processes never load.
    if type(value) is np.ndarray or not isinstance(value, np.ndarray):
        return
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected an array, got a {type(value).__name__}, whose mask a field cannot "
            "hold; fill it, as in value.filled(0), and put its mask into a field of its own"
        )


def unknown_field(name: str, names: tuple[str, ...]) -> TypeError:
    """Report a field missing from a schema, with the schema's fields."""
    from shmbus.base.near_names import near, near_argument

    found = next(iter(near(name, names)), None) or near_argument(name)
    hint = "" if found is None else f"; did you mean {found}=?"
    return TypeError(f"{name}: the schema has no such field, only {', '.join(names)}{hint}")


def _is_tensor(value: object) -> bool:
    """Tell if a value comes from PyTorch, without importing torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _tensor_array(tensor: Any) -> np.ndarray[Any, Any]:
    """Make an array of a CPU tensor: without its graph, by its bits if NumPy lacks its dtype."""
    if tensor.requires_grad:
        tensor = tensor.detach()
    try:
        return np.asarray(tensor)
    except TypeError:
        name = str(tensor.dtype).removeprefix("torch.")
        if name not in _STAND_INS:
            raise
    torch = sys.modules["torch"]
    bits = torch.int16 if tensor.element_size() == 2 else torch.uint8
    return np.asarray(tensor.view(bits)).view(_extension_dtype(name))


def _refuse_near(name: str, value: object) -> None:
    # Imported only for a value other than an array: a producer does not load the module.
    from shmbus.base.near_names import near_argument

    near = near_argument(name)
    if near == "advantages":
        near = "advantages=, an array with a number for each token"
    elif near is not None:
        near += "="
    if near is not None:
        raise TypeError(
            f"{name}: expected an array, got {type(value).__name__}; did you mean {near}?"
        )


def _value_advice(name: str, value: object) -> str:
    """Advise the right place for a value other than an array."""
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
    return (
        f"declare its dtype, as in Producer(..., schema={{{name!r}: {dtype!r}, ...}}), or wrap it: "
        f"np.asarray({name}, dtype=np.{dtype})"
    )


def _exports_buffer(value: object) -> bool:
    try:
        memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return True
