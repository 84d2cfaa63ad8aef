"""The connector of hidden states without an engine: what it refuses, holds back, and says."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.request import RequestStatus

from shmbus.engines import hidden_states
from shmbus.engines.hidden_states import Finished, HiddenStatesConnector, Options, _Worker
from shmbus.tensors import ChannelClosedError, SpecMismatchError, StepFailedError, TensorChannel

pytest_plugins = ["vllm_fixtures"]

BLOCKS, LAYERS, BLOCK, WIDTH = 6, 2, 4, 8
SPECS = {"hidden": ("float32", (None, LAYERS, WIDTH)), "token_ids": ("int64", (None,))}
BLOCK_IDS = [4, 1, 3]


def worker(channel: str, **extra: Any) -> _Worker:
    cache = torch.arange(BLOCKS * LAYERS * BLOCK * WIDTH, dtype=torch.float32)
    return _Worker(Options(channel=channel, **extra), 0, cache.view(BLOCKS, LAYERS, BLOCK, WIDTH))


def finished(rows: int = 10, name: str = "r", problem: str = "") -> Finished:
    tokens = list(range(100, 101 + rows))
    return Finished(name, tokens, rows, BLOCK_IDS, {"request": name}, problem)


def test_rows_are_read_from_a_requests_blocks_in_order(channel: str) -> None:
    one = worker(channel)
    rx = TensorChannel.open(channel, specs=SPECS)
    one.pending.append(finished())
    assert one.send(0.0) == {"r"}
    with rx.recv(30.0) as item:
        for row in range(10):
            place = BLOCK_IDS[row // BLOCK], slice(None), row % BLOCK
            assert torch.equal(item["hidden"][row], one._cache[place])
        assert item["token_ids"].tolist() == list(range(100, 110))
        assert item.meta == {"request": "r", "next": 110}
    one.close()
    rx.close()


def test_a_slow_trainer_keeps_requests_and_is_named_and_none_is_lost(
    channel: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hidden_states, "SLOW_S", 0.0)
    one = worker(channel)
    rx = TensorChannel.open(channel, specs=SPECS, label="the head")
    one.pending.extend(finished(10, f"r{i}") for i in range(4))
    with caplog.at_level(logging.WARNING, "vllm.shmbus"):
        assert one.send(0.0) == {"r0", "r1"}
        assert one.send(0.0) == set()
    assert "'the head' (pid" in caplog.text and "lives, and is slow or stopped" in caplog.text
    assert "2 requests keep their blocks, for 0 s now" in caplog.text
    for _ in range(2):
        rx.recv(30.0).ack()
    assert one.send(0.0) == {"r2", "r3"}
    one.close()
    rx.close()


def test_what_cannot_be_sent_is_told_as_that_step(channel: str) -> None:
    one = worker(channel, max_bytes=(64 << 10) + 5 * (LAYERS * WIDTH * 4 + 8) + 20, slots=8)
    rx = TensorChannel.open(channel, specs=SPECS)
    one.pending.append(finished(6, "long"))
    one.pending.append(finished(3, "short", "the engine has fewer"))
    lost = BLOCK_IDS[0] * BLOCK + 2
    one.expected = torch.tensor([lost, -1])
    one.end_step()
    one.pending.append(finished(3, "lost"))
    one.pending.append(finished(2, "before it"))
    odd = finished(2, "odd")
    odd.meta["params"] = {"index": "x" * (17 << 20)}
    one.pending.append(odd)
    assert one.send(0.0) == {"long", "short", "lost", "before it", "odd"}
    for why in (
        "request long: 6 rows and params have 4.. bytes",
        "the engine has fewer",
        "as max_model_len",
    ):
        with pytest.raises(StepFailedError, match=why):
            rx.recv(30.0)
    with rx.recv(30.0) as item:
        assert len(item["token_ids"]) == 2
    with pytest.raises(StepFailedError, match="request odd: "):
        rx.recv(30.0)
    one.expected = torch.tensor([lost])
    one.kept(torch.tensor([lost]))
    one.end_step()
    one.pending.append(finished(3))
    assert one.send(0.0) == {"r"}
    one.close()
    rx.close()


def test_another_specification_is_told(channel: str, caplog: pytest.LogCaptureFixture) -> None:
    one = worker(channel)
    wrong = {**SPECS, "hidden": ("bfloat16", (None, LAYERS, WIDTH))}
    with TensorChannel.open(channel, specs=wrong) as rx, caplog.at_level(logging.WARNING):
        one.pending.append(finished())
        assert one.send(0.0) == set()
        with pytest.raises(SpecMismatchError, match=r"expected bfloat16.*sent float32"):
            rx.recv(30.0)
    assert "expected bfloat16[*, 2, 8], sent float32[*, 2, 8]" in caplog.text
    with TensorChannel.open(channel, specs=SPECS) as rx:
        assert one.send(0.0) == {"r"}
        assert len(rx.recv(30.0)["token_ids"]) == 10
    one.close()


def test_a_closed_trainer_ends_only_sending(channel: str, caplog: pytest.LogCaptureFixture) -> None:
    one = worker(channel)
    rx = TensorChannel.open(channel, specs=SPECS)
    rx.close("done")
    one.pending.extend(finished(10, f"r{i}") for i in range(4))
    with caplog.at_level(logging.WARNING, "vllm.shmbus"):
        assert one.send(0.0) == {"r0", "r1", "r2", "r3"}
    assert "has closed it" in caplog.text and "the engine goes on" in caplog.text
    one.close()


def test_the_end_of_an_engine_says_what_it_leaves(channel: str) -> None:
    one = worker(channel)
    rx = TensorChannel.open(channel, specs=SPECS)
    one.pending.extend(finished(10, f"r{i}") for i in range(3))
    one.send(0.0)
    one.close()
    for _ in range(2):
        rx.recv(30.0).ack()
    with pytest.raises(ChannelClosedError, match="the engine ends; 1 requests were not sent"):
        rx.recv(30.0)
    rx.close()


@pytest.mark.parametrize(
    ("status", "computed", "blocks", "rows"),
    [
        (RequestStatus.FINISHED_LENGTH_CAPPED, 12, 3, 10),
        (RequestStatus.FINISHED_STOPPED, 10, 3, 10),
        (RequestStatus.FINISHED_STOPPED, 9, 3, -9),
        (RequestStatus.FINISHED_STOPPED, 10, 2, -8),
        (RequestStatus.FINISHED_ABORTED, 10, 3, None),
        (RequestStatus.FINISHED_ERROR, 10, 3, None),
    ],
)
def test_a_request_keeps_its_blocks_only_where_it_has_ended_as_it_should(
    status: RequestStatus, computed: int, blocks: int, rows: int | None
) -> None:
    connector = HiddenStatesConnector.__new__(HiddenStatesConnector)
    connector._group, connector._block_size, connector._layers = 1, BLOCK, [1, 2]
    connector._finished = []
    request: Any = SimpleNamespace(
        status=status, request_id="r", all_token_ids=list(range(11)), num_computed_tokens=computed,
        num_prompt_tokens=4, kv_transfer_params={"index": 3},
        get_finished_reason=lambda: "length",
    )  # fmt: skip
    keeps, _ = connector.request_finished_all_groups(request, ([9], list(range(blocks))))
    assert keeps == (rows is not None)
    told = connector.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=0))  # type: ignore[arg-type]
    assert told.idle and len(told.finished) == keeps
    if rows is not None:
        lacks = f"the engine has the states of {-rows} of 10 tokens" if rows < 0 else ""
        assert told.finished[0].rows == 10 and told.finished[0].problem == lacks
        assert told.finished[0].meta["params"] == {"index": 3}
        assert told.finished[0].meta["prompt"] == 4


def test_a_configuration_that_cannot_be_is_refused_with_what_can() -> None:
    with pytest.raises(ValueError, match=r"expected channel, senders, .*`chanel`"):
        hidden_states.options_of({"chanel": "x"})
    with pytest.raises(ValueError, match="required field `channel`"):
        hidden_states.options_of({})

    def config(layers: Any, method: str = "extract_hidden_states", device: str = "cpu") -> Any:
        hf_config = SimpleNamespace(eagle_aux_hidden_state_layer_ids=layers)
        draft = SimpleNamespace(hf_config=hf_config)
        return SimpleNamespace(
            speculative_config=SimpleNamespace(method=method, draft_model_config=draft),
            model_config=SimpleNamespace(get_total_num_hidden_layers=lambda: 4),
            device_config=SimpleNamespace(device_type=device),
        )

    assert hidden_states.layers_of(config((0, 2, 4))) == [0, 2, 4]
    assert hidden_states.layers_of(config((1, 4), device="cuda")) == [1, 4]
    with pytest.raises(ValueError, match=r"layers from 1 .on a GPU vLLM overwrites 0"):
        hidden_states.layers_of(config((0, 4), device="cuda"))
    for layers in ([5], [-1], [2, 1], [1, 1], [], ["1"]):
        with pytest.raises(ValueError, match=r"layers from 0 .the embedding. to 4 "):
            hidden_states.layers_of(config(layers))
    for other in (config([1], "ngram"), SimpleNamespace(speculative_config=None)):
        with pytest.raises(ValueError, match="expected the speculative method"):
            hidden_states.layers_of(other)
