"""What the daemon does, without a socket or a thread: messages and ring events in, replies out.

Invariants:

- One thread calls it. Nothing here blocks, and nothing is work proportional to a payload.
- A request that waits is answered once: with groups, with none when its time is over, or not at
  all when its client is gone.
- While it is frozen nothing is released or moved: somebody writes the bus to disk.
- No group is leased before what clients of an earlier daemon hold has been told apart (recovery).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import msgspec

from shmbus import errors, limits
from shmbus.control import messages
from shmbus.daemon.leases import Lease, LeaseTable, Session
from shmbus.daemon.recovery import Claims, InDoubt, extents_of_client, extents_of_clients
from shmbus.daemon.status import open_groups
from shmbus.daemon.steps import StepPlanner
from shmbus.ledger import Ledger
from shmbus.stash.collector import Collector
from shmbus_ext import _core

__all__ = ["Service"]

Trajectory = _core.Trajectory

#: More trajectories than there can be.
_ALL = 1 << 62
#: Groups that a waiting request has the ring read for before other messages have their turn.
_PORTION = 256


class _Waiting:
    __slots__ = ("deadline_s", "request", "session", "wanted")

    def __init__(
        self, session: Session, request: messages.Take | messages.TakeStep, now: float
    ) -> None:
        self.session = session
        self.request = request
        #: Groups that the ring is read for in one go.
        self.wanted = request.max_groups if isinstance(request, messages.Take) else _PORTION
        self.wanted = min(self.wanted, _PORTION)
        self.deadline_s = None if request.timeout_s is None else now + request.timeout_s


class Service:
    """Leases the groups of one collector to sessions.

    Parameters
    ----------
    collector : Collector
        Attached; the service pumps it.
    policy : dict[str, Any]
        The stash's options by the names that Consumer gives them.
    """

    def __init__(self, collector: Collector, policy: dict[str, object]) -> None:
        self.collector = collector
        self.policy = policy
        self.sessions: dict[int, Session] = {}
        self.draining = False
        self.frozen = False
        self.began_s = time.monotonic()
        self.table = LeaseTable(collector)
        self.world: StepPlanner | None = None
        self._waiting: list[_Waiting] = []
        self._ending: list[tuple[Session, Lease, int]] = []
        self._claiming: list[tuple[Session, messages.Claim]] = []
        self._doubt = InDoubt(collector)
        self._before = extents_of_clients(collector.segment)
        self._claims: Claims | None = Claims()
        self._reclaim_until_s = self.began_s + limits.RECLAIM_WAIT_S
        self._next_burial_s = 0.0
        self._end_recovery_if_all_came(self.began_s)

    # -- the ring -------------------------------------------------------------------------------

    def pump(self, now: float) -> bool:
        """Take a portion from the ring and serve who waits; True if there may be more.

        Where somebody waits it is as much as they want, and else little, so that a message which
        comes meanwhile is not kept waiting.
        """
        if self._claims is not None:
            return False
        if self.frozen:
            self.serve(now)
            return False
        collector = self.collector
        wanted = max((w.wanted for w in self._waiting), default=0)
        more = collector.pump_once(now)
        while more and collector.stash.ready_groups < wanted:
            more = collector.pump_once(now)
        self.serve(now)
        return more

    def tick(self, now: float) -> None:
        """Do what is due: house-keeping, the end of waits, of recovery, and of the dead."""
        if self.frozen:
            self.serve(now)
            return
        self.collector.run_maintenance(now)
        if self._claims is not None:
            self._end_recovery_if_all_came(now)
            return
        if len(self._doubt) and now >= self._next_burial_s:
            self._next_burial_s = now + limits.BURIAL_INTERVAL_S
            self._put_back(self._doubt.reap(set(self.sessions)))
        self.collector.expire(now)
        for session in self.sessions.values():
            session.confirm()
        self.serve(now)

    def next_tick_s(self, now: float) -> float:
        """Seconds until `tick` has something to do."""
        wait_s = limits.SWEEP_INTERVAL_S if self.frozen else self.collector.wait_s(now, None)
        if self._claims is not None:
            wait_s = min(wait_s, self._reclaim_until_s - now)
        elif len(self._doubt):
            wait_s = min(wait_s, self._next_burial_s - now)
        for waiting in self._waiting:
            if waiting.deadline_s is not None:
                wait_s = min(wait_s, waiting.deadline_s - now)
            if isinstance(waiting.request, messages.TakeStep) and self.world is not None:
                due = self.world.due_s(waiting.request)
                # One that is due already waits for more groups than there are, not for time.
                if due is not None and due > now:
                    wait_s = min(wait_s, due - now)
        return max(wait_s, 0.0)

    @property
    def waits(self) -> bool:
        """Whether somebody waits for groups."""
        return bool(self._waiting)

    # -- snapshots ------------------------------------------------------------------------------

    def freeze(self) -> str | None:
        """Release and move nothing until `thaw`; or say why that cannot be now."""
        name = self.collector.segment.name
        if self.frozen:
            return f"bus {name!r}: a snapshot is under way already; try again when it is done"
        if self._claims is not None:
            return (
                f"bus {name!r}: its daemon has just begun, and still asks clients what they hold; "
                f"try again in {limits.RECLAIM_WAIT_S:g} s"
            )
        self.frozen = True
        return None

    def thaw(self) -> None:
        """Do what had to wait, and go on."""
        self.frozen = False
        ending, self._ending = self._ending, []
        for session, lease, reason in ending:
            self.table.end(lease, reason)
            session.note_ended([lease.number], [])
        claiming, self._claiming = self._claiming, []
        for session, claim in claiming:
            if self.sessions.get(session.client) is session:
                self._claim(session, claim, time.monotonic())
        self.collector.flush()

    # -- recovery -------------------------------------------------------------------------------

    def _end_recovery_if_all_came(self, now: float) -> None:
        """Read the ring once all who may hold something of it have said what, or time is over."""
        claims = self._claims
        assert claims is not None
        for client in list(self._before):
            session = self.sessions.get(client)
            came = session is not None and session.settled
            if came or (session is None and not self._locked(client)):
                del self._before[client]
        if self._before and now < self._reclaim_until_s:
            return
        self._claims = None
        rest: list[Trajectory] = []
        while True:
            samples = self.collector.reader.poll(limits.POLL_RECORDS)
            rest += claims.divert(samples)
            if len(samples) < limits.POLL_RECORDS:
                break
        before, self._before = self._before, {}
        self._doubt.withheld.begin(rest, before)
        for session, claimed in claims.resolve(self.table).items():
            session.send(claimed)
        self.serve(now)

    def _locked(self, client: int) -> bool:
        return bool(self.collector.segment.locks_held(1 + client))

    # -- sessions -------------------------------------------------------------------------------

    def hello(
        self, hello: messages.Hello, send: Callable[[messages.Reply], None]
    ) -> Session | messages.Refused:
        """Let a client in, or say why not."""
        refused = self._refusal(hello)
        if refused is not None:
            return refused
        client = hello.client if hello.client not in self.sessions else -1
        if client < 0:
            client = self._free_number()
        if client < 0:
            return messages.Refused(
                kind="busy",
                message=f"bus {hello.bus!r}: {len(self.sessions)} clients are attached, more than "
                f"{limits.MAX_CLIENTS} are not served; close some",
            )
        session = Session(client, hello, send)
        self.sessions[client] = session
        if session.rank >= 0:
            assert self.world is not None
            self.world.join(session.rank, hello.next_step, returns=hello.client >= 0)
        return session

    def _refusal(self, hello: messages.Hello) -> messages.Refused | None:
        segment = self.collector.segment
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
                "restart the daemon if the bus was made anew",
            )
        different = {
            name: value for name, value in hello.policy.items() if self.policy.get(name) != value
        }
        if different:
            ours = {name: self.policy.get(name) for name in different}
            return messages.Refused(
                kind="value",
                message=f"bus {hello.bus!r}: this Consumer asks for {_options(different)}, its "
                f"daemon was started with {_options(ours)}; the daemon decides: give the options "
                "to `shmbus serve`, or leave them out here",
            )
        if hello.observer:
            return None
        if self.draining:
            return messages.Refused(
                kind="closed", message=f"bus {hello.bus!r}: its daemon is stopping; try again"
            )
        return self._rank_refusal(hello)

    def _rank_refusal(self, hello: messages.Hello) -> messages.Refused | None:
        ranked = [s for s in self.sessions.values() if s.rank >= 0]
        if self.world is not None and not ranked and hello.world_size != self.world.size:
            # The job of that size is over; what it left goes to whoever comes.
            leases, self.world = self.world.dissolve(), None
            self.table.give_back(leases)
        if hello.world_size == 1:
            return None
        if hello.rank >= hello.world_size:
            return messages.Refused(
                kind="value",
                message=f"rank: expected 0 to {hello.world_size - 1}, got {hello.rank}",
            )
        if self.world is None:
            self.world = StepPlanner(hello.world_size, self._all_ready)
        if self.world.size != hello.world_size:
            return messages.Refused(
                kind="value",
                message=f"bus {hello.bus!r}: world_size {hello.world_size}, but ranks of a world "
                f"of {self.world.size} are attached ({_people(ranked)}); stop those first",
            )
        same = [s for s in ranked if s.rank == hello.rank]
        if same:
            return messages.Refused(
                kind="busy",
                message=f"bus {hello.bus!r}: rank {hello.rank} of {hello.world_size} is attached "
                f"already: {_people(same)}; give each process a rank of its own",
            )
        return None

    def _free_number(self) -> int:
        awaited = self._doubt.clients() | set(self._before)
        for client in range(limits.MAX_CLIENTS):
            if client not in self.sessions and client not in awaited and not self._locked(client):
                return client
        return -1

    def leave(self, session: Session, *, orderly: bool) -> None:
        """End a session; what it held is the next to be delivered, or in doubt."""
        self.sessions.pop(session.client, None)
        self._waiting = [w for w in self._waiting if w.session is not session]
        held = extents_of_client(self.collector.segment, session.client)
        if self._claims is not None:
            self._claims.forget(session, dead=not held)
            if held and not orderly:
                self._before[session.client] = held
        leases = list(session.leases.values())
        session.leases.clear()
        out = self._doubt.clear(session.client) if orderly else []
        if not orderly and leases and held:
            # The process lives, or is about to end: its lock will say.
            self._doubt.add(session.client, leases)
            self._next_burial_s = 0.0
        else:
            out += leases
        self._put_back(out)
        self.serve(time.monotonic())

    def _put_back(self, leases: list[Lease]) -> None:
        free = []
        for lease in leases:
            if lease.rank >= 0 and self.world is not None and lease.rank < self.world.size:
                self.world.give_back(lease)
            else:
                lease.step = lease.rank = -1
                free.append(lease)
        self.table.give_back(free)

    # -- requests -------------------------------------------------------------------------------

    def handle(self, session: Session, request: messages.Request) -> None:
        """Do what a client asks; what it may not ask is a ProtocolError."""
        now = time.monotonic()
        if isinstance(request, (messages.Take, messages.TakeStep)):
            self._wait(session, request, now)
        elif isinstance(request, messages.End):
            self._end(session, request)
        elif isinstance(request, messages.GiveBack):
            found = [session.leases.pop(n) for n in request.numbers if n in session.leases]
            self._put_back(found)
            session.note_ended([lease.number for lease in found], [])
            self.serve(now)
        elif isinstance(request, messages.Claim):
            if self.frozen:
                self._claiming.append((session, request))
            else:
                self._claim(session, request, now)
        elif isinstance(request, messages.SetPolicyVersion):
            self.collector.policy_version = request.policy_version
            session.send(messages.Done(id=request.id))
        elif isinstance(request, messages.GetLedger):
            session.send(messages.LedgerReply(id=request.id, ledger=self.ledger()))
        elif isinstance(request, messages.GetStatus):
            session.send(self.status(request))
        else:
            raise errors.ProtocolError(
                f"{type(request).__name__} is not what a client says after its Hello"
            )

    def _wait(
        self, session: Session, request: messages.Take | messages.TakeStep, now: float
    ) -> None:
        steps = isinstance(request, messages.TakeStep)
        if session.observer or steps != (session.rank >= 0) or not session.settled:
            raise errors.ProtocolError(
                f"{type(request).__name__} from an observer, or without the rank that it needs, or "
                "before the last Claim"
            )
        if isinstance(request, messages.TakeStep) and (request.groups is None) == (
            request.tokens is None
        ):
            raise errors.ProtocolError("TakeStep: expected one of groups and tokens")
        if request.gathers:
            self.collector.reader.note_packing()
        if session.waiting >= limits.MAX_WAITING:
            raise errors.ProtocolError(f"more than {limits.MAX_WAITING} requests wait already")
        session.waiting += 1
        waiting = _Waiting(session, request, now)
        self._waiting.append(waiting)
        if self.collector.stash.ready_groups >= waiting.wanted:
            self.serve(now)
        else:
            self.pump(now)

    def _end(self, session: Session, request: messages.End) -> None:
        ended, unknown = [], []
        for number in request.numbers:
            lease = session.leases.pop(number, None)
            if lease is None:
                unknown.append(number)
                continue
            if self.frozen:
                self._ending.append((session, lease, request.reason))
                continue
            self.table.end(lease, request.reason)
            ended.append(number)
        session.note_ended(ended, unknown)
        self.collector.flush()

    def _claim(self, session: Session, request: messages.Claim, now: float) -> None:
        if session.settled:
            raise errors.ProtocolError("a Claim after the last one")
        session.settled = request.last
        if self._claims is not None:
            self._claims.add(session, request.groups)
            if request.last and not request.groups:
                session.send(messages.Claimed())
            self._end_recovery_if_all_came(now)
            return
        session.send(self._doubt.claim(session, request.groups, self.table))
        if request.last:
            self._put_back(self._doubt.clear(session.client))
            self.serve(now)

    def serve(self, now: float) -> None:
        """Answer who waits, in the order of asking, as far as there is something for them."""
        if self._claims is not None:
            return
        if not self.frozen:
            # A duplicate that is to be raised comes before the group that it was for.
            self.collector.release_discards()
        still = []
        for waiting in self._waiting:
            if not self._answer(waiting, now):
                still.append(waiting)
            else:
                waiting.session.waiting -= 1
        self._waiting = still
        if self.collector.stash.discards and not self.frozen:
            self.collector.release_discards()

    def _answer(self, waiting: _Waiting, now: float) -> bool:
        session, request = waiting.session, waiting.request
        step, leases = -1, None
        if not self.draining and not self.frozen:
            error = self.collector.next_error()
            if error is not None:
                session.send(messages.Refused(kind="protocol", message=str(error), id=request.id))
                return True
            if isinstance(request, messages.Take):
                if not request.ahead or sum(not s.observer for s in self.sessions.values()) == 1:
                    leases = self._lease(request.max_groups)
            elif session.rank not in self._doubt.ranks():
                assert self.world is not None
                wrong = self.world.disagreement(session.rank, request)
                if wrong is not None:
                    session.send(messages.Refused(kind="value", message=wrong, id=request.id))
                    return True
                taken = self.world.take(session.rank, request, now)
                step, leases = (-1, None) if taken is None else taken
        if not leases and (waiting.deadline_s is None or now < waiting.deadline_s):
            return False
        for lease in leases or []:
            session.leases[lease.number] = lease
        session.send(
            messages.Leases(
                id=request.id, groups=[lease.granted() for lease in leases or []], step=step
            )
        )
        return True

    def _lease(self, max_groups: int) -> list[Lease]:
        if not self.table.returned and not self.collector.stash.ready_groups:
            return []
        return self.table.take(max_groups, limits.MAX_GRANT_TRAJECTORIES)

    def _all_ready(self) -> list[Lease]:
        return self._lease(limits.POLL_RECORDS)

    # -- for people -----------------------------------------------------------------------------

    @property
    def leased_groups(self) -> int:
        """Groups that clients hold, or may hold."""
        held = sum(len(s.leases) for s in self.sessions.values())
        return held + len(self._doubt) + len(self._ending)

    def ledger(self) -> Ledger:
        """Return the ledger; what was claimed is leased, and what was returned is stashed."""
        ledger = self.collector.stats()
        table = self.table
        return msgspec.structs.replace(
            ledger,
            leased=ledger.leased + table.claimed_records + self._doubt.withheld.records(),
            stashed=ledger.stashed + table.returned_records,
        )

    def status(self, request: messages.GetStatus) -> messages.StatusReply:
        """Say what an operator wants to see."""
        segment = self.collector.segment
        paused = segment.paused()
        return messages.StatusReply(
            **open_groups(self.collector, request.oldest, time.monotonic()),
            id=request.id,
            bus=segment.name,
            uptime_s=time.monotonic() - self.began_s,
            ledger=self.ledger(),
            policy=dict(self.policy),
            clients=[s.status() for s in self.sessions.values() if not s.observer],
            recovering=self._claims is not None,
            draining=self.draining,
            in_doubt=len(self._doubt),
            world_size=0 if self.world is None else self.world.size,
            next_steps={} if self.world is None else dict(self.world.next_steps),
            paused=None if paused is None else paused[0] or "no reason given",
        )


def _options(policy: dict[str, object]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in sorted(policy.items()))


def _people(sessions: list[Session]) -> str:
    return ", ".join(f"rank {s.rank} is pid {s.pid} ({s.label})" for s in sessions)
