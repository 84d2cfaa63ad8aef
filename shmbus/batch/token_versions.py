"""Each token's sampling version, from a sample's field `token_versions`, and its staleness.

Invariants:

- A sample's own bytes are read only if its oldest version lies below the bound, and a share of its
  tokens may.
- Versions that do not fit the tokens count for nothing: the sample counts as old as its oldest
  version, and is named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

logger = logging.getLogger("shmbus.drops")


def trained_versions(fields: Any) -> NDArray[np.int64]:
    """Return the version of each trained token of a mapping of fields; ValueError for a misfit."""
    versions, mask = np.asarray(fields.get("token_versions")), fields.get("loss_mask")
    tokens = fields.get("tokens", versions) if mask is None else mask
    if versions.shape != np.shape(tokens) or (versions.dtype.kind not in "iu" and versions.size):
        raise ValueError(
            "field 'token_versions': expected an integer for each token, of shape "
            f"{np.shape(tokens)}, got {versions.dtype} of shape {versions.shape}"
        )
    return versions if mask is None else versions[np.asarray(mask) != 0]


def version_span(sample: Any, *rows: Any) -> tuple[int, int]:
    """Return the oldest and the newest version of a sample's trained tokens."""
    try:
        versions = np.concatenate([trained_versions(fields) for fields in rows])
    except ValueError as error:
        raise ValueError(f"{_named(sample)}: {error}") from error
    return (int(versions.min()), int(versions.max())) if len(versions) else (0, 0)


def is_stale(samples: Iterable[Any], bound: int, share: float) -> bool:
    """Tell if more than a share of a sample's trained tokens lies below a version."""
    return any(s.policy_version < bound and _share_below(s, bound, share) for s in samples)


def _share_below(sample: Any, bound: int, share: float) -> bool:
    if not share or sample.get("token_versions") is None:
        return True
    try:
        versions = trained_versions(sample)
    except ValueError as error:
        logger.warning(
            "%s: %s; all of it counts as of version %d",
            _named(sample), error, sample.policy_version,
        )  # fmt: skip
        return True
    return int(np.count_nonzero(versions < bound)) > share * len(versions)


def _named(sample: Any) -> str:
    return f"group {sample.instance_id!r}, sample {sample.index}"
