"""Each token's sampling version, from a sample's field `token_versions`."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


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


def _named(sample: Any) -> str:
    return f"group {sample.instance_id!r}, sample {sample.index}"
