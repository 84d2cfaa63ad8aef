"""A sample as the stash and its table see a trajectory, or the report that one failed."""

from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(eq=False, slots=True)
class Sample:
    """Of a report, `score` is the attempt and `meta` the reason."""

    key: Hashable
    group_size: int = 2
    index: int = 0
    score: float = 0.0
    policy_version: int = 0
    nbytes: int = 100
    failed: bool = False
    meta: object = None
    committed_ns: int = 0
    #: Samples that complete its group, if fewer than the group's size.
    fewer: int = 0

    @property
    def need(self) -> int:
        return self.fewer or self.group_size
