"""A server's counters by route and status, and their scrape."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

from shmbus.base.format import printable

_HELP = {
    "requests_total": ("counter", "Requests by route and status."),
    "request_seconds_total": ("counter", "Seconds from a request's head to its answer, by route."),
    "received_bytes_total": ("counter", "Bytes of bodies as they came, by route."),
    "sent_bytes_total": ("counter", "Bytes of answers' bodies as they went, by route."),
    "undelivered_total": ("counter", "Answers that did not reach their client, by route."),
}


class Metrics:
    """Counters of a server, with its prefix in their names."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._requests: Counter[tuple[str, int]] = Counter()
        self._by_route: dict[str, Counter[str]] = defaultdict(Counter)

    def note(self, route: str, status: int, seconds: float, received: int, sent: int) -> None:
        """Count a request."""
        self._requests[route, status] += 1
        self._by_route["request_seconds_total"][route] += seconds  # type: ignore[assignment]
        self._by_route["received_bytes_total"][route] += received
        self._by_route["sent_bytes_total"][route] += sent

    def note_undelivered(self, route: str) -> None:
        """Count a lost answer."""
        self._by_route["undelivered_total"][route] += 1

    def expose(
        self, bus: str, gauges: Mapping[str, float], counters: Mapping[str, float] | None = None
    ) -> str:
        """Return all in Prometheus' text format; names of gauges and counters may end in labels."""
        name = escaped(printable(bus))
        lines = []
        for family, (kind, text) in _HELP.items():
            full = f"{self._prefix}_{family}"
            lines += [f"# HELP {full} {text}", f"# TYPE {full} {kind}"]
            if family == "requests_total":
                lines += [
                    f'{full}{{bus="{name}",route="{route}",status="{status}"}} {count}'
                    for (route, status), count in sorted(self._requests.items())
                ]
            else:
                lines += [
                    f'{full}{{bus="{name}",route="{route}"}} {value:.15g}'
                    for route, value in sorted(self._by_route[family].items())
                ]
        typed = set()
        for kind, values in (("gauge", gauges), ("counter", counters or {})):
            # The format wants the lines of a family together.
            for each in sorted(values, key=lambda name: name.partition("{")[0]):
                family, _, labels = each.partition("{")
                if family not in typed:
                    typed.add(family)
                    lines.append(f"# TYPE {self._prefix}_{family} {kind}")
                own = f",{labels}" if labels else "}"
                lines.append(f'{self._prefix}_{family}{{bus="{name}"{own} {values[each]:.15g}')
        return "\n".join(lines) + "\n"


def escaped(label: str) -> str:
    """Return a label's value, escaped for the text format."""
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
