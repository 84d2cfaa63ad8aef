"""The daemon's decisions, without a socket or a thread: messages and ring events in, replies out.

Invariants:

- A single thread at a time calls the service. No call blocks, and no work is proportional to a
  payload.
- A waiting request gets a single answer: groups, or an empty answer at its timeout. A departed
  client gets no answer.
- While frozen the service releases and moves nothing: a snapshot is being written.
- No lease is granted until recovery has attributed the groups held by clients of the previous
  daemon.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from shmbus import errors
from shmbus._version import VERSION
from shmbus.base import limits
from shmbus.base.ledger import Ledger
from shmbus.control import messages
from shmbus.daemon import admission
from shmbus.daemon.groups import find_group, group_cells
from shmbus.daemon.history import History
from shmbus.daemon.leases import MAX_GRANT_TRAJECTORIES, Lease, LeaseTable, Session
from shmbus.daemon.recovery import Claims, InDoubt, extents_of_client, extents_of_clients
from shmbus.daemon.steps import StepPlanner, StepRequest, patience_s, step_request
from shmbus.data.keys import split_key
from shmbus.data.status_types import DaemonStatus
from shmbus.stash.collector import Collector
from shmbus_ext import _core

#: Waiting takes of a client, at most: the threads of a Consumer.
MAX_WAITING = 64
#: Seconds between checks whether a disconnected client still holds its lease locks; a dying process
#: closes socket and segment within much less.
_REAP_INTERVAL_S = 0.02
#: Groups per read of the ring, before other messages get their turn.
_PORTION = 256

Trajectory = _core.Trajectory


#: Request, patience and the planner's `changes`: ranks with equal ones lack the same groups.
_Lack: TypeAlias = tuple[StepRequest, float, int]


class Waiting:
    """An unanswered Take or TakeStep."""

    __slots__ = (
        "deadline_s", "followers", "lacked", "patience_s", "request", "session", "soonest_s",
        "split", "wanted",
    )  # fmt: skip

    def __init__(
        self, session: Session, request: messages.Take | messages.TakeStep, split: int, now: float
    ) -> None:
        self.session = session
        self.split = split
        self.request = request
        #: Ready groups that stop a read of the ring.
        self.wanted = request.max_groups if isinstance(request, messages.Take) else _PORTION
        self.wanted = min(self.wanted, _PORTION)
        self.deadline_s = math.inf if request.timeout_s is None else now + request.timeout_s
        self.patience_s = math.inf
        if isinstance(request, messages.TakeStep):
            self.patience_s = patience_s(request)
        #: Set while the rank's next step lacks groups.
        self.lacked: _Lack | None = None
        #: Ranks lacking the same groups; and the first deadline among them.
        self.followers: list[Waiting] = []
        self.soonest_s = self.deadline_s

    def lead(self, follower: Waiting) -> None:
        """Answer for another rank while both wait for the same step's groups."""
        self.followers.append(follower)
        self.soonest_s = min(self.soonest_s, follower.deadline_s)

    def release(self) -> list[Waiting]:
        """Return the followers, which now wait for themselves."""
        followers, self.followers = self.followers, []
        self.soonest_s = self.deadline_s
        return followers


class Service:
    """Leases a collector's groups to sessions."""

    def __init__(self, collector: Collector, policy: dict[str, object]) -> None:
        self.collector = collector
        self.policy = policy
        #: Attached clients, by number.
        self.sessions: dict[int, Session] = {}
        #: Set to grant nothing more, before the end.
        self.draining = False
        #: True while a snapshot is written.
        self.frozen = False
        #: Set after the bus lost its name: present groups are granted, and no request waits.
        self.removed = False
        self.began_s = time.monotonic()
        self._table = LeaseTable(collector)
        self._planner: StepPlanner | None = None
        self._waiting: list[Waiting] = []
        #: Received while frozen.
        self._deferred_ends: list[tuple[Session, Lease, int]] = []
        self._deferred_claims: list[tuple[Session, messages.Claim]] = []
        self._deferred_trained: list[tuple[Session, messages.EndTrained]] = []
        #: Received before clients of the previous daemon reported their trained samples.
        self._deferred_asks: list[tuple[Session, messages.GetTrained]] = []
        #: By rank, or -1 for clients without a rank: the samples counted as trained.
        self._trained: dict[int, set[bytes]] = {}
        self._next_forget_s = 0.0
        self._in_doubt = InDoubt(collector)
        #: Clients of the previous daemon without a report yet, and their extents.
        self._expected = extents_of_clients(collector.segment)
        #: The remaining clients' claims; None after the ring was read.
        self._claims: Claims | None = Claims()
        self._reclaim_until_s = self.began_s + limits.RECLAIM_WAIT_S
        self._next_reap_s = 0.0
        self.history = History(collector)
        collector.held_elsewhere = self._held_elsewhere
        self._finish_recovery(self.began_s)

    def _held_elsewhere(self) -> list[list[_core.Trajectory]] | None:
        """Return clients' groups from outside the stash; None while some stay unknown."""
        if len(self._in_doubt.withheld):
            return None
        return [lease.samples for lease in self._all_leases() if lease.group is None]

    # -- the ring -------------------------------------------------------------------------------

    def pump(self, now: float) -> bool:
        """Read a portion of the ring and answer waiting requests; return True for a rest."""
        # The portion fits the waiting requests, and is small otherwise, for quick answers to
        # messages.
        if self._claims is not None:
            return False
        self.history.look_at_producers()
        if self.frozen:
            self.serve(now)
            return False
        collector = self.collector
        more = collector.pump_once(now)
        while more and any(self._table.ready_of(w.split) < w.wanted for w in self._waiting):
            more = collector.pump_once(now)
        self.serve(now)
        return more

    def tick(self, now: float) -> None:
        """Do periodic work: maintenance, timeouts of requests, recovery, and dead clients."""
        self.history.look(self.sessions.values(), now)
        if self.frozen:
            self.serve(now)
            return
        self.collector.run_maintenance(now)
        if self._claims is not None:
            self._finish_recovery(now)
            return
        if len(self._in_doubt) and now >= self._next_reap_s:
            self._next_reap_s = now + _REAP_INTERVAL_S
            self._put_back(self._in_doubt.reap(set(self.sessions)))
        if self.collector.trained and now >= self._next_forget_s:
            self._forget_trained(now)
        self.collector.expire(now)
        for session in self.sessions.values():
            session.confirm()
        self.serve(now)

    def next_tick_s(self, now: float) -> float:
        """Seconds until the next work for `tick`."""
        wait_s = limits.SWEEP_INTERVAL_S if self.frozen else self.collector.wait_s(now, None)
        if self._claims is not None:
            wait_s = min(wait_s, self._reclaim_until_s - now)
        elif len(self._in_doubt):
            wait_s = min(wait_s, self._next_reap_s - now)
        if self._waiting:
            wait_s = min(wait_s, min(w.soonest_s for w in self._waiting) - now)
        if self._waiting and self._planner is not None:
            # A step past its time waits for groups, not for time.
            over_s = now - self._planner.due_s(0.0)
            patient = (w.patience_s for w in self._waiting if w.patience_s > over_s)
            wait_s = min(wait_s, min(patient, default=math.inf) - over_s)
        return max(wait_s, 0.0)

    @property
    def is_special(self) -> bool:
        """True outside of normal operation: frozen, draining or removed."""
        return self.frozen or self.draining or self.removed

    @property
    def has_waiting(self) -> bool:
        """True while a request waits for groups."""
        return bool(self._waiting)

    # -- snapshots ------------------------------------------------------------------------------

    def freeze(self) -> str | None:
        """Release and move nothing until `thaw`; or return the reason against a freeze now."""
        name = self.collector.segment.name
        if self.frozen:
            return f"bus {name!r}: a snapshot is being written already; try again when it is done"
        if self._claims is not None:
            return (
                f"bus {name!r}: its daemon has just started, and still asks clients what they "
                f"hold; try again in {limits.RECLAIM_WAIT_S:g} s"
            )
        self.frozen = self.collector.frozen = True
        return None

    def thaw(self) -> None:
        """Do the deferred work, and continue."""
        self.frozen = self.collector.frozen = False
        ending, self._deferred_ends = self._deferred_ends, []
        for session, lease, reason in ending:
            self.history.end(lease, session, reason)
            self._table.end(lease, reason)
            session.note_ended([lease.number], [])
        claiming, self._deferred_claims = self._deferred_claims, []
        for session, claim in claiming:
            if self.sessions.get(session.client) is session:
                self._claim(session, claim, time.monotonic())
        self._table.end_trained_returned()
        ending_trained, self._deferred_trained = self._deferred_trained, []
        for session, request in ending_trained:
            self._end_trained(session, request, time.monotonic())
        self.collector.flush()

    # -- recovery -------------------------------------------------------------------------------

    def _finish_recovery(self, now: float) -> None:
        """Read the ring after every client of the previous daemon reported, or at the deadline."""
        claims = self._claims
        assert claims is not None
        for client in list(self._expected):
            session = self.sessions.get(client)
            heard = session is not None and session.settled
            if heard or (session is None and not self._locked(client)):
                del self._expected[client]
        if self._expected and now < self._reclaim_until_s:
            return
        self._claims = None
        rest: list[Trajectory] = []
        while True:
            samples = self.collector.reader.poll(limits.POLL_RECORDS)
            rest += claims.divert(samples)
            if len(samples) < limits.POLL_RECORDS:
                break
        expected, self._expected = self._expected, {}
        # first: further samples of these groups count as late
        answers = claims.resolve(self._table)
        self._in_doubt.withheld.begin(rest, expected)
        for session, claimed in answers.items():
            session.send(claimed)
        asks, self._deferred_asks = self._deferred_asks, []
        for session, ask in asks:
            if self.sessions.get(session.client) is session:
                session.send(self._what_was_trained(ask))
        self.serve(now)

    def _locked(self, client: int) -> bool:
        return bool(self.collector.segment.locks_held(1 + client))

    # -- sessions -------------------------------------------------------------------------------

    def hello(self, hello: messages.Hello, send: Callable[..., None]) -> Session | messages.Refused:
        """Admit a client, or return why not."""
        # A draining daemon waits for the return of clients that end their leases.
        draining = self.draining and hello.client not in self._in_doubt.clients()
        refused = admission.refusal(hello, self.collector.segment, self.policy, draining=draining)
        if refused is None and not hello.observer:
            refused = self._admit_split(hello) or self._admit_rank(hello)
        if refused is not None:
            return refused
        client = hello.client if hello.client not in self.sessions else -1
        if client < 0:
            client = self._free_number()
        if client < 0:
            return admission.too_many(hello, len(self.sessions))
        session = Session(client, hello, send)
        self.sessions[client] = session
        self.history.joined(session)
        return session

    def _admit_split(self, hello: messages.Hello) -> messages.Refused | None:
        """Assign its split a number, or return the refusal."""
        try:
            _core.split_number(self.collector.segment, hello.split)
        except ValueError as error:
            return messages.Refused(kind="value", message=f"bus {hello.bus!r}: {error}")
        return None

    def _admit_rank(self, hello: messages.Hello) -> messages.Refused | None:
        """Make room for a rank among the steps, or return the refusal; admit plain clients."""
        ranked = self._ranked()
        if hello.client < 0:
            # A client returning after a restart came before the clients now here.
            mixed = admission.mixed_refusal(hello, self.sessions.values())
            if mixed is not None:
                return mixed
        if self._planner is not None and not ranked and hello.world_size != self._planner.size:
            # The job of the old size is over; its groups go to the next clients.
            leases, self._planner = self._planner.dissolve(), None
            for lease in self._in_doubt.leases():
                lease.step = lease.rank = -1
            self._table.give_back(leases)
        if hello.world_size == 1:
            return None
        size = None if self._planner is None else self._planner.size
        refused = admission.rank_refusal(hello, size, ranked)
        if refused is None and self._planner is None:
            self._planner = StepPlanner(hello.world_size, self._table)
        return refused

    def _ranked(self) -> list[Session]:
        return [session for session in self.sessions.values() if session.rank >= 0]

    def _free_number(self) -> int:
        taken = self._in_doubt.clients() | set(self._expected) | set(self.sessions)
        for client in range(limits.MAX_CLIENTS):
            if client not in taken and not self._locked(client):
                return client
        return -1

    def leave(self, session: Session, *, orderly: bool) -> None:
        """End a session; its groups are delivered next, or in doubt."""
        self.sessions.pop(session.client, None)
        self.history.left(session, time.monotonic(), orderly=orderly)
        waiting = [each for leader in self._waiting for each in (leader, *leader.release())]
        self._waiting = [each for each in waiting if each.session is not session]
        held = extents_of_client(self.collector.segment, session.client)
        if self._claims is not None:
            self._claims.forget(session, dead=not held)
            if held and not orderly:
                self._expected[session.client] = held
        leases = list(session.leases.values())
        session.leases.clear()
        out = self._in_doubt.clear(session.client) if orderly else []
        if not orderly and leases and held:
            # A living or dying process: its locks will tell.
            self._in_doubt.add(session.client, leases)
            self._next_reap_s = 0.0
        else:
            out += leases
        self._put_back(out)
        if self._planner is not None and not self._ranked():
            # Shards stay for their ranks; groups outside shards are free again.
            self._table.give_back(self._planner.empty_pool())
        self.serve(time.monotonic())

    def _put_back(self, leases: list[Lease]) -> None:
        free = []
        size = 0 if self._planner is None else self._planner.size
        for lease in leases:
            trained = self.collector.trained_of(lease.samples)
            if self._planner is not None and 0 <= lease.rank < size and not trained:
                self._planner.give_back(lease)
            else:
                lease.step = lease.rank = -1
                free.append(lease)
            self.history.given_back(lease)
        self._table.give_back(free)

    # -- requests -------------------------------------------------------------------------------

    def handle(self, session: Session, request: messages.Request) -> None:
        """Handle a request."""
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
            if session.settled:
                raise errors.ProtocolError("a Claim after the last one")
            session.settled = request.last
            if self.frozen:
                self._deferred_claims.append((session, request))
            else:
                self._claim(session, request, now)
        elif isinstance(request, messages.Trained):
            for number in request.numbers:
                if number in session.leases:
                    session.leases[number].trained_at = request.step
        elif isinstance(request, messages.GetTrained):
            if self._claims is None:
                session.send(self._what_was_trained(request))
            else:
                self._deferred_asks.append((session, request))
        elif isinstance(request, messages.EndTrained):
            if session.observer:
                raise errors.ProtocolError("EndTrained from an observer")
            if self.frozen:
                self._deferred_trained.append((session, request))
            else:
                self._end_trained(session, request, now)
        elif isinstance(request, messages.SetPolicyVersion):
            self.collector.policy_version = request.policy_version
            session.send(messages.Done(id=request.id))
        elif isinstance(request, messages.GetLedger):
            session.send(messages.LedgerReply(id=request.id, ledger=self.ledger()))
        elif isinstance(request, messages.GetGroups):
            session.send(self.groups(request))
        elif isinstance(request, messages.GetStatus):
            session.send(self.status(request))
        elif isinstance(request, messages.GetGroup):
            session.send(self.group(request, now))
        elif isinstance(request, messages.GetEvents):
            session.send(self.history.reply(request))
        else:
            raise errors.ProtocolError(
                f"expected a request of a client, got {type(request).__name__} after its Hello"
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
        if session.waiting >= MAX_WAITING:
            raise errors.ProtocolError(f"more than {MAX_WAITING} requests wait already")
        session.begin_wait(now)
        split = _core.split_number(self.collector.segment, session.split)
        waiting = Waiting(session, request, split, now)
        self._waiting.append(waiting)
        if self._table.ready_of(waiting.split) >= waiting.wanted:
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
                self._deferred_ends.append((session, lease, request.reason))
                continue
            self.history.end(lease, session, request.reason)
            self._table.end(lease, request.reason)
            ended.append(number)
        session.note_ended(ended, unknown)
        self.collector.flush()

    def _claim(self, session: Session, request: messages.Claim, now: float) -> None:
        if self._claims is not None:
            self._claims.add(session, request.groups)
            if request.last:
                if not request.groups:
                    session.send(messages.Claimed())
                self._rejoin(session)
            self._finish_recovery(now)
            return
        session.send(self._in_doubt.claim(session, request.groups, self._table))
        if request.last:
            self._rejoin(session)
            self._put_back(self._in_doubt.clear(session.client))
            self.serve(now)

    def _rejoin(self, session: Session) -> None:
        """Let a rank continue its steps after its last claim."""
        if session.rank >= 0:
            assert self._planner is not None
            self._planner.join(session.rank, session.next_step, self._held())

    def serve(self, now: float) -> None:
        """Answer waiting requests in order, while groups last."""
        if self._claims is not None:
            return
        if not self.frozen:
            # The error of a duplicate comes before its group.
            self.collector.release_discards()
        still: list[Waiting] = []
        leaders: dict[_Lack, Waiting] = {}
        queue = self._waiting
        for waiting in queue:
            lacked = waiting.lacked
            answered = self._answer(waiting, now)
            if answered or waiting.lacked != lacked or now >= waiting.soonest_s:
                queue += waiting.release()
            if answered:
                waiting.session.end_wait(now)
            elif waiting.lacked in leaders:
                leaders[waiting.lacked].lead(waiting)
            else:
                still.append(waiting)
                if waiting.lacked is not None:
                    leaders[waiting.lacked] = waiting
        self._waiting = still
        if self.collector.stash.discards and not self.frozen:
            self.collector.release_discards()
        table, unheld = self.collector.stash.table, self._unheld()
        if (table.unheld_groups, table.unheld_cells) != unheld:
            table.unheld_groups, table.unheld_cells = unheld
            self.collector.flush()

    def _answer(self, waiting: Waiting, now: float) -> bool:
        session, request = waiting.session, waiting.request
        step, leases = -1, None
        waiting.lacked = None
        if not self.draining and not self.frozen:
            error = self.collector.next_error()
            if error is not None:
                session.send(messages.Refused(kind="protocol", message=str(error), id=request.id))
                return True
            if isinstance(request, messages.Take):
                ranks_share = self._planner is not None and waiting.split == _core.SPLIT_TRAIN
                ranked = self._ranked() if ranks_share else []
                if ranked and not request.ahead:
                    message = admission.taken_by_ranks(self.collector.segment.name, ranked, session)
                    session.send(messages.Refused(kind="busy", message=message, id=request.id))
                    return True
                if not request.ahead or self._is_alone():
                    leases = self._lease(request.max_groups, waiting.split)
            elif session.rank not in self._in_doubt.ranks():
                planner = self._planner
                assert planner is not None
                if 0 < len(planner.next_steps) < planner.size:
                    planner.begin(self._held())
                wrong = planner.disagreement(session.rank, request)
                if wrong is not None:
                    session.send(messages.Refused(kind="value", message=wrong, id=request.id))
                    return True
                taken = planner.take(session.rank, request, now)
                step, leases = (-1, None) if taken is None else taken
                if planner.lacks_groups:
                    waiting.lacked = step_request(request), waiting.patience_s, planner.changes
        late = now >= waiting.deadline_s
        if not (leases or late or self.removed):
            return False
        for lease in leases or []:
            session.leases[lease.number] = lease
            self.history.leased(lease, session)
        session.send(
            messages.Leases(
                id=request.id, groups=[lease.granted() for lease in leases or []], step=step
            )
        )
        return True

    def _is_alone(self) -> bool:
        return sum(not session.observer for session in self.sessions.values()) == 1

    # -- trained samples -------------------------------------------------------------------------

    def _held(self) -> list[Lease]:
        """Return the groups held, or perhaps held, by clients."""
        held = [lease for session in self.sessions.values() for lease in session.leases.values()]
        return held + self._in_doubt.leases()

    def _all_leases(self) -> list[Lease]:
        """Return the groups outside the stash: with clients, given back, waiting for their rank."""
        waiting = [] if self._planner is None else self._planner.waiting()
        return [*self._held(), *self._table.returned, *waiting]

    def _what_was_trained(self, request: messages.GetTrained) -> messages.TrainedReply:
        leases = self._held() + ([] if self._planner is None else self._planner.waiting())
        # Each group goes once, with the least of its names.
        found: dict[bytes, list[tuple[str, int | None, str]]]
        found = {name: [] for name in self.collector.ended_names()}
        for lease in leases:
            if 0 <= lease.trained_at < request.step:
                origins = _core.lasting_origins(lease.samples)
                names = {name for of_sample in origins for name in of_sample}
                key, round, split = split_key(lease.samples[0].key)
                label = _core.split_label(self.collector.segment, split)
                found |= {name: [] for name in names}
                found[min(names)] = [(key, round, label)]
        behind = sorted(name for name in found if name > request.after)
        sizes = (len(name) + len(msgspec.msgpack.encode(found[name])) for name in behind)
        ends = itertools.accumulate(sizes)
        page = [name for name, end in zip(behind, ends, strict=True) if end <= messages.NAMES_BYTES]
        return messages.TrainedReply(
            id=request.id,
            names=b"".join(page),
            more=len(page) < len(behind),
            groups=[group for name in page for group in found[name]],
        )

    def _end_trained(self, session: Session, request: messages.EndTrained, now: float) -> None:
        known = self._trained.setdefault(session.rank, set())
        if not session.adds_trained:
            known.clear()
        known |= messages.split_names(request.names)
        session.adds_trained = request.more
        if not request.more:
            every = set().union(*self._trained.values())
            if self._claims is None:
                self.collector.end_trained(every, self._out_of_stash())
                self._withdraw_trained()
                self._forget_trained(now)
            else:
                self.collector.trained = every  # ended during the read
            self.serve(now)
        session.send(messages.Done(id=request.id))

    def _out_of_stash(self) -> list[Trajectory]:
        """Return leased and withheld samples that may come back."""
        found = [sample for lease in self._all_leases() for sample in lease.samples]
        return found + self._in_doubt.withheld.samples

    def _withdraw_trained(self) -> None:
        """End trained groups waiting for their rank; count the rest as untrained."""
        if self._planner is not None:
            waiting = self._planner.waiting()
            trained = [x for x in waiting if self.collector.trained_of(x.samples)]
            self._planner.withdraw(trained)
            for lease in waiting:
                lease.trained_at = -1
            for lease in trained:
                lease.step = lease.rank = -1
            self._table.give_back(trained)
        self._table.end_trained_returned()

    def _forget_trained(self, now: float) -> None:
        self._next_forget_s = now + limits.SWEEP_INTERVAL_S
        self.collector.forget_trained(self._out_of_stash())

    def _lease(self, max_groups: int, split: int) -> list[Lease]:
        if not self._table.ready_of(split):
            return []
        return self._table.take(max_groups, MAX_GRANT_TRAJECTORIES, split)

    # -- for operators --------------------------------------------------------------------------

    @property
    def is_empty(self) -> bool:
        """True if no group is leased and, on a removed bus, no group waits for a client."""
        ready = self.collector.stash.table.ready_groups + len(self._table.returned)
        return not self.leased_groups and not (self.removed and ready and self.sessions)

    @property
    def leased_groups(self) -> int:
        """Groups that clients hold or may hold."""
        held = sum(len(s.leases) for s in self.sessions.values())
        return held + len(self._in_doubt) + len(self._deferred_ends)

    def _unheld(self) -> tuple[int, int]:
        """Return how many groups and trajectories wait here for their rank."""
        planner = self._planner
        return (0, 0) if planner is None else (planner.waiting_groups, planner.waiting_records)

    def ledger(self) -> Ledger:
        """Return the ledger: "leased" counts groups held, claimed, or perhaps held by clients."""
        # Groups given back, or waiting for their rank, count as stashed.
        ledger = self.collector.stats()
        table = self._table
        groups, records = self._unheld()
        claimed = table.claimed_records + len(self._in_doubt.withheld.samples)
        return msgspec.structs.replace(
            ledger,
            leased=ledger.leased + claimed - records,
            stashed=ledger.stashed + table.returned_records + records,
            ready=ledger.ready + table.returned_records + records,
            groups_ready=table.ready_groups + groups,
            groups_leased=self.leased_groups,
        )

    def status(self, request: messages.GetStatus) -> messages.StatusReply:
        """Return the state of the daemon, of its clients and of incomplete groups."""
        now, oldest = time.monotonic(), self.collector.stash.oldest(1)
        ledger = self.ledger()
        daemon = DaemonStatus(
            answers=True,
            pid=os.getpid(),
            version=VERSION,
            uptime_s=now - self.began_s,
            recovering=self._claims is not None,
            draining=self.draining,
            in_doubt=len(self._in_doubt),
            world_size=0 if self._planner is None else self._planner.size,
            next_steps={} if self._planner is None else dict(self._planner.next_steps),
            groups_open=ledger.groups_open,
            groups_ready=ledger.groups_ready,
            groups_leased=ledger.groups_leased,
            leases=[s.status() for s in self.sessions.values() if not s.observer],
            oldest_s=max((now - group.born_s for group in oldest), default=0.0),
            failed_attempts=dict(self.history.failed_attempts),
        )
        return messages.StatusReply(id=request.id, daemon=daemon)

    def groups(self, request: messages.GetGroups) -> messages.GroupsReply:
        """Return the oldest incomplete groups, sample by sample."""
        now = time.monotonic()
        groups, omitted = group_cells(self.collector, request.groups, now, request.cells)
        return messages.GroupsReply(id=request.id, groups=groups, omitted=omitted)

    def group(self, request: messages.GetGroup, now: float) -> messages.GroupReply:
        """Return a group's state, samples and history."""
        key = self.history.key_of(request)
        if key is None:
            return messages.GroupReply(id=request.id, state="gone")
        leases = [(x, s.name) for s in self.sessions.values() for x in s.leases.values()]
        leases += [(lease, "a client that has not come back") for lease in self._in_doubt.leases()]
        state, group, holder, held_s = find_group(self.collector, leases, key, now)
        return messages.GroupReply(
            id=request.id,
            state=state,
            group=group,
            holder=holder,
            held_s=held_s,
            events=self.history.events.of_group(key),
        )
