"""Chat templates in the styles of model families, and a rendering in the stub engine's ids."""

import functools
import re
from typing import Any

import jinja2
from stub_engine import BEGIN, END, encode

#: Ids of words that no text merges with.
SPECIAL = {
    "<|im_start|>": BEGIN, "<|im_end|>": END, "</s>": END, "<|user|>": 3, "<|observation|>": 4,
    "<|assistant|>": 5, "[INST]": 6, "[/INST]": 7,
}  # fmt: skip
_CUT = re.compile("(" + "|".join(map(re.escape, SPECIAL)) + ")")

_CALLS = """\
{%- for call in message.tool_calls or [] -%}
{{ "{" }}{{ call.function.name }} {{ call.function.arguments }}{{ "}" }}{% endfor %}"""
_CHATML = """\
{%- if tools %}<|im_start|>system
{{ tools | tojson }}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ THOUGHT }}{{ message.content or "" }}CALLS<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}""".replace("CALLS", _CALLS)
#: Alternating roles, tools before the last question, the call's id behind its arguments.
_MISTRAL = """\
{%- set last = namespace(user=none, role="") -%}
{%- for message in messages if message.role == "user" %}{% set last.user = message %}{% endfor -%}
{%- for message in messages -%}
{%- if message.role == last.role and message.role != "tool" -%}
{{ raise_exception("roles must alternate") }}
{%- endif -%}
{%- set last.role = message.role -%}
{%- if message.role == "user" -%}
{%- if tools and message == last.user %}tools {{ tools | tojson }}{% endif -%}
[INST] {{ message.content }}[/INST]
{%- elif message.role == "tool" %}results {{ message.content }} {{ message.tool_call_id }}
{%- elif message.tool_calls -%}
{%- for call in message.tool_calls -%}
{{ "{" }}{{ call.function.name }} {{ call.function.arguments }}{{ "}" }} id {{ call.id }}
{%- endfor %}</s>
{%- else %} {{ message.content }}</s>{% endif -%}
{%- endfor -%}"""
#: No end of a turn but the next role.
_GLM = """\
{%- for message in messages -%}
{%- if message.role == "tool" %}<|observation|>
{{ message.content }}
{%- else %}<|{{ message.role }}|>
{{ message.content or "" }}CALLS{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>{% endif -%}""".replace("CALLS", _CALLS)

TEMPLATES = {
    "chatml": _CHATML.replace("{{ THOUGHT }}", ""),
    "qwen3": _CHATML.replace(
        "{{ THOUGHT }}",
        "{% if loop.last and message.role == 'assistant' %}<t>{{ message.reasoning }}</t>"
        "{% endif %}",
    ),
    "mistral": _MISTRAL,
    "glm": _GLM,
    # Each of these changes earlier text as the conversation grows.
    "counted": "{{ messages | length }}" + _CHATML.replace("{{ THOUGHT }}", ""),
    "system_last": "{% for message in messages %}{% if loop.last %}be brief {% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}",
    # The end of a turn merges with the text before.
    "plain": "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}",
}  # fmt: skip


_compiled = functools.cache(jinja2.Template)


class Refused(Exception):
    """A template raised."""


def _refuse(why: str) -> None:
    raise Refused(why)


def rendered(template: str, body: dict[str, Any], begins_turn: bool = True) -> list[int]:
    text = _compiled(template).render(
        messages=body["messages"], tools=body.get("tools"), add_generation_prompt=begins_turn,
        raise_exception=_refuse, **(body.get("chat_template_kwargs") or {}),
    )  # fmt: skip
    ids: list[int] = []
    for part in _CUT.split(text):
        ids += [SPECIAL[part]] if part in SPECIAL else encode(part)
    return ids
