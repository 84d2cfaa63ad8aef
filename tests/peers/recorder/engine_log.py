"""The engine's own record of what it sampled, and samples of a bus held against it."""

import json
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np

import shmbus


class Answer(NamedTuple):
    """An answer of the engine, with its call's end and its index there."""

    number: tuple[int, int]
    prompt: tuple[int, ...]
    output: tuple[int, ...]
    logprobs: tuple[float, ...]


class EngineLog:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._at = 0
        self._forgotten: set[str] = set()

    def since_last(self) -> list[Answer]:
        """Return what was sampled since the last question, in the order of ends."""
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        parts: dict[tuple[str, int], list[list[object]]] = defaultdict(list)
        last: dict[str, int] = {}
        for number, line in enumerate(lines):
            request, index, prompt, ids, logprobs = json.loads(line)
            parts[request, index].append([prompt, ids, logprobs])
            last[request] = number
        found = []
        for key, pieces in parts.items():
            request, index = key
            if last[request] < self._at or request in self._forgotten:
                continue
            prompt = next(piece[0] for piece in pieces if piece[0])
            output = [token for piece in pieces for token in piece[1]]  # type: ignore[attr-defined]
            values = [value for piece in pieces for value in piece[2]]  # type: ignore[attr-defined]
            logprobs = np.array([np.nan if v is None else v for v in values], np.float32).tolist()
            found.append(
                Answer((last[request], index), tuple(prompt), tuple(output), tuple(logprobs))
            )  # type: ignore[arg-type]
        self._at = len(lines)
        return sorted(found)

    def last(self) -> Answer:
        """Return the answer that ended last, without taking answers."""
        at = self._at
        found = self.since_last()[-1]
        self._at = at
        return found

    def forget_last(self) -> None:
        """Take the answer that ended last out of the log, as a test's own call."""
        self._forgotten.add(json.loads(self.path.read_text().splitlines()[-1])[0])


Row = tuple[list[int], list[int], list[float]]


def rows_of(sample: shmbus.Trajectory) -> list[Row]:
    return [
        (row["tokens"].tolist(), row["loss_mask"].tolist(), row["logprobs"].tolist())
        for row in sample.rows
    ]


def answers_of(rows: Iterable[Row], left: dict[tuple[int, ...], list[Answer]]) -> list[Answer]:
    """Find each trained token in the engine's record, bit for bit, and take it out of that."""
    found = []
    for tokens, mask, logprobs in rows:
        at = 0
        assert 1 in mask
        while at < len(tokens):
            if not mask[at]:
                assert logprobs[at] == 0.0
                at += 1
                continue
            fitting = [
                answer
                for answer in left[tuple(tokens[:at])]
                if answer.output == tuple(tokens[at : at + len(answer.output)])
                and answer.logprobs == tuple(logprobs[at : at + len(answer.output)])
                and all(mask[at : at + len(answer.output)])
            ]
            assert fitting, f"the engine never sampled what is trained from token {at} on"
            calls = {answer.number[0] for answer in fitting}
            assert len(calls) == 1, "two calls asked and got the same: whose is it?"
            left[tuple(tokens[:at])].remove(fitting[0])
            found.append(fitting[0])
            at += len(fitting[0].output)
    return found


def replayed(answers: Iterable[Answer]) -> list[Row]:
    """Join answers into rows as the documentation says, by lists alone."""
    rows: list[Row] = []
    for answer in sorted(answers):
        prompt = list(answer.prompt)
        fits = [row for row in rows if row[0] == prompt[: len(row[0])]]
        if fits:
            row = max(fits, key=lambda row: len(row[0]))
        else:
            rows.append(row := ([], [], []))
        context = prompt[len(row[0]) :]
        row[0].extend([*context, *answer.output])
        row[1].extend([0] * len(context) + [1] * len(answer.output))
        row[2].extend([0.0] * len(context) + list(answer.logprobs))
    return rows


def check(samples: Iterable[shmbus.Trajectory], log: EngineLog, *, in_order: bool = True) -> int:
    """Compare samples with all sampled tokens since the last call; return the number of tokens."""
    left: dict[tuple[int, ...], list[Answer]] = defaultdict(list)
    for answer in log.since_last():
        left[answer.prompt].append(answer)
    trained = 0
    for sample in samples:
        rows = rows_of(sample)
        answers = answers_of(rows, left)
        trained += sum(len(answer.output) for answer in answers)
        assert sample.meta["turns"] == len(answers)
        if in_order:
            assert rows == replayed(answers)
    assert not any(left.values()), "the engine sampled what nothing was trained of"
    return trained
