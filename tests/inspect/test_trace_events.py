"""Trace events of a bus: what a daemon remembers becomes slices, arrows, counters and instants."""

import random
from typing import Any

import pytest
import trace_format
from trace_format import slices

from shmbus.data.status_types import BusEvent, GroupCells, SampleCell, SampleCommit
from shmbus.inspect import trace_events
from shmbus.inspect.groups import Groups
from shmbus.inspect.trace_events import TraceEvents
from shmbus.pool.pool_status import PoolStatus, ReaderStatus, SlotStatus

TRAINER = "train.py (pid 7)"


def event(number: int, at: float, kind: str, **more: Any) -> BusEvent:
    return BusEvent(number=number, unix_s=at, kind=kind, **more)


def leased(number: int, at: float, key: str = "q", **more: Any) -> BusEvent:
    return event(number, at, "leased", who=TRAINER, instance_id=key, count=2, **more)


def spans(found: list[dict[str, Any]]) -> list[tuple[str, float, float]]:
    return [(e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6) for e in found]


def test_a_group_is_a_slice_until_its_lease_and_one_until_its_end() -> None:
    trace = TraceEvents("run1")
    made = trace.history(
        [
            leased(1, 15.0, round=2, samples=[SampleCommit(0, 3, 10.0), SampleCommit(1, 4, 12.0)]),
            event(2, 20.0, "acknowledged", who=TRAINER, instance_id="q", round=2, count=2),
        ]
    )
    trace_format.check(made)
    assert spans(slices(made, "groups")) == [
        ("q of round 2", 10, 15), ("incomplete", 10, 12), ("waits for a trainer", 12, 15),
    ]  # fmt: skip
    [at_trainer] = slices(made, TRAINER)
    assert spans([at_trainer]) == [("q of round 2", 15, 20)]
    assert at_trainer["args"] == {
        "instance_id": "q", "round": 2, "split": "train", "samples": 2, "end": "acknowledged",
    }  # fmt: skip
    assert [e["ph"] for e in made if e["ph"] in "sf"] == ["s", "f"]
    puts = [(e["name"], e["ts"] / 1e6) for e in made if e["name"].endswith(" put")]
    assert puts == [("q of round 2/0 put", 10), ("q of round 2/1 put", 12)]
    assert trace.end(21.0) == []


def test_what_was_before_the_trace_has_no_samples() -> None:
    trace = TraceEvents("run1")
    made = trace.history([leased(1, 15.0, began_unix_s=10.0)]) + trace.end(16.0)
    trace_format.check(made)
    assert spans(slices(made, "groups")) == [("q", 10, 15)]
    assert slices(made, TRAINER)[0]["args"]["end"] == "open at the end of the trace"


def test_a_group_that_is_given_back_waits_again() -> None:
    trace = TraceEvents("run1")
    commits = [SampleCommit(0, 3, 10.0), SampleCommit(1, 3, 11.0)]
    made = trace.history(
        [
            leased(1, 12.0, samples=commits),
            event(2, 14.0, "given_back", instance_id="q", count=2),
            leased(3, 17.0, samples=commits),
            event(4, 18.0, "dropped", who=TRAINER, instance_id="q", text="malformed", count=2),
        ]
    )
    trace_format.check(made)
    assert [e for e in spans(slices(made, "groups")) if e[0] == "q"] == [
        ("q", 10, 12), ("q", 14, 17),
    ]  # fmt: skip
    assert [e["args"]["end"] for e in slices(made, TRAINER)] == ["given_back", "dropped: malformed"]


def test_a_drop_of_another_group_of_this_id_ends_no_lease() -> None:
    trace = TraceEvents("run1")
    late = [SampleCommit(0, 3, 13.0)]
    made = trace.history(
        [
            leased(1, 12.0, began_unix_s=10.0),
            event(2, 14.0, "dropped", instance_id="q", text="surplus", index=1, count=1),
            event(3, 15.0, "dropped", instance_id="q", text="timeout", count=1, samples=late),
        ]
    )
    assert slices(made, TRAINER) == []
    assert slices(made, "groups")[-2]["args"]["end"] == "dropped: timeout"
    assert spans(slices(trace_of(made, trace.end(20.0)), TRAINER)) == [("q", 12, 20)]


def trace_of(*parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    whole = [each for part in parts for each in part]
    trace_format.check(whole)
    return whole


def test_a_sample_that_somebody_was_seen_to_make_is_a_slice_of_its_producer() -> None:
    trace = TraceEvents("run1")
    cells = [SampleCell(index=1, state="begun", producer=4)]
    group = GroupCells(
        instance_id="q", round=None, size=2, present=1, age_s=5.0, need=2, cells=cells
    )
    trace.groups(Groups(source="daemon", groups=[group]), 11.0)
    commits = [SampleCommit(0, 3, 10.0), SampleCommit(1, 4, 12.0)]
    made = trace_of(trace.history([leased(1, 15.0, samples=commits)]))
    assert spans(slices(made, "producer 4")) == [("q/1", 11, 12)]
    assert slices(made, "producer 3") == []


def test_pauses_are_slices_and_deaths_are_instants_of_who_died() -> None:
    trace = TraceEvents("run1")
    made = trace_of(
        trace.history(
            [
                event(1, 10.0, "paused", text="new weights"),
                event(2, 11.0, "producer_died", who="w0 (pid 5)"),
                event(3, 12.0, "policy_version", text="3 to 5"),
                event(4, 13.0, "resumed"),
                event(5, 14.0, "paused"),
                event(6, 14.5, "failed", who="w1 (pid 6)", instance_id="q", index=1, text="oom"),
            ],
            missed=9,
        ),
        trace.end(15.0),
    )
    assert spans(slices(made, "bus run1")) == [
        ("paused: new weights", 10, 13), ("paused", 14, 15),
    ]  # fmt: skip
    names = trace_format.processes(made)
    assert [(names[e["pid"]], e["name"]) for e in made if e["ph"] == "i"] == [
        ("bus run1", "9 events were forgotten before they were read"),
        ("w0 (pid 5)", "producer died"),
        ("bus run1", "policy version 3 to 5"),
        ("w1 (pid 6)", "q/1 failed: oom"),
    ]


def pool(sequence: int, version: int, applied: int | None) -> PoolStatus:
    slot = SlotStatus(
        slot=0, state="ready", newest=True, version=version, text="", sequence=sequence, size=64,
        meta_size=0, digests=0, ranks=1, published_unix_ns=version * 10**9, patch_from=None,
        held_by=[],
    )  # fmt: skip
    reader = ReaderStatus(
        reader=0, state="alive", pid=9, label="vllm", device="", applied_version=applied,
        applied_sequence=sequence, refused_version=None, error_code=0, error="", holds=[],
    )  # fmt: skip
    return PoolStatus(
        bus="run1", kind="weights", path="", size=64, slot_size=64, slots_open=1, max_slots=1,
        published=sequence, skipped=0, version=version, slots=[slot], ranks=[], readers=[reader],
    )  # fmt: skip


def test_versions_of_weights_are_published_once_and_run_until_the_next() -> None:
    trace = TraceEvents("run1")
    made = trace_of(
        trace.weights([pool(1, 3, None)], 4.0),
        trace.weights([pool(1, 3, 3)], 5.0),
        trace.weights([pool(2, 6, 3)], 7.0),
        trace.weights([pool(2, 6, 6)], 8.0),
        trace.end(9.0),
    )
    published = [(e["name"], e["ts"] / 1e6) for e in made if e["ph"] == "i"]
    assert published == [("version 3 published", 3), ("version 6 published", 6)]
    assert spans(slices(made, "weights of vllm (pid 9)")) == [
        ("version 3", 5, 8), ("version 6", 8, 9),
    ]  # fmt: skip


def test_slices_of_any_history_do_not_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    monkeypatch.setattr(trace_events, "MAX_OPEN", 5)  # hides some ends
    trace = TraceEvents("run1")
    at, made = 1000.0, []
    kinds = ("leased", "leased", "acknowledged", "given_back", "dropped", "failed", "paused",
             "resumed")  # fmt: skip
    for number in range(1, 600):
        at += dice.random()
        kind = dice.choice(kinds)
        key = "" if kind in ("paused", "resumed") else f"q{dice.randrange(12)}"
        samples = [
            SampleCommit(index, index, at - dice.random() * 5) for index in range(dice.randrange(3))
        ]
        if kind not in ("leased", "dropped"):
            samples = []
        who = dice.choice((TRAINER, "other (pid 8)")) if key and kind != "given_back" else ""
        index = dice.choice((None, 1)) if kind == "dropped" else None
        made += trace.history(
            [
                event(
                    number, at, kind, who=who, instance_id=key, count=len(samples), index=index,
                    samples=samples, began_unix_s=dice.choice((0.0, at - 2)),
                )
            ]
        )  # fmt: skip
    trace_of(made, trace.end(at))
