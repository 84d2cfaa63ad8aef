"""The state of an OnlineDataHandler in a checkpoint: no sample is trained twice or skipped.

Invariants:

- A sample's lasting name is the identity of its original bus, its producer and its sequence number
  there. Lasting names are unique, and a restored bus keeps them.
- A state is plain ints, strs and lists, for any serialiser.
- A state names everything trained by every rank before the save. So any rank's state is the job's
  state for any world size. A list of several ranks' states works too, even if a rank saved before
  another rank's batch arrived.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable
from typing import Any, Final

import msgspec

from shmbus.handles.open_requests import OpenRequest, request_key

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
    #: Identity of the bus.
    bus: str
    #: Lasting names of the samples of batches yielded on every rank, if the samples may come again.
    trained: set[bytes]
    #: Requests offered and not trained, in the form of `shmbus.Consumer.state_dict`.
    requests: Any = None
    #: Position in the prompts of `OnlineDataHandler.offer`.
    offer: Any = None
    #: For a rank without saved requests: the groups of its own yielded batches.
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
            # Not a dict: a distributed checkpoint loads only keys already present in the handler.
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
        """Read a dict of `as_dict`, or a list of such dicts saved by the ranks of a job."""
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
            requests = {**requests, "open": opened, "trained": [*known, *map(request_key, found)]}
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
    opened: Iterable[OpenRequest], trained: Counter[Key]
) -> tuple[list[OpenRequest], list[OpenRequest]]:
    """Split open requests, oldest first, into the trained and the remaining requests."""
    left = trained.copy()
    found: list[OpenRequest] = []
    rest: list[OpenRequest] = []
    for each in opened:
        left[request_key(each)] -= 1
        (found if left[request_key(each)] >= 0 else rest).append(each)
    return found, rest


def _names(trained: Iterable[tuple[str, Iterable[Iterable[Any]]]]) -> set[bytes]:
    """Return the names in a state; a state may hold very many."""
    pack = _NAME.pack
    found = set()
    for identity, rows in trained:
        bus = bytes.fromhex(identity)
        if len(bus) != 16:
            raise ValueError(f"trained: expected the identity of a bus, got {identity!r}")
        found |= {pack(bus, int(producer), int(sequence)) for producer, sequence in rows}
    return found
