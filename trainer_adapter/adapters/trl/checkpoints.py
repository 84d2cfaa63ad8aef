"""A checkpoint's record of a bus: the unacknowledged rows already trained into its weights.

The record is part of ``trainer_state.json``, the last file of a checkpoint: a checkpoint with this
file is complete.

Invariants:

- A row is recognised by producer id, sequence and row, unique on a bus, and only on the same bus.
- A row stays on the list until its next delivery, or until enough newer groups prove an earlier
  acknowledgement.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from trainer_adapter.adapters.trl.progress import Identity, OpenGroup

#: Format version of the saved state.
_VERSION: Final = 1
#: Newer groups after which a row without a second delivery counts as acknowledged. A bus delivers
#: groups in order of completion; lanes cannot mix up this many.
FORGET_AFTER_GROUPS: Final = 4096

_CHECKPOINT: Final = re.compile(r"checkpoint-(\d+)")
_STATE_FILE: Final = "trainer_state.json"


def last_whole_checkpoint(output_dir: str | Path) -> str | None:
    """Find the newest complete checkpoint.

    A trainer killed during a save leaves a folder without its last file. Transformers takes such a
    folder for a checkpoint, and begins at step 0 with its weights.

    Parameters
    ----------
    output_dir : path
        The trainer's.

    Returns
    -------
    str or None
        For ``trainer.train(resume_from_checkpoint=...)``; None without a checkpoint.
    """
    found: list[tuple[int, Path]] = []
    for path in Path(output_dir).glob("checkpoint-*"):
        match = _CHECKPOINT.fullmatch(path.name)
        if match is None:
            continue
        try:
            json.loads((path / _STATE_FILE).read_text())
        except (OSError, ValueError):
            continue
        found.append((int(match[1]), path))
    return str(max(found)[1]) if found else None


class TrainedRows:
    """Rows trained before a checkpoint and possibly delivered again."""

    def __init__(self, created: int) -> None:
        #: Creation time of the rows' bus: it tells buses of one name apart.
        self.created: Final = created
        self._waiting: dict[Identity, tuple[str, int | None, int]] = {}
        self._newer_groups = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, identity: Identity) -> bool:
        """Remove a row from the list; return False for an unlisted row."""
        return self._waiting.pop(identity, None) is not None

    def note_group(self, known: bool) -> None:
        """Note a delivered group, with a known row or without."""
        self._newer_groups = 0 if known else self._newer_groups + 1
        if self._newer_groups >= FORGET_AFTER_GROUPS:
            self._waiting.clear()

    def save(self, bus: str, version: int, behind: bool, groups: list[OpenGroup]) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        rows: list[list[Any]] = [[*where, *identity] for identity, where in self._waiting.items()]
        for group in groups:
            lease: Any = group.lease
            rows += [
                [lease.instance_id, lease.round, row.index, *row.identity]
                for row in group.rows
                if row.state in ("trained", "known")
            ]
        return {
            "version": _VERSION,
            "bus": bus,
            "created": self.created,
            "policy_version": version,
            "behind": behind,
            "trained": rows,
        }

    def load(self, saved: dict[str, Any]) -> bool:
        """Take over a checkpoint's record."""
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"checkpoint: expected the bus's state in form {_VERSION}, got "
                f"{saved.get('version')!r}; resume with the version of shmbus that saved it"
            )
        if saved["created"] != self.created:
            return False
        for instance_id, round, index, *identity in saved["trained"]:
            producer, sequence, row = identity
            self._waiting[producer, sequence, row] = (instance_id, round, index)
        return True
