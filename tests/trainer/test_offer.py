"""Prompts that a handler keeps open: whatever a group ends as, and across restarts."""

import functools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from answering import answering
from conftest import Daemon, keys_of, together, train_next, wait_until

import shmbus
from shmbus import Bus, Producer
from shmbus.store import snapshot as store
from trainer_adapter import OnlineDataHandler

pytestmark = pytest.mark.slow

TOKENS = np.arange(4, dtype=np.int32)


def answer(producer: Producer, request: shmbus.Request, **more: Any) -> None:
    given = {"score": float(request.index), "tokens": TOKENS, "logprobs": np.zeros(4), **more}
    producer.requests.answer(request, **given)


def prompts(count: int) -> list[dict[str, Any]]:
    return [{"instance_id": f"q{number}", "prompt": [number]} for number in range(count)]


worker = functools.partial(answering, answer=answer)


def train_all(handler: OnlineDataHandler) -> list[str]:
    trained = []
    for batch in handler:
        trained += keys_of(batch)
        handler.ack(batch)
    return trained


def train_past(handler: OnlineDataHandler, error: type[Exception], timeout: float) -> Any:
    """Train to the end, past errors of a kind; return the groups' ids, and these errors."""
    trained: list[str] = []
    errors: list[str] = []
    while True:
        try:
            trained += train_next(handler, timeout)
        except EOFError:
            return trained, errors
        except error as raised:
            errors.append(str(raised))


def open_ids(name: str) -> list[str]:
    with Producer(name) as producer:
        found = []
        while (request := producer.requests.next(timeout=0)) is not None:
            found.append(request.instance_id)
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_so_many_batches_are_open_and_each_prompt_is_trained_once(bus: Bus, prefetch: int) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2, prefetch=prefetch) as handler:
        handler.offer(prompts(20), ahead=3, group_size=2)
        assert handler.stats().requests.groups == 6
        with pytest.raises(TimeoutError, match=r"0 of 2 groups .* and 6 prompts are open"):
            handler.next_batch(0.1)
        assert open_ids(bus.name) == [f"q{number}" for number in range(6)]
        trained = []
        with worker(bus.name):
            for batch in handler:
                trained += keys_of(batch)
                assert handler.stats().requests.groups <= 2 * (3 + 1 + prefetch)
                handler.ack(batch)
        assert sorted(trained) == sorted(f"q{number}" for number in range(20))
        assert handler.step == 10
        with pytest.raises(EOFError, match="the 20 offered prompts"):
            handler.next_batch()


def test_batches_that_are_out_leave_room_for_others(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        handler.offer(prompts(12), ahead=1, group_size=1)
        out = [handler.next_batch(30) for _ in range(6)]
        for batch in out:
            handler.ack(batch)


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("groups", [3, None])
def test_the_last_batch_has_what_is_left(bus: Bus, prefetch: int, groups: int | None) -> None:
    budget: dict[str, Any] = (
        {"groups_per_batch": groups} if groups else {"tokens_per_batch": 24, "max_wait": None}
    )
    with OnlineDataHandler(bus.name, prefetch=prefetch, **budget) as handler, worker(bus.name):
        handler.offer(prompts(7), group_size=2)
        sizes = []
        for batch in handler:
            sizes.append(len(batch.groups))
            handler.ack(batch)
        assert sizes == [3, 3, 1]


def test_a_budget_of_tokens_is_estimated_from_recent_groups(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, tokens_per_batch=40, max_wait=None) as handler:
        handler.offer(prompts(400), ahead=2, group_size=1)
        with pytest.raises(TimeoutError):
            handler.next_batch(0)
        assert handler.stats().requests.groups == 16
        with worker(bus.name):
            for _ in range(5):
                handler.ack(handler.next_batch(30))
        wait_until(lambda: not handler.stats().requests.claimed)
        with pytest.raises(TimeoutError):
            while True:
                handler.ack(handler.next_batch(0.1))
        assert handler.stats().requests.groups >= 20  # 10 of 4 tokens fill a batch


def late(producer: Producer, request: shmbus.Request) -> None:
    if request.index == 0:
        answer(producer, request, tokens=np.arange(2000), logprobs=np.zeros(2000))


ENDS: dict[str, tuple[Callable[[Producer, shmbus.Request], None], dict[str, Any]]] = {
    "failed": (lambda producer, request: producer.requests.fail(request, "tool"), {}),
    "timeout": (late, {"group_timeout": 0.7, "on_timeout": "drop"}),
    "stale": (lambda producer, request: answer(producer, request), {"max_policy_lag": 0}),
    "malformed": (lambda producer, request: answer(producer, request, tokens=np.ones(4)), {}),
    "zero_variance": (
        lambda producer, request: answer(producer, request, score=1.0),
        {"skip_zero_variance": True},
    ),
    "filtered": (
        lambda producer, request: answer(producer, request, score=None),
        {"score_group": lambda group: None},
    ),
    "truncated": (
        lambda producer, request: answer(producer, request, meta={"finish_reason": "length"}),
        {"truncated": "drop"},
    ),
    "overflow": (late, {"max_stash_bytes": 4096, "on_overflow": "drop"}),
}


@pytest.mark.parametrize(
    ("how", "served"),
    [*((how, False) for how in ENDS), ("failed", True), ("stale", True), ("overflow", True)],
)
def test_a_group_that_ends_otherwise_than_trained_is_replaced(
    bus: Bus, how: str, served: bool, daemon: Callable[..., Daemon]
) -> None:
    ends, options = ENDS[how]

    def does(producer: Producer, request: shmbus.Request) -> None:
        if int(request.instance_id[1:]) % 3:
            return ends(producer, request)
        return answer(producer, request, policy_version=9)

    if served:
        flags: list[str] = []
        for name in sorted(options.keys() - {"score_group", "truncated"}):
            flags += [f"--{name.replace('_', '-')}", str(options[name])]
        daemon(*[flag for flag in flags if flag != "True"])
    with (
        OnlineDataHandler(bus.name, groups_per_batch=2, malformed="drop", **options) as handler,
        answering(bus.name, does),
    ):
        handler.set_policy_version(9)
        handler.offer(prompts(12), ahead=1, group_size=2)
        assert sorted(train_all(handler)) == ["q0", "q3", "q6", "q9"]
        ledger = handler.stats()
        assert ledger.balanced and ledger.requests.balanced and ledger.requests.groups == 0
        assert handler.refill == 8


def test_arrays_and_token_ids_are_fields_and_all_else_is_in_the_meta(bus: Bus) -> None:
    image = np.ones((2, 3), np.float32)
    given = [
        {
            "instance_id": "a",
            "prompt": [1, 2],
            "answer": "4",
            "difficulty": 3,
            "meta": {"x": 1},
            "split": "train",
            "round": np.array(3),
        },
        ("b", [5]),
        ("c", {"text": "text"}),
        (7, {"question": "why", "image": image, "group_size": 3}),
        {"temperature": 0.5, "chat": [{"role": "user", "content": "hi"}]},
        {"instance_id": "e", "meta": [1, 2], "priority": 0},
    ]
    found = {}
    with (
        Producer(bus.name) as producer,
        OnlineDataHandler(
            bus.name, groups_per_batch=3, prompt_schema={"prompt?": "int64", "image?": "float32",
                                                         "temperature?": "float32"},
        ) as handler,
    ):  # fmt: skip
        handler.offer(given, group_size=1)
        with pytest.raises(TimeoutError):
            handler.next_batch(0)
        while (request := producer.requests.next(timeout=0)) is not None:
            found.setdefault(request.instance_id, request)
    assert list(found) == ["a", "b", "c", "7", "4", "e"]
    assert [request.round for request in found.values()] == list(range(6))
    assert found["a"]["prompt"].tolist() == [1, 2] and found["a"]["prompt"].dtype == np.int64
    assert found["a"].meta == {
        "answer": "4", "difficulty": 3, "x": 1, "split": "train", "round": 3,
    }  # fmt: skip
    assert found["b"]["prompt"].tolist() == [5] and found["b"].meta is None
    assert found["c"].meta == {"text": "text"}
    assert found["7"]["image"].tolist() == image.tolist() and found["7"].group_size == 3
    assert found["7"].meta == {"question": "why"}
    assert found["4"]["temperature"] == 0.5
    assert found["4"].meta == {"chat": [{"role": "user", "content": "hi"}]}
    assert found["e"].meta == [1, 2]


def test_text_and_messages_go_into_the_meta(bus: Bus, producer: Producer) -> None:
    chat = [{"role": "user", "content": "hi"}]
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        handler.offer([("a", "text"), ("b", chat)], group_size=1)
        with pytest.raises(TimeoutError):
            handler.next_batch(0)
    first, second = producer.requests.next_many(2, timeout=30)
    assert first.meta == {"prompt": "text"} and second.meta == {"prompt": chat}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([1, 2], "expected a dict or an .id, prompt. pair, got int as prompt 0"),
        ([{1: 2}], "expected names as keys of prompt 0, got 1"),
        ([{"meta": [1], "answer": "x"}], r"a dict as the meta of prompt 0.*\['answer'\]"),
        ([{"group_size": 0}], "prompt '0', the 1. that was offered, is left out: group_size"),
        ([("", [1])], "is left out: instance_id"),
        ([{"tokens": np.zeros(3), "score": np.ones(1)}], "is left out: score: a request says no"),
        ([{"image": np.zeros(10**7)}], "is left out: .* the request lane has"),
    ],
)
def test_a_wrong_prompt_is_named_once_and_skipped(bus: Bus, wrong: list[Any], says: str) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler, worker(bus.name):
        with pytest.raises((TypeError, ValueError), match=says):
            handler.offer([wrong[0], *prompts(2)], group_size=2)
        assert sorted(train_all(handler)) == ["q0", "q1"]


def test_a_prompt_that_is_wrong_later_is_an_error_of_next_batch_once(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler, worker(bus.name):
        handler.offer([*prompts(3), 7, *prompts(5)[3:]], ahead=1, group_size=2)
        trained, errors = train_past(handler, TypeError, 30)
        assert len(errors) == 1 and "got int as prompt 3" in errors[0]
        assert sorted(trained) == [f"q{number}" for number in range(5)]


def test_a_loader_of_batches_is_refused(bus: Bus) -> None:
    from torch.utils.data import DataLoader

    with OnlineDataHandler(bus.name) as handler:
        with pytest.raises(ValueError, match=r"batch_size=None.*got batch_size=1"):
            handler.offer(DataLoader(prompts(3)))
        handler.offer(DataLoader(prompts(3), batch_size=None))


class Flaky:
    """Raises before each third prompt; the next call returns the prompt."""

    def __init__(self, count: int) -> None:
        self.left = iter(prompts(count))
        self.calls = 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        self.calls += 1
        if self.calls % 3 == 0:
            raise ConnectionError("the data server is away")
        return next(self.left)


class Again:
    """Can begin again; the first pass raises in the middle."""

    def __init__(self, count: int) -> None:
        self.count, self.passes = count, 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self.passes += 1
        for number, prompt in enumerate(prompts(self.count)):
            if self.passes == 1 and number == 4:
                raise ConnectionError("the data server is away")
            yield prompt


@pytest.mark.parametrize("make", [Flaky, Again])
def test_a_raising_iterator_resumes_at_its_prompt(bus: Bus, make: Callable[[int], Any]) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        data, trained, errors = make(9), [], 0
        while True:
            try:
                if not handler.stats().requests.offered:
                    handler.offer(data, group_size=2)
                batch = handler.next_batch(30)
            except ConnectionError:
                errors += 1
                continue
            except EOFError:
                break
            trained += keys_of(batch)
            handler.ack(batch)
        assert errors and sorted(trained) == sorted(f"q{number}" for number in range(9))


def test_a_generator_that_raises_is_not_taken_for_the_end(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        handler.offer(iter(Again(10)), group_size=2)
        trained = []
        with pytest.raises(ConnectionError):
            while True:
                trained += train_next(handler)
        for _ in range(2):
            with pytest.raises(ValueError, match="raised an exception at prompt 4"):
                handler.next_batch(30)
        handler.offer(iter(prompts(10)), group_size=2)
        trained += train_all(handler)
        assert sorted(trained) == sorted(f"q{number}" for number in range(10))


def test_an_iterator_that_is_slower_than_the_trainer_loses_nothing(bus: Bus) -> None:
    def slowly() -> Iterator[dict[str, Any]]:
        for prompt in prompts(8):
            time.sleep(0.03)
            yield prompt

    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        handler.offer(slowly(), group_size=1)
        trained, _ = train_past(handler, TimeoutError, 0.02)
        assert sorted(trained) == sorted(f"q{number}" for number in range(8))


def test_two_rounds_of_a_prompt_never_meet(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=4) as handler, worker(bus.name):
        handler.offer([*prompts(2)] * 10, ahead=3, group_size=3)
        rounds: Counter[Any] = Counter()
        for batch in handler:
            rounds.update((group.instance_id, group[0].round) for group in batch.groups)
            assert all(len({t.round for t in group}) == 1 for group in batch.groups)
            handler.ack(batch)
        assert rounds == Counter((f"q{number % 2}", number) for number in range(20))
        assert handler.stats().dropped == {}


def test_a_lane_that_is_full_is_filled_as_it_empties(bus: Bus) -> None:
    large = [(f"q{number}", np.full(4000, number, np.int32)) for number in range(24)]
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler:
        handler.offer(large, ahead=24, group_size=1)
        with pytest.raises(TimeoutError):
            handler.next_batch(0)
        assert 0 < handler.stats().requests.groups < 24
        with worker(bus.name):
            train_all(handler)
        assert handler.step == 24


def test_other_data_can_follow_when_all_were_trained(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        for _ in range(2):
            handler.offer(prompts(4), group_size=2)
            train_all(handler)
        assert handler.step == 4 and handler.stats().dropped == {}


@pytest.mark.parametrize("kind", ["list", "iterator", "state"])
def test_the_same_call_goes_on_at_the_exact_prompt_on_a_new_bus(bus_name: str, kind: str) -> None:
    def data() -> Any:
        return {"list": prompts, "iterator": lambda n: iter(prompts(n)), "state": Stateful}[kind](9)

    trained: list[str] = []
    state: Any = None
    for _ in range(5):
        with (
            Bus.create(bus_name, "4MiB"),
            OnlineDataHandler(bus_name, groups_per_batch=2) as handler,
            worker(bus_name),
        ):
            if state is not None:
                handler.load_state_dict(state)
            handler.offer(data(), ahead=2, group_size=2)
            batch = handler.next_batch(30)
            trained += keys_of(batch)
            state = json.loads(json.dumps(handler.state_dict()))
            handler.ack(batch)
    assert sorted(trained) == sorted(f"q{number}" for number in range(9))


class Stateful:
    """Has its own state, like torchdata's StatefulDataLoader."""

    def __init__(self, count: int) -> None:
        self.data, self.at = prompts(count), 0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while self.at < len(self.data):
            self.at += 1
            yield self.data[self.at - 1]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def test_a_full_lane_does_not_move_the_position_of_a_loader_with_a_state(bus: Bus) -> None:
    loader = Stateful(40)
    loader.data = [{**each, "x": np.zeros(4000)} for each in loader.data]
    with OnlineDataHandler(bus.name, groups_per_batch=40) as handler:
        handler.offer(loader, group_size=1)
        with pytest.raises(TimeoutError):
            handler.next_batch(0)
        offered = handler.stats().requests.offered
        assert loader.at == offered + 1 < 40
        assert handler.state_dict()["offer"]["source"] == {"at": offered}


def test_a_run_that_goes_back_in_one_process_trains_none_twice(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        handler.offer(prompts(10), group_size=2)
        handler.ack(handler.next_batch(30))
        state = handler.state_dict()
        handler.ack(handler.next_batch(30))  # its weights are lost
        handler.load_state_dict(state)
        trained = train_all(handler)
        assert len(set(trained)) == len(trained) == 8


def test_a_state_of_other_data_is_named_and_the_right_data_go_on(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        handler.offer(prompts(10), group_size=2)
        handler.ack(handler.next_batch(30))
        state = json.loads(json.dumps(handler.state_dict()))
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        handler.load_state_dict(state)
        with pytest.raises(ValueError, match="it had 10 prompts, and these are 9"):
            handler.offer(prompts(9), group_size=2)
        shuffled = prompts(10)[::-1]
        for given in (shuffled, iter(shuffled), iter(shuffled[:2])):
            for _ in range(2):
                with pytest.raises(ValueError, match=r"at prompt \d, .*got other data"):
                    handler.offer(given, group_size=2)
        handler.offer(prompts(10), group_size=2)
        seen = train_all(handler)
        assert len(seen) == len(set(seen)) == 8
    for changed, says in (
        ({"version": 9}, "of version 1, got 9"),
        ({"position": -1}, "expected the position of handler.offer"),
        ({"position": None}, "expected the position of handler.offer"),
        ({"rank": 1}, "expected the state of rank 0.*got that of rank 1"),
    ):
        with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
            with pytest.raises(ValueError, match=says):
                handler.load_state_dict({**state, "offer": {**state["offer"], **changed}})
            assert handler.step == 0
            handler.load_state_dict(state)


def test_a_state_that_is_loaded_behind_the_offer_is_refused(bus: Bus) -> None:
    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler:
        state = handler.state_dict()
        handler.offer(prompts(10), group_size=2)
        with pytest.raises(shmbus.ProtocolError, match="expected before offer"):
            handler.load_state_dict(state)


def test_prompts_without_ids_are_compared_by_what_they_say(bus: Bus) -> None:
    def data(first: int) -> list[dict[str, Any]]:
        return [{"prompt": [first + number], "answer": str(number)} for number in range(6)]

    with OnlineDataHandler(bus.name, groups_per_batch=2) as handler, worker(bus.name):
        handler.offer(data(0), group_size=2)
        handler.ack(handler.next_batch(30))
        state = handler.state_dict()
        handler.load_state_dict(state)
        handler.offer(data(0), group_size=2)
        handler.ack(handler.next_batch(30))
        handler.load_state_dict(state)
        with pytest.raises(ValueError, match=r"prompt 3 was '3', .* '3' with other content"):
            handler.offer(data(1), group_size=2)


def test_rank_0_offers_for_all_ranks(bus: Bus, daemon: Callable[..., Daemon]) -> None:
    daemon()
    handlers = [
        OnlineDataHandler(bus.name, groups_per_batch=2, rank=rank, world_size=2)
        for rank in range(2)
    ]
    found: list[list[str]] = [[], []]

    def run(rank: int) -> None:
        handler = handlers[rank]
        handler.offer(prompts(12), ahead=1, group_size=2)
        out = []
        for _ in range(3):
            batch = handler.next_batch(60)
            found[rank] += keys_of(batch)
            out.append(batch)  # acknowledged at the end: the second rank holds a batch
        for batch in out:
            handler.ack(batch)

    with worker(bus.name):
        together(run, range(2))
        assert sorted(found[0] + found[1]) == sorted(f"q{number}" for number in range(12))
        with pytest.raises(EOFError):
            handlers[0].next_batch(60)
        with pytest.raises(TimeoutError):
            handlers[1].next_batch(0.1)
        assert handlers[0].state_dict()["offer"]["position"] == 12
        assert handlers[1].state_dict()["offer"] == {"version": 1, "rank": 1}
    for handler in handlers:
        handler.close()


@pytest.mark.parametrize("left", [0, 1])
def test_ranks_train_all_that_fits(bus: Bus, daemon: Callable[..., Daemon], left: int) -> None:
    daemon()
    found: list[list[str]] = [[], []]
    over = threading.Event()

    def run(rank: int) -> None:
        try:
            with OnlineDataHandler(
                bus.name, tokens_per_batch=24, max_wait=0.3, rank=rank, world_size=2
            ) as handler:
                handler.offer(prompts(10 + left), group_size=2)
                while not over.is_set():
                    try:
                        batch = handler.next_batch(0.5)
                    except TimeoutError:
                        continue
                    found[rank] += keys_of(batch)
                    handler.ack(batch)
        except EOFError:
            pass
        finally:
            over.set()

    with worker(bus.name):
        together(run, range(2))
    trained = found[0] + found[1]
    assert len(set(trained)) == len(trained) and len(trained) >= 10


def test_prompts_offered_after_a_checkpoint_are_trained_once(bus: Bus, tmp_path: Path) -> None:
    """A snapshot keeps the samples of a prompt, and forgets the offer."""
    restored = f"{bus.name}-restored"
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler, Producer(bus.name) as producer:
        handler.offer(data := prompts(3), ahead=1, group_size=1)
        state = json.loads(json.dumps(handler.state_dict()))
        assert producer.requests.next(20).instance_id == "q0"
        handler.offer(data, ahead=2, group_size=1)
        answer(producer, request := producer.requests.next(20))
        assert request.instance_id == "q1"
    store.take(bus.name, tmp_path / "saved")
    store.restore(tmp_path / "saved", restored)
    with OnlineDataHandler(restored, groups_per_batch=1) as handler:
        handler.load_state_dict(state)
        handler.offer(prompts(3), ahead=1, group_size=1)
        opened = handler.state_dict()["requests"]["open"]
        assert [each["instance_id"] for each in opened] == ["q0", "q1"]
        handler.ack(batch := handler.next_batch(20))
        trained = keys_of(batch)
        assert trained == ["q1"]
        with worker(restored):
            trained += train_all(handler)
    assert trained == ["q1", "q0", "q2"]
    shmbus.unlink(restored)


@pytest.mark.parametrize("is_there", [False, True])
@pytest.mark.parametrize("offers", [False, True])
def test_a_group_that_a_later_bus_has_lost_is_offered_again(
    bus: Bus, tmp_path: Path, is_there: bool, offers: bool
) -> None:
    """A checkpoint names complete groups without a request, near the position and far ahead."""
    names = [f"{bus.name}-{number}" for number in range(2)]
    with OnlineDataHandler(bus.name, groups_per_batch=1) as handler, Producer(bus.name) as producer:
        handler.offer(data := prompts(9), ahead=1, group_size=1)
        state = json.loads(json.dumps(handler.state_dict()))
        handler.offer(data, ahead=9, group_size=1)
        for _ in range(9):
            request = producer.requests.next(20)
            if request.instance_id in ("q1", "q7"):
                answer(producer, request)
    store.take(bus.name, tmp_path / "saved")
    store.restore(tmp_path / "saved", names[0])
    with OnlineDataHandler(names[0], groups_per_batch=1) as handler:
        handler.load_state_dict(state)
        if offers:
            handler.offer(prompts(9), ahead=1, group_size=1)
        state = json.loads(json.dumps(handler.state_dict()))
    if is_there:
        store.restore(tmp_path / "saved", names[1], again=True)
    else:
        Bus.create(names[1], "1MiB").close()
    with OnlineDataHandler(names[1], groups_per_batch=1) as handler:
        handler.load_state_dict(state)
        handler.offer(prompts(9), ahead=1, group_size=1)
        with worker(names[1]):
            trained = train_all(handler)
    assert sorted(trained) == [f"q{number}" for number in range(9)]
    for name in names:
        shmbus.unlink(name)
