"""A conversation under the chat template of each model family is a single row.

`SHMBUS_TEST_TEMPLATES` names a folder of templates, which `make test-templates` downloads.
"""

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from recorders import Scene, chat, user
from stub_engine import encode
from test_stitch import assert_one_row, counts, returned

pytest_plugins = ["recorder_fixtures"]

FOLDER = Path(os.environ.get("SHMBUS_TEST_TEMPLATES", ""))
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Look.",
        "parameters": {
            "type": "object",
            "properties": {"at": {"type": "string", "description": "A thing."}},
            "required": ["at"],
        },
    },
}
CHATML, DEEPSEEK, LLAMA = "<|im_end|>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "<|eot_id|>"
#: Token that ends an answer in words, and token behind tool calls, of each template.
ENDS = {
    "GLM-4.6": ("<|user|>", "<|observation|>"),
    "GLM-4.7-Flash": ("<|user|>", "<|observation|>"),
    "HuggingFaceTB-SmolLM3-3B": (CHATML, CHATML),
    "LFM2.5-8B-A1B": (CHATML, CHATML),
    "MiniMax-M2": ("[e~[", "[e~["),
    "Mistral-Small-3.2-24B-Instruct-2506": ("</s>", "</s>"),
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": (CHATML, CHATML),
    "Qwen-QwQ-32B": (CHATML, CHATML),
    "Qwen-Qwen2.5-7B-Instruct": (CHATML, CHATML),
    "Qwen-Qwen3-0.6B": (CHATML, CHATML),
    "Qwen3-Coder": (CHATML, CHATML),
    "Qwen3.5-4B": (CHATML, CHATML),
    "StepFun3.5-Flash": (CHATML, CHATML),
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": (DEEPSEEK, DEEPSEEK),
    "deepseek-ai-DeepSeek-V3.1": (DEEPSEEK, DEEPSEEK),
    "deepseek-ai-DeepSeek-V3.2": (DEEPSEEK, DEEPSEEK),
    "ibm-granite-granite-4.0": ("<|end_of_text|>", "<|end_of_text|>"),
    "meta-llama-Llama-3.1-8B-Instruct": (LLAMA, LLAMA),
    "meta-llama-Llama-3.3-70B-Instruct": (LLAMA, LLAMA),
    "mistralai-Ministral-3-14B-Reasoning-2512": ("</s>", "</s>"),
    "moonshotai-Kimi-K2": (CHATML, CHATML),
    "mistralai-Mistral-Nemo-Instruct-2407": ("</s>", "</s>"),
}
#: Templates with the tools before the last question: a second question moves the tools.
ONE_QUESTION = ("Mistral-Small-3.2-24B-Instruct-2506", "mistralai-Mistral-Nemo-Instruct-2407")
TURNS = 8
_WORD = re.compile(
    r"(<[|\uff5c][^|\uff5c<>\n]{1,40}[|\uff5c]>|\[/?[A-Z_]{3,20}\]|</?(?:s|think|tool_call)>|\[e~\[|\]~!?b\]"
    r"|<(?:start|end)_of_turn>)"
)


class Tokenizer:
    """A token for each letter, and for each special word of a template."""

    def __init__(self) -> None:
        self.special: dict[str, int] = {}

    def id(self, word: str) -> int:
        return self.special.setdefault(word, 3 + len(self.special))

    def __call__(self, text: str) -> list[int]:
        ids: list[int] = []
        for part in _WORD.split(text):
            ids += [self.id(part)] if _WORD.fullmatch(part) else encode(part)
        return ids


def rendered(
    source: str, tokenizer: Tokenizer, body: dict[str, Any], begins_turn: bool
) -> list[int]:
    """Render a call as vLLM does: with objects for arguments, and ids of nine letters."""
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = json.loads(json.dumps(body["messages"]))
    for message in messages:
        if "tool_call_id" in message:
            message["tool_call_id"] = message["tool_call_id"].ljust(9, "0")
        for call in message.get("tool_calls") or ():
            call["id"] = call["id"].ljust(9, "0")
            call["function"]["arguments"] = {"at": call["function"]["arguments"]}
    texts, _ = render_jinja_template(
        [messages], tools=body.get("tools"), chat_template=source, bos_token="<s>",
        eos_token="</s>", add_generation_prompt=begins_turn,
        **(body.get("chat_template_kwargs") or {}),
    )  # fmt: skip
    return tokenizer(texts[0])


@pytest.mark.skipif(not FOLDER.name, reason="`make test-templates` downloads templates")
@pytest.mark.parametrize("tools", [[], [TOOL]], ids=["words", "tools"])
@pytest.mark.parametrize("name", ENDS)
def test_a_conversation_under_a_familys_template_is_one_row(
    name: str, tools: list[Any], scene: Scene
) -> None:
    pytest.importorskip("transformers")
    tokenizer = Tokenizer()
    source = (FOLDER / f"{name}.jinja").read_text()
    scene.engine.template = functools.partial(rendered, source, tokenizer)
    ends = [tokenizer.id(end) for end in ENDS[name]]
    with scene.open() as session:
        messages = [user("hello")]
        for turn in range(TURNS):
            calls = bool(tools) and (turn % 2 == 0 or name in ONE_QUESTION)
            scene.engine.script = [f"{{look [{turn}]}}" if calls else f"said {turn}"]
            scene.engine.end = ends[calls]
            answer = chat(session, messages, **({"tools": tools} if tools else {}))
            messages.append(returned(answer))
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": "a wall"}
                for call in answer.get("tool_calls") or ()
            ] or [user(f"go on {turn}")]
        assert session.finish(1.0)
    assert counts(scene.recorder) == {"start": 1, "stitched": TURNS - 1}
    (sample,) = scene.taken()
    assert_one_row(sample, scene.engine)
