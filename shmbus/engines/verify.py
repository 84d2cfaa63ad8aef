"""Compare weights of serving ranks with the slot of their version: ``shmbus weights --verify``.

A server spends about 10 ms a slice, and serves
undisturbed until a slice costs no more than its share of the time.

Invariants: the rows of every rank name one whole version before a server gets a call, since a
worker without the backend would raise; a paused server gets no slice, since a sleeping engine has
no memory; exit status 0 means no difference and no failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Final, Literal

import msgspec

from shmbus import BusNotFoundError, ShmbusError
from shmbus.base.format import fold, printable, show_size
from shmbus.engines.rank_check import Answer, Question, unmask
from shmbus.engines.results import EngineError
from shmbus.engines.resume import headers_for_servers
from shmbus.engines.vllm import VllmServer
from shmbus.errors import DamagedError, WaitTimeoutError
from shmbus.pool.pool_status import ReaderStatus, read_pool
from shmbus.pool.reader import PoolReader, VersionLease
from shmbus.pool.server_rows import NO_ROW, WEIGHTS, row_name, rows_of_server, server_versions
from shmbus.weights.carriers.interface import VersionMeta
from shmbus.weights.manifest import Manifest

#: Seconds of an engine's time for a slice; the last part of a slice may end later.
SLICE_S: Final = 0.01
#: Tensors named by the text; JSON names every tensor.
SHOWN: Final = 8
_AGAIN: Final = "nothing was changed; verify again once every rank runs one published version"
#: The status of a server without a route.
NO_ROUTE: Final = 404
_SGLANG: Final = (
    "vLLM answers with VLLM_SERVER_DEV_MODE=1; SGLang's call into a rank waits for all requests: "
)


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
        if error.status != NO_ROUTE:
            raise
        raise _refuse(server, _SGLANG + error.body, status=NO_ROUTE) from error
    row = _running(bus, server, count)
    with _leased(bus, server, row) as (lease, block_bytes):
        encoded = VersionMeta.decode(lease.meta()).manifest
        manifest = msgspec.msgpack.decode(encoded, type=Manifest)
    version, sequence = row.applied_version or 0, row.applied_sequence or 0
    verdict = ServerVerdict(server=server.address, version=version, life=row.applied_life or "")
    verdict.ranks = [RankVerdict(rank=rank) for rank in range(count)]
    cursors = dict.fromkeys(range(count), (0, 0))
    held: set[str] = set()
    began = time.monotonic()
    while cursors:
        if await server.paused(timeout):
            raise _refuse(server, "the server is paused, for instance for an update")
        question = msgspec.to_builtins(Question(bus, version, sequence, cursors, SLICE_S))
        answers = _checked(server, cursors, await server.verify(question, timeout))
        for rank, cursor in list(cursors.items()):
            said, own = answers[rank], verdict.ranks[rank]
            own.compared_bytes += said.nbytes
            if cursor == (0, 0):
                copied = unmask(manifest, said.copied)
                own.not_comparable = unmask(manifest, said.refused)
                if copied:
                    own.state = "equal in part" if own.not_comparable else "equal"
                held |= {*copied, *own.not_comparable}
            if said.differs is not None:
                own.state, own.block = "differs", said.differs // block_bytes
                own.tensor, own.offset = _place_of(manifest, said.differs)
                with contextlib.suppress(EngineError), _leased(bus, server, row) as (lease, _):
                    own.slot_damaged = _is_damaged(lease, own.block)
            cursors[rank] = said.copy, said.part
            if said.done:
                del cursors[rank]
        busy = max(said.seconds for said in answers.values())
        verdict.engine_s += busy
        await asyncio.sleep(busy / share - busy)
    verdict.total_s = time.monotonic() - began
    verdict.share = verdict.engine_s / verdict.total_s
    verdict.absent = [each.name for each in manifest.tensors if each.name not in held]
    return verdict


def _refuse(server: VllmServer, said: str, status: int | None = None) -> EngineError:
    return EngineError(server.address, "verify", status, said, _AGAIN)


def _running(bus: str, server: VllmServer, count: int) -> ReaderStatus:
    """Return the row of a rank; EngineError unless every rank runs the same publication."""
    pool = read_pool(bus, WEIGHTS)
    found = server_versions(bus, pool, trainers=1).get(row_name(server.address))
    if found is None:
        raise _refuse(server, f"bus {bus!r}: {NO_ROW}")
    if found.sleeps or found.state in ("loading", "unknown"):
        raise _refuse(server, found.why or "an update of its weights is under way")
    rows, _ = rows_of_server(bus, server.address)
    if len(rows) < count or not found.life:
        raise _refuse(server, f"bus {bus!r}: {len(rows)} of {count} ranks, expected one version")
    return rows[0]


@contextlib.contextmanager
def _leased(bus: str, server: VllmServer, row: ReaderStatus) -> Iterator[tuple[VersionLease, int]]:
    """Lease a row's publication; yield the lease and the bytes of a block."""
    assert row.applied_version is not None
    with PoolReader(bus, WEIGHTS, label="verify") as reader:
        try:
            found = reader.at(row.applied_version)
        except WaitTimeoutError as error:
            raise _refuse(server, str(error)) from error
        with found as lease:
            if lease.sequence != row.applied_sequence:
                raise _refuse(server, f"the slot of version {row.applied_version} was taken over")
            yield lease, reader.pool.block_bytes


def _place_of(manifest: Manifest, at: int) -> tuple[str, int]:
    """Return the tensor of a payload's byte, and the byte's offset in the tensor."""
    for place in manifest.tensors:
        if place.offset <= at < place.offset + place.size:
            return place.name, at - place.offset
    return "", at


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
        raise _refuse(server, str(error), status=200) from error
    faults = [f"rank {each.rank}: {each.error}" for each in found.values() if each.error]
    missing = sorted(set(asked) - set(found))
    if missing:
        faults.append(f"no answer from ranks {missing}: vLLM passes one data-parallel engine's on")
    if faults:
        raise _refuse(server, "; ".join(faults))
    return found


async def verify(
    bus: str, addresses: Sequence[str], share: float, timeout: float = 120.0
) -> list[ServerVerdict]:
    """Compare servers in turn; without addresses, every server with a row."""
    named = addresses or sorted(server_versions(bus, read_pool(bus, WEIGHTS), trainers=1))
    if not named:
        raise BusNotFoundError(f"bus {bus!r}: no server reads its weights; {_AGAIN}")
    found = []
    for address in named:
        try:
            if not addresses and ("://" not in address or "~" in address):
                advice = "name the server by --server URL"
                raise EngineError(address, "verify", None, "its rows lack its address", advice)
            server = VllmServer(address, headers=headers_for_servers())
            found.append(await verify_server(bus, server, share, timeout))
        except (ShmbusError, ValueError) as error:
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


def report(bus: str, addresses: Sequence[str], share: float, *, as_json: bool) -> int:
    """Compare servers and print the verdicts; return the exit status."""
    found = asyncio.run(verify(bus, addresses, share))
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(found)).decode())
    else:
        print("\n".join(map(_text, found)))
    return int(any(each.failed for each in found))
