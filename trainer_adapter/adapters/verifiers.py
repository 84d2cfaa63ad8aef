"""Episodes of verifiers as samples of a bus: each trainable branch of a trace is a row.

The environments run where they like, and nothing of verifiers is imported: an episode is read by
its published attributes (``verifiers.v1``: ``Episode``, ``Trace``, ``Branch``).

Invariants:

- A sample is one agent's trace, with its reward; traces with other rewards are never joined.
- What was not scored, or failed, is reported as failed, and is never a sample with reward 0.
- Logprobs are the sampler's, one for each sampled token: what lacks them is an error, not zeros.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np

import shmbus
from trainer_adapter.adapters.prompt_response import float32s, int32s
from trainer_adapter.adapters.sample_slot import Unusable, place_of

__all__ = ["TESTED", "put_episode", "sample_of"]

#: What the tests ran with.
TESTED: Final = "verifiers 0.4.0"

#: Streams of a branch that travel as fields of its row, by their names there.
_STREAMS: Final = {
    "advantages": ("advantages", np.float32),
    "reference_logprobs": ("ref_logprobs", np.float32),
    "routed_experts": ("routed_experts", np.uint8),
}


def put_episode(
    producer: shmbus.Producer,
    episode: Any,
    instance_id: str | int | None = None,
    *,
    request: shmbus.Request | None = None,
    group_size: int | None = None,
    index: int | None = None,
    round: int | None = None,
    split: str | None = None,
    agent: str | None = None,
    policy_version: int | tuple[int, int] | None = None,
    timeout: float | None = None,
) -> bool:
    """Put an episode, or report that it failed.

    Parameters
    ----------
    producer : Producer
        Of the bus.
    episode : verifiers.v1.Episode
        As ``Env.run`` or an environment server gave it.
    instance_id : str or int, optional
        The prompt's key; the id of the episode's group, else the task's key, where it is left out.
    request : Request, optional
        What `Producer.requests.next` gave; then the place is the request's.
    group_size, index, round : int, optional
        As for `Producer.put`, without a request.
    split : str, optional
        "eval" where the episode says so, else "train".
    agent : str, optional
        Whose trace it is, where the episode has several trainable ones.
    policy_version : int or tuple of (int, int), optional
        The span that the episode says, else the producer's.
    timeout : float, optional
        Seconds to wait for room.

    Returns
    -------
    bool
        Whether a sample was put. False: it was reported as failed, or nobody wants it any more.

    Raises
    ------
    TypeError
        This is no episode of the tested version; says what is missing. Or there is no place for it.
    ValueError
        The trace is not plain, or lacks tokens or logprobs.
    BusFullError, BusClosedError, RecordTooLargeError
        As for `Producer.put`.

    Examples
    --------
    ::

        episode = await env.run_episode(task, ctx)
        put_episode(producer, episode, request=request)
    """
    _check(episode, "an episode", ("traces", "task", "ok", "errors", "run", "group"))
    work = getattr(episode.run, "work", None)
    if request is None and instance_id is None:
        group = episode.group
        instance_id = group.id if group is not None else episode.task.key
    if split is None and request is None:
        kind = getattr(work or episode.run, "type", "train")
        split = "eval" if kind == "eval" else "train"
    place = place_of(request, instance_id, group_size, index, round, split)
    if policy_version is None:
        span = getattr(work, "policy", None)
        policy_version = (span.start, span.end) if span is not None else producer.policy_version
    try:
        if not episode.ok:
            raise Unusable(_reason("the episode failed", episode.errors))
        trace = _trace_of(episode, agent)
        record = sample_of(trace)
    except Unusable as failure:
        place.fail(producer, str(failure), timeout)
        return False
    record["meta"]["env"] = episode.env.name or episode.env.id
    record["meta"]["episode"] = episode.id
    return place.put(producer, {**record, "policy_version": policy_version}, timeout)


def sample_of(trace: Any) -> dict[str, Any]:
    """Return a trace as keywords of `Producer.put`.

    Parameters
    ----------
    trace : verifiers.v1.Trace

    Returns
    -------
    dict
        "score", "meta" and "rows"; of each row "tokens" (int32 [n]), "loss_mask" (uint8 [n]),
        "logprobs" (float32 [n]), and what else all branches have of "advantages", "ref_logprobs"
        (float32 [n]) and "routed_experts" (uint8, or int16 [n, layers, k]).

    Raises
    ------
    Unusable
        It failed, was not scored, or sampled nothing.
    ValueError
        Tokens or logprobs are missing, too large or not finite, or some branches only have a
        stream.

    Notes
    -----
    Branches share the tokens of their common messages. As in verifiers, each is trained whole;
    `Row.prefix_length` says what it shares with an earlier one.
    """
    _check(trace, "a trace", ("branches", "rewards", "ok", "errors", "metrics", "agent"))
    if not trace.ok:
        raise Unusable(_reason("the rollout failed", trace.errors))
    unscored = [name for name, reward in trace.rewards.items() if reward is None]
    if unscored or not trace.rewards:
        raise Unusable(f"scoring did not run: {', '.join(unscored) or 'no reward'}")
    if not math.isfinite(trace.reward):
        raise Unusable(f"reward {trace.reward}: expected a finite number")
    branches = [branch for branch in trace.branches if branch.trainable]
    sampled = [branch for branch in branches if any(branch.sampled_mask)]
    if not sampled:
        if any(node.sampled for branch in branches for node in branch.nodes):
            raise ValueError(
                f"trace {trace.id!r}: expected token ids of what was sampled, got none; sample "
                "with a client of type 'train', which records them"
            )
        raise Unusable("nothing was sampled")
    streams = _streams_of(trace.id, sampled)
    seen: dict[tuple[int, ...], int] = {}
    rows = []
    for number, branch in enumerate(sampled):
        _check_logprobs(trace.id, branch)
        row: dict[str, Any] = {
            "tokens": int32s(f"trace {trace.id!r}, token_ids", branch.token_ids),
            "loss_mask": np.array(branch.sampled_mask, np.uint8),
            "logprobs": float32s(f"trace {trace.id!r}", branch.logprobs),
        }
        row |= {name: values[number] for name, values in streams.items()}
        row["prefix_length"] = _shared(branch, seen)
        rows.append(row)
    meta = {
        "agent": trace.agent.name,
        "finish_reason": "length" if trace.is_truncated else "stop",
        "rewards": {name: reward.value for name, reward in trace.rewards.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
    }
    return {"score": float(trace.reward), "meta": meta, "rows": rows}


def _check(found: Any, what: str, names: tuple[str, ...]) -> None:
    missing = [name for name in names if not hasattr(found, name)]
    if missing:
        raise TypeError(
            f"put_episode: expected {what} of verifiers.v1, got {type(found).__name__} without "
            f"{', '.join(missing)}; tested with {TESTED}"
        )


def _reason(what: str, errors: Any) -> str:
    last = errors[-1] if errors else None
    return what if last is None else f"{what}: {last.type}: {last.message}"


def _trace_of(episode: Any, agent: str | None) -> Any:
    chosen = [
        trace
        for trace in episode.traces
        if (trace.agent.trainable if agent is None else trace.agent.name == agent)
    ]
    if len(chosen) == 1:
        return chosen[0]
    names = [trace.agent.name for trace in episode.traces]
    if not chosen:
        raise Unusable(f"no trace of {agent or 'a trainable agent'} among {names}")
    raise ValueError(
        f"episode {episode.id!r}: expected one trainable trace, got {len(chosen)} of agents "
        f"{names}: each has a reward of its own; name one by agent=, or put each by sample_of "
        "under a place of its own"
    )


def _check_logprobs(trace_id: str, branch: Any) -> None:
    for node in branch.nodes:
        wanted = sum(node.mask)
        if len(node.mask) != len(node.token_ids) or len(node.logprobs) != wanted:
            raise ValueError(
                f"trace {trace_id!r}, branch {branch.index}: expected {wanted} logprobs, one for "
                f"each sampled token, got {len(node.logprobs)}; have the sampler return them"
            )


def _streams_of(trace_id: str, branches: list[Any]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for attribute, (name, dtype) in _STREAMS.items():
        values = [getattr(branch, attribute, None) for branch in branches]
        have = sum(value is not None for value in values)
        if have == len(values):
            found[name] = [_stream(trace_id, attribute, value, dtype) for value in values]
        elif have:
            raise ValueError(
                f"trace {trace_id!r}: expected {attribute} in each branch or in none, got them in "
                f"{have} of {len(values)}; assign them to all"
            )
    return found


def _stream(trace_id: str, name: str, value: Any, dtype: Any) -> Any:
    """Return a stream as it travels: experts as uint8, or int16 where there are more."""
    array = np.asarray(value)
    if dtype is np.uint8 and array.size and array.max() > np.iinfo(np.uint8).max:
        dtype = np.int16
    with np.errstate(all="ignore"):  # what does not fit is found below
        found = array.astype(dtype)
    fits = np.isfinite(found).all() if found.dtype.kind == "f" else np.array_equal(found, array)
    if not fits:
        raise ValueError(
            f"trace {trace_id!r}: {name}: expected numbers that {np.dtype(dtype)} holds, got others"
            "; correct them, or leave them out"
        )
    return found


def _shared(branch: Any, seen: dict[tuple[int, ...], int]) -> int:
    """Return the tokens that a branch shares with an earlier one; notes its own messages."""
    path: tuple[int, ...] = ()
    length = shared = 0
    for node in branch.nodes:
        path = (*path, id(node))
        length += len(node.token_ids)
        if path in seen:
            shared = length
        seen[path] = length
    return shared
