"""What vLLM and SGLang answer over HTTP, straight into the arrays of a record.

Sources: vLLM 0.32, vllm/entrypoints/openai/{chat_completion,completion}/protocol.py; SGLang 0.5.23,
sglang/srt/managers/tokenizer_manager.py (`/generate`).

Invariant: routed experts, megabytes a sample, are decoded once, from the body to their place.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Sequence
from typing import Any, Final, Union

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus_ext import _core

__all__ = ["decode_answers"]

#: vLLM's value for a missing logprob; the rounding of a probability of 1; the start of an .npy.
_NO_LOGPROB, _ROUNDING = -9999.0, 1e-3
_NPY, _HEAD_BYTES = b"\x93NUMPY", 384
#: SGLang's logprob, id and text of a token.
_Triple = tuple[float, int, Any]


class _Token(msgspec.Struct, gc=False):
    token: str
    logprob: float
    top_logprobs: list[_Token] = []


class _Logprobs(msgspec.Struct):
    content: list[_Token] | None = None
    token_logprobs: list[float] = []
    top_logprobs: list[dict[str, float]] | None = None


class _Meta(msgspec.Struct):
    finish_reason: dict[str, Any] = {}
    output_token_logprobs: list[_Triple] = []
    output_top_logprobs: list[list[_Triple]] = []
    routed_experts: msgspec.Raw = msgspec.Raw()


class _Answer(msgspec.Struct):
    """A choice of vLLM's, an answer of SGLang's, with `meta_info`, or a body of choices."""

    finish_reason: str | None = None
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    output_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    routed_experts: msgspec.Raw = msgspec.Raw()
    meta_info: _Meta | None = None
    choices: list[_Answer] | None = None


_read: Final = msgspec.json.Decoder(Union[_Answer, list[_Answer]]).decode  # noqa: UP007


class RoutedExperts:
    """Routed experts in base64: vLLM's of an .npy, SGLang's of plain int32."""

    name: Final = "routed_experts"

    def __init__(self, text: Any, tokens: int, layers: int, experts: int) -> None:
        self._text = text = memoryview(text)
        if len(text) < 4:
            raise ValueError(
                f"{self.name}: expected base64, got none; start vLLM with "
                "--enable-return-routed-experts, or SGLang with the flag of that name"
            )
        count = len(text) // 4 * 3 - bytes(text[-2:]).count(b"=")
        head = bytearray(min(_HEAD_BYTES, count))
        _core.decode_base64(self.name, text, 0, head)
        said, by_columns, self.dtype, stream = None, False, np.dtype(np.int32), io.BytesIO(head)
        try:
            if head.startswith(_NPY):
                np.lib.format.read_magic(stream)
                said, by_columns, self.dtype = np.lib.format.read_array_header_1_0(stream)
        except Exception as error:
            # NumPy reads a head as Python source, whose readers raise errors of their own.
            raise ValueError(f"{self.name}: expected an .npy of version 1.0: {error}") from error
        self._start, row = stream.tell(), layers * experts * self.dtype.itemsize
        rows, rest = divmod(count - self._start, max(1, row))
        self.shape = (rows, layers, experts)
        # The last token, unseen by a forward pass, may lack experts.
        good = self.dtype.kind in "iu" and not by_columns and said in (None, self.shape)
        if rest or not good or not tokens - 1 <= rows <= tokens:
            raise ValueError(
                f"{self.name}: expected integers of [{tokens - 1} or {tokens}, {layers}, "
                f"{experts}], got {count - self._start} bytes of {self.dtype} {said or ''}"
            )

    def decode_into(self, out: NDArray[Any]) -> None:
        """Fill an array of at least as many rows; further rows become 0."""
        same = out.dtype == self.dtype and out.flags.c_contiguous
        rows, out[self.shape[0] :] = self.shape[0], 0
        part = out[:rows] if same else np.empty(self.shape, self.dtype)
        _core.decode_base64(self.name, self._text, self._start, part)
        if not same:
            low, high = part.min(initial=0), part.max(initial=0)
            if low < 0 or high > np.iinfo(out.dtype).max:
                held = f"what {out.dtype} holds, got {low} to {high}"
                raise ValueError(f"{self.name}: expected {held}")
            out[:rows] = part


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


def _sampled(answer: _Answer, tokens: int, k: int) -> dict[str, NDArray[Any]]:
    """Return an answer's values for each sampled token, without its experts."""
    top: list[list[tuple[Any, float]]]
    meta, said = answer.meta_info, answer.logprobs or _Logprobs()
    if meta is not None:
        logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
        top = [[(token, logprob) for logprob, token, _ in row] for row in meta.output_top_logprobs]
    elif said.content is not None:
        logprobs = [each.logprob for each in said.content]
        top = [[(each.token, each.logprob) for each in row.top_logprobs] for row in said.content]
    else:
        logprobs, top = said.token_logprobs, [list(row.items()) for row in said.top_logprobs or []]
    found: dict[str, Any] = {"logprobs": sampled_logprobs("logprobs", logprobs, tokens)}
    if k:
        fewest = min(map(len, top), default=0)
        if len(top) != tokens or fewest < k:
            got = f"{fewest} of each of {len(top)}"
            raise ValueError(f"top_logprobs: expected {k} of each of {tokens} tokens, got {got}")
        pairs = [pair for row in top for pair in row[:k]]
        try:
            ids = [int(str(name).removeprefix("token_id:")) for name, _ in pairs]
        except ValueError as error:
            raise ValueError(
                f"top_logprobs: expected ids, as return_tokens_as_token_ids has them: {error}"
            ) from error
        found["top_ids"] = token_ids("top_logprobs", ids).reshape(-1, k)
        values = np.asarray([logprob for _, logprob in pairs], np.float32)
        found["top_logprobs"] = values.reshape(-1, k)
    return found


def decode_answers(
    body: bytes,
    make: Callable[[int, dict[str, Any]], Any] | None = None,
    *,
    prompt: Sequence[int] | NDArray[Any] | None = None,
    experts: tuple[int, int] | None = None,
    top_logprobs: int = 0,
) -> list[tuple[Any, str]]:
    """Decode a whole answer of vLLM's completions and chat, or SGLang's `/generate`.

    Parameters
    ----------
    body : bytes
        JSON of an engine asked for logprobs; vLLM for `return_token_ids`, too.
    make : callable, optional
        ``make(choice, fields)`` returns a mapping with the arrays of a choice, for example a
        `Reservation` with these `fields`. By default the arrays are new, for `Producer.put`.
    prompt : sequence of int, optional
        Token ids of the prompt, missing from SGLang's answers.
    experts : (layers, experts of a token), optional
        For an engine started with ``--enable-return-routed-experts``.
    top_logprobs : int, default 0
        Number of top tokens to decode for each token, the engine's first; vLLM reports their ids
        with `return_tokens_as_token_ids`.

    Returns
    -------
    list of (arrays, finish_reason)
        By choice. For n tokens of prompt and answer: tokens [n] int32; loss_mask [n] uint8, 1 for
        sampled tokens; logprobs [n] float32, natural; routed_experts [n, layers, experts], in the
        engine's dtype or that of `make`, 0 for a last token without experts; top_ids [n, k] int32
        and top_logprobs [n, k] float32. A prompt's logprobs and top values are 0.

    Raises
    ------
    ValueError
        The body, or a named field, is malformed; the mapping from `make` stays unfinished.
    """
    try:
        read = _read(body)
    except msgspec.DecodeError as error:
        at = int((re.findall(r"byte (\d+)", str(error)) or ["0"])[0])
        near = bytes(body[max(0, at - 40) : at + 20])
        raise ValueError(f"body: expected an engine's answer: {error}, near {near!r}") from error
    answers = []
    listed = read if isinstance(read, list) else read.choices
    for number, answer in enumerate([read] if listed is None else listed):
        told, meta = answer.prompt_token_ids, answer.meta_info
        if told is None and isinstance(read, _Answer):
            told = read.prompt_token_ids
        before = token_ids("prompt_token_ids", told if prompt is None else prompt)
        field = "token_ids" if meta is None else "output_ids"
        output = token_ids(field, getattr(answer, field))
        start, count = len(before), len(before) + len(output)
        found = _sampled(answer, len(output), top_logprobs)
        found |= {"tokens": output, "loss_mask": np.ones(len(output), np.uint8)}
        fields = {name: (each.dtype, (count, *each.shape[1:])) for name, each in found.items()}
        if experts is not None:
            text = memoryview((meta or answer).routed_experts)[1:-1]
            routed = RoutedExperts(text, count, *experts)
            fields[routed.name] = routed.dtype, (count, *experts)
        arrays: Any = {} if make is None else make(number, fields)
        if make is None:
            arrays = {name: np.empty(shape, dtype) for name, (dtype, shape) in fields.items()}
        for name, values in found.items():
            arrays[name][:start], arrays[name][start:] = 0, values
        arrays["tokens"][:start] = before
        if experts is not None:
            routed.decode_into(arrays[routed.name])
        reason = answer.finish_reason if meta is None else meta.finish_reason.get("type")
        answers.append((arrays, str(reason)))
    return answers
