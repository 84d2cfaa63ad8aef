"""A harness over HTTP alone, and its engine's log of the samples."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

from recorders import ask, user
from stub_engine import Sampled, StubEngine, serving_stub
from threaded_server import in_thread

from shmbus.recorder.server import serving
from shmbus.recorder.settings import Settings

_TURNS, _TURNS_AFTER = 3, 2
#: A sample's score, from its letters: exact in any type of float.
_LETTERS_A_POINT = 16


class Row(NamedTuple):
    """A whole conversation; a mask of 0 has logprobs of 0."""

    tokens: list[int]
    mask: list[int]
    logprobs: list[float]

    @property
    def begin(self) -> int:
        return self.mask.index(1)


class Sample(NamedTuple):
    """An engine's log of a session's calls."""

    rows: list[Row]
    score: float
    versions: tuple[int, int]
    calls: int


@contextmanager
def recording(bus: str, seed: int) -> Iterator[tuple[StubEngine, str]]:
    with in_thread(lambda: serving_stub(StubEngine(seed))) as engine:
        settings = Settings(
            bus=bus, engines=(engine.url,), port=0, assume_trainer_version=True
        )  # stubs have no rows
        with in_thread(lambda: serving(settings)) as recorder:
            yield engine, recorder.url


def play(
    url: str,
    *,
    rewritten: bool = False,
    between: Callable[[], object] = lambda: None,
    wait_s: float = 30.0,
) -> bool:
    """Make a sample of some turns; False without a prompt. A `rewritten` history goes on cut."""
    status, session = ask(f"{url}/sessions", {"timeout": wait_s})
    if status == 204:
        return False
    assert status == 200, session
    letters = 0
    messages = [user(f"{session['instance_id']}[{session['index']}]")]
    turns = _TURNS + (_TURNS_AFTER if rewritten and session["index"] % 2 else 0)
    for turn in range(turns):
        if turn == _TURNS:
            messages[2:] = [user("cut")]
        if turn == turns - 1:
            between()
        body = {"model": "m", "messages": messages}
        status, answer = ask(f"{session['base_url']}/chat/completions", body, session["api_key"])
        assert status == 200, answer
        said = answer["choices"][0]["message"]
        letters += len(said["content"])
        messages += [said, user("go on")]
    scored = {"score": letters / _LETTERS_A_POINT}
    assert ask(f"{url}/session/score", scored, session["api_key"]) == (200, {"put": True})
    return True


@contextmanager
def playing(url: str, **options: Any) -> Iterator[None]:
    """Make samples in sequence, until the block's end."""
    over = threading.Event()

    def work() -> None:
        while not over.is_set():
            play(url, wait_s=0.1, **options)

    with ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        try:
            yield
        finally:
            over.set()
            working.result()  # raises the reason for the block's vain wait


def log_of(engine: StubEngine) -> dict[str, Sample]:
    """Return the samples, by ``instance_id[index]``."""
    found: dict[str, list[list[Sampled]]] = {}
    for one in engine.record:
        messages = one.body["messages"]
        calls = found.setdefault(messages[0]["content"], [])
        if not calls or len(messages) <= len(calls[-1][-1].body["messages"]):
            calls.append([])
        calls[-1].append(one)
    return {name: _sample(calls) for name, calls in found.items()}


def _sample(conversations: list[list[Sampled]]) -> Sample:
    calls = [one for each in conversations for one in each]
    # Without rows of ranks, an engine's version separates its prefix caches.
    versions = [int(one.body["cache_salt"].partition(".")[0]) for one in calls]
    letters = sum(len(one.output) - 1 for one in calls)
    return Sample(
        [_row(each) for each in conversations],
        letters / _LETTERS_A_POINT,
        (min(versions), max(versions)),
        len(calls),
    )


def _row(calls: list[Sampled]) -> Row:
    tokens = calls[-1].prompt + calls[-1].output
    found = Row(tokens, [0] * len(tokens), [0.0] * len(tokens))
    for one in calls:
        begin, end = len(one.prompt), len(one.prompt) + len(one.output)
        assert tokens[:end] == one.prompt + one.output
        found.mask[begin:end] = [1] * len(one.output)
        found.logprobs[begin:end] = one.logprobs
    return found
