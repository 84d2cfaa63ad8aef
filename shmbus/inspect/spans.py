"""Trace events of a bus as OpenTelemetry spans, for an exporter of its SDK (extra `otel`).

A group is a trace: its wait for samples and for a trainer, each sample, and its time at the
trainer, of the resource that is the process. All else is a trace of its own. Counters are left out:
metrics have them.

Invariants:

- Only the SDK's public API makes spans, so that its variables (OTEL_*) hold.
- Spans that the exporter refuses are counted; none is kept for a second try.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import Any, Final, TypeAlias

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import NonRecordingSpan, SpanContext, Tracer, set_span_in_context

from shmbus._version import VERSION
from shmbus.inspect.trace_events import TraceEvent, groups_of

#: Spans of one export: the SDK's own OTEL_BSP_MAX_EXPORT_BATCH_SIZE.
_BATCH: Final = 512
_ENTRIES: Final = "opentelemetry_traces_exporter"
_OF_A_PROCESS: Final = re.compile(r"(.*) \(.*\bpid (\d+)\)")

_GroupKey: TypeAlias = "tuple[Any, ...]"


def configured_exporter() -> SpanExporter:
    """Make the exporter that OTEL_TRACES_EXPORTER names; OTLP over HTTP where it names none."""
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "otlp":
        grpc = os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL") == "grpc"
        name = "otlp_proto_grpc" if grpc else "otlp_proto_http"
    installed = {entry.name: entry for entry in entry_points(group=_ENTRIES)}
    if name not in installed:
        raise RuntimeError(
            f"OTEL_TRACES_EXPORTER: expected one of {', '.join(sorted(installed))}, got {name!r}; "
            "install the package that has it"
        )
    exporter: SpanExporter = installed[name].load()()
    return exporter


class _Ended(SpanProcessor):
    """Keeps the spans that ended until they are exported."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def on_end(self, span: ReadableSpan) -> None:
        self.spans.append(span)


class Spans:
    """Exports trace events, in the order in which `TraceEvents` makes them."""

    def __init__(self, bus: str, exporter: SpanExporter) -> None:
        self._groups = groups_of(bus)
        self._exporter = exporter
        self._ended = _Ended()
        #: Of each process of the trace, by its number there.
        self._tracers: dict[int, Tracer] = {}
        self._groups_pid = 0
        #: Of each track the slice that others may lie in; and the last group, for its samples.
        self._outer: dict[tuple[int, int], SpanContext] = {}
        self._group: tuple[_GroupKey, SpanContext] | None = None
        #: Beginnings of arrows that have no end yet: groups that are leased.
        self._arrows: dict[int, SpanContext] = {}
        #: A slice whose arrow comes next, if it has one.
        self._held: TraceEvent | None = None
        self.exported = 0
        self.refused = 0

    def add(self, events: Iterable[TraceEvent]) -> None:
        """Export these events."""
        for event in events:
            held, self._held = self._held, None
            if event["ph"] == "f":
                assert held is not None, "an arrow ends at the slice before it"
                self._span(held, self._arrows.pop(event["id"], None))
                continue
            if held is not None:
                self._span(held)
            if event["ph"] == "X":
                self._held = event
            elif event["ph"] == "i":
                self._span(event)
            elif event["ph"] == "s":
                self._arrows[event["id"]] = self._outer[event["pid"], event["tid"]]
            elif event["ph"] == "M" and event["name"] == "process_name":
                self._process(event["pid"], event["args"]["name"])
        if self._held is not None:
            self._span(self._held)
            self._held = None
        spans, self._ended.spans = self._ended.spans, []
        for at in range(0, len(spans), _BATCH):
            batch = spans[at : at + _BATCH]
            if self._exporter.export(batch) is SpanExportResult.SUCCESS:
                self.exported += len(batch)
            else:
                self.refused += len(batch)

    def end(self) -> None:
        """Have the exporter send what it holds."""
        self._exporter.shutdown()

    def _process(self, pid: int, name: str) -> None:
        """Make the resource of a process."""
        about: dict[str, str | int] = {
            "service.namespace": "shmbus", "service.name": name, "service.instance.id": name,
        }  # fmt: skip
        if found := _OF_A_PROCESS.fullmatch(name):
            about |= {"service.name": found[1], "process.pid": int(found[2])}
        provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
        provider.add_span_processor(self._ended)
        self._tracers[pid] = provider.get_tracer("shmbus", VERSION)
        if name == self._groups:
            self._groups_pid = pid

    def _span(self, event: TraceEvent, parent: SpanContext | None = None) -> None:
        """Make a span: within the slice where its arrow begins, the one around it, or none."""
        args, track = event["args"], (event["pid"], event["tid"])
        key = args.get("instance_id"), args.get("round"), args.get("split")
        if not args and event["ph"] == "X":
            parent = self._outer.get(track)
        elif parent is None and "sample" in args and self._group and self._group[0] == key:
            parent = self._group[1]
        began_ns = event["ts"] * 1000
        span = self._tracers[event["pid"]].start_span(
            event["name"],
            context=set_span_in_context(NonRecordingSpan(parent)) if parent else None,
            attributes={f"shmbus.{name}": of for name, of in args.items() if of is not None},
            start_time=began_ns,
        )
        span.end(began_ns + event.get("dur", 0) * 1000)
        if args:
            self._outer[track] = span.get_span_context()
        if event["pid"] == self._groups_pid and (args or event["ph"] == "i"):
            self._group = (key, span.get_span_context()) if args else None
