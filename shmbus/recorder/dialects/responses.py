"""OpenAI's responses, as chat completions and back.

Tools run by OpenAI's own servers, for example a web search, are left out, as in engines. A
conversation named by ``previous_response_id`` is kept in its session. Sources: the API reference of
OpenAI's responses; vllm/entrypoints/openai/responses/{protocol,utils,streaming_events}.py of vLLM
0.32 for the translation of items.
"""

from __future__ import annotations

import time
from typing import Any, Final

import msgspec

from shmbus.recorder.dialects.base import Dialect, UnusableCall, new_id, object_of
from shmbus.recorder.engine_api import Words
from shmbus.recorder.event_stream import event

#: Translated fields; the rest pass on by name.
_TURNED: Final = frozenset({
    "background", "include", "input", "instructions", "max_output_tokens", "metadata",
    "previous_response_id", "prompt_cache_key", "reasoning", "store", "stream", "stream_options",
    "text", "tool_choice", "tools", "truncation",
})  # fmt: skip
#: Most conversations of earlier responses kept by a session.
_MOST_KEPT: Final = 32
#: The one argument of a free-text tool, named like in vLLM.
_FREE_TEXT: Final = "input"
_FREE_TOOL: Final = {
    "type": "object",
    "properties": {_FREE_TEXT: {"type": "string"}},
    "required": [_FREE_TEXT],
}


def _part(part: dict[str, Any]) -> dict[str, Any]:
    kind = part.get("type")
    if kind in ("input_text", "output_text", "text", "refusal"):
        return {"type": "text", "text": part.get("text") or part.get("refusal") or ""}
    if kind == "input_image":
        return {"type": "image_url", "image_url": {"url": part.get("image_url") or ""}}
    return part


def _content(content: Any) -> Any:
    if not isinstance(content, list):
        return content
    parts = [_part(part) for part in content]
    if all(part.get("type") == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _call(item: dict[str, Any]) -> dict[str, Any]:
    arguments = item.get("arguments")
    if item["type"] == "custom_tool_call":
        arguments = msgspec.json.encode({_FREE_TEXT: item.get("input") or ""}).decode()
    function = {"name": item["name"], "arguments": arguments}
    return {"id": item["call_id"], "type": "function", "function": function}


def _thought(item: dict[str, Any]) -> str:
    parts = item.get("content") or item.get("summary") or []
    return "".join(part.get("text", "") for part in parts)


def _messages(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return items as messages; items of one model answer share a message."""
    found: list[dict[str, Any]] = []

    def answer(name: str) -> dict[str, Any]:
        """Return the model's message for the item: the last, or a new one if the name is taken."""
        if not found or found[-1]["role"] != "assistant" or name in found[-1]:
            found.append({"role": "assistant"})
        return found[-1]

    for item in items:
        kind = item.get("type", "message")
        if kind in ("function_call", "custom_tool_call"):
            last = found[-1] if found and found[-1]["role"] == "assistant" else answer("tool_calls")
            last.setdefault("tool_calls", []).append(_call(item))
        elif kind in ("function_call_output", "custom_tool_call_output"):
            output = _content(item.get("output"))
            found.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        elif kind == "reasoning":
            answer("reasoning")["reasoning"] = _thought(item)
        elif kind == "message" and item["role"] == "assistant":
            answer("content")["content"] = _content(item["content"])
        elif kind == "message":
            role = "system" if item["role"] == "developer" else item["role"]
            found.append({"role": role, "content": _content(item["content"])})
        else:
            raise UnusableCall(
                f"input: an item of type {kind!r}; expected messages, reasoning, and calls of "
                "functions with their outputs"
            )
    return found


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    free = tool["type"] == "custom"
    function = {
        "name": tool["name"],
        "description": tool.get("description"),
        "parameters": _FREE_TOOL if free else tool.get("parameters"),
    }
    return {"type": "function", "function": function}


class Responses(Dialect):
    """A response."""

    def __init__(self, body: dict[str, Any], history: dict[str, list[Any]]) -> None:
        if body.get("background"):
            raise UnusableCall("background: expected a call that waits for its answer")
        self._asked = body
        self._history = history
        self.response_id = new_id("resp")
        self._created = int(time.time())
        self._number = 0
        try:
            self._free = {
                tool["name"] for tool in body.get("tools") or () if tool["type"] == "custom"
            }
            self._items = self._items_of(body)
            super().__init__(self._chat_of(body), history)
        except (AttributeError, KeyError, TypeError) as error:
            raise UnusableCall.of("OpenAI's responses", error) from error
        #: Items of the answer, in order; the last is open while a stream goes on.
        self._output: list[dict[str, Any]] = []
        self._is_open = False
        #: Text of the open item.
        self._words = Words()
        self._place = -1
        self._finish: str | None = None
        self._usage: dict[str, Any] | None = None

    def _items_of(self, body: dict[str, Any]) -> list[Any]:
        given = body["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else list(given)
        before = body.get("previous_response_id")
        if before is None:
            return items
        if before not in self._history:
            raise UnusableCall(
                f"previous_response_id: {str(before)[:80]!r} is no response of this session that "
                f"is kept; expected one of the last {_MOST_KEPT}, or the whole conversation as "
                "input"
            )
        return [*self._history[before], *items]

    def _chat_of(self, body: dict[str, Any]) -> dict[str, Any]:
        chat = {name: value for name, value in body.items() if name not in _TURNED}
        head = body.get("instructions")
        chat["messages"] = [{"role": "system", "content": head}] if head else []
        chat["messages"] += _messages(self._items)
        if body.get("max_output_tokens") is not None:
            chat["max_completion_tokens"] = body["max_output_tokens"]
        tools = [
            _tool(tool)
            for tool in body.get("tools") or ()
            if tool.get("type") in ("function", "custom")
        ]
        if tools:
            chat["tools"] = tools
            choice = body.get("tool_choice", "auto")
            if isinstance(choice, dict):
                choice = {"type": "function", "function": {"name": choice["name"]}}
            chat["tool_choice"] = choice
        effort = (body.get("reasoning") or {}).get("effort")
        if effort:
            chat["reasoning_effort"] = effort
        form = (body.get("text") or {}).get("format") or {}
        if form.get("type") == "json_schema":
            schema = {name: form[name] for name in ("name", "schema", "strict") if name in form}
            chat["response_format"] = {"type": "json_schema", "json_schema": schema}
        elif form.get("type") == "json_object":
            chat["response_format"] = {"type": "json_object"}
        if body.get("stream"):
            chat |= {"stream": True, "stream_options": {"include_usage": True}}
        return chat

    # -- the response as an object --------------------------------------------------------------

    def _response(self, status: str) -> dict[str, Any]:
        asked = self._asked
        cut = status == "incomplete"
        return {
            "id": self.response_id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "instructions": asked.get("instructions"),
            "max_output_tokens": asked.get("max_output_tokens"),
            "metadata": asked.get("metadata") or {},
            "model": asked.get("model"),
            "output": self._output,
            "parallel_tool_calls": asked.get("parallel_tool_calls", True),
            "previous_response_id": asked.get("previous_response_id"),
            "reasoning": asked.get("reasoning") or {},
            "store": asked.get("store", True),
            "temperature": asked.get("temperature"),
            "text": asked.get("text") or {"format": {"type": "text"}},
            "tool_choice": asked.get("tool_choice", "auto"),
            "tools": asked.get("tools") or [],
            "top_p": asked.get("top_p"),
            "truncation": asked.get("truncation", "disabled"),
            "usage": self._used(),
        }

    def _used(self) -> dict[str, Any] | None:
        if self._usage is None:
            return None
        said = self._usage
        cached = (said.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        thought = (said.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        return {
            "input_tokens": said.get("prompt_tokens", 0),
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens": said.get("completion_tokens", 0),
            "output_tokens_details": {"reasoning_tokens": thought},
            "total_tokens": said.get("total_tokens", 0),
        }

    def _ended(self) -> dict[str, Any]:
        """Return the response, whole, and keep its conversation for the next."""
        if self._asked.get("store") is not False:
            while len(self._history) >= _MOST_KEPT:
                del self._history[next(iter(self._history))]
            self._history[self.response_id] = [*self._items, *self._output]
        return self._response("incomplete" if self._finish == "length" else "completed")

    def answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        """Turn a chat completion into a response."""
        choice = answer["choices"][0]
        said = choice["message"]
        self._finish, self._usage = choice.get("finish_reason"), answer.get("usage")
        thought = said.get("reasoning") or said.get("reasoning_content")
        if thought:
            self._output.append(_closed(_new_item("reasoning"), thought))
        calls = said.get("tool_calls") or []
        if said.get("content") or not (thought or calls):
            self._output.append(_closed(_new_item("message"), said.get("content") or ""))
        for call in calls:
            item = self._new_call(call)
            self._output.append(_closed(item, call["function"].get("arguments") or ""))
        return self._ended()

    def _new_call(self, call: dict[str, Any]) -> dict[str, Any]:
        name = (call.get("function") or {}).get("name")
        item = _new_item("custom_tool_call" if name in self._free else "function_call")
        return item | {"call_id": call.get("id"), "name": name}

    # -- a stream -------------------------------------------------------------------------------

    def _event(self, kind: str, **more: Any) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **more}, kind)

    def _begin(self) -> bytes:
        if self._number:
            return b""
        begun = self._response("in_progress")
        return self._event("response.created", response=begun) + self._event(
            "response.in_progress", response=begun
        )

    def chunk(self, chunk: dict[str, Any], prompt_tokens: int) -> bytes:
        """Turn a chunk into events of items."""
        out = self._begin()
        self._usage = chunk.get("usage") or self._usage
        for choice in chunk["choices"][:1]:
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning") or delta.get("reasoning_content")
            if thought:
                out += self._text("reasoning", thought)
            if delta.get("content"):
                out += self._text("message", delta["content"])
            for call in delta.get("tool_calls") or ():
                out += self._tool(call)
            self._finish = choice.get("finish_reason") or self._finish
        return out

    def _text(self, kind: str, text: str) -> bytes:
        out = b""
        if not self._is_open or self._output[-1]["type"] != kind:
            out = self._open(_new_item(kind))
            out += self._event("response.content_part.added", **self._at(), part=_new_part(kind))
        self._words.add(text)
        more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
        return out + self._event(f"{_EVENTS[kind]}.delta", **self._at(), delta=text, **more)

    def _tool(self, call: dict[str, Any]) -> bytes:
        place = call.get("index", 0)
        out = b""
        if place != self._place:
            out = self._open(self._new_call(call))
            self._place = place
        item = self._output[-1]
        text = (call.get("function") or {}).get("arguments") or ""
        self._words.add(text)
        if text and item["type"] == "function_call":
            where = {"item_id": item["id"], "output_index": len(self._output) - 1}
            out += self._event(f"{_EVENTS[item['type']]}.delta", **where, delta=text)
        return out

    def _at(self) -> dict[str, Any]:
        index = len(self._output) - 1
        return {"item_id": self._output[-1]["id"], "output_index": index, "content_index": 0}

    def _open(self, item: dict[str, Any]) -> bytes:
        out = self._close()
        self._output.append(item)
        self._is_open, self._words = True, Words()
        index = len(self._output) - 1
        shown = {**item, "content": []} if item["type"] in ("message", "reasoning") else item
        return out + self._event("response.output_item.added", output_index=index, item=shown)

    def _close(self) -> bytes:
        if not self._is_open:
            return b""
        self._is_open, self._place = False, -1
        item = self._output[-1]
        kind, at = item["type"], self._at()
        _closed(item, self._words.joined())
        if kind in ("message", "reasoning"):
            part = _part_of(item)
            more: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            out = self._event(f"{_EVENTS[kind]}.done", **at, text=part["text"], **more)
            out += self._event("response.content_part.done", **at, part=part)
        else:
            del at["content_index"]
            name = "arguments" if kind == "function_call" else "input"
            more = {"name": item["name"]} if kind == "function_call" else {}
            out = self._event(f"{_EVENTS[kind]}.done", **at, **{name: item[name]}, **more)
        index = at["output_index"]
        return out + self._event("response.output_item.done", output_index=index, item=item)

    def done(self) -> bytes:
        """End the response."""
        out = self._begin()
        if not self._output:
            out += self._text("message", "")
        out += self._close()
        response = self._ended()
        return out + self._event(f"response.{response['status']}", response=response)

    def failed(self, message: str, code: str) -> bytes:
        """End the response with an error."""
        error = {"code": "server_error", "message": message}
        if self._is_open:
            item = _closed(self._output[-1], self._words.joined())
            if "status" in item:
                item["status"] = "incomplete"
        return (
            self._begin()
            + self._event("error", code=code, message=message, param=None)
            + self._event("response.failed", response={**self._response("failed"), "error": error})
        )


_EVENTS: Final = {
    "message": "response.output_text",
    "reasoning": "response.reasoning_text",
    "function_call": "response.function_call_arguments",
    "custom_tool_call": "response.custom_tool_call_input",
}


def _new_part(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _new_item(kind: str) -> dict[str, Any]:
    if kind == "reasoning":
        return {"id": new_id("rs"), "type": kind, "summary": [], "content": [_new_part(kind)]}
    if kind == "message":
        item = {"id": new_id("msg"), "type": kind, "role": "assistant", "status": "in_progress"}
        return {**item, "content": [_new_part(kind)]}
    if kind == "custom_tool_call":
        return {"id": new_id("ctc"), "type": kind, "input": ""}
    return {"id": new_id("fc"), "type": kind, "status": "in_progress", "arguments": ""}


def _part_of(item: dict[str, Any]) -> dict[str, Any]:
    part: dict[str, Any] = item["content"][0]
    return part


def _closed(item: dict[str, Any], text: str) -> dict[str, Any]:
    """Return an item with its whole text."""
    if item["type"] in ("message", "reasoning"):
        _part_of(item)["text"] = text
    elif item["type"] == "function_call":
        item["arguments"] = text
    else:
        found = object_of(text)
        item["input"] = str(found.get(_FREE_TEXT, text))
    if "status" in item:
        item["status"] = "completed"
    return item
