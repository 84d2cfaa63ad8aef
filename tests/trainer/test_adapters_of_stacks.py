"""What the adapters of other trainers share, and what they say where their stack is not there."""

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from conftest import wait_until

import shmbus
from trainer_adapter.adapters.optional_imports import Stack
from trainer_adapter.adapters.prompt_response import experts_of, part_row
from trainer_adapter.adapters.requested_groups import SplitConsumer


@pytest.mark.skipif(importlib.util.find_spec("verl") is not None, reason="verl is installed here")
def test_without_its_stack_an_adapter_says_what_it_needs() -> None:
    with pytest.raises(ImportError, match=r"needs kv_put of transfer_queue.*no verl \(tested"):
        importlib.import_module("trainer_adapter.adapters.verl.manager")


def test_a_stack_of_another_version_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stack = Stack("other", {"pytest": "0.1", "nowhere": "2.0"}, "other==1.0")
    assert stack.needed("pytest", "raises", "mark") == (pytest.raises, pytest.mark)
    with pytest.raises(ImportError) as raised:
        stack.needed("pytest", "raises", "rises", "sets")
    assert str(raised.value) == (
        "the other adapter needs raises, rises, sets of pytest, and it has no rises, sets: "
        f"pytest {pytest.__version__} (tested: 0.1), no nowhere (tested: 2.0); install other==1.0"
    )
    monkeypatch.syspath_prepend(tmp_path)
    reasons = {
        "import not_there_at_all": "the module not_there_at_all is not there",
        "from sys import gone": r"it does not import \(ImportError: cannot import name 'gone'",
        "def f[T](x: T) -> T: ...; else": r"it does not import \(SyntaxError: ",
    }
    for number, (text, reason) in enumerate(reasons.items()):
        (tmp_path / f"other_stack_{number}.py").write_text(text)
        with pytest.raises(ImportError, match=f"needs Name of other_stack_{number}, and {reason}"):
            stack.needed(f"other_stack_{number}", "Name")


def row(**changes: Any) -> dict[str, Any]:
    good = {"tokens": [1, 2, 3, 4], "loss_mask": [0, 1, 0, 1], "logprobs": [0, -1, np.nan, -2.0]}
    return {name: np.array(value) for name, value in (good | changes).items() if value is not None}


def test_a_row_is_parted_at_its_first_sampled_token() -> None:
    t: Any = SimpleNamespace(instance_id="q", index=2, keys=tuple)
    parted = part_row(t, row(), logprobs=True)
    assert (parted.prompt, parted.response) == ([1], [2, 3, 4])
    assert (parted.mask, parted.logprobs) == ([1, 0, 1], [-1, 0, -2])
    assert part_row(t, row(logprobs=None), logprobs=False).logprobs is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tokens": None}, "'tokens': expected one value a token, got none"),
        ({"loss_mask": [0, 1]}, r"'loss_mask': expected one value a token, got shape \(2,\)"),
        ({"logprobs": None}, "'logprobs': expected one value a token, got none"),
        ({"logprobs": [0, np.inf, 0, 0]}, "'logprobs': expected finite numbers"),
        ({"logprobs": [0, -1, -2]}, r"'logprobs': expected one value a token, got shape \(3,\)"),
        ({"tokens": np.full(4, 2**63, np.uint64)}, "'tokens': .*2..63, got 9223372036854775808"),
        ({"logprobs": [b"a"] * 4}, r"'logprobs': expected real numbers, got \|S1"),
        ({"loss_mask": [b"a"] * 4}, r"'loss_mask': expected numbers, got \|S1"),
        ({"tokens": [1.5] * 4}, r"'tokens': expected whole numbers below 2\*\*63, got float64"),
        ({"logprobs": [1j] * 4}, "'logprobs': expected real numbers, got complex128"),
        ({"loss_mask": [0] * 4}, "expected a prompt, and then a sampled token, got 0 sampled of 4"),
        ({"loss_mask": [1] * 4}, "expected a prompt, and then a sampled token, got 4 sampled of 4"),
    ],
)
def test_a_row_that_lacks_something_is_named(changes: dict[str, Any], words: str) -> None:
    t: Any = SimpleNamespace(instance_id="q", index=2, keys=tuple)
    with pytest.raises(ValueError, match=f"group 'q', sample 2, field {words}|{words}"):
        part_row(t, row(**changes), logprobs=True)


@pytest.mark.parametrize(
    ("experts", "got"),
    [
        (np.full((3, 2, 2), 1.7), r"float64 in shape \(3, 2, 2\)"),
        (np.full((3, 2, 2), 70_000), "0 to 70000"),
        (np.full((3, 2, 2), -1), "-1 to 0"),
        (np.ones((5, 2, 2), np.uint8), r"uint8 in shape \(5, 2, 2\)"),
        (np.ones(3, np.uint8), r"uint8 in shape \(3,\)"),
    ],
)
def test_experts_changed_by_a_cast_are_refused(experts: Any, got: str) -> None:
    t: Any = SimpleNamespace(instance_id="q", index=2)
    says = f"group 'q', sample 2, field 'routed_experts': expected the numbers .*got {got}"
    with pytest.raises(ValueError, match=says):
        experts_of(t, row(routed_experts=experts))


@pytest.mark.parametrize("served", [False, True])
def test_evaluations_are_taken_beside_training_with_a_daemon_and_without(
    served: bool, bus_name: str, daemon: Callable[..., Any]
) -> None:
    if served:
        daemon("--capacity", "1MiB")
    with (
        shmbus.Bus.ensure(bus_name, capacity="1MiB") as handle,
        shmbus.Producer(bus_name) as producer,
    ):
        for split in ("train", "eval", "train"):
            round = producer.next_round()
            producer.put("q", group_size=1, index=0, split=split, round=round, tokens=[1])
        consumers = SplitConsumer(bus_name)
        for split, count in (("eval", 1), ("train", 2), ("eval", 0)):
            taken: list[shmbus.Group] = []
            for _ in range(50 if count else 1):
                consumer, groups = consumers.take(split, 8, 0.1)
                consumer.ack(groups)
                taken += groups
                if len(taken) >= count:
                    break
            assert len(taken) == count, split
        wait_until(lambda: handle.stats().acknowledged == 3)
        consumers.close()


def test_a_wrong_call_without_a_daemon_opens_no_second_consumer(bus: shmbus.Bus) -> None:
    consumers = SplitConsumer(bus.name)
    try:
        with pytest.raises(ValueError, match="max_groups: expected 1 or more, got 0"):
            consumers.take("eval", 0, 0.0)
    finally:
        consumers.close()
