"""Rows from turns: what is joined, what begins a row, and what is trained, against an oracle."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from shmbus.recorder.transcript import Span, Transcript, Turn


def turn(prompt: list[int], output: list[int], **more: Any) -> Turn:
    logprobs = [-(token + 1) / 1000 for token in output]
    return Turn(
        np.array(prompt, np.int32), np.array(output, np.int32), np.array(logprobs, np.float32),
        more.pop("versions", Span(0, 0)), **more,
    )  # fmt: skip


def shown(transcript: Transcript) -> list[tuple[list[int], list[int], int]]:
    return [
        (row["tokens"].tolist(), row["loss_mask"].tolist(), row["prefix_length"])
        for row in transcript.rows()
    ]


def test_a_prompt_that_continues_a_row_extends_it() -> None:
    transcript = Transcript()
    transcript.add(turn([1, 2], [3, 4]))
    transcript.add(turn([1, 2, 3, 4, 5], [6]))
    assert shown(transcript) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], 0)]


def test_the_longest_row_that_fits_is_continued() -> None:
    transcript = Transcript()
    transcript.add(turn([1], [2]))
    transcript.add(turn([1], [2, 3]))
    transcript.add(turn([1, 2, 3, 4], [5]))
    assert shown(transcript) == [([1, 2], [0, 1], 0), ([1, 2, 3, 4, 5], [0, 1, 1, 0, 1], 1)]


def test_one_other_token_begins_a_row() -> None:
    transcript = Transcript()
    transcript.add(turn([1, 2], [3, 4]))
    transcript.add(turn([1, 2, 3, 9, 5], [6]))
    assert shown(transcript) == [
        ([1, 2, 3, 4], [0, 0, 1, 1], 0),
        ([1, 2, 3, 9, 5, 6], [0, 0, 0, 0, 0, 1], 3),
    ]


def test_a_prompt_that_is_cut_within_a_row_begins_one() -> None:
    transcript = Transcript()
    transcript.add(turn([1, 2], [3, 4]))
    transcript.add(turn([1, 2, 3], [7]))
    assert shown(transcript)[1] == ([1, 2, 3, 7], [0, 0, 0, 1], 3)


def test_tokens_that_end_alike_in_bytes_are_not_the_same() -> None:
    transcript = Transcript()
    transcript.add(turn([256], [1]))
    transcript.add(turn([1, 256, 1], [5]))
    assert len(transcript.rows()) == 2


def test_drift_is_text_that_goes_on_while_its_tokens_do_not() -> None:
    transcript = Transcript()
    assert transcript.add(turn([1], [2], said="ask", answer="answer"))
    assert not transcript.add(turn([1, 9, 9], [3], said="askanswermore"))
    assert transcript.add(turn([7], [8], said="another"))
    assert transcript.drift == 1


def test_versions_of_all_turns_are_the_samples() -> None:
    transcript = Transcript()
    transcript.add(turn([1], [2], versions=Span(4, 5)))
    transcript.add(turn([1, 2], [3], versions=Span(3, 4)))
    assert transcript.versions == Span(3, 5)


def test_an_answer_without_a_token_is_a_turn_and_no_row() -> None:
    transcript = Transcript()
    transcript.add(turn([1], []))
    assert (transcript.turns, transcript.rows()) == (1, [])


def test_experts_are_those_that_sampled_a_token_and_the_last_ones_come_with_the_next_call() -> None:
    def routed(count: int, by: int) -> np.ndarray[Any, Any]:
        return np.full((count, 2, 1), by, np.uint8)

    transcript = Transcript()
    transcript.add(turn([1, 2], [3, 4], experts=routed(3, 1)))
    transcript.add(turn([1, 2, 3, 4, 5], [6], experts=routed(5, 2)))
    (row,) = transcript.rows()
    assert row["routed_experts"][:, 0, 0].tolist() == [1, 1, 1, 2, 2, 0]


def test_bytes_are_those_of_its_arrays() -> None:
    transcript = Transcript()
    transcript.add(turn([1, 2], [3, 4]))
    (row,) = transcript.rows()
    arrays = ("tokens", "loss_mask", "logprobs")
    assert transcript.nbytes == sum(row[name].nbytes for name in arrays)
    assert transcript.tokens == 4


@pytest.mark.parametrize("round", range(20))
def test_random_sessions_are_joined_as_the_oracle_joins_them(round: int, seed: int) -> None:
    rng = random.Random(seed + round)
    transcript = Transcript()
    rows: list[list[tuple[int, bool, float]]] = []
    for _ in range(rng.randrange(1, 40)):
        kind = rng.random()
        base = [token for token, *_ in rng.choice(rows)] if rows and kind < 0.8 else []
        if kind < 0.3:
            base = base[: rng.randrange(len(base) + 1)]
        elif kind < 0.4 and base:
            base[rng.randrange(len(base))] ^= 1
        prompt = [*base, *(rng.randrange(4) for _ in range(rng.randrange(1, 5)))]
        output = [rng.randrange(4) for _ in range(rng.randrange(6))]
        made = turn(prompt, output)
        transcript.add(made)
        if not output:
            continue
        context = [(token, False, 0.0) for token in prompt]
        fits = [row for row in rows if [t for t, *_ in row] == prompt[: len(row)]]
        if fits:
            row = max(fits, key=len)
            row += context[len(row) :]
        else:
            rows.append(row := context)
        row += zip(output, [True] * len(output), made.logprobs.tolist(), strict=True)
    found = []
    for row in transcript.rows():
        trained = (row["loss_mask"] == 1).tolist()
        found.append([*zip(row["tokens"].tolist(), trained, row["logprobs"].tolist(), strict=True)])
    assert found == rows
