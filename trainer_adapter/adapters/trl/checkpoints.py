"""What a checkpoint says of a bus: the rows that its weights were trained on, not acknowledged.

It is part of ``trainer_state.json``, which transformers writes as the last file of a checkpoint: a
checkpoint that has this file has all of it.

Invariants:

- A row is found again by producer id, sequence and row, which a bus gives once, and only on the bus
  that gave them.
- A row stays on the list until it was delivered again, or so many newer groups came that it was
  acknowledged before.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Final

from trainer_adapter.adapters.trl.progress import Identity, OpenGroup

#: The form of what is saved.
_VERSION: Final = 1
#: Newer groups after which a row that has not come again is taken for acknowledged. A bus delivers
#: what was complete before what completes later; so many are more than the lanes can mix up.
FORGET_AFTER_GROUPS: Final = 4096

_CHECKPOINT: Final = re.compile(r"checkpoint-(\d+)")
_STATE_FILE: Final = "trainer_state.json"


def last_whole_checkpoint(output_dir: str | Path) -> str | None:
    """Find the newest checkpoint that was written to its end.

    A trainer that is killed while it saves leaves a folder without its last file. Transformers
    takes such a folder for a checkpoint, and begins at step 0 with its weights.

    Parameters
    ----------
    output_dir : path
        The trainer's.

    Returns
    -------
    str or None
        For ``trainer.train(resume_from_checkpoint=...)``; None where there is none.
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
    """Rows that were trained before a checkpoint, and may be delivered again."""

    def __init__(self, created: int) -> None:
        #: When the bus was created that gave the rows: it tells buses of one name apart.
        self.created: Final = created
        self._waiting: dict[Identity, tuple[str, int | None, int]] = {}
        self._newer_groups = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def take(self, identity: Identity) -> bool:
        """Whether a row is on the list; it leaves it."""
        return self._waiting.pop(identity, None) is not None

    def note_group(self, known: bool) -> None:
        """Note that a group was delivered that has a known row, or none."""
        self._newer_groups = 0 if known else self._newer_groups + 1
        if self._newer_groups >= FORGET_AFTER_GROUPS:
            self._waiting.clear()

    def save(self, bus: str, version: int, behind: bool, groups: list[OpenGroup]) -> dict[str, Any]:
        """Return what goes into a checkpoint."""
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
        """Take over what a checkpoint says."""
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
