"""Distribution of weights versions: chains of mirrors, as a pure state machine.

The trainer's node sends each transfer once, to the first mirror of its chain; each mirror forwards
the pieces here while the rest arrives. Mirrors with a version's base get its patch, in a chain of
their own; the rest get the whole version.

Invariants:

- A mirror's upstream is an earlier mirror of its chain or the trainer's node: no cycles.
- A slow or silent mirror goes to the end of its chain: no mirror waits for it.
- A newer version never interrupts a transfer: under frequent versions a mirror would finish none.
- Mirrors repeat their states: a state may come late, twice or never.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

from shmbus.base.backoff import Backoff
from shmbus.relay.messages import MirrorState, Transfer
from shmbus.relay.party import PARTY_BACKOFF_S

#: Bytes of a piece: a few system calls each, and little beside a version, because in a chain of n
#: mirrors the last mirror ends n pieces later.
PIECE_BYTES: Final = 4 << 20
#: Seconds of silence until a mirror counts as away: three hellos.
SILENT_S: Final = 3.0
#: Seconds without a piece, though the upstream holds more, until later mirrors move ahead.
STALL_S: Final = 0.25
#: The upper limit after repeated stalls, as when every mirror waits for the same link.
_MOST_STALL_S: Final = 8.0
#: Allowed lag in pieces behind the upstream: pieces under way, and pieces since its last message.
LAG: Final = 64
#: Versions until a slow mirror is tried at the head of a chain again.
_SLOW_VERSIONS: Final = 16
#: Seconds to keep an old version for mirrors until a mirror holds it whole; the publisher may wait
#: for its slot.
KEEP_S: Final = 20.0


def count_pieces(nbytes: int, piece_bytes: int) -> int:
    """Return the number of pieces for `nbytes` bytes."""
    return max(1, -(-nbytes // piece_bytes))


class Hop(NamedTuple):
    """A mirror's transfer and its upstream."""

    mirror: str
    transfer: Transfer
    upstream: str


class _Chain:
    """A transfer and its mirrors, in forwarding order."""

    def __init__(self, transfer: Transfer, pieces: int) -> None:
        self.transfer, self.pieces = transfer, pieces
        self.members: list[str] = []
        #: The best rate of a member so far, in pieces a second.
        self.best = 0.0
        #: Stalled mirrors by upstream. With one stalled child the child is at fault; with two, the
        #: upstream.
        self.behind: dict[str, set[str]] = {}


class _Mirror:
    """The known state of a mirror."""

    def __init__(self) -> None:
        self.state: MirrorState | None = None
        self.heard_s = self.moved_s = 0.0
        self.offered: Hop | None = None
        self.backoff = Backoff(PARTY_BACKOFF_S)
        #: Allowed standstill in seconds; and the number of versions left as a slow mirror.
        self.stall_s = STALL_S
        self.slow = 0
        #: The time of the last rate sample, and the pieces by then.
        self.looked_s = 0.0
        self.looked = 0

    def place(self, pieces: int, now_s: float) -> None:
        """Restart the stall timer after a change of upstream."""
        self.moved_s = self.looked_s = now_s
        self.looked = pieces


class Distribution:
    """The chains of a pool's versions."""

    def __init__(
        self, address: str, mirrors: Sequence[str], piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._address = address
        self._piece_bytes = piece_bytes
        self._mirrors = {each: _Mirror() for each in mirrors}
        self._chains: dict[Transfer, _Chain] = {}
        self._whole = self._patch = Transfer("", 0, 0)
        self._nbytes: dict[Transfer, int] = {}
        #: Transfers gone from the trainer's node, while mirrors still get them.
        self._gone: set[Transfer] = set()
        self._newer_s = 0.0
        self._turn = 0

    # -- what happens ----------------------------------------------------------------------------

    def join(self, address: str) -> None:
        """Take on a mirror."""
        self._mirrors.setdefault(address, _Mirror())

    def forget(self, address: str) -> None:
        """Go on without a lost mirror."""
        for chain in self._chains.values():
            if address in chain.members:
                chain.members.remove(address)
        self._mirrors.pop(address, None)

    def publish(
        self, whole: Transfer, size: int, base: int, patch_bytes: int, now_s: float
    ) -> None:
        """Take a new version of `size` bytes, with a patch if `base` is not 0."""
        self._whole = whole
        self._patch = whole._replace(base=base)
        self._nbytes = {whole: size}
        if base:
            self._nbytes[self._patch] = patch_bytes
        self._newer_s = now_s
        self._turn += 1
        for mirror in self._mirrors.values():
            mirror.slow = max(0, mirror.slow - 1)

    def hear(self, state: MirrorState, now_s: float) -> None:
        """Take a mirror's state."""
        mirror = self._mirrors[state.address]
        before = mirror.state
        mirror.heard_s = now_s
        if before is None or (before.getting, before.pieces) != (state.getting, state.pieces):
            mirror.moved_s = now_s
        mirror.state = state

    def round(self, now_s: float) -> list[Hop]:
        """Do timed work; return the offers to send."""
        here = [each for each, mirror in self._mirrors.items() if self._is_here(mirror, now_s)]
        self._leave_chains(set(here))
        for address in self._in_order(here):
            self._join_chain(address, now_s)
        for chain in self._chains.values():
            self._reorder(chain, now_s)
        return [hop for chain in self._chains.values() for hop in self._offers(chain, now_s)]

    # -- chains ----------------------------------------------------------------------------------

    def _is_here(self, mirror: _Mirror, now_s: float) -> bool:
        return mirror.state is not None and now_s - mirror.heard_s <= SILENT_S

    def _in_order(self, addresses: list[str]) -> list[str]:
        """Return the mirrors rotated by version, slow mirrors last."""
        if not addresses:
            return []
        turn = self._turn % len(addresses)
        turned = addresses[turn:] + addresses[:turn]
        return sorted(turned, key=lambda each: (self._lacks(each), self._mirrors[each].slow > 0))

    def _lacks(self, address: str) -> bool:
        state = self._mirrors[address].state
        return state is not None and state.error != ""

    def _wanted(self, state: MirrorState) -> Transfer | None:
        """Return a mirror's transfer: the running transfer, or the newest version."""
        if state.getting in self._chains:
            return state.getting
        if not self._whole.sequence or self._has(state):
            return None
        has_base = state.pool == self._patch.pool and state.sequence == self._patch.base
        return self._patch if self._patch.base and has_base else self._whole

    def _has(self, state: MirrorState) -> bool:
        return (state.pool, state.sequence) == (self._whole.pool, self._whole.sequence)

    def _leave_chains(self, here: set[str]) -> None:
        """Remove mirrors away or on another transfer; finished mirrors stay as upstreams."""
        for chain in list(self._chains.values()):
            for address in list(chain.members):
                state = self._mirrors[address].state
                assert state is not None
                stays = state.done == chain.transfer or self._wanted(state) == chain.transfer
                if address not in here or not stays:
                    chain.members.remove(address)
            done = [self._is_done(each, chain) for each in chain.members]
            old = chain.transfer.sequence != self._whole.sequence
            gone = chain.transfer in self._gone
            if (old and all(done)) or (gone and not any(done)):
                del self._chains[chain.transfer]
                self._gone.discard(chain.transfer)
            elif gone:
                # A finished mirror takes the place of the trainer's node.
                chain.members.sort(key=lambda each: not self._is_done(each, chain))

    def _join_chain(self, address: str, now_s: float) -> None:
        mirror = self._mirrors[address]
        assert mirror.state is not None
        wanted = self._wanted(mirror.state)
        if wanted is None:
            return
        if wanted not in self._chains:
            pieces = count_pieces(self._nbytes[wanted], self._piece_bytes)
            self._chains[wanted] = _Chain(wanted, pieces)
        members = self._chains[wanted].members
        if address not in members:
            members.append(address)
            mirror.place(self._progress(address, self._chains[wanted]), now_s)

    def _is_done(self, address: str, chain: _Chain) -> bool:
        state = self._mirrors[address].state
        return state is not None and state.done == chain.transfer

    def _progress(self, address: str, chain: _Chain) -> int:
        state = self._mirrors[address].state
        if state is None:
            return 0
        if state.done == chain.transfer:
            return chain.pieces
        return state.pieces if state.getting == chain.transfer else 0

    def _reorder(self, chain: _Chain, now_s: float) -> None:
        """Move a stalled, lagging or slowly forwarding mirror out of the way."""
        before, upstream = chain.pieces, ""
        for address in list(chain.members):
            here = self._progress(address, chain)
            if here < chain.pieces and self._is_behind(address, chain, before - here, now_s):
                self._blame(address, upstream, chain, now_s)
                return
            if here == chain.pieces:
                self._mirrors[address].stall_s = STALL_S
            before, upstream = here, address

    def _is_behind(self, address: str, chain: _Chain, lag: int, now_s: float) -> bool:
        """Return True if a mirror gets too few of its upstream's pieces."""
        mirror, here = self._mirrors[address], self._progress(address, chain)
        if lag > 0 and now_s - mirror.moved_s > mirror.stall_s:
            return True
        if now_s - mirror.looked_s < STALL_S:
            return False
        rate = (here - mirror.looked) / (now_s - mirror.looked_s)
        mirror.looked_s, mirror.looked = now_s, here
        chain.best = max(chain.best, rate)
        return lag > LAG and rate < chain.best / 2

    def _blame(self, address: str, upstream: str, chain: _Chain, now_s: float) -> None:
        """Put the slow party last: the mirror, or its upstream after a second stalled child."""
        behind = chain.behind.setdefault(upstream, set())
        behind.add(address)
        self._mirrors[address].place(self._progress(address, chain), now_s)
        others = chain.members[chain.members.index(address) + 1 :]
        if upstream and (len(behind) > 1 or self._is_done(upstream, chain)):
            for each in behind:
                self._mirrors[each].slow = 0
            self._put_last(upstream, chain, now_s)
        elif any(not self._is_done(each, chain) for each in others):
            self._put_last(address, chain, now_s)

    def _put_last(self, address: str, chain: _Chain, now_s: float) -> None:
        mirror = self._mirrors[address]
        behind = chain.members[chain.members.index(address) :]
        chain.members.remove(address)
        chain.members.append(address)
        mirror.slow = _SLOW_VERSIONS
        mirror.stall_s = min(2 * mirror.stall_s, _MOST_STALL_S)
        for each in behind:  # its children get another upstream
            self._mirrors[each].place(self._progress(each, chain), now_s)

    def _offers(self, chain: _Chain, now_s: float) -> Iterable[Hop]:
        upstream = self._address
        for address in chain.members:
            mirror = self._mirrors[address]
            assert mirror.state is not None
            hop = Hop(address, chain.transfer, upstream)
            upstream = address
            if self._is_done(address, chain):
                continue
            if (mirror.state.getting, mirror.state.upstream) == (chain.transfer, hop.upstream):
                continue
            again = mirror.backoff.is_over(hop, now_s)
            if again or mirror.offered != hop:
                mirror.offered = hop
                yield hop

    # -- retention -------------------------------------------------------------------------------

    def keeps(self, transfer: Transfer, now_s: float) -> bool:
        """Return True if a transfer's bytes must stay: newest, or not yet whole on a mirror."""
        if transfer.sequence == self._whole.sequence:
            return True
        chain = self._chains.get(transfer)
        if chain is None or now_s - self._newer_s > KEEP_S:
            return False
        if any(self._is_done(each, chain) for each in chain.members):
            return False
        return any(
            mirror.state is not None
            and mirror.state.getting == transfer
            and now_s - mirror.moved_s <= SILENT_S
            for mirror in map(self._mirrors.__getitem__, chain.members)
        )

    def let_go(self, transfer: Transfer) -> None:
        """Note a transfer gone from the trainer's node."""
        if transfer in self._chains:
            self._gone.add(transfer)

    def everybody_has_it(self, now_s: float) -> bool:
        """Return True if every present mirror holds the newest version."""
        here = [each.state for each in self._mirrors.values() if self._is_here(each, now_s)]
        return bool(here) and all(state is not None and self._has(state) for state in here)

    def seen(self, now_s: float) -> list[tuple[str, MirrorState | None, float]]:
        """Return each mirror's last state, and its age in seconds."""
        return [(each, it.state, now_s - it.heard_s) for each, it in self._mirrors.items()]
