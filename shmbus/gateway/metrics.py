"""What the gateway counts, by route and status, and how a scrape reads it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping

__all__ = ["Metrics"]

_HELP = {
    "requests_total": ("counter", "Requests by route and status."),
    "request_seconds_total": ("counter", "Seconds from a request's head to its answer, by route."),
    "received_bytes_total": ("counter", "Bytes of bodies as they came, by route."),
    "sent_bytes_total": ("counter", "Bytes of answers' bodies as they went, by route."),
    "undelivered_total": ("counter", "Answers that did not reach their client, by route."),
}


class Metrics:
    """Counters of one gateway."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, int]] = Counter()
        self._by_route: dict[str, Counter[str]] = defaultdict(Counter)

    def note(self, route: str, status: int, seconds: float, received: int, sent: int) -> None:
        """Count a request."""
        self._requests[route, status] += 1
        self._by_route["request_seconds_total"][route] += seconds  # type: ignore[assignment]
        self._by_route["received_bytes_total"][route] += received
        self._by_route["sent_bytes_total"][route] += sent

    def note_undelivered(self, route: str) -> None:
        """Count an answer that was lost."""
        self._by_route["undelivered_total"][route] += 1

    def expose(self, bus: str, gauges: Mapping[str, float]) -> str:
        """Return everything in the text format of Prometheus."""
        name = bus.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
        lines = []
        for family, (kind, text) in _HELP.items():
            lines += [
                f"# HELP shmbus_gateway_{family} {text}",
                f"# TYPE shmbus_gateway_{family} {kind}",
            ]
            if family == "requests_total":
                lines += [
                    f'shmbus_gateway_{family}{{bus="{name}",route="{route}",status="{status}"}} '
                    f"{count}"
                    for (route, status), count in sorted(self._requests.items())
                ]
            else:
                lines += [
                    f'shmbus_gateway_{family}{{bus="{name}",route="{route}"}} {value:g}'
                    for route, value in sorted(self._by_route[family].items())
                ]
        for gauge, value in gauges.items():
            lines += [
                f"# TYPE shmbus_gateway_{gauge} gauge",
                f'shmbus_gateway_{gauge}{{bus="{name}"}} {value:g}',
            ]
        return "\n".join(lines) + "\n"
