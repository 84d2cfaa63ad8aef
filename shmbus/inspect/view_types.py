"""What is made of a bus for whoever looks at it: groups sample by sample, and one sentence.

Below `shmbus.inspect.types`, whose status has the sentence, and below the control messages, which
carry the groups.

Invariant: field names are the keys of ``--json`` and of the wire: they stay.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeAlias

import msgspec

__all__ = [
    "BusEvent",
    "Finding",
    "GroupCells",
    "GroupState",
    "SampleCell",
    "Verdict",
    "WaitedStatus",
]

#: Where a group is: incomplete; complete and not taken; with a trainer; or not on the bus, maybe
#: not any more.
GroupState: TypeAlias = Literal["open", "ready", "leased", "gone"]


class SampleCell(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A sample of an incomplete group, as far as it is known."""

    index: Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]
    #: asked: it failed, and producers are asked for it again. begun: a producer makes it now, and
    #: says so. A missing sample has no cell.
    state: Literal["there", "failed", "asked", "begun"] = "there"
    #: Of a sample that is there; None also where it is not finite.
    score: float | None = None
    #: Number of the producer that sent it, or its failure, or has begun it.
    producer: int | None = None
    #: Seconds since its commit, or since it was begun.
    age_s: float | None = None
    attempts: int = 0
    reason: str = ""
    #: Number of the producer that makes it again.
    taken_by: int | None = None


class GroupCells(msgspec.Struct, frozen=True, kw_only=True):
    """An incomplete group, sample by sample."""

    instance_id: str
    round: int | None
    #: Samples of its group, 0 where that is not known yet, and samples that are here.
    size: int
    present: int
    age_s: float
    #: By index; a missing sample has none.
    cells: list[SampleCell]
    #: Cells that did not fit into the answer.
    cells_omitted: int = 0
    #: Samples that complete it, at most `size`; 0 where that is not known yet.
    need: int = 0
    split: str = "train"


class BusEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Something that happened on a bus."""

    #: Grows with each event of a daemon.
    number: int
    #: When, in seconds since 1970.
    unix_s: float
    #: "daemon_began", "producer_came", "producer_left", "producer_died", "producer_gone" (left or
    #: died), "trainer_came", "trainer_left", "trainer_lost", "paused", "resumed",
    #: "requests_paused", "requests_resumed", "policy_version"; of a group "leased", "given_back",
    #: "acknowledged", "dropped"; of a sample "failed" and "asked" (it failed, and producers are
    #: asked for it again).
    kind: str
    #: The producer or the trainer; "" where nobody is to be named.
    who: str = ""
    #: The reason of a failure, a drop or a pause; the number of a policy version, or "3 to 5" where
    #: versions followed each other.
    text: str = ""
    #: The group; an id of "" where it is of none.
    instance_id: str = ""
    round: int | None = None
    split: str = "train"
    index: int | None = None
    #: Samples of the group, or failed attempts of the sample.
    count: int = 0


class WaitedStatus(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds that were waited on a bus since it was created, of all who waited together."""

    #: By producers: for space in the ring, for the end of a pause, and for the bound on groups that
    #: may be begun (`max_lead`).
    space_s: float = 0.0
    paused_s: float = 0.0
    ahead_s: float = 0.0
    #: By trainers that held no group, for the next.
    trainers_s: float = 0.0


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that keeps a bus from going on, or may."""

    #: Such as "producers_wait"; `shmbus.inspect.verdict` lists them.
    kind: str
    #: The part of the work that it costs, 0 to 1, as an estimate: what findings are ranked by.
    cost: float
    #: What happens, who causes it, and what to do; the latter two may be "".
    what: str
    cause: str = ""
    advice: str = ""
    #: The producers and trainers that cause it.
    who: list[str] = []
    #: Incomplete groups that wait for them.
    groups: int = 0


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be said of a bus in one sentence."""

    #: How bad the first finding is.
    level: Literal["good", "note", "warning", "trouble"]
    #: The first finding: what, who, and what to do.
    sentence: str
    #: All of them, the costliest first; empty where nothing is wrong.
    findings: list[Finding] = []
