"""What engines are asked for, and how vLLM's and SGLang's forms are read and taken out again."""

import base64
import io
from typing import Any

import numpy as np
import pytest

from shmbus.recorder.engine_api import CHAT, BadAnswer, Endpoint, Reading
from shmbus.recorder.transcript import Span

COMPLETIONS: Endpoint = "/v1/completions"
ASK = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
NOW = Span(1, 2)


def logprobs(*values: float) -> dict[str, Any]:
    return {"content": [{"token": "t", "logprob": value} for value in values]}


def choice(**more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": "yes"}
    return {"index": 0, "message": message, "finish_reason": "stop", **more}


def test_vllm_is_asked_for_ids_logprobs_and_the_salt_of_its_version() -> None:
    reading = Reading({**ASK, "stream": True}, CHAT, "vllm", cache_salt="run1:7")
    assert reading.body == {
        **ASK, "stream": True, "logprobs": True, "return_token_ids": True,
        "return_tokens_as_token_ids": True, "stream_options": {"include_usage": True},
        "cache_salt": "run1:7",
    }  # fmt: skip
    own = {**ASK, "cache_salt": "mine", "logprobs": True, "top_logprobs": 3}
    assert Reading(own, CHAT, "vllm", cache_salt="run1:7").body == {
        **own, "return_token_ids": True,
    }  # fmt: skip


def test_thoughts_that_a_client_hides_are_hidden_from_it_and_their_ids_come() -> None:
    reading = Reading({**ASK, "include_reasoning": False}, CHAT, "vllm")
    assert reading.body["include_reasoning"] is True
    said = {"role": "assistant", "content": "yes", "reasoning": "hm"}
    answer = {
        "choices": [choice(message=said, token_ids=[5, 6], logprobs=logprobs(-1, -2))],
        "prompt_token_ids": [1],
    }
    read = reading.read(answer)
    assert read is not None
    assert read["choices"][0]["message"]["reasoning"] is None
    assert reading.turns(NOW)[0].output.tolist() == [5, 6]


@pytest.mark.parametrize("stream", [False, True])
def test_sglang_says_a_chats_ids_beside_the_choices(stream: bool) -> None:
    experts = None if stream else (1, 2)
    reading = Reading({**ASK, "stream": stream}, CHAT, "sglang", experts=experts)
    assert reading.body.get("return_routed_experts", False) is not stream
    assert "return_token_ids" not in reading.body
    routed = base64.b64encode(np.arange(6, dtype=np.int32).tobytes()).decode()
    ids = {"input_ids": [1, 2], "output_ids": [[5, 6]], "routed_experts": routed}
    if stream:
        delta = {"role": "assistant", "content": "yes"}
        first = {"index": 0, "delta": delta, "finish_reason": None, "logprobs": logprobs(-1)}
        last = {"index": 0, "delta": {}, "finish_reason": "stop", "logprobs": logprobs(-2)}
        assert reading.read({"choices": [first]})["choices"][0]["logprobs"] is None  # type: ignore[index]
        reading.read({"choices": [last]})
        assert not reading.complete
        assert reading.read({"choices": [], "sglext": ids}) is None
        assert reading.read({"choices": [], "usage": {"completion_tokens": 2}}) is None
    else:
        answer = {
            "choices": [choice(logprobs=logprobs(-1, -2), matched_stop=2)],
            "sglext": {**ids, "cached_tokens_details": {"device": 1}},
            "metadata": {"weight_version": "4"},
        }
        read = reading.read(answer)
        assert read is not None
        assert read["sglext"] == {"cached_tokens_details": {"device": 1}}
        assert reading.version == 4
    (turn,) = reading.turns(NOW)
    assert (turn.prompt.tolist(), turn.output.tolist()) == ([1, 2], [5, 6])
    assert turn.logprobs.tolist() == [-1, -2]
    assert stream or (turn.experts is not None and turn.experts.shape == (3, 1, 2))
    reading.check_usage()


def test_sglangs_completions_carry_ids_as_vllms_do() -> None:
    ask = {"model": "m", "prompt": "hi", "return_token_ids": True}
    reading = Reading(ask, COMPLETIONS, "sglang")
    assert reading.body["logprobs"] == 1
    one = {"index": 0, "text": "yes", "finish_reason": "stop", "token_ids": [5]}
    one |= {"prompt_token_ids": [1], "logprobs": {"tokens": ["y"], "token_logprobs": [-1.0]}}
    read = reading.read({"choices": [one]})
    assert read is not None
    assert read["choices"][0]["token_ids"] == [5]
    assert read["choices"][0]["logprobs"] is None
    assert reading.turns(NOW)[0].answer == "yes"


def test_vllms_experts_are_an_npy_of_all_tokens_but_the_last() -> None:
    stream = io.BytesIO()
    routed = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    np.save(stream, routed)
    encoded = base64.b64encode(stream.getvalue()).decode()
    for kind in ("sglang", "vllm"):
        reading = Reading({**ASK, "stream": True}, CHAT, kind, experts=(2, 2))
        assert reading.body["stream"] is False
    answer = {
        "choices": [choice(token_ids=[5, 6], logprobs=logprobs(-1, -2), routed_experts=encoded)],
        "prompt_token_ids": [1, 2],
    }
    read = reading.read(answer)
    assert read is not None
    assert read["choices"][0]["routed_experts"] is None
    (turn,) = reading.turns(NOW)
    assert turn.experts is not None
    assert (turn.experts == routed).all()


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ({}, "no choices"),
        ({"choices": {}}, "no choices"),
        ({"choices": [1]}, "index"),
        ({"choices": [{"index": "0"}]}, "index"),
        ({"choices": [choice(token_ids=3)]}, "form"),
        ({"choices": [choice(token_ids=[1], logprobs={"content": [{}]})]}, "form"),
        ({"choices": [choice(token_ids=[True], logprobs=logprobs(-1))]}, "token ids"),
        ({"choices": [choice(token_ids=[1.5], logprobs=logprobs(-1))]}, "token ids"),
        ({"choices": [choice(token_ids=[-1], logprobs=logprobs(-1))]}, "token ids"),
        ({"choices": [choice(token_ids=[2**31], logprobs=logprobs(-1))]}, "token ids"),
        ({"choices": [choice(token_ids=[[1]], logprobs=logprobs(-1))]}, "token ids"),
        ({"choices": [choice(token_ids=[1], logprobs=logprobs(float("inf")))]}, "finite"),
        ({"choices": [choice(token_ids=[1], logprobs=logprobs(1.0))]}, "finite"),
        ({"choices": []}, "before its end"),
        ({"choices": [choice(finish_reason=None)]}, "before its end"),
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ({"error": {"message": "bad schema", "code": 400}}, "bad schema"),
    ],
)
def test_an_answer_of_another_form_is_no_answer(answer: dict[str, Any], said: str) -> None:
    reading = Reading(ASK, CHAT, "vllm")
    with pytest.raises(BadAnswer, match=said) as caught:
        reading.read({"prompt_token_ids": [1], **answer})
        reading.turns(NOW)
    assert caught.value.engine_gone is (said in ("before its end", "out of memory"))
