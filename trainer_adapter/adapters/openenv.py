"""Episodes over OpenEnv as samples of a bus: turns become rows, step rewards the score.

OpenEnv's clients pass observations and rewards, no tokens. So who samples notes each turn with its
tokens, and each result of a step; nothing of OpenEnv is imported.

Invariants:

- A turn whose prompt begins with all that came before is the same row; any other begins a new one.
- Only what was sampled is trained; the rest of each prompt is context.
- An episode that did not end, or has no reward, is reported as failed, and is never a 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final, Literal

import numpy as np

import shmbus
from shmbus._arguments import check_choice
from trainer_adapter.adapters.parted import float32s, int32s
from trainer_adapter.adapters.place import Unusable, place_of

__all__ = ["TESTED", "EpisodeRecord", "put_episode"]

#: What the tests ran with.
TESTED: Final = "openenv-core 0.3.0"


class EpisodeRecord:
    """One episode, turn by turn.

    Parameters
    ----------
    env : str, optional
        The environment's name, for the sample's meta.

    Attributes
    ----------
    rewards : list of float
        What the steps gave.
    done : bool
        Whether the environment has said so.

    Examples
    --------
    ::

        record = EpisodeRecord("echo")
        result = env.reset()
        while not result.done:
            prompt_ids = tokenize(result.observation)
            output = sample(prompt_ids)
            record.turn(prompt_ids, output.ids, output.logprobs)
            result = env.step(action_of(output))
            record.result(result)
        put_episode(producer, record, request=request, policy_version=version)
    """

    def __init__(self, env: str | None = None) -> None:
        self.env = env
        self.rewards: list[float] = []
        self.done = False
        self._rows: list[tuple[list[int], list[int], list[float]]] = []
        self._finish_reason = "stop"

    def turn(
        self,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        logprobs: Sequence[float],
        finish_reason: str = "stop",
    ) -> None:
        """Note a call of the model.

        Parameters
        ----------
        prompt_ids : sequence of int, [p]
            The whole prompt of this turn; a list, an array or a tensor, as all three.
        output_ids : sequence of int, [n]
            What was sampled.
        logprobs : sequence of float, [n]
            The sampler's.
        finish_reason : str
            "length" where the output was cut off.

        Raises
        ------
        TypeError
            Something is no flat sequence of numbers.
        ValueError
            There is no logprob for each sampled token, one is not finite, or a token id is beyond
            32 bits. Nothing is noted then.
        """
        turn = f"turn {len(self._rows)}"
        prompt = int32s(f"{turn}, prompt_ids", prompt_ids).tolist()
        output = int32s(f"{turn}, output_ids", output_ids).tolist()
        values = float32s(turn, logprobs).tolist()
        if len(values) != len(output):
            raise ValueError(
                f"{turn}: expected {len(output)} logprobs, one for each sampled "
                f"token, got {len(values)}; have the sampler return them"
            )
        if not self._rows or prompt[: len(self._rows[-1][0])] != self._rows[-1][0]:
            self._rows.append(([], [], []))
        tokens, mask, held = self._rows[-1]
        context = prompt[len(tokens) :]
        tokens += context + output
        mask += [0] * len(context) + [1] * len(output)
        held += [0.0] * len(context) + values
        self._finish_reason = finish_reason

    def result(self, result: Any) -> None:
        """Note what a step gave.

        Parameters
        ----------
        result : openenv.core.client_types.StepResult
            Its reward may be missing; it counts as a step without one.

        Raises
        ------
        TypeError
            It is no result of a step, or its reward no number.
        """
        if not hasattr(result, "reward") or not hasattr(result, "done"):
            raise TypeError(
                f"result: expected OpenEnv's StepResult, got {type(result).__name__} without "
                f"reward or done; tested with {TESTED}"
            )
        if result.reward is not None:
            try:
                reward = float(result.reward)
            except (TypeError, ValueError, OverflowError, RuntimeError) as error:
                raise TypeError(
                    f"result: expected a number or None as reward, got {result.reward!r:.80}"
                ) from error
            self.rewards.append(reward)
        self.done = bool(result.done)

    def rows(self) -> list[dict[str, Any]]:
        """Return the rows that have a sampled token, as `Producer.put` takes them.

        Returns
        -------
        list of dict
            "tokens" int32 [n], "loss_mask" uint8 [n], "logprobs" float32 [n].
        """
        return [
            {
                "tokens": np.array(tokens, np.int32),
                "loss_mask": np.array(mask, np.uint8),
                "logprobs": np.array(logprobs, np.float32),
            }
            for tokens, mask, logprobs in self._rows
            if any(mask)
        ]

    @property
    def finish_reason(self) -> str:
        """The last turn's."""
        return self._finish_reason


def put_episode(
    producer: shmbus.Producer,
    record: EpisodeRecord,
    instance_id: str | int | None = None,
    *,
    request: shmbus.Request | None = None,
    group_size: int | None = None,
    index: int | None = None,
    round: int | None = None,
    split: str | None = None,
    rewards: Literal["sum", "last"] = "sum",
    unfinished: Literal["fail", "put"] = "fail",
    policy_version: int | tuple[int, int] | None = None,
    meta: dict[str, Any] | None = None,
    timeout: float | None = None,
) -> bool:
    """Put an episode, or report that it failed.

    Parameters
    ----------
    producer : Producer
    record : EpisodeRecord
    instance_id : str or int, optional
        The prompt's key.
    request : Request, optional
        What `Producer.requests.next` gave; then the place is the request's.
    group_size, index, round : int, optional
        As for `Producer.put`, without a request.
    split : str, optional
        "train" where nothing is said.
    rewards : "sum" | "last"
        How the rewards of the steps become the score.
    unfinished : "fail" | "put"
        What happens with an episode whose environment is not done, such as at a limit of turns.
    policy_version : int or tuple of (int, int), optional
        The producer's, where it is left out.
    meta : dict, optional
        Further values.
    timeout : float, optional
        Seconds to wait for room.

    Returns
    -------
    bool
        Whether a sample was put. False: it was reported as failed, or nobody wants it any more.

    Raises
    ------
    TypeError, ValueError
        An argument is of another kind.
    BusFullError, BusClosedError, RecordTooLargeError
        As for `Producer.put`.
    """
    check_choice("rewards", rewards, ("sum", "last"))
    check_choice("unfinished", unfinished, ("fail", "put"))
    if not isinstance(record, EpisodeRecord):
        raise TypeError(f"record: expected an EpisodeRecord, got {type(record).__name__}")
    if meta is not None and not isinstance(meta, dict):
        raise TypeError(f"meta: expected a dict or None, got {type(meta).__name__}")
    place = place_of(request, instance_id, group_size, index, round, split)
    try:
        score = _score(record, rewards, unfinished)
        rows = record.rows()
        if not rows:
            raise Unusable("nothing was sampled")
    except Unusable as failure:
        place.fail(producer, str(failure), timeout)
        return False
    version = producer.policy_version if policy_version is None else policy_version
    said = {"finish_reason": record.finish_reason, "steps": len(record.rewards)}
    if record.env is not None:
        said["env"] = record.env
    sample = {"score": score, "rows": rows, "meta": {**said, **(meta or {})}}
    return place.put(producer, {**sample, "policy_version": version}, timeout)


def _score(record: EpisodeRecord, rewards: str, unfinished: str) -> float:
    if not record.done and unfinished == "fail":
        raise Unusable("the environment was not done")
    if not record.rewards:
        raise Unusable("no step gave a reward")
    score = sum(record.rewards) if rewards == "sum" else record.rewards[-1]
    if not math.isfinite(score):
        raise Unusable(f"reward {score}: expected a finite number")
    return score
