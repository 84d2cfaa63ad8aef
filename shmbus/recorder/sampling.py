"""Sampling options of a call: values for the sample's meta, a recorder's own values, grammars.

A grammar masks the engine's logits, so the logprobs differ from the model's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

#: Options by name, with their least and most; a top_p of 0 would allow no token.
OPTIONS: Final = {"temperature": (0.0, 1e6), "top_p": (1e-9, 1.0), "top_k": (-1.0, 1e9)}
#: Fields of vLLM and SGLang that limit tokens by a grammar, for any value.
_GRAMMARS: Final = (
    "structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar",
    "structural_tag", "regex", "json_schema", "ebnf",
)  # fmt: skip


def options_of(body: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling options of a call; the engine sets missing options."""
    found: dict[str, float] = {}
    for name in OPTIONS:
        value = body.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            # The engine refuses infinite and huge numbers.
            value = float(value) if abs(value) < 1e300 else math.inf
            if math.isfinite(value):
                found[name] = value
    return found


def conflict_of(body: Mapping[str, Any], required: Mapping[str, float]) -> str | None:
    """Return a sentence about an option that contradicts `required`, or None."""
    for name, value in required.items():
        if body.get(name) not in (None, value):
            return f"{name}: expected {value:g} or nothing, got {body[name]!r:.80}"
    return None


def has_grammar(body: Mapping[str, Any], *, strict_tools: bool) -> bool:
    """Check for a grammar; `strict_tools`: the engine enforces strict schemas of tools."""
    form = body.get("response_format")
    if isinstance(form, dict) and form.get("type") not in (None, "text"):
        return True
    if any(body.get(name) is not None for name in _GRAMMARS):
        return True
    choice, tools = body.get("tool_choice"), body.get("tools")
    if not isinstance(tools, list) or not tools or choice == "none":
        return False
    return (
        choice == "required"
        or isinstance(choice, dict)
        or (strict_tools and any(_is_strict(tool) for tool in tools))
    )


def _is_strict(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    return isinstance(function, dict) and bool(function.get("strict"))
