"""Admission of clients: checks a Hello, and refuses it with the reason.

Pure functions without side effects: a refused client leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shmbus.base import limits
from shmbus.base.arguments import TRAIN
from shmbus.control import messages
from shmbus.daemon.leases import Session
from shmbus_ext import _core


def refusal(
    hello: messages.Hello, segment: _core.Segment, policy: Mapping[str, object], *, draining: bool
) -> messages.Refused | None:
    """Return the reason against a client's attachment, or None."""
    if hello.version != messages.VERSION:
        return messages.Refused(
            kind="version",
            message=f"bus {hello.bus!r}: control messages of version {hello.version}, its "
            f"daemon needs {messages.VERSION}; restart what runs another shmbus",
        )
    if hello.bus != segment.name or hello.created_unix_ns not in (0, segment.created_unix_ns):
        return messages.Refused(
            kind="not_found",
            message=f"this daemon serves another bus {segment.name!r}, made at "
            f"{segment.created_unix_ns} ns, not {hello.bus!r} of {hello.created_unix_ns} ns; "
            "restart the daemon if the bus was created again",
        )
    different = {name: value for name, value in hello.policy.items() if policy.get(name) != value}
    if different:
        ours = {name: policy.get(name) for name in different}
        return messages.Refused(
            kind="value",
            message=f"bus {hello.bus!r}: this Consumer asks for {_options(different)}, its "
            f"daemon was started with {_options(ours)}; the daemon decides: give the options "
            "to `shmbus serve`, or leave them out here",
        )
    if hello.world_size > 1 and hello.split != TRAIN:
        return messages.Refused(
            kind="value",
            message=f"bus {hello.bus!r}: split {hello.split!r} with world_size "
            f"{hello.world_size}: the steps that ranks share are those of {TRAIN!r}",
        )
    if draining and not hello.observer:
        return messages.Refused(
            kind="closed", message=f"bus {hello.bus!r}: its daemon is stopping; try again"
        )
    return None


def rank_refusal(
    hello: messages.Hello, world_size: int | None, ranked: Collection[Session]
) -> messages.Refused | None:
    """Return the reason against a rank beside the attached ranks, or None."""
    if hello.rank >= hello.world_size:
        return messages.Refused(
            kind="value",
            message=f"rank: expected 0 to {hello.world_size - 1}, got {hello.rank}",
        )
    if world_size is not None and world_size != hello.world_size:
        return messages.Refused(
            kind="value",
            message=f"bus {hello.bus!r}: world_size {hello.world_size}, but ranks of a world "
            f"of {world_size} are attached ({_processes(ranked, hello)}); stop those first, or "
            f"pass world_size={world_size}",
        )
    same = [session for session in ranked if session.rank == hello.rank]
    if same:
        return messages.Refused(
            kind="busy",
            message=f"bus {hello.bus!r}: rank {hello.rank} of {hello.world_size} is attached "
            f"already: {_processes(same, hello)}; give each process a rank of its own, or end "
            "that one: its successor gets what it had not acknowledged",
        )
    return None


def mixed_refusal(hello: messages.Hello, others: Collection[Session]) -> messages.Refused | None:
    """Return the reason against ranks and plain consumers on the same bus, or None."""
    # A group goes to a step of the ranks or to a plain consumer: the first to ask would leave
    # nothing to the rest. Consumers of a split besides "train" take none of their groups.
    if hello.split != TRAIN:
        return None
    ranked = [session for session in others if session.rank >= 0]
    if hello.world_size == 1:
        if not ranked:
            return None
        return messages.Refused(kind="busy", message=taken_by_ranks(hello.bus, ranked, hello))
    plain = [
        session
        for session in others
        if session.rank < 0 and not session.observer and session.split == TRAIN
    ]
    if not plain:
        return None
    return messages.Refused(
        kind="busy",
        message=f"bus {hello.bus!r}: consumers without a rank are attached "
        f"({_processes(plain, hello)}), and would take the groups of rank {hello.rank} of "
        f"{hello.world_size}; close those first, or give each its rank and "
        f"world_size={hello.world_size}",
    )


def taken_by_ranks(bus: str, ranked: Collection[Session], client: messages.Hello | Session) -> str:
    """Say that ranks share out the groups, to a consumer without a rank."""
    size = max(session.world_size for session in ranked)
    return (
        f"bus {bus!r}: ranks of a world of {size} are attached ({_processes(ranked, client)}), and "
        f"every group is for one of their steps; pass rank and world_size={size}, or stop those "
        f"first; `shmbus status {bus}` shows a bus without attaching"
    )


def too_many(hello: messages.Hello, attached: int) -> messages.Refused:
    """Return the refusal of a client without a free number."""
    return messages.Refused(
        kind="busy",
        message=f"bus {hello.bus!r}: {attached} clients are attached, more than "
        f"{limits.MAX_CLIENTS} are not served; close some",
    )


def _options(policy: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(policy.items()))


def _processes(sessions: Collection[Session], client: messages.Hello | Session) -> str:
    named = []
    for session in sessions:
        rank = f"rank {session.rank} is " if session.rank >= 0 else ""
        # A pid alone says little between containers.
        here = (
            ", this process" if (session.pid, session.label) == (client.pid, client.label) else ""
        )
        named.append(f"{rank}pid {session.pid} ({session.label}){here}")
    return ", ".join(named)
