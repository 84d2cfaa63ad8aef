"""``shmbus metrics``: Prometheus metrics of a bus that no daemon serves, over loopback HTTP."""

from __future__ import annotations

import argparse
import signal

from shmbus.base import limits
from shmbus.cli._options import Commands, add_command, host, require_extra, whole


def add_parser(commands: Commands) -> None:
    """Add the command to the parser of the command line."""
    parser = add_command(
        commands,
        "metrics",
        run,
        help="serve Prometheus metrics of a bus",
        description="Serves /metrics and /healthz of a bus until SIGTERM or SIGINT. The bus need "
        "not exist yet, and may be removed and created again. docs/grafana.json is a dashboard, "
        "docs/alerts.yml has alert rules.",
        examples=[
            "shmbus metrics run1",
            "shmbus metrics run1 --port 9500 & curl -s localhost:9500/metrics",
        ],
    )
    parser.add_argument(
        "--port",
        type=whole(0, 65535),
        default=limits.METRICS_PORT,
        help=f"where to listen (default {limits.METRICS_PORT}; 0 takes any free one)",
    )
    parser.add_argument(
        "--host", type=host, default="127.0.0.1", help="loopback unless told otherwise"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    require_extra("metrics", "prometheus_client", "aiohttp")
    from shmbus.daemon.metrics import MetricsServer

    signals = {signal.SIGINT, signal.SIGTERM}
    signal.pthread_sigmask(signal.SIG_BLOCK, signals)
    with MetricsServer(arguments.name, arguments.port, arguments.host) as server:
        print(f"{server.url}/metrics", flush=True)
        signal.sigwait(signals)
    return 0
