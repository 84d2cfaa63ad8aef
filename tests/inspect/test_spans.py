"""Spans of a bus, as OpenTelemetry's own SDK makes and exports them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from shmbus.inspect import spans as module
from shmbus.inspect.groups import Groups
from shmbus.inspect.spans import Spans, configured_exporter
from shmbus.inspect.trace_events import TraceEvents
from shmbus.inspect.types import BusEvent, GroupCells, SampleCell, SampleCommit

TRAINER = "train.py (rank 0, pid 7)"


def event(number: int, at: float, kind: str, **more: Any) -> BusEvent:
    return BusEvent(number=number, unix_s=at, kind=kind, **more)


def of_group(number: int, at: float, kind: str, **more: Any) -> BusEvent:
    return event(number, at, kind, who=TRAINER, instance_id="q", round=2, count=2, **more)


def exported(*parts: list[dict[str, Any]]) -> list[ReadableSpan]:
    exporter = InMemorySpanExporter()
    spans = Spans("run1", exporter)
    for part in parts:
        spans.add(part)
    found = list(exporter.get_finished_spans())
    spans.end()
    assert (spans.exported, spans.refused) == (len(found), 0)
    return found


def told(spans: Sequence[ReadableSpan]) -> dict[str, tuple[str, float, float]]:
    """Service, beginning and end of each span by its name; names are different here."""
    found = {
        span.name: (
            str(span.resource.attributes["service.name"]),
            (span.start_time or 0) / 1e9,
            (span.end_time or 0) / 1e9,
        )
        for span in spans
    }
    assert len(found) == len(spans)
    return found


def test_the_life_of_a_group_is_one_trace() -> None:
    trace = TraceEvents("run1")
    cell = SampleCell(index=1, state="begun", producer=4, age_s=3.0)
    cells = GroupCells(instance_id="q", round=2, size=2, present=1, age_s=5, need=2, cells=[cell])
    trace.groups(Groups(source="daemon", groups=[cells]), 11.0)
    commits = [SampleCommit(0, 3, 10.0), SampleCommit(1, 4, 12.0)]
    spans = exported(
        trace.history([of_group(1, 15.0, "leased", samples=commits)]),
        trace.history([of_group(2, 20.0, "acknowledged")]),
    )
    [at_trainer] = [span for span in spans if span.resource.attributes.get("process.pid") == 7]
    rest = [span for span in spans if span is not at_trainer]
    assert told(rest) == {
        "q of round 2": ("groups of run1", 10, 15),
        "incomplete": ("groups of run1", 10, 12),
        "waits for a trainer": ("groups of run1", 12, 15),
        "q of round 2/0 put": ("producer 3", 10, 10),
        "q of round 2/1": ("producer 4", 8, 12),
    }
    assert told([at_trainer]) == {"q of round 2": ("train.py", 15, 20)}
    [root] = [span for span in spans if span.parent is None]
    assert root.context is not None and root.name == "q of round 2"
    assert {span.context.trace_id for span in spans if span.context} == {root.context.trace_id}
    assert all(span.parent == root.context for span in spans if span is not root)
    assert dict(at_trainer.attributes or {}) == {
        "shmbus.instance_id": "q", "shmbus.round": 2, "shmbus.split": "train",
        "shmbus.samples": 2, "shmbus.end": "acknowledged",
    }  # fmt: skip
    scope = root.instrumentation_scope
    assert scope is not None and scope.name == "shmbus"


def test_what_is_of_no_group_is_a_trace_of_its_own() -> None:
    trace = TraceEvents("run1")
    spans = exported(
        trace.history(
            [
                event(1, 10.0, "paused", text="new weights"),
                event(2, 11.0, "producer_died", who="w0 (pid 5)"),
                event(3, 13.0, "resumed"),
                of_group(4, 14.0, "leased", began_unix_s=9.0),
                of_group(5, 14.5, "dropped", text="surplus", index=1),
            ]
        ),
        trace.end(15.0),
    )
    assert told(spans[:2]) == {
        "producer died": ("w0", 11, 11), "paused: new weights": ("bus run1", 10, 13),
    }  # fmt: skip
    assert len({span.context.trace_id for span in spans if span.context}) == 4
    assert [span.name for span in spans if span.parent] == ["q of round 2"]


def test_a_group_that_is_sampled_again_is_another_trace() -> None:
    trace = TraceEvents("run1")
    made = []
    for number, at in ((1, 15.0), (3, 35.0)):
        commits = [SampleCommit(index, 3, at - 5 + index) for index in range(2)]
        made += trace.history(
            [
                of_group(number, at, "leased", samples=commits),
                of_group(number + 1, at + 1, "acknowledged"),
            ]
        )
    spans = exported(made)
    traces = [span.context.trace_id for span in spans if span.context]
    assert sorted(traces.count(each) for each in set(traces)) == [6, 6]


def test_any_history_becomes_spans_that_lie_within_known_traces() -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    trace, at, made = TraceEvents("run1"), 1000.0, []
    for number in range(1, 400):
        at += dice.random()
        kind = dice.choice(("leased", "leased", "acknowledged", "given_back", "dropped", "failed"))
        samples = [SampleCommit(i, i, at - dice.random() * 5) for i in range(dice.randrange(3))]
        if kind not in ("leased", "dropped"):
            samples = []
        made += trace.history(
            [
                event(
                    number, at, kind, who=TRAINER, instance_id=f"q{dice.randrange(9)}",
                    count=len(samples), samples=samples, index=dice.choice((None, 1)),
                    began_unix_s=dice.choice((0.0, at - 2)),
                )
            ]
        )  # fmt: skip
    made += trace.end(at)
    spans = exported(made)
    shown = [each for each in made if each["ph"] in "Xi"]
    assert len(spans) == len(shown)
    assert sorted(told["name"] for told in shown) == sorted(span.name for span in spans)
    known = {(of.context.trace_id, of.context.span_id) for of in spans if of.context}
    for span in spans:
        assert span.parent is None or (span.parent.trace_id, span.parent.span_id) in known
        assert span.end_time is not None and span.end_time >= (span.start_time or 0) > 0


class Refuses(InMemorySpanExporter):
    """A collector that is away for the second batch."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.sizes.append(len(spans))
        return SpanExportResult.FAILURE if len(self.sizes) == 2 else SpanExportResult.SUCCESS


def test_spans_that_the_exporter_refuses_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_BATCH", 3)
    trace, exporter = TraceEvents("run1"), Refuses()
    spans = Spans("run1", exporter)
    died = [event(n, 10.0 + n, "producer_died", who=f"w{n} (pid 5)") for n in range(7)]
    spans.add(trace.history(died))
    assert exporter.sizes == [3, 3, 1]
    assert (spans.exported, spans.refused) == (4, 3)


def test_the_exporter_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    assert isinstance(configured_exporter(), ConsoleSpanExporter)
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkins")
    with pytest.raises(RuntimeError, match=r"one of console.*otlp_proto_http.*'zipkins'"):
        configured_exporter()
    for unset in ("", "otlp"):
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", unset)
        exporter = configured_exporter()
        assert type(exporter).__name__ == "OTLPSpanExporter"
        exporter.shutdown()
