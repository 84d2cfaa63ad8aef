"""Advantages of trajectories within their groups: relative to their siblings.

Invariants:

- Float64 inside, for any dtype of the scores; every group at once.
- A group of one, and a group of equal scores up to rounding, give exactly 0 (except for kind
  "none", without a comparison). Finite scores never give nan or an infinity.
- Groups never touch: a group's advantages depend on its own scores only, unless the kind is named
  after the batch.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, overload

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmbus.base.arguments import check_choice, check_number
from shmbus.batch.gather import MAX_SCORE
from shmbus.batch.scores import relative_scores
from trainer_adapter.scored_group import ScoredGroup, sight_of

__all__ = ["group_advantages"]

DEFAULT_EPS: Final = 1e-6
"""Added to a group's standard deviation, in units of the score. Small beside the spread of any
score in use; 1e-6 is what verl adds."""

FloatArray = npt.NDArray[np.float64]
Kind = (
    Literal["grpo", "dr_grpo", "rloo", "batch", "batch_std", "none"]
    | Callable[[FloatArray], Any]
    | Callable[[ScoredGroup], Any]
    | Callable[[FloatArray, ScoredGroup], Any]
)
Std = Literal["bessel", "biased"]
#: Returns groups of these sizes, of the samples kept by a mask; None keeps everything.
SeenGroups = Callable[[npt.NDArray[np.int64], npt.NDArray[np.bool_] | None], Sequence[ScoredGroup]]
_KINDS: Final = ("grpo", "dr_grpo", "rloo", "batch", "batch_std", "none")


@overload
def group_advantages(
    scores: npt.NDArray[Any],
    kind: Kind = ...,
    *,
    sizes: npt.ArrayLike | None = ...,
    std: Std = ...,
    eps: float = ...,
) -> npt.NDArray[np.floating[Any]]: ...
@overload
def group_advantages(
    scores: Tensor,
    kind: Kind = ...,
    *,
    sizes: npt.ArrayLike | None = ...,
    std: Std = ...,
    eps: float = ...,
) -> Tensor: ...
@overload
def group_advantages(
    scores: Sequence[Any],
    kind: Kind = ...,
    *,
    sizes: npt.ArrayLike | None = ...,
    std: Std = ...,
    eps: float = ...,
) -> list[Any]: ...
def group_advantages(
    scores: npt.NDArray[Any] | Tensor | Sequence[Any],
    kind: Kind = "grpo",
    *,
    sizes: npt.ArrayLike | None = None,
    std: Std = "bessel",
    eps: float = DEFAULT_EPS,
) -> npt.NDArray[np.floating[Any]] | Tensor | list[Any]:
    """Turn the scores of groups into advantages.

    Parameters
    ----------
    scores : array, tensor or list, [n] or [groups, n]
        One group, or groups of one size; or [samples], with `sizes`.
    kind : {"grpo", "dr_grpo", "rloo", "batch", "batch_std", "none"} or callable
        "grpo": ``(score - mean) / (std + eps)`` (Shao et al. 2024, arXiv:2402.03300). "dr_grpo":
        ``score - mean`` (Liu et al. 2025, arXiv:2503.20783). "rloo": the score minus the mean of
        the *others* (Ahmadian et al. 2024, arXiv:2402.14740). "batch": as "grpo", with mean and
        deviation of the whole batch, across groups (REINFORCE++, Hu 2025, arXiv:2501.03262).
        "batch_std": the mean of the group, the deviation of the whole batch (Lite PPO, Liu et al.
        2025, arXiv:2508.08221). "none": the score itself. A callable gets each group's scores,
        float64 [n], and returns the same number of advantages: array, tensor or list. A callable
        with two required parameters gets ``(scores, group)``, and a callable with a parameter
        annotated as `ScoredGroup` gets the group, with lengths, metas, further rewards and
        truncated flags; here the group holds scores only.
    sizes : integers [groups], optional
        Sizes of consecutive groups in `scores`.
    std : {"bessel", "biased"}
        Divide the squares by n - 1, like `torch.std`, TRL and verl, or by n, like `numpy.std`. The
        paper leaves the choice open.
    eps : float
        Added to the standard deviation ("grpo", "batch", "batch_std"), in units of the score.

    Returns
    -------
    array, tensor or list
        Shape, container and device of `scores`; float32, or float64 for float64 scores. Detached
        from the graph: an advantage is a constant of the loss.

    Raises
    ------
    TypeError, ValueError
        For scores that are not real, finite and within 1e38, or invalid arguments.

    Notes
    -----
    A group of one, and a group of scores equal up to 2**-20 of the largest, give 0: without a
    comparison, nothing can be learned, and 0 / 0 must not reach the weights. "batch" compares
    across the batch, so a group of one gets an advantage too.
    """
    values, kept = _as_float64(scores)
    if values.ndim == 2 and sizes is None:
        sizes = np.full(values.shape[0], values.shape[1])
    elif values.ndim != 1:
        raise ValueError(
            f"scores: expected [n] or [groups, n], and [samples] with sizes, got shape "
            f"{values.shape}; flatten it and pass sizes"
        )
    check_choice("std", std, ("bessel", "biased"), "torch.std is 'bessel'")
    eps = check_number("eps", eps)
    if not 0 <= eps < math.inf:
        raise ValueError(f"eps: expected a finite number from 0 on, got {eps}; 1e-6 is usual")
    check_kind("kind", kind)
    flat = values.ravel()
    counts = _as_array("sizes", [len(flat)] if sizes is None else sizes)
    result = _by_sizes(flat, _checked_sizes(counts, len(flat)), kind, std, eps)
    return _like(result.reshape(values.shape), scores, kept)


def advantages_for_groups(
    scores: FloatArray,
    sizes: npt.NDArray[np.int64],
    kind: Kind = "grpo",
    *,
    std: Std = "bessel",
    eps: float = DEFAULT_EPS,
    excluded: npt.NDArray[np.bool_] | None = None,
    groups: SeenGroups | None = None,
) -> npt.NDArray[np.float32]:
    """Turn a ragged batch's finite scores into advantages; excluded samples get 0."""
    if excluded is None:
        seen = None if groups is None else functools.partial(groups, sizes, None)
        return _by_sizes(scores, sizes, kind, std, eps, seen).astype(np.float32)
    kept = ~excluded
    group = np.repeat(np.arange(len(sizes)), sizes)[kept]
    counts = np.bincount(group, minlength=len(sizes))
    counts = counts[counts > 0]
    seen = None if groups is None else functools.partial(groups, counts, kept)
    result = np.zeros(len(scores), np.float32)
    result[kept] = _by_sizes(scores[kept], counts, kind, std, eps, seen)
    return result


def check_kind(name: str, kind: object) -> None:
    """Raise ValueError for an unknown kind of advantages."""
    if not (callable(kind) or (isinstance(kind, str) and kind in _KINDS)):
        raise ValueError(
            f"{name}: expected {', '.join(map(repr, _KINDS))} or a callable, got {kind!r}; "
            "pass one of these"
        )


# --- in and out


def _as_array(name: str, given: object) -> npt.NDArray[Any]:
    """Return the argument as an array; TypeError or ValueError, with its name, for a non-array."""
    # An array of NumPy itself needs no look at a module that few processes load.
    is_subclass = isinstance(given, np.ndarray) and type(given) is not np.ndarray
    if is_subclass and isinstance(given, np.ma.MaskedArray):
        raise TypeError(
            f"{name}: expected an array, got a {type(given).__name__}, whose mask nothing here "
            "reads; leave out what is masked: .compressed()"
        )
    try:
        return np.asarray(given)
    except ValueError:
        more = " and pass sizes" if name == "scores" else ""
        raise ValueError(
            f"{name}: expected rows of one length, got a ragged list; flatten it{more}"
        ) from None


def _as_float64(
    scores: npt.NDArray[Any] | Tensor | Sequence[Any],
) -> tuple[FloatArray, type[np.floating[Any]]]:
    """Return the scores as float64 on the host, and the floating type of the result."""
    host = scores
    if isinstance(scores, Tensor):
        # numpy knows no bfloat16, and float64 holds every other floating type.
        host = scores.detach().to("cpu", torch.float64 if scores.is_floating_point() else None)
    array = _as_array("scores", host)
    if array.dtype.kind not in "fiub" and array.size:
        raise TypeError(f"scores: expected real numbers, got {array.dtype}; convert them to float")
    source = scores.dtype if isinstance(scores, Tensor) else array.dtype
    stays = source in (torch.float64, np.dtype(np.float64))
    values = array.astype(np.float64)
    # Negated, to find a nan too, which compares with nothing.
    if values.size and not (
        np.maximum.reduce(values, axis=None) <= MAX_SCORE
        and np.minimum.reduce(values, axis=None) >= -MAX_SCORE
    ):
        wrong = ~(np.abs(values) <= MAX_SCORE)
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise ValueError(
            f"scores: expected finite numbers up to {MAX_SCORE:g}, got {values[where]} at "
            f"{where[0] if len(where) == 1 else where}; drop the group, or score the sample anew"
        )
    return values, np.float64 if stays else np.float32


def _like(
    result: FloatArray,
    scores: npt.NDArray[Any] | Tensor | Sequence[Any],
    kept: type[np.floating[Any]],
) -> npt.NDArray[np.floating[Any]] | Tensor | list[Any]:
    if isinstance(scores, Tensor):
        return torch.from_numpy(result.astype(kept)).to(scores.device)
    if isinstance(scores, np.ndarray):
        return result.astype(kept)
    listed: list[Any] = result.tolist()
    return listed


# --- the arithmetic


def _by_sizes(
    values: FloatArray,
    sizes: npt.NDArray[np.int64],
    kind: Kind,
    std: Std,
    eps: float,
    groups: Callable[[], Sequence[ScoredGroup]] | None = None,
) -> FloatArray:
    if callable(kind):
        return _by_callable(values, sizes[sizes > 0], kind, groups)
    if kind == "none":
        return values
    if kind == "batch":
        sizes = np.array([len(values)])
    return relative_scores(values, sizes, kind, std == "biased", float(eps))


def _checked_sizes(sizes: npt.NDArray[Any], samples: int) -> npt.NDArray[np.int64]:
    """Return the sizes of groups as int64."""
    if sizes.ndim != 1 or (sizes.dtype.kind not in "iu" and sizes.size):
        raise TypeError(
            f"sizes: expected integers [groups], got {sizes.dtype} of shape {sizes.shape}; "
            "pass one size a group"
        )
    counts: npt.NDArray[np.int64] = sizes.astype(np.int64)
    smallest = counts.min(initial=samples)
    # A size beyond the samples first: the sum of several may wrap around.
    if smallest < 0 or counts.max(initial=0) > samples or counts.sum() != samples:
        raise ValueError(
            f"sizes: expected {samples} samples in all and none below 0, got {counts.sum()} with "
            f"smallest {counts.min(initial=0)}; count the samples of each group"
        )
    return counts


def _by_callable(
    values: FloatArray,
    counts: npt.NDArray[np.int64],
    kind: Callable[..., Any],
    groups: Callable[[], Sequence[ScoredGroup]] | None,
) -> FloatArray:
    result = np.empty_like(values)
    sight = sight_of(kind)
    seen = None if sight == "scores" or groups is None else groups()
    end = 0
    for number, count in enumerate(counts.tolist()):
        start, end = end, end + count
        scores = values[start:end].copy()
        if sight == "scores":
            given = kind(scores)
        else:
            group = ScoredGroup(scores) if seen is None else seen[number]
            given = kind(group) if sight == "group" else kind(scores, group)
        found = as_real(given)
        if found is None or found.shape != (count,) or not (abs(found) <= 2 * MAX_SCORE).all():
            raise ValueError(
                f"advantages: expected {count} finite real numbers from {kind!r} for the scores "
                f"from {start} on, got {given!r}; correct the callable"
            )
        result[start:end] = found
    return result


def as_real(given: Any) -> FloatArray | None:
    """Return a callable's result as float64 on the host; None for a non-real result."""
    if isinstance(given, (list, tuple)):
        given = [as_real(one) if isinstance(one, Tensor) else one for one in given]
    if isinstance(given, Tensor):
        # numpy knows neither bfloat16 nor a tensor with a graph or on a device.
        given = None if given.is_complex() else given.detach().to("cpu", torch.float64)
    try:
        array = np.asarray(given)
        return array.astype(np.float64) if array.dtype.kind in "fiubO" else None
    except (OverflowError, TypeError, ValueError):
        return None
