"""End a dead trainer's pause: ``python -m shmbus.engines.resume NAME``.

Run by the daemon of a bus, and by ``shmbus weights NAME --resume``. The servers come from the
trainer's note; they get the requests of `EngineFleet.recover`.

Invariant: exit status 0 means that no server stays paused by a dead process.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from typing import Final

import msgspec

from shmbus import ShmbusError
from shmbus.base.format import with_notes
from shmbus.engines.fleet import EngineFleet
from shmbus.engines.pause_note import PauseNotice, paused_by
from shmbus.engines.results import UpdateReport
from shmbus.engines.sglang import SglangServer
from shmbus.engines.vllm import VllmDraft, VllmServer

#: JSON object of headers for each server, for example its key: a note holds no secrets.
HEADERS_VARIABLE: Final = "SHMBUS_SERVER_HEADERS"

_KINDS: Final[dict[str, type[VllmServer] | type[SglangServer]]] = {
    "sglang": SglangServer,
    "vllm": VllmServer,
    "vllm-draft": VllmDraft,
}


async def resume(bus: str, *, timeout: float = 120.0) -> UpdateReport | None:
    """End a dead process's pause, with the servers named by its note."""
    found = paused_by(bus)
    if found is None or found[1]:
        return None
    servers = _servers(found[0])
    async with EngineFleet(servers, bus=bus, timeout=timeout) as fleet:
        return await fleet.recover()


def headers_for_servers() -> dict[str, str]:
    """Read the headers from the environment; ValueError where they are none."""
    try:
        return msgspec.json.decode(os.environ.get(HEADERS_VARIABLE, "{}"), type=dict[str, str])
    except msgspec.DecodeError as error:
        raise ValueError(f"{HEADERS_VARIABLE}: expected a JSON object of texts: {error}") from error


def _servers(notice: PauseNotice) -> list[VllmServer | SglangServer]:
    headers = headers_for_servers()
    foreign = [f"{address} ({kind})" for kind, address in notice.servers if kind not in _KINDS]
    if foreign:
        raise ValueError(
            f"{', '.join(foreign)}: expected {' or '.join(sorted(_KINDS))}; a trainer that knows "
            "them has to call EngineFleet.recover()"
        )
    return [
        _KINDS[kind](address, headers=headers, bus=notice.buses.get(address))
        for kind, address in notice.servers
    ]


def main(arguments: list[str] | None = None) -> int:
    """Resume, and print each server's result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", metavar="NAME", help="the bus")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a step (default 120)")
    given = parser.parse_args(arguments)
    try:
        report = asyncio.run(resume(given.name, timeout=given.timeout))
    except (ShmbusError, BlockingIOError, ValueError) as error:
        print(f"{given.name}: {with_notes(error)}", file=sys.stderr)
        return 1
    if report is None:
        print(f"{given.name}: no server was left paused by a trainer that has ended")
        return 0
    for server in report.servers:
        runs = "no whole version" if server.version is None else f"version {server.version}"
        print(f"{server.address}: {server.state}, runs {runs} {server.error}".rstrip())
    if report.torn:
        print(f"{given.name}: still paused: {', '.join(report.torn)}", file=sys.stderr)
    return 1 if report.torn else 0


if __name__ == "__main__":
    sys.exit(main())
