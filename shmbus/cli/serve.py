"""``shmbus serve NAME``: the daemon. Creates or adopts the bus, and serves until SIGTERM."""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
from collections.abc import Callable

from shmbus import errors
from shmbus.cli._options import Commands, bus_name, require_extra
from shmbus.cli._supervise import resume_program, supervised
from shmbus.control.socket_path import require_place
from shmbus.daemon import config, logs, server
from shmbus.handles.source import stash_options
from shmbus.segment import creation, lifecycle
from shmbus.segment.names import SHM_DIRECTORY, companion_name
from shmbus.store import snapshot

logger = logging.getLogger("shmbus.serve")

_EXAMPLES = """\
examples:
  shmbus serve run1 --capacity 1GiB --group-timeout 600 --on-timeout partial
  shmbus serve run1 --capacity 4GiB --http 127.0.0.1:8000
  shmbus serve run1 --capacity 4GiB --web 8123
  shmbus serve run1 --schema '{"tokens": "int32", "logprobs": "float32"}'
  shmbus serve run1 --metrics-port 9464 --restore /data/run1-before-reboot
  SHMBUS_LOG_FORMAT=json shmbus serve run1 --capacity 1GiB

Every setting is also an environment variable (--group-timeout is SHMBUS_GROUP_TIMEOUT). Flags win.
"""


def add_parser(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add_parser(
        "serve",
        help="run the daemon of a bus",
        description="Creates or adopts the bus, and leases its groups to trainers until SIGTERM or "
        "SIGINT.",
        epilog=_EXAMPLES,
    )
    parser.add_argument("name", metavar="NAME", type=bus_name, help="the bus")
    config.add_arguments(parser)
    parser.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """Serve; 0 after an orderly end, 2 for wrong settings."""
    settings = config.load(vars(parsed), os.environ)
    logs.set_up(settings.log_format, settings.log_level)
    if settings.http is not None:
        require_extra("gateway", "aiohttp", option="--http")
    if settings.web is not None:
        require_extra("web", "aiohttp", option="--web")
    policy = settings.policy()
    require_place(parsed.name)
    with contextlib.ExitStack() as stack:
        # First, before creating anything, because its port may be taken.
        if settings.metrics_port is not None:
            stack.enter_context(_metrics(parsed.name, settings.metrics_port, settings.metrics_host))
        if settings.restore is not None:
            _restore(parsed.name, settings.restore)
        if creation.remove_unfinished(parsed.name):
            logger.warning("removed what a creator that died had left of bus %r", parsed.name)
        _create(parsed.name, settings)
        on_stop = _start_supervised(parsed.name, settings, stack)
        ours = server.serve(
            parsed.name,
            policy,
            settings.duplicate,
            stash_options(policy, settings.duplicate),
            settings.drain_timeout,
            resume_program(parsed.name),
            on_stop,
        )
    if settings.unlink_on_exit and ours:
        with contextlib.suppress(errors.BusNotFoundError, FileNotFoundError):
            lifecycle.unlink(parsed.name)
            if settings.http is not None:
                os.unlink(SHM_DIRECTORY + companion_name("gateway", parsed.name))
    return 0


def _create(name: str, settings: config.Settings) -> None:
    """Create the bus, or keep an existing bus with the requested schema."""
    schema = settings.declared()
    try:
        creation.create_segment(
            name, settings.capacity, settings.max_producers, bounds=settings.bounds(), schema=schema
        ).close()
    except errors.BusExistsError:
        if schema is not None:
            creation.ensure_segment(name, schema=schema).close()


def _start_supervised(
    name: str, settings: config.Settings, stack: contextlib.ExitStack
) -> Callable[[], None] | None:
    """Start the processes beside the daemon; return the gateway's signal before a drain."""
    if settings.web is not None:
        # A token for all its lives: open pages go on.
        token = os.environ.get("SHMBUS_WEB_TOKEN") or secrets.token_urlsafe(24)
        words = ["web", name, "--port", str(settings.web)]
        stack.enter_context(supervised("page", words, {"SHMBUS_WEB_TOKEN": token}))
    if settings.http is None:
        return None
    words = ["gateway", name, "--daemon", "--http", settings.http]
    if settings.http_token_file is not None:
        words += ["--token-file", settings.http_token_file]
    words += ["--log-format", settings.log_format, "--log-level", settings.log_level]
    return stack.enter_context(supervised("gateway", words))


def _restore(name: str, directory: str) -> None:
    """Restore a snapshot once: a daemon that restarts with the same flags keeps its bus."""
    before = snapshot.restored_as(directory)
    if before is not None:
        logger.info("%s was restored before, as bus %r; not again", directory, before)
        return
    try:
        manifest = snapshot.restore(directory, name)
    except errors.BusExistsError:
        logger.info("bus %r is there; %s is not restored", name, directory)
        return
    logger.info("restored %d trajectories from %s", manifest.records, directory)


def _metrics(name: str, port: int, host: str) -> contextlib.AbstractContextManager[object]:
    require_extra("metrics", "prometheus_client", "aiohttp", option="--metrics-port")
    from shmbus.daemon.metrics import MetricsServer

    serving = MetricsServer(name, port, host)
    logger.info("metrics at %s/metrics", serving.url)
    return serving
