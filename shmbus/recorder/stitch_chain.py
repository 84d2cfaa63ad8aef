"""Sampled answers of a session as chains of token ids, found by their messages. Pure: no socket.

Invariants:

- A client's message equals a kept answer only with the same words and calls. Whitespace at both
  ends, the form of a call's arguments and missing thoughts may differ.
- All messages before the answer are equal, field by field.
- The ids of a link are prompt and output as reported by the engine.
"""

from __future__ import annotations

import hashlib
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from shmbus.recorder.engine_api import Said, arguments_of, calls_of, text_of
from shmbus.recorder.transcript import Turn

Ids = NDArray[np.int32]

#: Bytes of a link beside its ids: objects of Python.
_LINK_BYTES: Final = 512
#: Fields of a call without influence on the rendered prompt.
_FREE: Final = frozenset({
    "allowed_token_ids", "bad_words", "cache_salt", "ebnf", "extra_key", "frequency_penalty",
    "guided_choice", "guided_grammar", "guided_json", "guided_regex", "ignore_eos",
    "include_reasoning", "include_stop_str_in_output", "json_schema", "length_penalty",
    "logit_bias", "logprobs", "max_completion_tokens", "max_tokens", "messages", "metadata",
    "min_p", "min_tokens", "n", "parallel_tool_calls", "presence_penalty", "priority",
    "prompt_cache_key", "prompt_logprobs", "regex", "repetition_penalty", "request_id",
    "return_token_ids", "return_tokens_as_token_ids", "rid", "seed", "service_tier", "session_id",
    "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "store",
    "stream", "stream_options", "structural_tag", "structured_outputs", "temperature",
    "thinking_token_budget", "top_k", "top_logprobs", "top_p", "user",
})  # fmt: skip

_encode = msgspec.json.Encoder(order="sorted").encode


class Root(NamedTuple):
    """The first call of a chain: its messages, prompt, and rendering options."""

    messages: int
    prompt: Ids
    options: bytes
    #: Kinds of turns whose bridge agreed with the full rendering.
    verified: set[object]


class Link(NamedTuple):
    """An answer, behind the link continued by its prompt."""

    root: Root
    before: Link | None
    #: Ids behind those of `before`: context, then output.
    added: Ids
    #: Length of all ids.
    end: int
    said: Said
    #: True if the engine told thoughts apart anywhere in the chain.
    thinks: bool

    def ids(self) -> Ids:
        """Return prompt and output."""
        parts, link = [self.added], self.before
        while link is not None:
            parts.append(link.added)
            link = link.before
        return np.concatenate(parts[::-1])


def options_of(call: dict[str, Any]) -> bytes:
    """Return a digest of the fields with influence on the rendered prompt."""
    return _digest(_encode({name: call[name] for name in call.keys() - _FREE}))


class Chains:
    """The answers of one session."""

    def __init__(self) -> None:
        self._links: dict[bytes, Link] = {}
        self.nbytes = 0

    def __bool__(self) -> bool:
        return bool(self._links)

    def keep(
        self, call: dict[str, Any], messages: bytes, turn: Turn, said: Said, before: Link | None
    ) -> bytes:
        """Keep the answer of a call, with its messages' digest, on its chain or as a new chain."""
        known = 0 if before is None else before.end
        added = np.concatenate([turn.prompt[known:], turn.output])
        if before is None:
            prompt = added[: len(turn.prompt)]
            root = Root(len(call["messages"]), prompt, options_of(call), set())
        else:
            root = before.root
        thinks = bool(said.thought) or (before is not None and before.thinks)
        place = _digest(_words(said.text, said.calls), messages)
        self.drop([place])
        self._links[place] = Link(root, before, added, known + len(added), said, thinks)
        self.nbytes += added.nbytes + _LINK_BYTES
        return place

    def drop(self, places: list[bytes]) -> None:
        """Forget answers; chains behind them stay whole."""
        for place in places:
            link = self._links.pop(place, None)
            if link is not None:
                self.nbytes -= link.added.nbytes + _LINK_BYTES

    def walk(self, messages: list[dict[str, Any]]) -> tuple[bytes, Link | None, int]:
        """Return the digest of messages, and the last kept answer among them with its end."""
        state, found, end = b"", None, 0
        for number, message in enumerate(messages, 1):
            if message.get("role") == "assistant":
                said = _digest(_words(text_of(message.get("content")), calls_of(message)), state)
                link = self._links.get(said)
                if link is not None and _thought_of(message) in ("", link.said.thought.strip()):
                    state, found, end = said, link, number
                    continue
            state = _digest(_encode(message), state)
        return state, found, end


def _digest(data: bytes, before: bytes = b"") -> bytes:
    return hashlib.blake2b(data, key=before, digest_size=16).digest()


def _words(text: str, calls: list[tuple[Any, Any]]) -> bytes:
    # No message of JSON begins like these.
    words = ["", text.strip()]
    for name, arguments in calls:
        words += [str(name), arguments_of(arguments or "{}")]
    return "\x1f".join(words).encode("utf-8", "surrogatepass")


def _thought_of(message: dict[str, Any]) -> str:
    return str(message.get("reasoning") or message.get("reasoning_content") or "").strip()
