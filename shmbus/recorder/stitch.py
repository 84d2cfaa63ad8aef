"""Prompts of token ids for the calls of a conversation: sampled ids, a bridge, and new messages.

A stitched call gives the engine ids for its messages: prompt and answer of the call before, as the
engine reported them, and the engine's own rendering of the new messages. The bridge between two
answers is cut out of renderings with two stand-ins for the last answer, which differ in one word:
the equal ends begin inside or right behind the answer's turn. Any other call is rendered
by the engine, as without stitching. Sources: `_reused_prompt_token_ids` in
vllm/renderers/online_renderer.py of vLLM 0.32, which also parses and streams the answer;
`ChatCompletionRequest.input_ids` in sglang/srt/entrypoints/openai/protocol.py of SGLang 0.5.23.

Invariants:

- A stitched prompt begins with the ids of a kept answer and ends with the engine's rendering.
- A bridge holds only ids rendered by the engine's own template, behind the last answer. The end
  token of the answer stands in the bridge only if the engine did not sample the token.
- Each kind of turn is stitched in a chain only after a comparison with the full rendering.
- An engine's answer to other ids than the sent ids ends stitching for that engine.
- Doubt never fails a call: the engine renders the messages.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple

import aiohttp
import msgspec
import numpy as np

from shmbus.recorder import settings as limits
from shmbus.recorder.engine_api import Said
from shmbus.recorder.engines import Engine, EngineGone, Engines
from shmbus.recorder.sampling import has_grammar
from shmbus.recorder.sessions import Answer, Session, Sessions
from shmbus.recorder.stitch_chain import Ids, Link, options_of
from shmbus.recorder.token_fields import token_ids
from shmbus.recorder.transcript import Turn

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


logger = logging.getLogger(__name__)

#: Fields of a call for the rendering of its messages.
_RENDERED: Final = (
    "model", "tools", "tool_choice", "chat_template", "chat_template_kwargs", "add_special_tokens",
    "documents", "reasoning_effort", "mm_processor_kwargs", "media_io_kwargs",
)  # fmt: skip
#: Fields that change a prompt beyond its messages.
_UNFIT: Final = (
    "kv_transfer_params", "input_ids", "echo", "truncate_prompt_tokens", "continue_final_message",
)  # fmt: skip
#: Statuses of an engine without the endpoint of renderings.
_MISSING: Final = frozenset({401, 403, 404, 405, 501})
_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
#: Failures in succession after which a kind of turn is in doubt.
_FAILURES: Final = 3
#: Most remembered kinds of turns without a bridge, and ends of turns; beyond, both start afresh.
_MOST_KINDS: Final = 4096


class Place(NamedTuple):
    """The place of a call behind its session's answers."""

    #: Digest of the call's messages.
    messages: bytes
    #: Continued answer, and the stitched prompt; None for a prompt rendered by the engine.
    link: Link | None = None
    ids: Ids | None = None

    @property
    def at_once(self) -> bool:
        """True for an answer without a stream.

        The engine's parser may take thoughts in the prompt for the end of the answer's thoughts.
        """
        return self.link is not None and self.link.thinks


class _Unstitched(Exception):
    """The engine renders this call; with a word for the reason."""

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.how = how


class _Kind(NamedTuple):
    """A kind of turn: everything of a bridge except words."""

    engine: str
    options: bytes
    #: Roles of the new messages; True if the first is a tool's result.
    roles: tuple[Any, ...]
    has_results: bool
    is_closed: bool


class Stitcher:
    """Prompts for the calls of all sessions."""

    def __init__(self, engines: Engines, sessions: Sessions) -> None:
        self._engines = engines
        self._sessions = sessions
        #: Chat calls by the origin of their prompts.
        self.counts: Counter[str] = Counter()
        #: Engines without stitching and kinds of turns without a bridge, until a time.
        self._doubted: dict[object, float] = {}
        #: Failures in succession of kinds of turns: a conversation may fail for its own words.
        self._failed: Counter[_Kind] = Counter()
        #: Told reasons, by engine.
        self._told: set[tuple[str, str]] = set()
        #: Stable ends of a worded turn, by engine and rendering options.
        self._ends: dict[tuple[str, bytes], Ids] = {}

    async def place(self, session: Session, engine: Engine, call: dict[str, Any]) -> Place | None:
        """Return the place of a chat call; None for a call without place, never continued."""
        messages: Any = call.get("messages")
        if not _are_messages(messages):
            return None  # the engine refuses the call
        if self._doubts(engine.url):
            self.counts["engine"] += 1
            return None
        digest, link, begun = session.chains.walk(messages)
        try:
            if not session.chains or not any(each.get("role") == "assistant" for each in messages):
                raise _Unstitched("start")
            if link is None:
                raise _Unstitched("history")
            ids = await asyncio.wait_for(self._prompt(engine, call, link, begun), limits.STITCH_S)
        except _Unstitched as reason:
            self.counts[reason.how] += 1
            return Place(digest)
        except (EngineGone, aiohttp.ClientError, OSError, asyncio.TimeoutError) as error:
            self.counts["unanswered"] += 1
            if isinstance(error, asyncio.TimeoutError):
                why = f"/tokenize did not answer within {limits.STITCH_S:g} s"
                self._doubt(engine, "unanswered", engine.url, why, limits.STITCH_BUSY_S)
            return Place(digest)
        return Place(digest, link, ids)

    def answered(
        self, answer: Answer | None, engine: Engine, call: dict[str, Any], place: Place | None,
        turns: Sequence[Turn], said: Iterable[Said],
    ) -> None:  # fmt: skip
        """Keep a chat call's answers for later calls."""
        if place is None or answer is None:
            return
        link = place.link
        if place.ids is not None:
            stitched = np.array_equal(place.ids, turns[0].prompt)
            self.counts["stitched" if stitched else "engine"] += 1
            if not stitched:
                self._doubt(engine, "engine", engine.url, "messages are rendered in place of ids")
                link = None
        for turn, words in zip(turns, said, strict=True):
            if len(turn.output) and turn.finish_reason in ("stop", "length", "tool_calls"):
                self._sessions.chain(answer, call, place.messages, turn, words, link)

    # -- doubt ----------------------------------------------------------------------------------

    def _doubts(self, what: object) -> bool:
        return self._doubted.get(what, 0.0) > time.monotonic()

    def _doubt(
        self, engine: Engine, how: str, what: object, why: str,
        seconds: float = limits.STITCH_AGAIN_S,
    ) -> _Unstitched:  # fmt: skip
        """Leave an engine or a kind of turn unstitched for a time."""
        if len(self._doubted) >= _MOST_KINDS:
            self._doubted.clear()
        self._doubted[what] = time.monotonic() + seconds
        return self._unstitched(engine, how, why)

    def _unstitched(self, engine: Engine, how: str, why: str) -> _Unstitched:
        if (engine.url, how) not in self._told:
            self._told.add((engine.url, how))
            logger.warning("engine %s: %s; a drift begins a row there", engine.url, why)
        return _Unstitched(how)

    # -- a prompt -------------------------------------------------------------------------------

    async def _prompt(self, engine: Engine, call: dict[str, Any], link: Link, begun: int) -> Ids:
        messages = call["messages"]
        roles = tuple(each.get("role") for each in messages[begun:])
        if not roles or "assistant" in roles:
            raise _Unstitched("history")
        if not all(map(_is_text, messages)):
            raise _Unstitched("media")
        options = options_of(call)
        unfit = any(call.get(name) for name in _UNFIT) or call.get("add_generation_prompt") is False
        if unfit or options != link.root.options:
            raise _Unstitched("options")
        if link.thinks and has_grammar(call, strict_tools=engine.kind == "sglang"):
            # Thoughts in the prompt would begin the grammar before the answer's own thoughts end.
            raise _Unstitched("grammar")
        kind = _Kind(engine.url, options, roles, roles[0] == "tool", link.said.is_closed)
        if self._doubts(kind):
            raise _Unstitched("template")
        before = link.ids()
        turn = await self._turn(engine, call, begun, kind)
        added = None if turn is None else bridge(*turn, int(before[-1]), kind.is_closed)
        if turn is not None and added is None:
            why = f"an answer ended with token {before[-1]}, its turn under the chat template not"
            raise self._unstitched(engine, "end", why)
        # An end of the turn sampled by the engine is rendered, too.
        shown = added if added is None or not kind.is_closed else np.append(before[-1:], added)
        if shown is None or (
            kind not in link.root.verified and not await self._agrees(engine, call, link, shown)
        ):
            if len(self._failed) >= _MOST_KINDS:
                self._failed.clear()
            self._failed[kind] += 1
            if self._failed[kind] >= _FAILURES:
                why = "the chat template gives new messages no stable begin"
                self._doubt(engine, "template", kind, why)
            raise _Unstitched("template")
        self._failed.pop(kind, None)
        link.root.verified.add(kind)
        assert added is not None
        return np.concatenate([before, added])

    async def _turn(
        self, engine: Engine, call: dict[str, Any], begun: int, kind: _Kind
    ) -> tuple[Ids, Ids] | None:
        """Return the end of the answer's turn, without and with the new messages."""
        answer, new = call["messages"][begun - 1], call["messages"][begun:]
        # The comparison with the full rendering has the tools; new messages rarely depend on tools.
        small = {name: call[name] for name in call.keys() - {"tools", "tool_choice"}}
        if kind.has_results and kind.is_closed and answer.get("tool_calls"):
            pair = [[OPENING, stand_in(word, answer)] for word in WORDS[:2]]
            end, behind = await asyncio.gather(
                self._equal_end(engine, small, pair, begins_turn=False),
                self._equal_end(engine, small, [[*talk, *new] for talk in pair]),
            )
            # Without a difference the template shows no calls.
            if end is not None and behind is not None:
                return _grown(end, behind)
        pair = [[OPENING, stand_in(word)] for word in WORDS]
        end = self._ends.get(key := (kind.engine, kind.options))
        if end is None:
            asked = [[*talk, OPENING] for talk in pair]
            end, two, all_words = await asyncio.gather(
                self._equal_end(engine, small, pair[:2], begins_turn=False),
                self._equal_end(engine, small, asked[:2]),
                self._equal_end(engine, small, asked),
            )
            if end is None or two is None or all_words is None or len(two) != len(all_words):
                return None
            if len(self._ends) >= _MOST_KINDS:
                self._ends.clear()
            self._ends[key] = end
        behind = await self._equal_end(engine, small, [[*talk, *new] for talk in pair[:2]])
        return None if behind is None else _grown(end, behind)

    async def _agrees(self, engine: Engine, call: dict[str, Any], link: Link, shown: Ids) -> bool:
        """Compare a chain with the renderings of its first call and of this call."""
        messages, root = call["messages"], link.root
        first = messages[: root.messages]
        rendered, head, full = await asyncio.gather(
            self._render(engine, call, first),
            self._render(engine, call, first, begins_turn=False),
            self._render(engine, call, messages),
        )
        if rendered is None or head is None or full is None:
            return False
        return (
            np.array_equal(rendered, root.prompt)
            and begins(rendered, head)
            and begins(full, head)
            and ends(full, shown)
        )

    # -- the engine's renderings ----------------------------------------------------------------

    async def _equal_end(
        self, engine: Engine, call: dict[str, Any], talks: list[list[dict[str, Any]]], *,
        begins_turn: bool = True,
    ) -> Ids | None:  # fmt: skip
        """Return the equal end of different renderings."""
        found = await asyncio.gather(
            *(self._render(engine, call, talk, begins_turn=begins_turn) for talk in talks)
        )
        rendered = [ids for ids in found if ids is not None]
        if len(rendered) < len(talks) or np.array_equal(rendered[0], rendered[1]):
            return None
        return equal_end(rendered)

    async def _render(
        self, engine: Engine, call: dict[str, Any], messages: list[dict[str, Any]], *,
        begins_turn: bool = True,
    ) -> Ids | None:  # fmt: skip
        """Return the engine's rendering of messages; None if the template refuses."""
        body = {name: call[name] for name in _RENDERED if call.get(name) is not None}
        body["messages"] = messages
        if not begins_turn:
            body["add_generation_prompt"] = False
        if engine.kind == "vllm" and (effort := body.pop("reasoning_effort", None)) is not None:
            thinks = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
            body["chat_template_kwargs"] = thinks | (body.get("chat_template_kwargs") or {})
        asked = self._engines.ask(engine, "POST", "/tokenize", _encode(body), _HEADERS)
        async with asked as answer:
            raw = await answer.read()
        if answer.status in _MISSING:
            why = f"/tokenize answers {answer.status}"
            raise self._doubt(engine, "engine", engine.url, why)
        if answer.status != HTTPStatus.OK:
            return None
        try:
            return token_ids("/tokenize: tokens", msgspec.json.decode(raw)["tokens"])
        except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
            why = f"/tokenize: {str(error)[:200]}"
            raise self._doubt(engine, "engine", engine.url, why) from error


_encode = msgspec.json.Encoder().encode


def _grown(end: Ids, behind: Ids) -> tuple[Ids, Ids] | None:
    return (end, behind) if len(behind) > len(end) and begins(behind, end) else None


def _are_messages(messages: Any) -> bool:
    return isinstance(messages, list) and all(
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(calls := message.get("tool_calls") or [], list)
        and all(isinstance(call, dict) and isinstance(call.get("function"), dict) for call in calls)
        for message in messages
    )


def _is_text(message: dict[str, Any]) -> bool:
    content = message.get("content")
    return not isinstance(content, list) or all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
        for part in content
    )
