"""Rows from turns, against an oracle: continued rows, new rows, trained tokens."""

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


def of(*turns: Turn) -> Transcript:
    transcript = Transcript()
    for each in turns:
        transcript.add(each)
    return transcript


def routed(count: int, by: int) -> np.ndarray[Any, Any]:
    return np.full((count, 2, 1), by, np.uint8)


def shown(transcript: Transcript) -> list[tuple[list[int], list[int], int]]:
    return [
        (row["tokens"].tolist(), row["loss_mask"].tolist(), row["prefix_length"])
        for row in transcript.rows()
    ]


def test_tokens_that_end_alike_in_bytes_are_not_the_same() -> None:
    assert len(of(turn([256], [1]), turn([1, 256, 1], [5])).rows()) == 2


def test_drift_is_text_that_goes_on_while_its_tokens_do_not() -> None:
    transcript = Transcript()
    assert transcript.add(turn([1], [2], said="ask", answer="answer"))
    assert not transcript.add(turn([1, 9, 9], [3], said="askanswermore"))
    assert transcript.add(turn([7], [8], said="another"))
    assert transcript.drift == 1


def test_versions_of_all_turns_are_the_samples() -> None:
    older = turn([1, 2], [3], versions=Span(3, 4))
    assert of(turn([1], [2], versions=Span(4, 5)), older).versions == Span(3, 5)


def test_experts_are_those_that_sampled_a_token_and_the_last_ones_come_with_the_next_call() -> None:
    first = turn([1, 2], [3, 4], experts=routed(3, 1))
    (row,) = of(first, turn([1, 2, 3, 4, 5], [6], experts=routed(5, 2))).rows()
    assert row["routed_experts"][:, 0, 0].tolist() == [1, 1, 1, 2, 2, 0]


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


def check(transcript: Transcript, kept: list[Turn]) -> None:
    rows = transcript.rows()
    wholes = [row["tokens"].tolist() for row in rows]
    trained = [
        (row["tokens"][at].item(), row["logprobs"][at].item())
        for row in rows
        for at in np.flatnonzero(row["loss_mask"])
    ]
    sampled = [pair for each in kept for pair in zip(each.output, each.logprobs, strict=True)]
    assert sorted(trained) == sorted(sampled)
    for each in kept:
        whole = [*each.prompt.tolist(), *each.output.tolist()]
        assert not len(each.output) or any(row[: len(whole)] == whole for row in wholes)
    for number, row in enumerate(rows):
        assert row["loss_mask"].any()
        shared = wholes[number][: row["prefix_length"]]
        assert not shared or any(each[: len(shared)] == shared for each in wholes[:number])
    assert transcript.tokens == sum(map(len, wholes)) - sum(row["prefix_length"] for row in rows)
    assert (transcript.turns, transcript.sampled) == (len(kept), len(sampled))


@pytest.mark.parametrize("round", range(30))
def test_random_answers_are_taken_out_alone(round: int, seed: int) -> None:
    rng = random.Random(seed + round)
    transcript, kept, undone = Transcript(), list[Turn](), 0
    for _ in range(rng.randrange(1, 40)):
        base = rng.choice(kept) if kept else turn([], [])
        whole = [*base.prompt.tolist(), *base.output.tolist()]
        prompt = whole[: rng.randrange(len(whole) + 1)] if rng.random() < 0.4 else whole
        if rng.random() < 0.2:
            prompt = base.prompt.tolist()
        prompt += [rng.randrange(3) for _ in range(rng.randrange(not prompt, 3))]
        made = turn(prompt, [rng.randrange(3) for _ in range(rng.randrange(4))])
        transcript.add(made)
        kept.append(made)
        if rng.random() < 0.5:
            at = rng.randrange(len(kept))
            goes_on = any(
                other.prompt.tolist()[: len(kept[at].prompt) + 1]
                == [*kept[at].prompt.tolist(), *kept[at].output.tolist()[:1]]
                for other in kept
            )
            if transcript.undo(transcript.recorded[at]):
                del kept[at]
                undone += 1
            else:
                assert goes_on or undone
        check(transcript, kept)


def test_an_answer_that_a_later_call_goes_on_from_stays() -> None:
    more = [turn([1, 2, 3, 4, 5], [6]), turn([1, 2, 3, 4, 5, 6, 7], [8])]
    transcript = of(turn([1, 2], [3, 4]), *more)
    before = shown(transcript)
    assert not any(transcript.undo(each) for each in transcript.recorded[:2])
    assert shown(transcript) == before
    assert transcript.undo(transcript.recorded[2])
    assert shown(transcript) == [([1, 2, 3, 4, 5, 6], [0, 0, 1, 1, 0, 1], 0)]


def test_an_answer_in_the_place_of_a_lost_one_continues_the_row() -> None:
    lost = turn([1, 2, 3], [4], versions=Span(5, 9))
    transcript = of(turn([1], [2]), lost, turn([1, 2, 3], [4, 7]))
    assert transcript.undo(transcript.recorded[1])
    assert shown(transcript) == [([1, 2, 3, 4, 7], [0, 1, 0, 1, 1], 0)]
    assert transcript.versions == Span(0, 0)


def test_experts_of_a_shared_prefix_are_those_of_its_row() -> None:
    first = turn([1, 2], [3, 4], experts=routed(3, 1))
    transcript = of(first, turn([1, 2, 9], [6], experts=routed(3, 2)))
    assert [row["routed_experts"][:, 0, 0].tolist() for row in transcript.rows()] == [
        [1, 1, 1, 0], [1, 1, 2, 0],
    ]  # fmt: skip
    assert transcript.nbytes == 6 * 9 + 4 * 2


def test_a_grammar_masks_its_tokens_and_is_counted() -> None:
    sampling = {"temperature": 1.0, "top_k": 4.0}
    transcript = of(
        turn([1], [2], sampling={"temperature": 0.3}),
        turn([1, 2], [3, 4], sampling=sampling, grammar=True, trained=False),
    )
    assert shown(transcript) == [([1, 2, 3, 4], [0, 1, 0, 0], 0)]
    assert (transcript.sampled, transcript.grammar_tokens) == (3, 2)
    assert transcript.sampling() == {"temperature": [0.3, 1.0], "top_k": [4.0, 4.0]}


class Counted(np.ndarray[Any, np.dtype[np.int32]]):
    """A prompt that counts compared tokens."""

    work = 0

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **more: Any) -> Any:
        plain = [np.asarray(each) for each in inputs]
        Counted.work += plain[0].size
        return getattr(ufunc, method)(*plain, **more)


class Letters(str):
    """Text that counts the letters of its slices."""

    work = 0

    def __getitem__(self, part: Any) -> str:
        found = super().__getitem__(part)
        Letters.work += len(found)
        return found


def test_sixty_turns_with_dropped_thoughts_are_kept_once_and_compared_once() -> None:
    rng = np.random.default_rng(0)

    def made(count: int) -> list[int]:
        return rng.integers(0, 1 << 17, count, np.int32).tolist()

    transcript, context, words = Transcript(), made(200), "x"
    Counted.work = Letters.work = asked = 0
    for number in range(60):
        thought, answer, result = made(100), made(60), made(610)
        prompt = np.array(context, np.int32).view(Counted)
        one = turn(context, thought + answer, said=Letters(words), answer=f"answer {number}")
        transcript.add(one._replace(prompt=prompt))
        context += answer + result
        words += f"answer {number}" + "result " * 100
        asked += len(context)
    assert (transcript.turns, len(transcript.rows()), transcript.drift) == (60, 60, 59)
    assert len(context) > 40_000
    assert transcript.tokens < 2 * len(context)
    assert Counted.work < 4 * asked
    assert Letters.work < 60 * len(words)
