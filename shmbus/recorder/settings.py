"""Settings of a recorder, and its limits, with units and reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Literal

import msgspec

#: Bytes of one call's body: a conversation of a million tokens, or some twenty images.
BODY_LIMIT: Final = 32 << 20
#: Seconds for a client to read an answer.
DELIVER_S: Final = 300.0
#: Bytes of bodies in progress, and of sessions.
MEMORY: Final = 2 << 30
#: Memory of a JSON body while read, sent on and translated, in parts of its own size.
BODY_PARTS: Final = 6
#: Bytes of a request, such as a score, that is read however full the memory is: its end of a
#: session frees memory.
FREE_BODY: Final = 16 << 10
#: Sessions at once, calls of a session, and its calls at once: sub-agents, not a flood.
MAX_SESSIONS: Final = 4096
MAX_CALLS: Final = 1000
MAX_CALLS_AT_ONCE: Final = 64
#: Tokens of a session's rows: several contexts of 256k, as compacted conversations have.
MAX_TOKENS: Final = 1 << 20
#: Seconds without a call until a session opened over HTTP fails: its harness died.
IDLE_S: Final = 600.0
#: Longest silence of an engine, in seconds: a long prefill behind a pause.
ENGINE_SILENCE_S: Final = 900.0
#: Seconds for a connection to an engine; an engine at its connection limit accepts none.
CONNECT_S: Final = 15.0
#: Idle seconds of a pooled connection to an engine: uvicorn closes connections after 5.
POOLED_S: Final = 3.0
#: Bytes of a stream between two turns of the event loop: less than a millisecond of work.
STREAM_PIECE: Final = 16 << 10
#: Seconds for the rest behind the last event of a stream: the end of its body, at once.
DRAIN_S: Final = 0.1
#: Engines asked in turn for one answer.
MAX_TRIES: Final = 3
#: Seconds between two tries after every engine was asked, for example during a restart.
RETRY_S: Final = 0.5
#: Seconds that a call waits for an engine of known weights, as `EngineFleet.catch_up` brings to a
#: restarted engine; seconds until the next try of a refused client.
VERSION_WAIT_S: Final = 30.0
VERSION_RETRY_S: Final = 5
#: Seconds for the renderings of a stitched prompt; afterwards the engine renders the call.
STITCH_S: Final = 10.0
#: Seconds until the next try after doubt about an engine or a template: either may be replaced.
STITCH_AGAIN_S: Final = 600.0
#: The same after renderings that took too long.
STITCH_BUSY_S: Final = 60.0
#: Seconds between two probes of engines, and the answer time of a slow engine.
PROBE_S: Final = 2.0
SLOW_S: Final = 1.0
#: Seconds between two looks for unwanted sessions.
SWEEP_S: Final = 0.5
#: Sessions per look, some 1 ms of work; the next look continues.
SWEEP_SESSIONS: Final = 512
#: Ended sessions kept to tell late callers the reason.
KEEP_ENDED: Final = 65_536
#: Bytes of a harness's reason for a failure; every ended session keeps its own.
MOST_REASON_BYTES: Final = 1024
#: Sessions named in the page's file.
SHOWN_SESSIONS: Final = 48
#: Connections, and their idle seconds: agents think, and run tools.
MAX_CONNECTIONS: Final = 16_384
IDLE_CONNECTION_S: Final = 600.0
#: Bytes of an engine's whole answer: 64k tokens with logprobs and routed experts.
ANSWER_LIMIT: Final = 256 << 20
#: Bytes of a whole answer that a thread decodes: 5 ms of work for the event loop.
LARGE_ANSWER: Final = 512 << 10
#: Longest wait of `POST /sessions` for a prompt, in seconds.
MAX_WAIT_S: Final = 300.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a recorder for one bus."""

    bus: str
    engines: Sequence[str]
    host: str = "127.0.0.1"
    port: int = 8080
    #: Secret for opening sessions; None for open access.
    token: str | None = None
    engine_key: str | None = None
    body_limit: int = BODY_LIMIT
    memory: int = MEMORY
    sessions: int = MAX_SESSIONS
    calls: int = MAX_CALLS
    tokens: int = MAX_TOKENS
    #: Seconds without a call until a session opened over HTTP fails.
    idle_s: float = IDLE_S
    #: Versions behind the trainer's until a session ends.
    max_lag: int | None = None
    #: Sampling options set in every call; sampling options that no call may contradict.
    force_sampling: dict[str, float] = {}
    require_sampling: dict[str, float] = {}
    #: Continue conversations by their sampled ids.
    stitch: bool = True
    #: Train tokens sampled under a grammar.
    train_grammar: bool = False
    #: Whether engines without rows of weights count as engines of the trainer's version.
    assume_trainer_version: bool = False
    #: Layers, and experts of a token.
    experts: tuple[int, int] | None = None
    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
