"""Anthropic's messages, as chat completions and back.

A conversation becomes the same chat as vLLM's own /v1/messages makes of it, so that its template
renders the same prompt. Source: vllm/entrypoints/anthropic/{protocol,serving}.py of vLLM 0.32;
https://docs.anthropic.com/en/api/messages and .../messages-streaming for the client's side.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from shmbus.recorder.dialects.base import Dialect, UnusableCall, error_body, new_id, object_of
from shmbus.recorder.event_stream import event

#: Translated fields; the rest pass on by name.
_TURNED: Final = frozenset({
    "max_tokens", "messages", "metadata", "output_config", "stop_sequences", "system", "thinking",
    "tool_choice", "tools",
})  # fmt: skip
#: Claude Code's header with a hash of each request; vLLM omits it too.
_BILLING: Final = "x-anthropic-billing-header"
_CHOICES: Final = {"auto": "auto", "any": "required", "none": "none"}


def _text_blocks(content: Any) -> str:
    blocks: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    return "".join(
        block["text"]
        for block in blocks
        if block.get("type") == "text"
        and block.get("text")
        and not block["text"].startswith(_BILLING)
    )


def _image(source: dict[str, Any]) -> dict[str, Any]:
    if source.get("type") == "url":
        url = source.get("url", "")
    else:
        url = f"data:{source.get('media_type', 'image/jpeg')};base64,{source.get('data', '')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _unknown(kind: Any) -> UnusableCall:
    return UnusableCall(f"messages: a block of type {kind!r}; expected text, image, thought, tool")


def _tool_result(block: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a tool's result as messages: its text, then its images."""
    content = block.get("content")
    parts: Any = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
    text = "\n".join(part.get("text", "") for part in parts if part.get("type") == "text")
    images = [_image(part.get("source") or {}) for part in parts if part.get("type") == "image"]
    names: list[dict[str, Any]] = []
    for part in parts:
        if part.get("type") == "tool_reference":
            names.append({"type": "tool_reference", "name": part.get("tool_name")})
        elif part.get("type") not in ("image", "text"):
            raise _unknown(part.get("type"))
    found: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.get("tool_use_id") or "", "content": text}
    ]
    if images:
        found.append({"role": "user", "content": images})
    if names:
        found.append({**found[0], "content": names})
    return found


def _message(message: dict[str, Any]) -> list[dict[str, Any]]:
    role, content = message["role"], message["content"]
    if role == "system":
        text = _text_blocks(content)
        return [{"role": role, "content": text}] if text else []
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    before: list[dict[str, Any]] = []
    parts: list[dict[str, Any]] = []
    calls: list[dict[str, Any]] = []
    thought: list[str] = []
    for block in content:
        kind = block.get("type")
        if kind == "text" and block.get("text"):
            parts.append({"type": "text", "text": block["text"]})
        elif kind == "image":
            parts.append(_image(block.get("source") or {}))
        elif kind == "thinking":
            thought.append(block.get("thinking") or "")
        elif kind == "tool_use":
            arguments = msgspec.json.encode(block.get("input") or {}).decode()
            function = {"name": block.get("name", ""), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result":
            before += _tool_result(block)
        elif kind not in ("redacted_thinking", "text", "tool_reference"):
            raise _unknown(kind)
    found: dict[str, Any] = {"role": role}
    if thought:
        found["reasoning"] = "".join(thought)
    if calls:
        found["tool_calls"] = calls
    if parts:
        plain = len(parts) == 1 and parts[0]["type"] == "text"
        found["content"] = parts[0]["text"] if plain else parts
    return [*before, found] if len(found) > 1 else before


def _chat_of(body: dict[str, Any]) -> dict[str, Any]:
    chat = {name: value for name, value in body.items() if name not in _TURNED}
    system = _text_blocks(body.get("system"))
    chat["messages"] = [{"role": "system", "content": system}] if system else []
    for message in body["messages"]:
        chat["messages"] += _message(message)
    chat["max_tokens"] = chat["max_completion_tokens"] = body["max_tokens"]
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    if body.get("tools") is not None:
        chat["tools"] = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description"),
                    "parameters": {"type": "object", **(tool.get("input_schema") or {})},
                    **{name: tool[name] for name in ("strict", "defer_loading") if name in tool},
                },
            }
            for tool in body["tools"]
        ]
        chat["tool_choice"] = "auto"
    choice = body.get("tool_choice")
    if choice:
        chat["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
        chat["tool_choice"] = _CHOICES.get(choice["type"]) or {
            "type": "function",
            "function": {"name": choice["name"]},
        }
    thinking = body.get("thinking") or {}
    if thinking.get("type") == "disabled":
        chat["reasoning_effort"] = "none"
    elif thinking.get("type") == "enabled":
        chat["thinking_token_budget"] = thinking["budget_tokens"]
    output = body.get("output_config") or {}
    if output.get("effort"):
        chat["reasoning_effort"] = output["effort"]
    if (output.get("format") or {}).get("schema"):
        schema = {"name": "json_schema", "schema": output["format"]["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    if body.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _usage(usage: dict[str, Any] | None, prompt_tokens: int = 0) -> dict[str, Any]:
    """Return the usage; tokens from the prefix cache count separately."""
    said = usage or {}
    found = {
        "input_tokens": said.get("prompt_tokens") or prompt_tokens,
        "output_tokens": said.get("completion_tokens") or 0,
    }
    cached = (said.get("prompt_tokens_details") or {}).get("cached_tokens")
    if cached is not None:
        found["input_tokens"] = max(0, found["input_tokens"] - cached)
        found["cache_read_input_tokens"] = cached
    return found


def _stop(finish: str | None, stop: Any, has_tools: bool) -> tuple[str | None, str | None]:
    if finish == "length":
        return "max_tokens", None
    if has_tools:
        return "tool_use", None
    if isinstance(stop, str):
        return "stop_sequence", stop
    return "end_turn", None


class Messages(Dialect):
    """A message."""

    def __init__(self, body: dict[str, Any], history: dict[str, list[Any]]) -> None:
        try:
            super().__init__(_chat_of(body), history)
        except (AttributeError, KeyError, TypeError) as error:
            raise UnusableCall.of("Anthropic's messages", error) from error
        self._id = new_id("msg")
        self._model = str(body.get("model", ""))
        self._started = False
        #: The open block: its index and its type; and the place of its tool's call.
        self._index, self._open, self._place = -1, "", -1
        self._finish: str | None = None
        self._stop: Any = None
        self._has_tools = False
        self._usage: dict[str, Any] | None = None

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Turn a chat completion into a message."""
        choice = answer["choices"][0]
        said = choice["message"]
        content: list[dict[str, Any]] = []
        thought = said.get("reasoning") or said.get("reasoning_content")
        if thought:
            content.append({"type": "thinking", "thinking": thought, "signature": ""})
        calls = said.get("tool_calls") or []
        if said.get("content") or not (content or calls):
            content.append({"type": "text", "text": said.get("content") or ""})
        content += [
            {
                "type": "tool_use",
                "id": call["id"],
                "name": call["function"]["name"],
                "input": object_of(call["function"]["arguments"]),
            }
            for call in calls
        ]
        stopped = choice.get("stop_reason") or choice.get("matched_stop")
        reason, sequence = _stop(choice.get("finish_reason"), stopped, bool(calls))
        return {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": answer.get("model", self._model),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": _usage(answer.get("usage")),
        }

    # -- a stream -------------------------------------------------------------------------------

    def chunk(self, chunk: dict[str, Any], prompt_tokens: int) -> bytes:
        """Turn a chunk into events of blocks."""
        out = self._start(chunk, prompt_tokens)
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"][:1]:
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            if thought:
                out += self._block("thinking", {"thinking": "", "signature": ""})
                out += self._delta("thinking_delta", "thinking", thought)
            if delta.get("content"):
                out += self._block("text", {"text": ""})
                out += self._delta("text_delta", "text", delta["content"])
            for call in delta.get("tool_calls") or ():
                out += self._tool(call)
            self._finish = choice.get("finish_reason") or self._finish
            self._stop = choice.get("stop_reason") or choice.get("matched_stop") or self._stop
        return out

    def _start(self, chunk: dict[str, Any], prompt_tokens: int) -> bytes:
        if self._started:
            return b""
        self._started = True
        message = {
            "id": self._id,
            "type": "message",
            "role": "assistant",
            "model": chunk.get("model", self._model),
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(None, prompt_tokens),
        }
        return event({"type": "message_start", "message": message}, "message_start")

    def _block(self, kind: str, empty: dict[str, Any], place: int = -1) -> bytes:
        """Open a block unless already open; close the previous block."""
        if self._open == kind and self._place == place:
            return b""
        out = self._close()
        self._index += 1
        self._open, self._place = kind, place
        start = {"type": "content_block_start", "index": self._index}
        return out + event(
            {**start, "content_block": {"type": kind, **empty}}, "content_block_start"
        )

    def _close(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return event({"type": "content_block_stop", "index": self._index}, "content_block_stop")

    def _delta(self, kind: str, name: str, value: str) -> bytes:
        delta = {"type": kind, name: value}
        return event(
            {"type": "content_block_delta", "index": self._index, "delta": delta},
            "content_block_delta",
        )

    def _tool(self, call: dict[str, Any]) -> bytes:
        place = call.get("index", 0)
        function = call.get("function") or {}
        out = b""
        if place != self._place or self._open != "tool_use":
            self._has_tools = True
            tool: dict[str, Any] = {"id": call.get("id"), "name": function.get("name"), "input": {}}
            out += self._block("tool_use", tool, place)
        if function.get("arguments"):
            out += self._delta("input_json_delta", "partial_json", function["arguments"])
        return out

    def done(self) -> bytes:
        """End the message, with its stop reason and usage."""
        out = self._start({}, 0)
        if self._index < 0:
            out += self._block("text", {"text": ""})
        out += self._close()
        reason, sequence = _stop(self._finish, self._stop, self._has_tools)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        out += event(
            {"type": "message_delta", "delta": delta, "usage": _usage(self._usage)},
            "message_delta",
        )
        return out + event({"type": "message_stop"}, "message_stop")

    def failed(self, message: str, code: str) -> bytes:
        """End the message with an error."""
        return event(error_body(message, "api_error", code), "error")
