"""`decode_answers` against numpy, base64 and json done plainly, and what it says of bad answers."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmbus import Bus, Consumer, Producer
from shmbus.decode import decode_answers
from shmbus_ext import _core

PROMPT, OUTPUT, LOGPROBS = [5, 6, 7], [1, 2_000_000_000], [-0.25, -1e-7]
SHAPE = (2, 3)


def routed(rows: int = 4, dtype: Any = np.uint8) -> Any:
    return np.arange(rows * 6, dtype=dtype).reshape(rows, *SHAPE)


def npy(array: Any, **how: Any) -> str:
    np.save(stream := io.BytesIO(), array, **how)
    return base64.b64encode(stream.getvalue()).decode()


def headed(head: bytes) -> str:
    padded = head.ljust(54) + b"\n"
    return base64.b64encode(b"\x93NUMPY\1\0" + len(padded).to_bytes(2, "little") + padded).decode()


def flat(array: Any) -> str:
    return base64.b64encode(array.tobytes()).decode()


def vllm(**more: Any) -> dict[str, Any]:
    top = [{f"token_id:{n}": -float(n) for n in (token, 3, 4)} for token in (1, 2)]
    said = {"tokens": ["a", "b"], "token_logprobs": LOGPROBS, "top_logprobs": top}
    choice = {"index": 0, "text": "ab", "finish_reason": "stop", "stop_reason": None}
    choice |= {"prompt_token_ids": PROMPT, "token_ids": OUTPUT, "logprobs": said}
    return {"id": "x", "choices": [{**choice, "routed_experts": npy(routed()), **more}]}


def chat(**more: Any) -> dict[str, Any]:
    def one(token: int, logprob: float) -> dict[str, Any]:
        return {"token": f"token_id:{token}", "logprob": logprob, "bytes": [116]}

    top = [[one(n, -float(n)) for n in (token, 3, 4)] for token in (1, 2)]
    pairs = zip(OUTPUT, LOGPROBS, top, strict=True)
    content = [{**one(token, value), "top_logprobs": each} for token, value, each in pairs]
    choice = {"index": 0, "message": {"content": 'a"b'}, "finish_reason": "stop"}
    choice |= {"token_ids": OUTPUT, "logprobs": {"content": content}}
    choice |= {"routed_experts": npy(routed()), **more}
    return {"prompt_token_ids": PROMPT, "choices": [choice], "usage": {"prompt_tokens": 3}}


def sglang(**more: Any) -> dict[str, Any]:
    top = [[[-float(n), n, None] for n in (token, 3, 4)] for token in (1, 2)]
    pairs = zip(LOGPROBS, OUTPUT, strict=True)
    meta = {"finish_reason": {"type": "stop", "matched": 2}, "output_top_logprobs": top}
    meta |= {"output_token_logprobs": [[value, token, "t"] for value, token in pairs]}
    meta |= {"routed_experts": flat(routed(dtype=np.int32)), **more}
    return {"text": "ab", "output_ids": OUTPUT, "meta_info": meta}


def decoded(answer: Any, **how: Any) -> Any:
    how = {"experts": SHAPE, "top_logprobs": 2, **how}
    ((arrays, reason),) = decode_answers(json.dumps(answer).encode(), **how)
    assert reason == "stop"
    return arrays


@pytest.mark.parametrize("form", [vllm, chat, sglang])
def test_each_form_gives_the_same_arrays(form: Any) -> None:
    arrays = decoded(form(), prompt=PROMPT if form is sglang else None)
    assert arrays["tokens"].tolist() == PROMPT + OUTPUT
    assert arrays["loss_mask"].tolist() == [0, 0, 0, 1, 1]
    assert (arrays["logprobs"] == np.float32([0, 0, 0, *LOGPROBS])).all()
    assert arrays["top_ids"].tolist() == [[0, 0]] * 3 + [[1, 3], [2, 3]]
    assert arrays["top_logprobs"].tolist() == [[0, 0]] * 3 + [[-1, -3], [-2, -3]]
    assert (arrays["routed_experts"] == [*routed(), np.zeros(SHAPE)]).all()
    dtypes = {name: str(each.dtype) for name, each in arrays.items()}
    experts = "int32" if form is sglang else "uint8"
    assert dtypes == {
        "tokens": "int32", "loss_mask": "uint8", "logprobs": "float32", "top_ids": "int32",
        "top_logprobs": "float32", "routed_experts": experts,
    }  # fmt: skip


def test_choices_and_batches_are_decoded_one_by_one() -> None:
    both = vllm()
    both["choices"] *= 2
    assert len(decode_answers(json.dumps(both).encode())) == 2
    assert len(decode_answers(json.dumps([sglang()] * 3).encode(), prompt=PROMPT)) == 3


@pytest.mark.parametrize(("form", "dtype"), [(chat, np.uint8), (sglang, np.uint8), (sglang, None)])
def test_a_slot_of_the_ring_is_filled_in_place(form: Any, dtype: Any, bus_name: str) -> None:
    with Bus.create(bus_name, "1MiB"), Producer(bus_name) as producer:

        def slot(choice: int, fields: dict[str, Any]) -> Any:
            if dtype is not None:
                fields["routed_experts"] = dtype, fields["routed_experts"][1]
            return producer.reserve("q", group_size=1, index=choice, fields=fields)

        decoded(form(), make=slot, prompt=PROMPT).commit()
        with Consumer(bus_name) as consumer:
            (group,) = consumer.take(max_groups=1, timeout=10)
            assert (group[0]["routed_experts"][:4] == routed()).all()
            assert group[0]["tokens"].tolist() == PROMPT + OUTPUT
            group.ack()


@given(data=st.binary(max_size=40), cut=st.data())
def test_any_part_of_any_bytes_comes_out_of_base64(data: bytes, cut: Any) -> None:
    text = base64.b64encode(data)
    begin = cut.draw(st.integers(0, len(data)))
    out = bytearray(cut.draw(st.integers(0, len(data) - begin)))
    _core.decode_base64("f", text, begin, out)
    assert out == data[begin : begin + len(out)]


@given(text=st.binary(max_size=16), size=st.integers(0, 14), begin=st.integers(0, 14))
def test_bad_base64_is_refused_or_decoded_as_by_python(text: bytes, size: int, begin: int) -> None:
    out = bytearray(size)
    try:
        _core.decode_base64("f", text, begin, out)
    except ValueError as error:
        assert str(error).startswith("f: expected base64 of")
    else:
        # What lies before the part is not looked at.
        skipped, rest = divmod(begin, 3)
        part = text[4 * skipped : (begin + size + 2) // 3 * 4] if size else b""
        assert out == base64.b64decode(part, validate=True)[rest : rest + size]


@given(
    logprobs=st.lists(st.floats(-9998, 0), min_size=1, max_size=8),
    dtype=st.sampled_from(["u1", "i2", "<u4", ">i4", "i8"]),
)
def test_numbers_are_those_of_numpy(logprobs: list[float], dtype: str) -> None:
    tokens = list(range(len(logprobs)))
    array = routed(3 + len(tokens)).astype(dtype)
    answer = vllm(
        token_ids=tokens, logprobs={"token_logprobs": logprobs}, routed_experts=npy(array)
    )
    arrays = decoded(answer, top_logprobs=0)
    assert (arrays["logprobs"][3:] == np.asarray(logprobs, np.float32)).all()
    assert (arrays["routed_experts"] == array).all() and arrays[
        "routed_experts"
    ].dtype == array.dtype


TEXTS = {"a": -1, "b": -1}
OBJECTS = np.array([[[{}, {}, {}]] * 2] * 4)
BAD: dict[str, tuple[Any, str]] = {
    "text": (b"<html>", "body: expected an engine's answer: JSON is malformed"),
    "NaN": (b'{"choices": [{"logprobs": {"token_logprobs": [NaN]}}]}', "token_logprobs.*NaN"),
    "null": (vllm(logprobs={"token_logprobs": [-1, None]}), "float.*null.*token_logprobs"),
    "no logprob": (vllm(logprobs={"token_logprobs": [-1, -9999.0]}), r"logprobs\[1\].*-9999"),
    "positive": (vllm(logprobs={"token_logprobs": [-1, 0.5]}), r"logprobs\[1\].*0.5"),
    "infinite": (vllm(logprobs={"token_logprobs": [-1, -1e999]}), "token_logprobs"),
    "fewer logprobs": (vllm(logprobs={"token_logprobs": [-1]}), "logprobs: expected 2.* got 1"),
    "more logprobs": (vllm(logprobs={"token_logprobs": [-1] * 3}), "expected 2.* got 3"),
    "no logprobs": (vllm(logprobs=None), "logprobs: expected 2.* got 0"),
    "no ids": (vllm(token_ids=None), "token_ids: expected token ids, got none.*return_token"),
    "no prompt": (vllm(prompt_token_ids=None), "prompt_token_ids: expected token ids, got none"),
    "half a token": (vllm(token_ids=[1, 1.5]), r"int.*float.*token_ids\[1\]"),
    "a negative token": (vllm(token_ids=[1, -1]), r"token_ids: expected a list.*\[1, -1\]"),
    "a wide token": (vllm(token_ids=[1, 2**31]), "token_ids: expected a list.*2147483648"),
    "no experts": (vllm(routed_experts=None), "routed_experts: expected base64, got none"),
    "experts cut": (vllm(routed_experts=npy(routed())[:-4]), "expected integers of.*22 bytes"),
    "experts cut off": (vllm(routed_experts=npy(routed())[:-1]), "routed_experts"),
    "no base64": (vllm(routed_experts=npy(routed())[:-6] + "!!" + "AAAA"), "expected base64"),
    "fewer experts": (vllm(routed_experts=npy(routed(3))), r"\[4 or 5, 2, 3\].*\(3, 2, 3\)"),
    "more experts": (vllm(routed_experts=npy(routed(6))), r"\[4 or 5, 2, 3\].*\(6, 2, 3\)"),
    "other layers": (vllm(routed_experts=npy(routed().reshape(4, 3, 2))), r"\(4, 3, 2\)"),
    "floats": (vllm(routed_experts=npy(routed(dtype=np.float32))), "integers.*float32"),
    "by columns": (vllm(routed_experts=npy(np.asfortranarray(routed()))), "integers"),
    "pickled": (vllm(routed_experts=npy(OBJECTS, allow_pickle=True)), "integers.*object"),
    "a broken npy": (vllm(routed_experts=flat(np.frombuffer(b"\x93NUMPY\1", "u1"))), "an .npy"),
    "a head that is open": (vllm(routed_experts=headed(b"{'descr': (")), "an .npy"),
    "a head of brackets": (vllm(routed_experts=headed(b"(" * 200)), "an .npy"),
    "a head that is no UTF-8": (vllm(routed_experts=headed(b"{'\xff")), "an .npy"),
    "a head of a huge shape": (
        vllm(routed_experts=headed(b"{'descr': '<i4', 'fortran_order': False, 'shape': (1%s,)}"
                                   % (b"0" * 200))),
        "routed_experts",
    ),
    "int64 of SGLang": (sglang(routed_experts=flat(routed(dtype=np.int64))), "expected integers"),
    "fewer of top": (vllm(logprobs={"token_logprobs": LOGPROBS, "top_logprobs": [{}, {}]}),
                     "top_logprobs: expected 2 of each of 2 tokens, got 0 of each of 2"),
    "top of fewer": (sglang(output_top_logprobs=[[[-1, 1, ""]] * 2]), "got 2 of each of 1"),
    "top by text": (vllm(logprobs={"token_logprobs": LOGPROBS, "top_logprobs": [TEXTS] * 2}),
                    "return_tokens_as_token_ids"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_answer_is_refused_by_its_field(name: str) -> None:
    answer, said = BAD[name]
    body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
    body = body.replace(b"-Infinity", b"-1e999")
    prompt = None if b"prompt_token_ids" in body else PROMPT
    with pytest.raises(ValueError, match=said):
        decode_answers(body, prompt=prompt, experts=SHAPE, top_logprobs=2)


def test_one_token_has_no_experts_and_an_empty_answer_none_sampled() -> None:
    none = vllm(prompt_token_ids=[], token_ids=[4], routed_experts=npy(routed(0)))
    none["choices"][0]["logprobs"] = {"token_logprobs": [-1.0]}
    assert (decoded(none, top_logprobs=0)["routed_experts"] == np.zeros((1, *SHAPE))).all()
    empty = vllm(token_ids=[], logprobs=None, routed_experts=npy(routed(3)))
    assert decoded(empty, top_logprobs=0)["tokens"].tolist() == PROMPT


def test_experts_that_a_field_cannot_hold_are_refused() -> None:
    wide = sglang(routed_experts=flat(routed(dtype=np.int32) + 250))

    def made(choice: int, fields: dict[str, Any]) -> Any:
        fields["routed_experts"] = np.uint8, fields["routed_experts"][1]
        return {name: np.empty(shape, dtype) for name, (dtype, shape) in fields.items()}

    with pytest.raises(ValueError, match="expected what uint8 holds, got 0 to 273"):
        decoded(wide, make=made, prompt=PROMPT)
