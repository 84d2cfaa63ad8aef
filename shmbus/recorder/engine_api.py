"""Additions to a client's call for engines, and their removal from the answer.

Two endpoints carry token ids: chat completions and completions. Sources: vLLM 0.32,
vllm/entrypoints/openai/{chat_completion,completion}/{protocol,serving}.py; SGLang 0.5.23,
sglang/srt/entrypoints/openai/{protocol,serving_chat,serving_completions}.py.

Invariants:

- A client gets only requested fields, with the engine's values unchanged.
- An answer with a token without id, finite logprob, or place is invalid: BadAnswer.
- Work on a chunk of a stream is proportional to the chunk, for any preceding length.
"""

from __future__ import annotations

from array import array
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import msgspec

from shmbus.data.encoding import decodable
from shmbus.recorder.sampling import has_grammar, options_of
from shmbus.recorder.token_fields import routed_experts, sampled_logprobs, token_ids
from shmbus.recorder.transcript import Span, Turn

Kind: TypeAlias = Literal["vllm", "sglang"]
Endpoint: TypeAlias = Literal["/v1/chat/completions", "/v1/completions"]

CHAT: Final = "/v1/chat/completions"
#: vLLM's name of a logprob's token by its id.
_BY_ID: Final = "token_id:"

#: Tokens decoded in one step, in half a millisecond: other threads run between two steps.
_STEP: Final = 4096

_IDS: Final = frozenset({int})
_NUMBERS: Final = frozenset({int, float})

#: From here on a float may stand for several integers.
_EXACT: Final = 2**53

#: Options that make an answer unsampled, with the reason.
_UNSAMPLED: Final = {
    "use_beam_search": "an answer of a beam search is not sampled",
    "echo": "an echo has no logprobs of its own",
}


class BadAnswer(Exception):
    """An engine's answer unfit for training; `engine_gone` if a different engine may answer."""

    def __init__(self, message: str, *, engine_gone: bool = False) -> None:
        super().__init__(message)
        self.engine_gone = engine_gone


@decodable
class _ChatLogprobs(msgspec.Struct):
    content: list[msgspec.Raw] | None = None


@decodable
class _Token(msgspec.Struct, gc=False):
    token: str
    logprob: float


@decodable
class _TextLogprobs(msgspec.Struct):
    token_logprobs: list[float] | None = None
    tokens: list[str] | None = None


def decode_chunk(raw: bytes | bytearray) -> dict[str, Any]:
    """Decode an object of JSON."""
    try:
        found = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise BadAnswer(f"the engine's answer is no JSON: {str(error)[:200]}") from error
    if not isinstance(found, dict):
        raise BadAnswer(f"the engine's answer is no object: {str(found)[:80]}")
    return found


def decode_answer(raw: bytes | bytearray) -> dict[str, Any]:
    """Decode a whole answer; logprobs stay `msgspec.Raw`, since a dict a token costs too much."""
    try:
        raw.decode()  # fields stay undecoded, and reach clients
        answer = _fields_of(raw, "choices")
        choices = msgspec.json.decode(answer["choices"], type=list[msgspec.Raw])
        answer["choices"] = [_fields_of(choice, "logprobs") for choice in choices]
    except (msgspec.DecodeError, UnicodeError, RecursionError, KeyError, TypeError):
        return decode_chunk(raw)  # names the fault
    return answer


def _fields_of(raw: bytes | bytearray | msgspec.Raw, raw_name: str) -> dict[str, Any]:
    """Decode an object, except for the field `raw_name` if longer than ``null``."""
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    return {
        name: value
        if name == raw_name and memoryview(value).nbytes > len("null")
        else msgspec.json.decode(value)
        for name, value in fields.items()
    }


def refuse_unsampled(body: dict[str, Any]) -> str | None:
    """Return the reason if a call cannot be recorded for any answer."""
    for name, why in _UNSAMPLED.items():
        if body.get(name):
            return f"{name}: {why}; expected a call without it"
    return None


class Said(NamedTuple):
    """An answer in words, as its client got them."""

    text: str
    #: Names and arguments of the tools' calls.
    calls: list[tuple[str, str]]
    thought: str
    #: True if the end of the turn was sampled, False for a cut answer.
    is_closed: bool


def text_of(content: Any) -> str:
    """Return the text of a message's content."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "".join(
        part["text"]
        if isinstance(part, dict) and isinstance(part.get("text"), str)
        else msgspec.json.encode(part).decode()
        for part in content
    )


def arguments_of(text: Any) -> str:
    """Return a tool's arguments as every client writes them."""
    try:
        found = _decode_arguments(text)
        while isinstance(found, dict) and len(found) == 1:
            ((name, value),) = found.items()
            if name not in ("arguments", "input") or not isinstance(value, str):
                break
            # Dialects put arguments that are no object under such a name.
            text = value
            found = _decode_arguments(text)
        return msgspec.json.encode(found, order="sorted").decode()
    except (msgspec.DecodeError, TypeError, RecursionError):
        return str(text)


def _as_javascript(text: str) -> float:
    """Return a number as JavaScript keeps it: 2.0 is 2."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < _EXACT else value


_decode_arguments = msgspec.json.Decoder(float_hook=_as_javascript).decode


def calls_of(message: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Return names and arguments of a message's calls."""
    return [
        (call["function"].get("name"), call["function"].get("arguments"))
        for call in message.get("tool_calls") or ()
        if isinstance(call, dict) and isinstance(call.get("function"), dict)
    ]


def _one_canonical(role: object, content: object, calls: list[tuple[Any, Any]]) -> str:
    said = "".join(f"\x1f{name}\x1f{arguments_of(arguments)}" for name, arguments in calls)
    return f"\x1e{role}\x1f{text_of(content)}{said}"


def canonical(endpoint: str, body: dict[str, Any]) -> str:
    """Return a conversation in a canonical form, a prefix of the client's next call."""
    if endpoint != CHAT:
        prompt = body.get("prompt")
        return prompt if isinstance(prompt, str) else ""
    found = []
    for message in body.get("messages") or ():
        if not isinstance(message, dict):
            return ""
        calls = calls_of(message)
        found.append(_one_canonical(message.get("role"), message.get("content"), calls))
    return "".join(found)


def _answers_of(chat: bool, body: dict[str, Any]) -> int:
    """Return how many choices a call asks for."""
    count = body.get("n")
    count = count if isinstance(count, int) else 1
    prompt = body.get("prompt")
    several = not chat and isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    return max(1, count) * (len(prompt) if several and isinstance(prompt, list) else 1)


class Words(bytearray):
    """A growing text in a single buffer: a string a token would pause the loop at its end."""

    def add(self, text: str) -> None:
        """Append a piece."""
        self += text.encode("utf-8", "surrogatepass")

    def joined(self) -> str:
        """Return the whole text."""
        return self.decode("utf-8", "surrogatepass")


class _Choice:
    """One incoming answer to a prompt."""

    def __init__(self) -> None:
        self.prompt: array[int] | None = None
        self.ids: array[int] | None = None
        self.logprobs = array("d")
        self.finish_reason: str | None = None
        self.text = Words()
        self.thought = Words()
        #: Matched stop string or token of the call.
        self.stop: Any = None
        #: Names and arguments of the tools' calls, by their places.
        self.names: dict[int, str] = {}
        self.arguments: dict[int, Words] = {}
        self.experts: str | None = None


def _append(kept: array[Any], values: Any, kinds: frozenset[type], what: str) -> None:
    try:
        if kinds.issuperset(map(type, values)):
            kept.extend(values)
            return
    except (TypeError, OverflowError):
        pass
    raise BadAnswer(f"{what}, a list of numbers; got {values!s:.80}")


class Reading:
    """One call: the engine's body, and the answer, read and translated for the client."""

    def __init__(
        self,
        body: dict[str, Any],
        endpoint: Endpoint,
        kind: Kind,
        *,
        cache_salt: str | None = None,
        experts: tuple[int, int] | None = None,
        trains_grammar: bool = False,
        prompt: list[int] | None = None,
        at_once: bool = False,
    ) -> None:
        self._sampling = options_of(body)
        self._grammar = has_grammar(body, strict_tools=kind == "sglang")
        self._trained = trains_grammar or not self._grammar
        self._chat = endpoint == CHAT
        self._endpoint: str = endpoint
        self._said_body = body
        self._experts = experts
        # vLLM's streams carry no routed experts, SGLang's in an event beyond the largest.
        at_once = at_once or experts is not None
        #: False for a whole answer.
        self.streams = bool(body.get("stream")) and not at_once
        self._expected = _answers_of(self._chat, body)
        self._wants_logprobs = bool(body.get("logprobs")) or (
            not self._chat and body.get("logprobs") is not None
        )
        self._wants_ids = bool(body.get("return_token_ids"))
        self._wants_reasoning = body.get("include_reasoning") is not False
        options = body.get("stream_options")
        options = options if isinstance(options, dict) else {}
        self._wants_usage = bool(options.get("include_usage"))
        self._choices: dict[int, _Choice] = {}
        self._prompt: array[int] | None = None
        self._usage: dict[str, Any] | None = None
        self._version: int | None = None
        self._turns: list[Turn] = []
        #: Body for the engine.
        self.body = dict(body)
        self._ask(kind, options, cache_salt)
        if prompt is not None:
            # Both engines parse and stream an answer to ids as an answer to the messages.
            ids = {"prompt_token_ids": prompt}
            self.body |= {"kv_transfer_params": ids} if kind == "vllm" else {"input_ids": prompt}

    # -- requested fields -----------------------------------------------------------------------

    def _ask(self, kind: Kind, options: dict[str, Any], cache_salt: str | None) -> None:
        body = self.body
        if not self._wants_logprobs:
            # SGLang returns no logprobs for 0.
            body["logprobs"] = True if self._chat else int(kind == "sglang")
        if self.streams:
            body["stream_options"] = {**options, "include_usage": True}
        elif body.get("stream"):
            body["stream"] = False
            body.pop("stream_options", None)
        salted = "cache_salt" if kind == "vllm" else "extra_key"
        if cache_salt is not None and body.get(salted) is None:
            body[salted] = cache_salt
        if kind == "vllm":
            body["return_token_ids"] = True
            if not self._wants_logprobs:
                body["return_tokens_as_token_ids"] = True
            if not self._wants_reasoning:
                # Otherwise vLLM hides the ids of reasoning tokens.
                body["include_reasoning"] = True
            return
        if self._chat:
            # SGLang refuses `return_token_ids` in a stream.
            body |= {"return_input_ids_in_sglext": True, "return_output_ids_in_sglext": True}
        else:
            body["return_token_ids"] = True
        if self._experts is not None:
            body["return_routed_experts"] = True

    # -- what comes -----------------------------------------------------------------------------

    @property
    def prompt_tokens(self) -> int:
        """Known tokens of the prompt."""
        return len(self._prompt or ())

    @property
    def version(self) -> int | None:
        """The weights' version reported by the engine itself, as in SGLang."""
        return self._version

    def read(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        """Take a whole answer, or a chunk of a stream; return the client's part."""
        try:
            return self._read(answer)
        except (
            AttributeError, KeyError, TypeError, ValueError, msgspec.DecodeError,
        ) as error:  # fmt: skip
            raise BadAnswer(
                f"the engine's answer is not of OpenAI's form: {type(error).__name__}: {error}"
            ) from error

    def _read(self, answer: dict[str, Any]) -> dict[str, Any] | None:
        if "error" in answer and not answer.get("choices"):
            code = error.get("code") if isinstance(error := answer["error"], dict) else None
            # Every engine refuses such a call.
            refused = isinstance(code, int) and 400 <= code < 500 and code != 429
            raise BadAnswer(f"the engine said: {str(error)[:300]}", engine_gone=not refused)
        usage = answer.get("usage")
        if isinstance(usage, dict):
            self._usage = usage
        metadata = answer.get("metadata")
        if isinstance(metadata, dict) and str(metadata.get("weight_version", "")).isdigit():
            self._version = int(metadata["weight_version"])
        choices = answer.get("choices")
        if not isinstance(choices, list):
            raise BadAnswer("the engine's answer has no choices; expected OpenAI's form")
        self._take_prompt(answer.get("prompt_token_ids"))
        for choice in choices:
            self._take_choice(choice)
        self._take_extension(answer.get("sglext"))
        return self._of_client(answer, choices)

    def _take_prompt(self, ids: Any) -> array[int] | None:
        if ids is None:
            return None
        self._prompt = array("q")
        _append(self._prompt, ids, _IDS, "prompt: expected token ids")
        return self._prompt

    def _take_choice(self, choice: Any) -> None:
        if not isinstance(choice, dict) or not isinstance(index := choice.get("index", 0), int):
            raise BadAnswer("the engine's answer has a choice without an index")
        kept = self._choices.setdefault(index, _Choice())
        if choice.get("prompt_token_ids") is not None:
            kept.prompt = self._take_prompt(choice["prompt_token_ids"])
        ids = choice.get("token_ids")
        logprobs, names = self._logprobs_of(choice.get("logprobs"))
        if kept.finish_reason is not None and (ids or logprobs):
            raise BadAnswer(
                f"choice {index}: tokens came after its finish_reason {kept.finish_reason!r}"
            )
        if ids is not None:
            if len(ids) != len(logprobs):
                raise BadAnswer(
                    f"choice {index}: {len(ids)} tokens came with {len(logprobs)} logprobs; "
                    "expected one for each"
                )
            for token, name in zip(ids, names, strict=True):
                if name.startswith(_BY_ID) and name != f"{_BY_ID}{token}":
                    raise BadAnswer(
                        f"choice {index}: token {token} came with the logprob of {name}"
                    )
            if kept.ids is None:
                kept.ids = array("q")
            _append(kept.ids, ids, _IDS, f"choice {index}: expected token ids")
        _append(kept.logprobs, logprobs, _NUMBERS, f"choice {index}: expected logprobs")
        kept.finish_reason = choice.get("finish_reason") or kept.finish_reason
        if not isinstance(kept.finish_reason, (str, type(None))):
            raise TypeError(f"finish_reason is a {type(kept.finish_reason).__name__}")
        kept.experts = choice.get("routed_experts") or kept.experts
        kept.stop = choice.get("stop_reason") or choice.get("matched_stop") or kept.stop
        self._take_text(kept, choice)

    def _logprobs_of(self, found: Any) -> tuple[list[float], list[str]]:
        if isinstance(found, msgspec.Raw):
            return self._decoded_logprobs(found)
        if not isinstance(found, dict):
            return [], []
        if self._chat:
            content = found.get("content") or []
            return [each["logprob"] for each in content], [each["token"] for each in content]
        values = found.get("token_logprobs") or []
        return values, [str(name) for name in found.get("tokens") or ()]

    def _decoded_logprobs(self, raw: msgspec.Raw) -> tuple[list[float], list[str]]:
        if not self._chat:
            text = msgspec.json.decode(raw, type=_TextLogprobs)
            return text.token_logprobs or [], text.tokens or []
        content = msgspec.json.decode(raw, type=_ChatLogprobs).content or []
        values: list[float] = []
        names: list[str] = []
        for at in range(0, len(content), _STEP):
            step = b"[%b]" % b",".join(content[at : at + _STEP])
            for each in msgspec.json.decode(step, type=list[_Token]):
                values.append(each.logprob)
                names.append(each.token)
        return values, names

    def _take_text(self, kept: _Choice, choice: dict[str, Any]) -> None:
        said = choice.get("message") or choice.get("delta") or choice
        text = said.get("content") if self._chat else said.get("text")
        if isinstance(text, str):
            kept.text.add(text)
        kept.thought.add(str(said.get("reasoning") or said.get("reasoning_content") or ""))
        for place, call in enumerate(said.get("tool_calls") or ()):
            function, at = call.get("function") or {}, call.get("index", place)
            kept.names[at] = function.get("name") or kept.names.get(at, "")
            arguments = function.get("arguments") or ""
            if not isinstance(arguments, str):
                raise TypeError(f"arguments of a tool's call are a {type(arguments).__name__}")
            kept.arguments.setdefault(at, Words()).add(arguments)

    def _take_extension(self, found: Any) -> None:
        """Take SGLang's fields beside the choices."""
        if not isinstance(found, dict):
            return
        self._take_prompt(found.get("input_ids"))
        for index, ids in enumerate(found.get("output_ids") or ()):
            kept = self._choices.setdefault(index, _Choice())
            kept.ids = array("q")
            _append(kept.ids, ids, _IDS, f"choice {index}: expected token ids")
        for kept in self._choices.values():
            kept.experts = found.get("routed_experts") or kept.experts

    # -- the client's part ----------------------------------------------------------------------

    def _of_client(
        self, answer: dict[str, Any], choices: list[dict[str, Any]]
    ) -> dict[str, Any] | None:
        """Remove fields not requested by the client; None if nothing remains."""
        extension = answer.get("sglext")
        if isinstance(extension, dict):
            for name in ("input_ids", "output_ids", "routed_experts"):
                if not self._said_body.get(f"return_{name}_in_sglext"):
                    extension.pop(name, None)
            if not extension:
                del answer["sglext"]
        if not self._wants_ids and answer.get("prompt_token_ids") is not None:
            answer["prompt_token_ids"] = None
        if self.streams and not self._wants_usage:
            answer.pop("usage", None)
        kept = [choice for choice in choices if self._of_choice(choice)]
        if len(kept) < len(choices):
            answer["choices"] = kept
        if self.streams and not kept and not answer.get("usage") and not answer.get("sglext"):
            return None
        return answer

    def _of_choice(self, choice: dict[str, Any]) -> bool:
        """Remove fields not requested from a choice; return False if nothing remains."""
        if not self._wants_ids:
            for name in ("token_ids", "prompt_token_ids"):
                if choice.get(name) is not None:
                    choice[name] = None
        if not self._wants_logprobs and choice.get("logprobs") is not None:
            choice["logprobs"] = None
        if self._experts is not None and choice.get("routed_experts") is not None:
            choice["routed_experts"] = None
        said = choice.get("delta") if self.streams else choice.get("message")
        if isinstance(said, dict) and not self._wants_reasoning:
            for name in ("reasoning", "reasoning_content"):
                if self.streams:
                    said.pop(name, None)
                elif name in said:
                    said[name] = None
        # vLLM sends a chunk without words only for the requested ids.
        silent = self.streams and self._chat and not said
        return not (silent and not choice.get("finish_reason") and not choice.get("logprobs"))

    # -- trained values -------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """True if every choice came, and ended, with its ids."""
        return len(self._choices) >= self._expected and all(
            kept.finish_reason is not None and kept.ids is not None
            for kept in self._choices.values()
        )

    def turns(self, versions: Span) -> list[Turn]:
        """Return the answers of an ended call, after their checks."""
        if len(self._choices) < self._expected or any(
            kept.finish_reason is None for kept in self._choices.values()
        ):
            raise BadAnswer("the engine's answer ended before its end", engine_gone=True)
        said = canonical(self._endpoint, self._said_body)
        self._turns = [
            self._turn(index, kept, said, versions) for index, kept in sorted(self._choices.items())
        ]
        return self._turns

    def _turn(self, index: int, kept: _Choice, said: str, versions: Span) -> Turn:
        if kept.finish_reason == "abort":
            raise BadAnswer("the engine aborted the answer", engine_gone=True)
        ids = self._prompt if kept.prompt is None else kept.prompt
        try:
            prompt = token_ids(f"choice {index}: prompt", ids)
            if not len(prompt):
                raise BadAnswer(f"choice {index}: prompt: expected token ids, got none")
            output = token_ids(f"choice {index}", kept.ids)
            logprobs = sampled_logprobs(f"choice {index}: logprobs", kept.logprobs, len(output))
            experts = None
            if self._experts is not None:
                text = kept.experts if isinstance(kept.experts, str) else ""
                experts = routed_experts(text, len(prompt) + len(output), *self._experts)
        except (TypeError, ValueError) as error:
            raise BadAnswer(str(error)) from error
        answer = kept.text.joined()
        if self._chat:
            answer = _one_canonical("assistant", answer, self._said_of(kept).calls)
        assert kept.finish_reason is not None
        return Turn(
            prompt, output, logprobs, versions, kept.finish_reason, said, answer, experts,
            self._sampling, self._grammar, self._trained,
        )  # fmt: skip

    def _said_of(self, kept: _Choice) -> Said:
        own = self._said_body.get("stop_token_ids")
        is_own = isinstance(own, list) and kept.stop in own
        is_cut = kept.finish_reason == "length" or isinstance(kept.stop, str) or is_own
        return Said(
            kept.text.joined(),
            [(name, kept.arguments[at].joined()) for at, name in kept.names.items()],
            kept.thought.joined(),
            not is_cut,
        )

    @property
    def said(self) -> list[Said]:
        """The answers in words, in the order of the turns."""
        return [self._said_of(kept) for _, kept in sorted(self._choices.items())]

    def check_usage(self) -> None:
        """Compare the recorded tokens with the engine's own count."""
        turns = self._turns
        said = (self._usage or {}).get("completion_tokens")
        sampled = sum(len(turn.output) for turn in turns)
        if isinstance(said, int) and said != sampled:
            raise BadAnswer(f"the engine says that it sampled {said} tokens, and sent {sampled}")
        said = (self._usage or {}).get("prompt_tokens")
        if len(turns) == 1 and isinstance(said, int) and said != len(turns[0].prompt):
            raise BadAnswer(
                f"the engine says that the prompt has {said} tokens, and sent "
                f"{len(turns[0].prompt)}"
            )
