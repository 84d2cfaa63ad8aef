"""The state of an OnlineDataHandler in a checkpoint, so that nothing is trained twice or skipped.

Invariants:

- A sample is known by its lasting name: the identity of the bus that it was put onto, its producer
  and its sequence number there. No two samples share one, and a restored bus keeps it.
- A state is plain ints, strs and lists, for any serialiser.
- It names what all ranks had trained when it was saved. So any rank's state is the job's, whatever
  its world size is; those of several ranks together are, too, also where one saved before another
  had its batch.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import msgspec

__all__ = ["HandlerState", "Key", "part_trained"]

#: Instance id, round and split.
Key = tuple[str, "int | None", str]

STATE_VERSION: Final = 2

#: A lasting name: identity, producer and sequence.
_NAME: Final = struct.Struct(">16sQQ")


class HandlerState(msgspec.Struct, frozen=True):
    """Progress of a handler."""

    rank: int
    step: int
    policy_version: int
    #: The identity of its bus.
    bus: str
    #: Lasting names of the samples of all batches that were yielded, on any rank, and that may come
    #: again.
    trained: set[bytes]
    #: Requests that were offered and not trained, as `shmbus.Consumer.state_dict` has them.
    requests: Any = None
    #: Where it stands in the prompts of `OnlineDataHandler.offer`.
    offer: Any = None
    #: Of a rank that saves no requests, the groups of its own batches that were yielded.
    groups: list[Key] = []

    def as_dict(self) -> dict[str, Any]:
        """Return the state as a dict, for `parse`."""
        trained: dict[str, list[list[int]]] = {}
        for identity, producer, sequence in map(_NAME.unpack, sorted(self.trained)):
            trained.setdefault(identity.hex(), []).append([producer, sequence])
        state = {
            "version": STATE_VERSION,
            "rank": self.rank,
            "step": self.step,
            "policy_version": self.policy_version,
            "bus": self.bus,
            # No dict: a distributed checkpoint loads only keys that the handler has already.
            "trained": [[identity, rows] for identity, rows in trained.items()],
        }
        if self.requests is not None:
            state["requests"] = self.requests
        if self.offer is not None:
            state["offer"] = self.offer
        if self.groups:
            state["groups"] = [list(key) for key in self.groups]
        return state

    @classmethod
    def parse(cls, state: Any) -> HandlerState:
        """Read a dict of `as_dict`, or a list of those that the ranks of one job saved."""
        if not isinstance(state, (list, tuple)):
            return cls._parse_one(state)
        if not state:
            raise ValueError("state_dict: expected one state or more, got none")
        parsed = sorted(map(cls._parse_one, state), key=lambda each: each.rank)
        steps = sorted({each.step for each in parsed})
        if len(steps) > 1:
            raise ValueError(
                "state_dict: expected states of one step, got steps "
                f"{' and '.join(map(str, steps))}; load those that the ranks saved together, or "
                "one rank's alone"
            )
        first = parsed[0]
        requests = first.requests
        if requests is not None:
            known = requests["trained"]
            groups = Counter(key for each in parsed[1:] for key in each.groups)
            groups -= Counter(map(tuple, known))
            found, opened = part_trained(requests["open"], groups)
            requests = {**requests, "open": opened, "trained": [*known, *map(list, found)]}
        return msgspec.structs.replace(
            first, trained=set().union(*(each.trained for each in parsed)), requests=requests
        )

    @classmethod
    def _parse_one(cls, state: Any) -> HandlerState:
        version = state.get("version") if isinstance(state, dict) else type(state).__name__
        if version != STATE_VERSION:
            newer = isinstance(version, int) and version > STATE_VERSION
            raise ValueError(
                f"state_dict: expected version {STATE_VERSION}, got {version!r}; it "
                + ("was saved by a newer shmbus: load it with that one" if newer else
                   "is not a handler's state, or was saved by an older version of shmbus")
            )  # fmt: skip
        try:
            parsed = cls(
                int(state["rank"]),
                int(state["step"]),
                int(state["policy_version"]),
                str(state["bus"]),
                _names(state["trained"]),
                state.get("requests"),
                state.get("offer"),
                [(str(id_), round, split) for id_, round, split in state.get("groups", ())],
            )
        except (
            KeyError, TypeError, ValueError, OverflowError, RuntimeError, AttributeError,
            struct.error,
        ) as error:  # fmt: skip
            # OverflowError: of an infinite number; RuntimeError: PyTorch's, of a tensor.
            raise ValueError(
                f"state_dict: expected what state_dict() returned, got {sorted(state)}: {error!r}"
            ) from error
        if parsed.step < 0:
            raise ValueError(
                f"state_dict: expected step 0 or more, got {parsed.step}; it was never saved"
            )
        return parsed


def part_trained(
    opened: Iterable[dict[str, Any]], trained: Counter[Key]
) -> tuple[list[Key], list[dict[str, Any]]]:
    """Part open requests into the keys of those that are trained, and the others."""
    left, found, rest = trained.copy(), [], []
    for each in opened:
        key = (each["instance_id"], each["round"], each["split"])
        if left[key] > 0:
            left[key] -= 1
            found.append(key)
        else:
            rest.append(each)
    return found, rest


def _names(trained: Iterable[tuple[str, Iterable[Iterable[Any]]]]) -> set[bytes]:
    """Return the names in a state; there may be very many."""
    pack = _NAME.pack
    found = set()
    for identity, rows in trained:
        bus = bytes.fromhex(identity)
        if len(bus) != 16:
            raise ValueError(f"trained: expected the identity of a bus, got {identity!r}")
        found |= {pack(bus, int(producer), int(sequence)) for producer, sequence in rows}
    return found
