"""Settings of a recorder, and its limits, each with its unit and its reason."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

#: Bytes of one call's body: a conversation of a million tokens, or some twenty images.
BODY_LIMIT: Final = 32 << 20
#: Seconds for a body, plus a second for each BODY_BYTES_PER_S bytes.
BODY_S: Final = 20.0
BODY_BYTES_PER_S: Final = 256 << 10
#: Seconds for a client to read an answer.
DELIVER_S: Final = 300.0
#: Bytes of all bodies that are read, and of what sessions keep.
MEMORY: Final = 2 << 30
#: What a body of JSON takes while it is read, sent on and turned, in parts of its own size.
BODY_PARTS: Final = 6
#: Sessions at once, calls of a session, and those of it at once: sub-agents, not a flood.
MAX_SESSIONS: Final = 4096
MAX_CALLS: Final = 1000
MAX_CALLS_AT_ONCE: Final = 64
#: Tokens of a session's rows: several contexts of 256k, as compacted conversations have.
MAX_TOKENS: Final = 1 << 20
#: Seconds without a call after which a session that was opened over HTTP fails: its harness died.
IDLE_S: Final = 600.0
#: Seconds that an engine may send nothing: a long prefill behind a pause.
ENGINE_SILENCE_S: Final = 900.0
#: Seconds for a connection to an engine; one that is full of connections takes none.
CONNECT_S: Final = 15.0
#: Idle seconds of a pooled connection to an engine: uvicorn closes connections after 5.
POOLED_S: Final = 3.0
#: Bytes of a stream between two turns of the event loop: less than a millisecond of work.
STREAM_PIECE: Final = 16 << 10
#: Seconds for what comes behind the last event of a stream: the end of its body, at once.
DRAIN_S: Final = 0.1
#: Engines that are asked for one answer, one after the other.
MAX_TRIES: Final = 3
#: Seconds between two tries where all engines have been asked, such as while one is restarted.
RETRY_S: Final = 0.5
#: Seconds that a call waits for an engine of known weights, as `EngineFleet.catch_up` brings to a
#: restarted engine; seconds until the next try of a refused client.
VERSION_WAIT_S: Final = 30.0
VERSION_RETRY_S: Final = 5
#: Seconds between two looks at engines, and after which one that answers counts as slow.
PROBE_S: Final = 2.0
SLOW_S: Final = 1.0
#: Seconds between two looks at which sessions are still wanted.
SWEEP_S: Final = 0.5
#: Sessions of one such look, some 1 ms of work; the next look goes on with the others.
SWEEP_SESSIONS: Final = 512
#: Sessions that ended, of which late callers are told why.
KEEP_ENDED: Final = 65_536
#: Sessions that the file for the page names.
SHOWN_SESSIONS: Final = 48
#: Connections, and seconds that one may stay without a request: agents think, and run tools.
MAX_CONNECTIONS: Final = 16_384
IDLE_CONNECTION_S: Final = 600.0
#: Bytes of an engine's answer that is no stream: 64k tokens with logprobs and routed experts.
ANSWER_LIMIT: Final = 256 << 20
#: Seconds that `POST /sessions` may wait for a prompt.
MAX_WAIT_S: Final = 300.0


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """How a recorder serves one bus."""

    bus: str
    engines: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8080
    #: What opens sessions; None where nothing is asked for.
    token: str | None = None
    engine_key: str | None = None
    body_limit: int = BODY_LIMIT
    memory: int = MEMORY
    sessions: int = MAX_SESSIONS
    calls: int = MAX_CALLS
    tokens: int = MAX_TOKENS
    #: Without a call, after which a session that was opened over HTTP fails.
    idle_s: float = IDLE_S
    #: Versions behind the trainer's from which a session ends.
    max_lag: int | None = None
    #: Sampling options set in every call; sampling options that no call may contradict.
    force_sampling: dict[str, float] = {}
    require_sampling: dict[str, float] = {}
    #: Train tokens sampled under a grammar.
    train_grammar: bool = False
    #: Whether engines without rows of weights count as engines of the trainer's version.
    assume_trainer_version: bool = False
    #: Layers, and experts of a token.
    experts: tuple[int, int] | None = None
    log_format: Literal["json", "text"] = "text"
    log_level: Literal["debug", "info", "warning", "error"] = "info"
