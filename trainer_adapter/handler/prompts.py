"""Prompts offered by a trainer through its handler, and the prompts of a checkpoint.

Invariants:

- A request counts as trained after its batch was yielded, like a trajectory; so a state holds the
  open requests, minus the requests of batches out.
- `offer` counts open prompts, not past offers: a group's end, for any reason, ends its request, and
  another prompt takes its place.
- A trainer back at a checkpoint repeats its data from there. Offers of an earlier life, if still in
  a state or on the bus, are not repeated.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import shmbus
from shmbus.base.arguments import check_int
from shmbus.base.format import several
from shmbus.handles.open_requests import RestoredRequests, request_key, whole_groups
from trainer_adapter.handler.checkpoint import Key as _Key
from trainer_adapter.handler.checkpoint import part_trained
from trainer_adapter.handler.planner import BatchPlanner, MadeBatch
from trainer_adapter.handler.prompt_source import PromptSource, check_state, rank_state

if TYPE_CHECKING:
    from trainer_adapter.batches.batch import Batch

logger = logging.getLogger(__name__)

#: Seconds between two looks at the open prompts, while waiting for a batch: a group's end without a
#: batch wakes no thread.
LOOK_S: Final = 0.1
#: Seconds to wait for a daemon's ledger while a batch is awaited.
LEDGER_S: Final = 1.0


class _Seen(NamedTuple):
    """The ledger's groups of one split, and sources of further groups."""

    incomplete: int
    ready: int
    leased: int
    unread: int
    producers: int

    @property
    def is_empty(self) -> bool:
        """True if no complete group can come."""
        return not (self.incomplete or self.unread)


#: Of a silent daemon: anything may come.
_UNSEEN: Final = _Seen(incomplete=1, ready=0, leased=0, unread=1, producers=1)


class PromptsEndedError(EOFError):
    """Every offered prompt ended, trained or given up, and no prompts remain."""


def _keys_of(groups: Iterable[shmbus.Group]) -> Counter[_Key]:
    return Counter((group.instance_id, group[0].round, group[0].split) for group in groups)


def _keys(state: Any, name: str) -> Counter[_Key]:
    return Counter((id_, round, split) for id_, round, split in (state or {}).get(name, ()))


class PromptOffers:
    """Offers a handler's prompts, keeps enough of them open, and restores a checkpoint's."""

    def __init__(
        self,
        consumer: shmbus.Consumer,
        planner: BatchPlanner[Batch],
        *,
        rank: int,
        world_size: int,
        split: str,
        prompt_schema: Iterable[str] | None,
    ) -> None:
        self._consumer, self._planner = consumer, planner
        self._rank, self._world_size, self._split = rank, world_size, split
        self._prompt_fields = frozenset(name.rstrip("?") for name in prompt_schema or ())
        self._source: PromptSource | None = None
        self._ahead_batches = 0
        #: A loaded state's position in the prompts, until they are offered.
        self._source_state: Any = None
        self._has_offered = False
        #: A prompt under offer, and its place: an exception may leave the prompt open.
        self._offering: tuple[int, _Key] | None = None
        #: True if this process requested single groups of its own split.
        self._requested = False
        #: True if this run offers prompts, and so repeats its data by itself.
        self._offers = False
        #: Result of the last `restore_requests`.
        self.restored: RestoredRequests | None = None
        #: Offers of an earlier life of this run, beyond its position in the data.
        self._ahead: Counter[_Key] = Counter()
        #: Complete groups without a request, to offer soon: the bus changed since their offer.
        self._whole: set[_Key] = set()
        #: Complete groups without a request, not trained at the last look, near and far.
        self._untrained: set[_Key] = set()
        #: Numbers of the requests trained by an earlier life, and not acknowledged yet.
        self._trained_open: set[int] = set()

    def request(
        self, instance_id: str | int, round: int | None, split: str | None, **more: Any
    ) -> int:
        """Offer one group to the workers; details in `shmbus.Consumer.request`."""
        self._offers = True
        split = self._split if split is None else split
        self._requested = self._requested or split == self._split
        key = (str(instance_id), round, split)
        if self._ahead[key] > 0:
            self._pass_ahead(key)
            return 0
        if key in self._whole:
            self._whole.discard(key)
            if not self._is_untrained(key):
                return 0
            self._untrained.discard(key)
        return self._consumer.request(instance_id, round=round, split=split, **more)

    # -- open prompts -----------------------------------------------------------------------------

    def offer(self, prompts: Any, ahead: int = 2, group_size: int = 8) -> None:
        """Keep prompts open for the workers until the prompts end."""
        ahead, group_size = check_int("ahead", ahead, 1), check_int("group_size", group_size, 1)
        source = self._source
        if source is None or source.prompts is not prompts or source.ended:
            source = PromptSource(prompts, self._prompt_fields)
        if self._rank:
            self._source = source  # for its state
            return
        self.settle()
        before = self._source
        if before is None:
            if self._source_state is not None:
                source.go_to(self._source_state)
        elif before.ended:
            source.begin_behind(before)
        elif before is not source:
            source.go_to(before.state())
        source.group_size = group_size
        self._source, self._ahead_batches = source, ahead
        self._offers = True
        self._planner.last = False
        self._refill(source, time.monotonic())

    def settle(self) -> None:
        """Find out if an exception came after a prompt's offer."""
        source, offering = self._source, self._offering
        if source is not None and offering is not None:
            number, key = offering
            if number == source.position and key in self._consumer.open_requests():
                source.passed()
        self._offering = None

    def look(self, asked: bool, deadline_s: float | None) -> float | None:
        """Offer missing prompts, and return the seconds until the next look; None for never."""
        source = self._source if self._rank == 0 else None
        if source is None:
            return LOOK_S if self._requested else None
        if not source.ended:
            self._refill(source, deadline_s)
        if source.ended and self._has_ended(asked):
            raise PromptsEndedError(
                f"bus {self._consumer.name!r}: the {source.position} offered prompts are "
                "trained or given up; offer further prompts, or stop here"
            )
        return LOOK_S

    def _refill(self, source: PromptSource, deadline_s: float | None) -> None:
        self.settle()
        if source.unchecked:
            source.next()
        lacking = self._ahead_batches * self._planner.batch_groups - self._count_coming()
        if self._whole:
            lacking = max(lacking, self._count_whole(source))
        # An expired deadline leaves time for prompts without cost.
        until_s = time.monotonic() + LOOK_S
        if deadline_s is None or deadline_s > until_s:
            until_s = float("inf") if deadline_s is None else deadline_s
        while lacking > 0 and (given := source.next()) is not None:
            try:
                lacking -= self._offer_one(source, given)
            except shmbus.BusFullError:
                return  # open prompts must end first
            if time.monotonic() >= until_s:
                return

    def _count_whole(self, source: PromptSource) -> int:
        """Count the prompts to offer whose groups the bus already holds, without a request."""
        places = {key: source.place_of(key[1] or 0) for key in self._whole}
        reach = self._ahead_batches * self._planner.batch_groups + len(places)
        self._whole = {key for key, at in places.items() if 0 <= at < reach}
        self._ahead.update(key for key, at in places.items() if at >= reach)
        return 1 + max((places[key] for key in self._whole), default=-1)

    def _offer_one(self, source: PromptSource, given: dict[str, Any]) -> bool:
        """Offer a prompt; False if an earlier life of this run offered it."""
        key = (str(given["instance_id"]), given["round"], self._split)
        is_ahead = self._ahead[key] > 0
        if is_ahead and not self._is_untrained(key):
            # In this order: rounds are unique, so no lookup finds a leftover key.
            source.passed()
            self._pass_ahead(key)
            return False
        self._has_offered = True
        self._offering = source.position, key
        try:
            self._consumer.request(**given, split=self._split, timeout=0)
        except (TypeError, ValueError) as error:
            source.passed()
            raise type(error)(
                f"prompt {key[0]!r}, the {source.position}. that was offered, is left out: {error}"
            ) from error
        source.passed()
        self._offering = None
        if is_ahead:
            self._pass_ahead(key)
        self._whole.discard(key)
        self._untrained.discard(key)
        return True

    def _pass_ahead(self, key: _Key) -> None:
        left = self._ahead[key] - 1
        if left:
            self._ahead[key] = left
        else:
            del self._ahead[key]

    def _is_untrained(self, key: _Key) -> bool:
        if key in self._untrained:
            self._look_for_untrained(self._keys_out())
        return key in self._untrained

    def _look_for_untrained(self, out: Counter[_Key]) -> None:
        """Forget the groups that a batch has had since the last look."""
        if self._untrained:
            self._untrained &= set(whole_groups(self._consumer.name)) - out.keys()

    def _count_open(self, without: Counter[_Key] | None = None) -> int:
        """Count the open requests of this split, minus the requests of some groups."""
        return self._consumer.count_open_requests(self._split, without=without)

    def _keys_in_batches(self) -> Counter[_Key]:
        made = [one for one in self._planner.ready if isinstance(one, MadeBatch)]
        return self._keys_out() + _keys_of(one.group for each in made for one in each.planned)

    def _keys_out(self) -> Counter[_Key]:
        """Return the groups of batches yielded and not yet acknowledged."""
        return _keys_of(one.group for made in self._planner.out.values() for one in made.planned)

    def groups_to_save(self) -> list[_Key]:
        """Return the groups of a rank above 0, possibly unknown to rank 0 at its save."""
        return [] if self._rank == 0 else list(self._keys_out().elements())

    def _count_coming(self, ledger: shmbus.Ledger | None = None) -> int:
        """Count the requests with groups open or on their way, and in no batch."""
        if self._world_size == 1:
            return self._count_open(self._keys_in_batches())
        # Groups held by further ranks form a shard, and so a batch.
        return max(0, self._count_open() - self._see(ledger).leased)

    def _see(self, ledger: shmbus.Ledger | None = None) -> _Seen:
        try:
            ledger = ledger or self._consumer.stats(LEDGER_S)
        except shmbus.DaemonUnavailableError:
            return _UNSEEN
        splits = dict(ledger.splits)
        here = splits.pop(self._split, None)
        incomplete, ready, leased = (
            (0, 0, 0) if here is None else (here.groups_open, here.groups_ready, here.groups_leased)
        )
        if self._world_size > 1:
            # Groups waiting at the daemon for a step are ready; the splits omit them.
            ready = ledger.groups_ready - sum(of.groups_ready for of in splits.values())
            leased = ledger.groups_leased - sum(of.groups_leased for of in splits.values())
        return _Seen(incomplete, ready, leased, ledger.in_ring, ledger.producers)

    def _has_ended(self, asked: bool) -> bool:
        """Return True if no batch comes any more; before, declare the waiting groups last."""
        planner = self._planner
        if self._world_size == 1:
            held = self._keys_in_batches() + _keys_of(planner.groups)
            planner.last = not planner.inbox and not self._count_open(held)
            if not planner.last:
                return False
        if not asked or planner.inbox or planner.waiting or planner.ready:
            return False
        coming, seen = self._count_open(), self._see()
        if self._world_size > 1 and coming > seen.leased + seen.ready:
            return False
        return seen.is_empty and seen.ready < planner.least_groups

    def is_hopeless(self) -> bool:
        """Return True if every request has ended and no process can complete a batch."""
        if not self._requested or (self._source is not None and self._rank == 0):
            return False
        planner = self._planner
        if planner.ready or planner.inbox or planner.left_s(time.monotonic()) is not None:
            return False
        if self._count_open(self._keys_in_batches() + _keys_of(planner.groups)):
            return False
        seen = self._see()
        return seen.is_empty and not seen.ready and not seen.producers

    def open_text(self, ledger: shmbus.Ledger) -> str:
        """Describe the number of open prompts, for a message; empty for a run without prompts."""
        if not (self._offers or ledger.requests.offered):
            return ""
        coming = self._count_coming(ledger) - len(self._planner.waiting)
        if coming > 0:
            return f"{several(coming, 'prompt', 'are')} open or on their way"
        if self._source is None:
            return "no prompt is open: offer more, or have handler.offer keep some open"
        return "no prompt is open" + (", and there are no more" if self._source.ended else "")

    # -- checkpoints ------------------------------------------------------------------------------

    def position(self) -> Any:
        """Return the position in the prompts; None without `offer`."""
        if self._source is None:
            return self._source_state
        return self._source.state() if self._rank == 0 else rank_state(self._rank)

    def restore_position(self, saved: Any) -> None:
        """Go to a state's position; raise ValueError, and change nothing, for foreign data."""
        if self._rank:
            return
        if saved is not None:
            check_state(saved)
        if self._has_offered and not self._planner.step:
            raise shmbus.ProtocolError(
                "load_state_dict: expected before offer, which has offered prompts from their "
                "start already; make the handler anew, load the state, and offer then"
            )
        if self._source is not None:
            self._source.go_to(saved or PromptSource((), frozenset()).state())
        self._source_state = saved
        self._offering = None
        self._planner.last = False

    def requests_to_save(self, on_ranks: Counter[_Key]) -> Any:
        """Return the untrained requests, and a restart's further knowledge."""
        if self._rank:
            return None
        state: Any = self._consumer.state_dict()
        out = on_ranks | self._keys_out()
        ended = [each for each in state["open"] if each["number"] in self._trained_open]
        rest = (each for each in state["open"] if each["number"] not in self._trained_open)
        found, opened = part_trained(rest, out)
        self._look_for_untrained(out)
        ahead = [*self._ahead.elements(), *self._whole]
        saved = {
            "open": opened,
            "trained": [list(request_key(each)) for each in ended + found],
            "ahead": [list(key) for key in ahead if key not in self._untrained],
            "whole": [list(key) for key in sorted(self._untrained)],
            "offers": self._offers,
        }
        # The number tells feeders the position of the data, even with no open request.
        return {**state, **saved} if any(saved.values()) or state["number"] else None

    def restore_requests(self, saved: Any, here: bool) -> None:
        """Offer untrained requests again; a state without requests leaves none open."""
        if self._rank:
            return  # on one rank only: two ranks would offer twice
        there: Any = self._consumer.state_dict()
        state: Any = saved
        if saved is None:
            # For this bus 0 means "nothing offered yet"; for another bus, None means "unknown".
            state = {**there, "open": [], "number": 0 if here else None}
        restored = self._consumer.load_state_dict(state)
        self.restored = restored
        self._ahead = _keys(saved, "ahead") + Counter(restored.beyond)
        self._whole = {each for each in restored.whole if each[2] == self._split}
        self._whole -= self._ahead.keys()
        self._untrained = set(self._whole)
        trained, _ = part_trained(there["open"], Counter(restored.trained))
        self._trained_open = {each["number"] for each in trained}
        self._offers = bool(state.get("offers")) or self._source is not None
        if restored.ended and not self._offers:
            logger.warning(
                "bus %r: %d requests that were offered after this checkpoint have ended, and their "
                "prompts are not trained any more: what was offered behind request %d must be "
                "offered again, but for those that restored_requests.beyond has. handler.request "
                "does so as this run goes over its data again; a Feeder in another process does "
                "not know, so tell it, or start it anew from there",
                self._consumer.name,
                restored.ended,
                restored.number,
            )
