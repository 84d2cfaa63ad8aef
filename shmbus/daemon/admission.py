"""Which clients a daemon admits: a Hello is checked here, and refused with the reason.

Pure functions: they change nothing, so a refused client leaves no trace.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from shmbus import limits
from shmbus.control import messages
from shmbus.daemon.leases import Session
from shmbus_ext import _core

__all__ = ["rank_refusal", "refusal", "too_many"]


def refusal(
    hello: messages.Hello,
    segment: _core.Segment,
    policy: Mapping[str, object],
    *,
    draining: bool,
) -> messages.Refused | None:
    """Return why a client cannot attach to this daemon, or None.

    Parameters
    ----------
    hello : Hello
        What the client said.
    segment : Segment
        The bus that the daemon serves.
    policy : mapping
        The daemon's options of the stash, by the names of Consumer.
    draining : bool
        Whether the daemon is about to stop; observers may attach all the same.
    """
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
    if draining and not hello.observer:
        return messages.Refused(
            kind="closed", message=f"bus {hello.bus!r}: its daemon is stopping; try again"
        )
    return None


def rank_refusal(
    hello: messages.Hello, world_size: int | None, ranked: Collection[Session]
) -> messages.Refused | None:
    """Return why a rank cannot join the ranks that are attached, or None.

    Parameters
    ----------
    hello : Hello
        What the rank said; of `world_size` 2 or more.
    world_size : int | None
        Of the job that the daemon forms steps for; None without one.
    ranked : collection of Session
        The ranks that are attached.
    """
    if hello.rank >= hello.world_size:
        return messages.Refused(
            kind="value",
            message=f"rank: expected 0 to {hello.world_size - 1}, got {hello.rank}",
        )
    if world_size is not None and world_size != hello.world_size:
        return messages.Refused(
            kind="value",
            message=f"bus {hello.bus!r}: world_size {hello.world_size}, but ranks of a world "
            f"of {world_size} are attached ({_processes(ranked)}); stop those first",
        )
    same = [session for session in ranked if session.rank == hello.rank]
    if same:
        return messages.Refused(
            kind="busy",
            message=f"bus {hello.bus!r}: rank {hello.rank} of {hello.world_size} is attached "
            f"already: {_processes(same)}; give each process a rank of its own",
        )
    return None


def too_many(hello: messages.Hello, attached: int) -> messages.Refused:
    """Return the refusal of a client for which there is no free number."""
    return messages.Refused(
        kind="busy",
        message=f"bus {hello.bus!r}: {attached} clients are attached, more than "
        f"{limits.MAX_CLIENTS} are not served; close some",
    )


def _options(policy: Mapping[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(policy.items()))


def _processes(sessions: Collection[Session]) -> str:
    return ", ".join(f"rank {s.rank} is pid {s.pid} ({s.label})" for s in sessions)
