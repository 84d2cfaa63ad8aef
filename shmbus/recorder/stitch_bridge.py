"""Token ids between two answers of a conversation, cut out of renderings. Pure: ids and messages.

Two stand-ins replace the last answer of a conversation, and differ in one word. The equal ends of
their renderings begin inside or right behind the answer's turn.

Invariants:

- A bridge holds only ids rendered by the engine's own template, behind the last answer.
- The end token of the answer stands in the bridge only if the engine did not sample the token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec
import numpy as np

from shmbus.recorder.stitch_chain import Ids

#: Begin of every small conversation.
OPENING: Final = {"role": "user", "content": "a"}
#: Words of stand-ins. A template whose turn merges with the word's last character is unstable.
WORDS: Final = ("a", "b", ".", "0")


def stand_in(word: str, answer: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return an answer of one word, or an answer's calls with the word as last argument."""
    if answer is None:
        return {"role": "assistant", "content": word}
    *calls, last = answer["tool_calls"]
    arguments = msgspec.json.encode({"a": word}).decode()
    last = {**last, "function": {**last["function"], "arguments": arguments}}
    return {"role": "assistant", "content": "", "tool_calls": [*calls, last]}


def equal_end(rendered: Sequence[Ids]) -> Ids:
    """Return the longest common suffix."""
    least = min(map(len, rendered))
    if not least:
        return rendered[0][:0]
    ends = np.stack([each[len(each) - least :] for each in rendered])
    differ = np.flatnonzero((ends != ends[0]).any(axis=0))
    return ends[0, differ[-1] + 1 :] if len(differ) else ends[0]


def bridge(end: Ids, behind: Ids, last: int, is_closed: bool) -> Ids | None:
    """Return the ids between an answer and the next answer, or None without a certain bridge.

    `end`: the end of the answer's turn. `behind`: the same, with new messages and the next turn's
    begin. `last`: last id of the answer. `is_closed`: the engine sampled the end of the turn.
    """
    assert len(behind) > len(end)
    if not is_closed:
        return behind[int(behind[0] == last) :]
    places = np.flatnonzero(end == last)
    if len(places):
        return behind[places[0] + 1 :]
    # In some templates the next role's first token ends a turn.
    return behind[len(end) + 1 :] if behind[len(end)] == last else None


def begins(ids: Ids, head: Ids) -> bool:
    """Return whether ids begin with a head."""
    return len(head) <= len(ids) and bool((ids[: len(head)] == head).all())


def ends(ids: Ids, tail: Ids) -> bool:
    """Return whether ids end with a tail."""
    return len(tail) <= len(ids) and bool((ids[len(ids) - len(tail) :] == tail).all())
