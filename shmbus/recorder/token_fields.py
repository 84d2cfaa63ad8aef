"""Token ids, logprobs and routed experts of an engine's answer, checked, as arrays.

Sources: vLLM 0.32, vllm/entrypoints/openai/{chat_completion,completion}/protocol.py; SGLang 0.5.23,
sglang/srt/managers/tokenizer_manager.py.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

#: vLLM's value for a missing logprob; the rounding of a probability of 1; the start of an .npy.
_NO_LOGPROB, _ROUNDING = -9999.0, 1e-3
_NPY: Final = b"\x93NUMPY"
#: Characters of base64 decoded in one step: other threads run between two steps.
_STEP: Final = 1 << 20


def token_ids(field: str, found: Any) -> NDArray[np.int32]:
    """Return token ids as an array, after their check."""
    if found is None:
        raise ValueError(
            f"{field}: expected token ids, got none; expected vLLM 0.10.2 or newer, with "
            "return_token_ids, or SGLang 0.5.23 or newer"
        )
    ids = np.asarray(found)
    good = ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids))
    if not good or (len(ids) and not 0 <= ids.min() <= ids.max() <= np.iinfo(np.int32).max):
        got = str(found)[:80]
        raise ValueError(f"{field}: expected a list of token ids, 0 to 2^31 - 1, got {got}")
    return ids.astype(np.int32)


def sampled_logprobs(field: str, found: Sequence[Any], tokens: int) -> NDArray[np.float32]:
    """Return the logprobs of sampled tokens as an array, after their check."""
    if len(found) != tokens:
        raise ValueError(f"{field}: expected {tokens}, one of each token, got {len(found)}")
    values = np.asarray(found, np.float64)
    good = np.isfinite(values) & (values > _NO_LOGPROB) & (values <= _ROUNDING)
    if not good.all():
        at = int(good.argmin())
        raise ValueError(f"{field}[{at}]: expected a finite one, at most 0, got {found[at]}")
    return values.astype(np.float32)


def routed_experts(text: str, tokens: int, layers: int, experts: int) -> NDArray[Any]:
    """Return experts [tokens or tokens - 1, layers, experts]: vLLM's .npy, SGLang's int32.

    The last token, unseen by a forward pass, may lack experts.
    """
    if not text:
        raise ValueError(
            "routed_experts: expected base64, got none; start vLLM with "
            "--enable-return-routed-experts, or SGLang with the flag of that name"
        )
    said, by_columns, dtype, start = None, False, np.dtype(np.int32), 0
    try:
        steps = range(0, len(text), _STEP)
        data = b"".join(base64.b64decode(text[at : at + _STEP], validate=True) for at in steps)
        if data.startswith(_NPY):
            stream = io.BytesIO(data)
            np.lib.format.read_magic(stream)
            said, by_columns, dtype = np.lib.format.read_array_header_1_0(stream)
            start = stream.tell()
    except Exception as error:
        # NumPy reads a head as Python source, whose readers raise errors of their own.
        expected = "an .npy of version 1.0 or int32, in base64"
        raise ValueError(f"routed_experts: expected {expected}: {error}") from error
    size = len(data) - start
    rows, rest = divmod(size, max(1, layers * experts * dtype.itemsize))
    shape = (rows, layers, experts)
    good = dtype.kind in "iu" and not by_columns and said in (None, shape)
    if rest or not good or not tokens - 1 <= rows <= tokens:
        raise ValueError(
            f"routed_experts: expected integers of [{tokens - 1} or {tokens}, {layers}, "
            f"{experts}], got {size} bytes of {dtype} {said or ''}"
        )
    return np.frombuffer(data, dtype, offset=start).reshape(shape)
