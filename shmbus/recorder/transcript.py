"""What a session's calls sampled, joined into rows of one sample. Pure: no clock, no socket.

Invariants:

- A token is trained once at most, and only if the engine sampled it; its logprob is its own.
- A call whose prompt begins with a whole row continues the longest such row; any other begins one.
- Text is never made into tokens here: where the engine's ids differ, they are others.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

_TOKEN: Final = np.dtype(np.int32)
_LOGPROB: Final = np.dtype(np.float32)
#: Bytes of a token in a row: id, logprob, mask.
_TOKEN_BYTES: Final = _TOKEN.itemsize + _LOGPROB.itemsize + 1


class Span(NamedTuple):
    """The oldest and the newest version of the weights that something met."""

    oldest: int
    newest: int

    def join(self, other: Span | None) -> Span:
        """Return what both met."""
        if other is None:
            return self
        return Span(min(self.oldest, other.oldest), max(self.newest, other.newest))


class Turn(NamedTuple):
    """One answer of the engine, after its checks."""

    prompt: NDArray[np.int32]
    output: NDArray[np.int32]
    logprobs: NDArray[np.float32]
    versions: Span
    finish_reason: str = "stop"
    #: What was asked and answered, as a client's next call begins; it tells drift, and is never
    #: trained.
    said: str = ""
    answer: str = ""
    #: [tokens, layers, experts] of all tokens but the last, which no forward pass has seen.
    experts: NDArray[Any] | None = None


class _Row:
    """One row, as bytes that grow."""

    __slots__ = ("experts", "heard", "logprobs", "mask", "prefix", "tokens")

    def __init__(self, prefix: int) -> None:
        self.tokens = bytearray()
        self.mask = bytearray()
        self.logprobs = bytearray()
        self.experts: NDArray[Any] | None = None
        #: Tokens at its begin that an earlier row has too.
        self.prefix = prefix
        #: Length and hash of the conversation up to its last answer.
        self.heard = (0, 0)

    def __len__(self) -> int:
        return len(self.mask)

    def add(self, turn: Turn, prompt: bytes) -> None:
        context = len(turn.prompt) - len(self)
        self.tokens += prompt[len(self.tokens) :]
        self.tokens += turn.output.tobytes()
        self.mask += bytes(context) + b"\1" * len(turn.output)
        self.logprobs += bytes(context * _LOGPROB.itemsize) + turn.logprobs.tobytes()
        if turn.experts is not None:
            self._route(turn.experts)
        text = turn.said + turn.answer
        self.heard = (len(text), hash(text))

    def _route(self, experts: NDArray[Any]) -> None:
        """Keep what routed each token when it was sampled; the last token has none yet."""
        routed = np.zeros((len(self), *experts.shape[1:]), experts.dtype)
        routed[: len(experts)] = experts
        if self.experts is not None:
            known = len(self.experts) - 1
            routed[:known] = self.experts[:known]
        self.experts = routed

    def shared_with(self, prompt: NDArray[np.int32]) -> int:
        """Return how many tokens a prompt begins with that this row begins with."""
        own = np.frombuffer(self.tokens, _TOKEN)
        length = min(len(own), len(prompt))
        differ = np.flatnonzero(own[:length] != prompt[:length])
        return int(differ[0]) if len(differ) else length


class Transcript:
    """The rows of one sample, as its calls end."""

    def __init__(self) -> None:
        self.turns = 0
        self.sampled = 0
        #: Calls that went on with a conversation in words, and not in token ids: the chat template
        #: renders earlier turns differently, or the tokenizer splits their text otherwise.
        self.drift = 0
        self.versions: Span | None = None
        self.finish_reason = ""
        self._rows: list[_Row] = []

    @property
    def tokens(self) -> int:
        """Tokens of all rows."""
        return sum(map(len, self._rows))

    @property
    def nbytes(self) -> int:
        """Bytes that it occupies."""
        routed = sum(row.experts.nbytes for row in self._rows if row.experts is not None)
        return self.tokens * _TOKEN_BYTES + routed

    def add(self, turn: Turn) -> bool:
        """Take an answer; whether it went on with its conversation's tokens, or had none to."""
        self.turns += 1
        self.versions = turn.versions.join(self.versions)
        self.finish_reason = turn.finish_reason
        if not len(turn.output):
            return True
        self.sampled += len(turn.output)
        prompt = turn.prompt.tobytes()
        fitting = [row for row in self._rows if prompt.startswith(row.tokens)]
        if fitting:
            max(fitting, key=len).add(turn, prompt)
            return True
        drifts = any(row.heard[0] and _begins(turn.said, row.heard) for row in self._rows)
        self.drift += drifts
        row = _Row(max((row.shared_with(turn.prompt) for row in self._rows), default=0))
        row.add(turn, prompt)
        self._rows.append(row)
        return not drifts

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as `Producer.put` takes them: each has a sampled token."""
        found = []
        for row in self._rows:
            fields = {
                "tokens": np.frombuffer(bytes(row.tokens), _TOKEN),
                "loss_mask": np.frombuffer(bytes(row.mask), np.uint8),
                "logprobs": np.frombuffer(bytes(row.logprobs), _LOGPROB),
                "prefix_length": row.prefix,
            }
            if row.experts is not None:
                fields["routed_experts"] = row.experts
            found.append(fields)
        return found


def _begins(text: str, heard: tuple[int, int]) -> bool:
    """Whether a conversation begins with one that was heard."""
    length, digest = heard
    return len(text) >= length and hash(text[:length]) == digest
