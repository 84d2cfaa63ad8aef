"""Sampled tokens of a session's calls, joined into rows of one sample. Pure: no clock, no socket.

Invariants:

- A token is trained once at most, and only if sampled by the engine, with its own logprob.
- A call with a whole row at the start of its prompt continues the longest such row; any other call
  begins a row.
- Text is never tokenized here: different ids from the engine count as different tokens.
- Rows form a tree: a row holds the tokens behind its prefix, and its parent holds the prefix.
- A call compares each token of the tree with the prompt once at most.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shmbus.handles.session import Branch, join_branches

_TOKEN: Final = np.dtype(np.int32)
_LOGPROB: Final = np.dtype(np.float32)
#: Bytes of a token in a row: id, logprob, mask.
_TOKEN_BYTES: Final = _TOKEN.itemsize + _LOGPROB.itemsize + 1
#: Tokens of the first comparison with a row; each further comparison doubles the total.
_FIRST_LOOK: Final = 256


class Span(NamedTuple):
    """The oldest and the newest version of the weights met."""

    oldest: int
    newest: int

    def join(self, other: Span | None) -> Span:
        """Return the union of two spans."""
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
    #: Question and answer, in the form of a client's next call; used to detect drift, never
    #: trained.
    said: str = ""
    answer: str = ""
    #: [tokens, layers, experts] of every token except the last, unseen by a forward pass.
    experts: NDArray[Any] | None = None
    #: Sampling options of the call, by name.
    sampling: Mapping[str, float] = {}
    #: True for tokens limited by a grammar; True for trained tokens.
    grammar: bool = False
    trained: bool = True


class Recorded:
    """An answer in the transcript, and the state of its row before the answer."""

    __slots__ = (
        "begin", "context_end", "drifts", "finish_reason", "grammar", "heard", "row", "sampled",
        "sampling", "versions",
    )  # fmt: skip

    def __init__(self, turn: Turn) -> None:
        self.sampled = len(turn.output)
        self.versions, self.finish_reason = turn.versions, turn.finish_reason
        self.sampling, self.grammar = turn.sampling, turn.grammar
        self.drifts = False
        self.row: _Row | None = None
        #: Positions in the row: end of the row before the call, end of the prompt.
        self.begin = self.context_end = 0
        self.heard = (0, b"")


class _Row:
    """One row: its parent's first `prefix` tokens, then its own, as growing bytes."""

    __slots__ = ("experts", "heard", "last", "logprobs", "mask", "parent", "prefix", "tokens")

    def __init__(self, parent: _Row | None, prefix: int) -> None:
        self.parent = parent
        #: Tokens shared with the parent.
        self.prefix = prefix
        self.tokens = bytearray()
        self.mask = bytearray()
        self.logprobs = bytearray()
        #: Routed experts of its own tokens, in consecutive arrays.
        self.experts: list[NDArray[Any]] = []
        #: Length and digest of the conversation up to its last answer.
        self.heard = (0, b"")
        #: The last answer, if an undo is possible.
        self.last: Recorded | None = None

    @property
    def end(self) -> int:
        """Tokens of the row with its prefix."""
        return self.prefix + len(self.mask)

    @property
    def routed(self) -> int:
        """Own tokens with known routed experts."""
        return sum(map(len, self.experts))

    def add(self, turn: Turn, recorded: Recorded) -> None:
        recorded.row, recorded.begin, recorded.context_end = self, self.end, len(turn.prompt)
        recorded.heard, self.last = self.heard, recorded
        context = turn.prompt[self.end :]
        self.tokens += context.data
        self.tokens += turn.output.data
        self.mask += bytes(len(context)) + bytes([turn.trained]) * len(turn.output)
        self.logprobs += bytes(len(context) * _LOGPROB.itemsize)
        self.logprobs += turn.logprobs.data
        if turn.experts is not None:
            self.experts.append(turn.experts[self.prefix + self.routed :].copy())
        text = turn.said + turn.answer
        self.heard = len(text), _digests(text, [len(text)])[len(text)]

    def cut(self, end: int) -> None:
        keep = end - self.prefix
        del self.tokens[keep * _TOKEN.itemsize :]
        del self.logprobs[keep * _LOGPROB.itemsize :]
        del self.mask[keep:]
        known = [np.concatenate(self.experts)[:keep]] if self.experts else []
        self.experts = known

    def adopt(self, child: _Row, begin: int) -> None:
        """Append a branch at the end of this row; the branch's prompt begins at `begin`."""
        assert child.prefix == self.end
        if child.last is not None and child.last.begin == child.prefix:
            child.last.begin, child.last.heard = begin, self.heard
        self.tokens += child.tokens
        self.mask += child.mask
        self.logprobs += child.logprobs
        self.experts += child.experts
        self.heard, self.last = child.heard, child.last
        if child.last is not None:
            child.last.row = self

    def fields(self) -> dict[str, NDArray[Any]]:
        fields: dict[str, NDArray[Any]] = {
            "tokens": np.frombuffer(bytes(self.tokens), _TOKEN),
            "loss_mask": np.frombuffer(bytes(self.mask), np.uint8),
            "logprobs": np.frombuffer(bytes(self.logprobs), _LOGPROB),
        }
        if self.experts:
            known = np.concatenate(self.experts)
            routed = np.zeros((len(self.mask), *known.shape[1:]), known.dtype)
            routed[: len(known)] = known
            fields["routed_experts"] = routed
        return fields

    def shared_with(self, prompt: NDArray[np.int32]) -> int:
        """Count the tokens behind the prefix shared with a prompt, in time linear in the count."""
        own, others = np.frombuffer(self.tokens, _TOKEN), prompt[self.prefix :]
        length = min(len(own), len(others))
        same = 0
        while same < length:
            stop = min(length, max(_FIRST_LOOK, 2 * same))
            differ = np.flatnonzero(own[same:stop] != others[same:stop])
            if len(differ):
                return same + int(differ[0])
            same = stop
        return length


class Transcript:
    """The rows of one sample, as its calls end."""

    def __init__(self) -> None:
        #: The answers, in order.
        self.recorded: list[Recorded] = []
        self.versions: Span | None = None
        self._rows: list[_Row] = []

    @property
    def turns(self) -> int:
        """Answers of calls."""
        return len(self.recorded)

    @property
    def sampled(self) -> int:
        """Tokens sampled by the engine."""
        return sum(each.sampled for each in self.recorded)

    @property
    def drift(self) -> int:
        """Calls that went on with a conversation in words, and not in token ids.

        The chat template renders earlier turns differently, or the tokenizer splits their text
        otherwise.
        """
        return sum(each.drifts for each in self.recorded)

    @property
    def finish_reason(self) -> str:
        """Why the last answer ended."""
        return self.recorded[-1].finish_reason if self.recorded else ""

    @property
    def tokens(self) -> int:
        """Tokens of the rows; a shared prefix counts once."""
        return sum(len(row.mask) for row in self._rows)

    @property
    def nbytes(self) -> int:
        """Bytes of the transcript."""
        routed = sum(each.nbytes for row in self._rows for each in row.experts)
        return self.tokens * _TOKEN_BYTES + routed

    def add(self, turn: Turn) -> bool:
        """Take an answer; False if it drifts from its conversation's tokens."""
        recorded = Recorded(turn)
        self.recorded.append(recorded)
        self.versions = turn.versions.join(self.versions)
        if not len(turn.output):
            return True
        shared = self._shared_with(turn.prompt)
        fitting = [row for row in self._rows if shared[row] == row.end]
        if fitting:
            max(fitting, key=lambda row: row.end).add(turn, recorded)
            return True
        recorded.drifts = self._goes_on(turn.said)
        parent = max(self._rows, key=shared.__getitem__, default=None)
        prefix = 0 if parent is None else shared[parent]
        while parent is not None and prefix <= parent.prefix:
            parent = parent.parent
        row = _Row(parent, prefix)
        row.add(turn, recorded)
        self._rows.append(row)
        return not recorded.drifts

    def _shared_with(self, prompt: NDArray[np.int32]) -> dict[_Row, int]:
        """Return the length of the common prefix of each row and a prompt."""
        shared: dict[_Row, int] = {}
        for row in self._rows:
            of_parent = row.prefix if row.parent is None else shared[row.parent]
            shared[row] = (
                of_parent if of_parent < row.prefix else row.prefix + row.shared_with(prompt)
            )
        return shared

    def _goes_on(self, said: str) -> bool:
        """Check a conversation for the words of a row at its begin."""
        heard = [row.heard for row in self._rows if 0 < row.heard[0] <= len(said)]
        digests = _digests(said, (length for length, _ in heard))
        return any(digests[length] == digest for length, digest in heard)

    def undo(self, recorded: Recorded) -> bool:
        """Remove an answer; False if a later call continues the answer."""
        row = recorded.row
        if recorded not in self.recorded:
            return False
        if row is not None:
            if row.last is not recorded:
                return False
            branches = [
                each for each in self._rows if each.parent is row and each.prefix > recorded.begin
            ]
            longest = max(branches, key=lambda each: each.prefix, default=None)
            if longest is not None and longest.prefix > recorded.context_end:
                return False
            self._take_out(row, recorded, longest)
        self.recorded.remove(recorded)
        self.versions = None
        for each in self.recorded:
            self.versions = each.versions.join(self.versions)
        return True

    def _take_out(self, row: _Row, recorded: Recorded, branch: _Row | None) -> None:
        """Shorten a row by its last answer; a branch from the answer's prompt continues the row."""
        if branch is None:
            row.cut(recorded.begin)
            row.heard, row.last = recorded.heard, None
            if not row.mask:
                self._rows.remove(row)
            return
        row.cut(branch.prefix)
        row.heard = recorded.heard
        row.adopt(branch, recorded.begin)
        self._rows.remove(branch)
        for each in self._rows:
            if each.parent is branch:
                each.parent = row

    def branches(self) -> list[Branch]:
        """Return the rows as a tree: each contains a sampled token."""
        numbers = {row: number for number, row in enumerate(self._rows)}
        return [
            Branch(None if row.parent is None else numbers[row.parent], row.prefix, row.fields())
            for row in self._rows
        ]

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows as `Producer.put` takes them."""
        return join_branches(self.branches())

    def sampling(self) -> dict[str, list[float]]:
        """Return [least, largest] value of each sampling option of the calls."""
        found: dict[str, list[float]] = {}
        for each in self.recorded:
            for name, value in each.sampling.items():
                low, high = found.get(name, (value, value))
                found[name] = [min(low, value), max(high, value)]
        return found

    @property
    def grammar_tokens(self) -> int:
        """Tokens sampled under a grammar."""
        return sum(each.sampled for each in self.recorded if each.grammar)


def _digests(text: str, lengths: Iterable[int]) -> dict[int, bytes]:
    """Return digests of a text's beginnings, by their lengths, in one pass over the text."""
    found: dict[int, bytes] = {}
    state, at = hashlib.blake2b(digest_size=8), 0
    for length in sorted(set(lengths)):
        state.update(text[at:length].encode("utf-8", "surrogatepass"))
        at, found[length] = length, state.digest()
    return found
