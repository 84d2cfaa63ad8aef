"""Compare weights of serving ranks with the slot: ``python -m shmbus.engines.verify NAME``.

``shmbus weights NAME --verify`` runs this program. A server spends about 10 ms a slice, and serves
undisturbed until a slice costs no more than its share of the time.

Invariants: the rows of every rank name one whole version before a server gets a call, since a
worker without the backend would raise; a paused server gets no slice, since a sleeping engine has
no memory; exit status 0 means no difference and no failure.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal

import msgspec

from shmbus import ShmbusError
from shmbus._format import fold, printable, show_size
from shmbus.engines.errors import EngineError
from shmbus.engines.pause_note import paused_by
from shmbus.engines.rank_check import Answer, Question, unmask
from shmbus.engines.resume import headers_for_servers
from shmbus.engines.rows import RankRows
from shmbus.engines.vllm import VllmServer
from shmbus.errors import DamagedError, WaitTimeoutError
from shmbus.pool.reader import PoolReader, VersionLease
from shmbus.pool.server_rows import WEIGHTS
from shmbus.pool.status import LOADING_CODE, ReaderStatus, read_pool
from shmbus.weights.carriers.pool import VersionMeta
from shmbus.weights.manifest import Manifest

#: Seconds of an engine's time for a slice; the last part of a slice may end later.
SLICE_S: Final = 0.01
#: The default share of an engine's time.
SHARE: Final = 0.05
#: Tensors named by the text; JSON names every tensor.
SHOWN: Final = 8
_AGAIN: Final = "nothing was changed; verify again once every rank runs one published version"
_WHOLE: Final = "name the server by --server URL"
_SGLANG: Final = "a server of SGLang cannot be verified: no call reaches a rank while it serves; "


class RankVerdict(msgspec.Struct, kw_only=True):
    """A rank: the first differing tensor, the slot's block, the byte's offset in the tensor."""

    rank: int
    state: Literal["equal", "equal in part", "not comparable", "differs"] = "not comparable"
    tensor: str = ""
    block: int | None = None
    offset: int | None = None
    #: Whether the slot's block fails its digest; None without digests.
    slot_damaged: bool | None = None
    compared_bytes: int = 0
    not_comparable: list[str] = []


class ServerVerdict(msgspec.Struct, kw_only=True):
    """A server: version, life, ranks, seconds of the engine, seconds in total, their quotient."""

    server: str
    error: str = ""
    version: int | None = None
    life: str = ""
    ranks: list[RankVerdict] = []
    #: Published tensors without a byte in any rank.
    absent: list[str] = []
    engine_s: float = 0.0
    total_s: float = 0.0
    share: float = 0.0

    @property
    def failed(self) -> bool:
        """Tell whether a rank differs, or was not compared."""
        states = {each.state for each in self.ranks}
        return bool(self.error or states & {"differs", "not comparable"})


async def verify_server(
    bus: str, server: VllmServer, share: float, timeout: float
) -> ServerVerdict:
    """Compare every rank of a server; EngineError if the server cannot be verified."""
    try:
        count = await server.ranks(timeout)
    except EngineError as error:
        if error.status != 404:
            raise
        raise EngineError(
            server.address, error.step, 404, error.body, _SGLANG + error.advice
        ) from error
    row = _running(bus, server, count)
    assert row.applied_version is not None and row.applied_sequence is not None
    with _leased(bus, server, row) as (lease, block_bytes):
        encoded = VersionMeta.decode(lease.meta()).manifest
        manifest = msgspec.msgpack.decode(encoded, type=Manifest)
    verdict = ServerVerdict(
        server=server.address, version=row.applied_version, life=row.applied_life or ""
    )
    cursors = dict.fromkeys(range(count), (0, 0))
    found = {rank: RankVerdict(rank=rank) for rank in cursors}
    held: set[str] = set()
    began = time.monotonic()
    while cursors:
        if await server.paused(timeout):
            raise EngineError(server.address, "verify", None, "the server is paused", _AGAIN)
        question = Question(bus, row.applied_version, row.applied_sequence, dict(cursors), SLICE_S)
        answers = _checked(
            server, cursors, await server.verify(msgspec.to_builtins(question), timeout)
        )
        for rank in list(cursors):
            said, own = answers[rank], found[rank]
            own.compared_bytes += said.nbytes
            if cursors[rank] == (0, 0):
                copied = unmask(manifest, said.copied)
                own.not_comparable = unmask(manifest, said.refused)
                own.state = "not comparable" if not copied else "equal"
                if copied and own.not_comparable:
                    own.state = "equal in part"
                held |= {*copied, *own.not_comparable}
            cursors[rank] = said.copy, said.part
            if said.differs is not None:
                _name_difference(manifest, own, said.differs)
                own.block = said.differs // block_bytes
                with contextlib.suppress(EngineError), _leased(bus, server, row) as (lease, _):
                    own.slot_damaged = _is_damaged(lease, own.block)
            if said.done:
                del cursors[rank]
        busy = max(said.seconds for said in answers.values())
        verdict.engine_s += busy
        await asyncio.sleep(busy / share - busy)
    verdict.total_s = time.monotonic() - began
    verdict.share = verdict.engine_s / verdict.total_s
    verdict.ranks = list(found.values())
    verdict.absent = [each.name for each in manifest.tensors if each.name not in held]
    return verdict


def _running(bus: str, server: VllmServer, count: int) -> ReaderStatus:
    """Return the row of a rank; EngineError unless every row names the same whole version."""
    rows = RankRows(bus)
    own = rows.of(server)
    note = paused_by(bus)
    paused = [] if note is None or not note[1] else [address for _, address in note[0].servers]
    problem = ""
    if server.address in paused or any(row.error_code == LOADING_CODE for row in own):
        problem = "an update of its weights is under way"
    elif len(own) < count:
        problem = f"{len(own)} of {count} ranks read the weights of bus {bus!r} of today"
    elif rows.whole_version(server, count) is None:
        runs = sorted({str(row.applied_version) for row in own})
        problem = f"its ranks run no whole version of these weights: {', '.join(runs)}"
    elif own[0].applied_sequence is None:
        problem = "its rows came by a relay: verify on the server's node, with the bus of that node"
    if problem:
        raise EngineError(server.address, "verify", None, problem, _AGAIN)
    return own[0]


@contextlib.contextmanager
def _leased(bus: str, server: VllmServer, row: ReaderStatus) -> Iterator[tuple[VersionLease, int]]:
    """Lease a row's publication; yield the lease and the bytes of a block."""
    assert row.applied_version is not None
    with PoolReader(bus, WEIGHTS, label="verify") as reader:
        try:
            found = reader.at(row.applied_version)
        except WaitTimeoutError as error:
            raise EngineError(server.address, "verify", None, str(error), _AGAIN) from error
        with found as lease:
            if lease.sequence != row.applied_sequence:
                said = f"the slot of version {row.applied_version} was taken over"
                raise EngineError(server.address, "verify", None, said, _AGAIN)
            yield lease, reader.pool.block_bytes


def _name_difference(manifest: Manifest, own: RankVerdict, at: int) -> None:
    """Name the tensor of a payload's byte."""
    own.state = "differs"
    for place in manifest.tensors:
        if place.offset <= at < place.offset + place.size:
            own.tensor, own.offset = place.name, at - place.offset


def _is_damaged(lease: VersionLease, block: int) -> bool | None:
    """Tell whether a slot's block fails the publisher's digest; None without digests."""
    if not lease.digests:
        return None
    try:
        lease.check(block, 1)
    except DamagedError:
        return True
    return False


def _checked(
    server: VllmServer, asked: Collection[int], answers: Sequence[object]
) -> dict[int, Answer]:
    """Return answers by rank; EngineError for a missing or invalid answer, or a refusal."""
    try:
        found = {each.rank: each for each in msgspec.convert(answers, list[Answer])}
        for each in found.values():
            int(each.copied, 16), int(each.refused, 16)
    except (msgspec.ValidationError, ValueError) as error:
        raise EngineError(server.address, "verify", 200, str(error), _AGAIN) from error
    faults = [f"rank {each.rank}: {each.error}" for each in found.values() if each.error]
    missing = sorted(set(asked) - set(found))
    if missing:
        faults.append(f"no answer from ranks {missing}: vLLM passes one data-parallel engine's on")
    if faults:
        raise EngineError(server.address, "verify", None, "; ".join(faults), _AGAIN)
    return found


async def verify(
    bus: str, addresses: Sequence[str], share: float = SHARE, timeout: float = 120.0
) -> list[ServerVerdict]:
    """Compare servers in turn; without addresses, every server with a row."""
    if not addresses:
        rows = [row for row in read_pool(bus, WEIGHTS).readers if row.state == "alive"]
        named = [row.label.rpartition(" rank ")[0] for row in rows]
        addresses = sorted({name for name in named if name.startswith("http")})
        if not addresses:
            raise WaitTimeoutError(f"bus {bus!r}: no server reads its weights; {_AGAIN}")
    headers = headers_for_servers()
    found = []
    for address in addresses:
        try:
            if "~" in address:
                raise EngineError(address, "verify", None, "its row cuts its address", _WHOLE)
            server = VllmServer(address, headers=headers)
            found.append(await verify_server(bus, server, share, timeout))
        except ShmbusError as error:
            found.append(ServerVerdict(server=address, error=str(error)))
    return found


def _text(verdict: ServerVerdict) -> str:
    if verdict.error:
        return f"{verdict.server}: not verified: {verdict.error}"
    lines = [
        f"{verdict.server}: version {verdict.version}, life {verdict.life}; "
        f"{show_size(sum(each.compared_bytes for each in verdict.ranks))} compared, "
        f"{verdict.engine_s:.3f} of {verdict.total_s:.3f} s of the engine "
        f"({100 * verdict.share:.1f} %)"
    ]
    for each in verdict.ranks:
        line = f"  rank {each.rank}: {each.state}"
        if each.state == "differs":
            line += f" in {each.tensor!r}, block {each.block}, byte {each.offset} of the tensor"
        if each.slot_damaged:
            line += "; the slot fails its digest: the slot is damaged"
        if each.not_comparable:
            line += f"; not comparable, the loader computes with {_names(each.not_comparable)}"
        lines.append(line)
    if verdict.absent:
        lines.append(f"  not comparable, in no rank: {_names(verdict.absent)}")
    return "\n".join(lines)


def _names(names: Sequence[str]) -> str:
    return f"{len(names)}: {fold([printable(name) for name in names], SHOWN)}"


def main(arguments: list[str] | None = None) -> int:
    """Compare, and print the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", metavar="NAME", help="the bus")
    parser.add_argument("--server", action="append", default=[], help="an address; all by default")
    parser.add_argument("--share", type=float, default=SHARE, help="of the engine's time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds a call (default 120)")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    try:
        found = asyncio.run(verify(given.name, given.server, given.share, given.timeout))
    except (ShmbusError, ValueError) as error:
        print(f"{given.name}: {error}", file=sys.stderr)
        return 1
    if given.json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print("\n".join(map(_text, found)))
    return int(any(each.failed for each in found))


if __name__ == "__main__":
    sys.exit(main())
