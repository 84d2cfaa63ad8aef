"""One recorder: its sessions, its own samples in hand, and reports of their ends.

A session opened by a worker stays the worker's: the worker takes the rows and puts them. A session
opened by a harness over HTTP is the recorder's own: the recorder takes the prompt and puts the
sample. Either way one producer holds the request, and its death hands the request to the remaining
producers.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import AsyncIterator
from http import HTTPStatus
from typing import Any

import msgspec
from aiohttp import web

import shmbus
from shmbus.base.format import printable
from shmbus.data.prompts import Ticket
from shmbus.handles.session import MOST_SCORE, PackedArray, PackedRow, PackedSample
from shmbus.http.bodies import BodyReader
from shmbus.recorder import settings as limits
from shmbus.recorder.calls import Calls
from shmbus.recorder.engines import Engines
from shmbus.recorder.refusals import CallRefusal
from shmbus.recorder.sessions import Place, Session, Sessions
from shmbus.recorder.settings import Settings
from shmbus.recorder.versions import EngineVersions
from shmbus.segment.recorder_files import EngineNote, RecorderFile, RecorderNote, SessionNote

logger = logging.getLogger(__name__)

#: Seconds between two looks for requests of dead workers, and between two notes of the file.
_SLOW_SWEEP_S = 1.0


class Recorder:
    """Serves one bus."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.producer = shmbus.Producer(settings.bus, label="recorder")
        self.sessions = Sessions(settings)
        self.engines = Engines(settings.engines, settings.engine_key)
        self.versions = EngineVersions(self.producer, settings.assume_trainer_version)
        self.calls = Calls(settings, self.sessions, self.engines, self.versions, self.fail)
        #: Bytes of bodies in progress.
        self.body_bytes = 0
        #: Set after the removal of the bus: the process ends.
        self.gone = asyncio.Event()
        self._file = RecorderFile(settings.bus)
        #: Own address.
        self.url = ""
        self._tasks: set[asyncio.Task[Any]] = set()
        #: Sessions not yet checked in this round.
        self._unchecked: list[Session] = []

    # -- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start the checks of engines and sessions, and publish the address."""
        await self.engines.start()
        self._write_note()
        self._later(self._sweep())

    async def close(self) -> None:
        """Leave: requests in hand go to the remaining producers."""
        self._file.close()
        for session in self.sessions:
            self.end(session, "recorder_ended", "the recorder ends")
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.engines.close()
        self.versions.close()
        self.producer.close()

    def _later(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep(self) -> None:
        slow_s = 0.0
        while True:
            await asyncio.sleep(limits.SWEEP_S)
            try:
                now_s = time.monotonic()
                self._check_some(now_s)
                if now_s >= slow_s:
                    slow_s = now_s + _SLOW_SWEEP_S
                    self.producer._recover_dead()
                    self._write_note()
            except (shmbus.BusRemovedError, shmbus.BusClosedError) as error:
                logger.error("this recorder ends: %s", error)
                self.gone.set()
                return
            except Exception:
                # The sweep must survive errors: it alone ends sessions.
                logger.exception("the sweep failed, and goes on")

    def _check_some(self, now_s: float) -> None:
        left = self._unchecked or list(self.sessions)
        self._unchecked = left[limits.SWEEP_SESSIONS :]
        for session in left[: limits.SWEEP_SESSIONS]:
            self._check(session, now_s)

    def _write_note(self) -> None:
        if self.producer._segment.note_removal():
            raise shmbus.BusRemovedError(f"bus {self.settings.bus!r} was removed")
        now_s = time.monotonic()
        running = [
            SessionNote(
                instance_id=session.place.instance_id,
                index=session.place.index,
                age_s=round(now_s - session.opened_s, 1),
                turns=session.transcript.turns,
                tokens=session.transcript.tokens,
                calls=session.running,
                engine="" if session.engine is None else session.engine.url,
            )
            for session in list(self.sessions)[: limits.SHOWN_SESSIONS]
        ]
        engines = [
            EngineNote(
                url=engine.url,
                state=engine.state,
                calls=engine.calls,
                version=None if version.span is None else version.span.oldest,
                version_by=version.by,
                why=version.why,
            )
            for engine in self.engines.all
            for version in (self.versions.of(engine.url),)
        ]
        self._file.write(
            RecorderNote(
                url=self.url,
                pid=os.getpid(),
                token=self.settings.token,
                sessions=len(self.sessions),
                calls=self.calls.running,
                drift=self.sessions.drift,
                running=running,
                engines=engines,
            )
        )

    # -- checks of sessions ---------------------------------------------------------------------

    def _is_wanted(self, session: Session) -> bool:
        if session.is_own:
            return self.producer.requests.is_wanted(session.hold)
        return self.producer.requests._holds(session.hold)

    def _check(self, session: Session, now_s: float) -> None:
        """End an unwanted session, a stale session, or a session of a dead harness."""
        if session.putting is not None:
            return
        if not self._is_wanted(session):
            if session.sealed:
                self.end(session, "scored", "its worker has the rows")
            else:
                why = "its group is complete or cancelled, or its worker died"
                self.end(session, "unwanted", why)
            return
        versions, lag = session.transcript.versions, self.settings.max_lag
        if lag is not None and versions is not None and not session.sealed:
            newest = self.versions.trainers
            if newest - versions.oldest > lag:
                self.fail(
                    session,
                    "stale",
                    f"it began with version {versions.oldest}, the trainer has {newest}, and "
                    f"--max-lag is {lag}",
                )
                return
        idle_s = now_s - session.last_s
        if session.is_own and not session.running and idle_s > self.settings.idle_s:
            self.fail(session, "idle", f"no call for {self.settings.idle_s:g} s")

    def require_wanted(self, session: Session) -> None:
        """Refuse a call of a session that ends now."""
        self._check(session, time.monotonic())
        session.require_open()

    # -- ends -----------------------------------------------------------------------------------

    def end(self, session: Session, code: str, reason: str) -> bool:
        """End a session, and give back its sample if the recorder holds it."""
        if not self.sessions.end(session, code, reason):
            return False
        logger.info("%s: %s: %s", session.place, code, printable(reason))
        if session.is_own and code not in ("scored", "unwanted"):
            self.producer.requests.release(session.hold, reason=reason)
        return True

    def fail(self, session: Session, code: str, reason: str) -> bool:
        """End a session with a failed sample; an engine's failure only gives the sample back."""
        if not session.is_own or code == "engine":
            return self.end(session, code, reason)
        if not self.sessions.end(session, code, reason):
            return False
        logger.info("%s failed: %s: %s", session.place, code, printable(reason))
        self._later(self.producer.requests.afail(session.hold, f"{code}: {reason}"))
        return True

    # -- opening --------------------------------------------------------------------------------

    def open_for(self, ticket: Ticket) -> Session:
        """Open a session for a sample in a worker's hand."""
        if not self.producer.requests._holds(ticket):
            raise CallRefusal(
                HTTPStatus.CONFLICT,
                "unwanted",
                f"{ticket.instance_id!r}[{ticket.index}] of bus {self.settings.bus!r} is in no "
                "worker's hand; is it the same bus?",
            )
        place = Place(ticket.instance_id, ticket.index, ticket.group_size)
        return self.sessions.open(place, ticket, False, time.monotonic())

    async def open_next(self, wait_s: float) -> Session | None:
        """Open a session for the next prompt of the bus; None after the timeout."""
        self.sessions.require_room()
        request = await self.producer.requests.anext(wait_s)
        if request is None:
            return None
        try:
            place = Place(request.instance_id, request.index, request.group_size)
            return self.sessions.open(place, request, True, time.monotonic())
        except BaseException:
            self.producer.requests.release(request)
            raise

    # -- samples --------------------------------------------------------------------------------

    def seal(self, session: Session) -> dict[str, Any]:
        """Refuse further calls of a session; return its sample, or fail it and refuse."""
        session.require_open()
        session.sealed = True
        session.cancel_calls()
        transcript = session.transcript
        if not transcript.sampled or transcript.versions is None:
            self.fail(session, "no_tokens", "it has no sampled token")
            session.require_open()
        assert transcript.versions is not None
        meta: dict[str, Any] = {
            "turns": transcript.turns,
            "drift": transcript.drift,
            "finish_reason": transcript.finish_reason,
            "engine": "" if session.engine is None else session.engine.url,
        }
        if sampling := transcript.sampling():
            meta["sampling"] = sampling
        if transcript.grammar_tokens:
            meta["grammar_tokens"] = transcript.grammar_tokens
        if session.assumed:
            meta["version_by"] = "trainer"
        return {
            "policy_version": tuple(transcript.versions),
            "meta": meta,
        }

    def rows(self, session: Session) -> bytes:
        """Return a worker's sample, packed; the session ends once the worker has answered."""
        if session.is_own:
            raise CallRefusal(
                HTTPStatus.CONFLICT,
                "not_a_workers",
                "this session was opened by POST /sessions; send its score to /session/score",
            )
        sample = self.seal(session)
        packed = PackedSample(
            branches=[
                PackedRow(
                    row.parent,
                    row.prefix,
                    {
                        name: PackedArray(value.dtype.str, list(value.shape), value.tobytes())
                        for name, value in row.fields.items()
                    },
                )
                for row in session.transcript.branches()
            ],
            versions=sample["policy_version"],
            meta=sample["meta"],
        )
        return msgspec.msgpack.encode(packed)

    def require_unscored(self, session: Session, end: object) -> None:
        """Refuse a different end of a session whose score is being put."""
        if session.putting is not None and session.score != end:
            raise CallRefusal(
                HTTPStatus.CONFLICT,
                "scored",
                f"the session of {session.place} has the score {session.score}, got {end!r:.80}; a "
                "sample has one end",
            )

    async def score(self, session: Session, score: object, meta: dict[str, Any]) -> bool:
        """Put a harness's sample; False if unwanted by now."""
        if not session.is_own:
            raise CallRefusal(
                HTTPStatus.CONFLICT,
                "a_workers",
                "this session was opened by producer.session; give its score to session.finish",
            )
        self.require_unscored(session, score)
        status = _status_of_score(score)
        if status is not HTTPStatus.OK:
            self.fail(
                session, "bad_score", f"score: expected a number within 1e38, got {score!r:.80}"
            )
            raise CallRefusal(
                status,
                "bad_score",
                f"score: expected a number within 1e38, got {score!r:.80}; the sample has failed",
            )
        if session.putting is None:
            sample = self.seal(session)
            sample["rows"] = session.transcript.rows()
            session.score = float(score)  # type: ignore[arg-type]
            sample["meta"] |= meta
            # The put outlives its client: a second request finds the put.
            session.putting = self._later(self._put(session, sample))
        done: bool = await asyncio.shield(session.putting)
        return done

    async def _put(self, session: Session, sample: dict[str, Any]) -> bool:
        try:
            put = await self.producer.requests.aanswer(session.hold, score=session.score, **sample)
        except (TypeError, ValueError, OverflowError, shmbus.RecordTooLargeError) as error:
            # The bus's schema or size does not fit the sample.
            self.fail(session, "refused", f"{type(error).__name__}: {error}")
            raise CallRefusal(
                HTTPStatus.UNPROCESSABLE_ENTITY, "refused", f"the bus refuses the sample: {error}"
            ) from error
        except asyncio.CancelledError:
            self.end(session, "recorder_ended", "the recorder ends")
            raise
        if put:
            self.end(session, "scored", f"it has its score, {session.score}")
        else:
            self.end(session, "unwanted", "its group is complete or cancelled")
        return put

    @contextlib.asynccontextmanager
    async def body(
        self, request: web.BaseRequest, session: Session | None = None, free: int = 0
    ) -> AsyncIterator[bytearray]:
        """Read a body; its bytes count in the memory of bodies and sessions during the block.

        A body that never fits beside its own session is too large; a body of `free` bytes fits.
        """
        held = 0
        own = 0 if session is None else session.nbytes
        most = max(free, (self.settings.memory - own) // limits.BODY_PARTS)
        more_memory = f"--memory, {limits.BODY_PARTS} times the largest body"
        limit, option = min((self.settings.body_limit, "--body-limit"), (most, more_memory))

        def take(nbytes: int) -> None:
            nonlocal held
            more = nbytes * limits.BODY_PARTS
            used = self.body_bytes + self.sessions.nbytes
            if used + more > self.settings.memory and held + more > free * limits.BODY_PARTS:
                raise CallRefusal(
                    HTTPStatus.SERVICE_UNAVAILABLE,
                    "memory",
                    f"bodies and sessions have {used} of {self.settings.memory} bytes; ask again, "
                    "or start the recorder with more --memory",
                    retry_after_s=1,
                )
            self.body_bytes += more
            held += more

        try:
            yield await BodyReader(request, limit, option).read(take)
        finally:
            self.body_bytes -= held


def _status_of_score(score: object) -> HTTPStatus:
    """Return 200 for a score that a put accepts."""
    if isinstance(score, bool) or not isinstance(score, (int, float)):
        return HTTPStatus.UNPROCESSABLE_ENTITY
    try:
        return HTTPStatus.OK if abs(float(score)) <= MOST_SCORE else HTTPStatus.UNPROCESSABLE_ENTITY
    except OverflowError:  # an int beyond every float
        return HTTPStatus.BAD_REQUEST
