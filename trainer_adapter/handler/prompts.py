"""Prompts that a trainer offers through its handler, and those of a checkpoint.

Invariants:

- A request counts as trained once its batch was yielded, as trajectories do; so a state has the
  requests that are open, less those of batches that are out.
- What `offer` counts is what is open, not what was offered: however a group ends, its request ends
  with it, and another prompt takes its place.
- A trainer that goes back to a checkpoint goes over its data again from there. What an earlier life
  of it had offered, and a state or the bus has still, is not offered again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import shmbus
from shmbus._arguments import check_int
from shmbus._format import several
from shmbus.open_requests import RestoredRequests
from trainer_adapter.handler.checkpoint import Key as _Key
from trainer_adapter.handler.checkpoint import part_trained
from trainer_adapter.handler.planner import BatchPlanner, MadeBatch
from trainer_adapter.handler.prompt_source import PromptSource, check_state, rank_state

if TYPE_CHECKING:
    from trainer_adapter.batches.batch import Batch

__all__ = ["PromptOffers", "PromptsEndedError"]

logger = logging.getLogger(__name__)

#: Seconds between two looks at what is open, while a batch is waited for: a group that ends without
#: a batch wakes nobody.
LOOK_S: Final = 0.1


class _Seen(NamedTuple):
    """Groups of one split as the ledger has them, and what may still become some."""

    incomplete: int
    ready: int
    leased: int
    unread: int
    producers: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing is there that could become a complete group."""
        return not (self.incomplete or self.unread)


class PromptsEndedError(EOFError):
    """Every prompt that was offered was trained or given up, and there are no more."""


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
        #: Where a loaded state stands in the prompts, until they are offered.
        self._source_state: Any = None
        self._has_offered = False
        #: A prompt that is being offered, and its place: after an exception it may be open.
        self._offering: tuple[int, _Key] | None = None
        #: Whether this process has requested groups of its own split, one by one.
        self._requested = False
        #: Whether this run offers prompts itself, and so goes over its data again by itself.
        self._offers = False
        #: What the last `restore_requests` did.
        self.restored: RestoredRequests | None = None
        #: Offered by an earlier life of this run, beyond where it stands in its data.
        self._ahead: Counter[_Key] = Counter()
        #: Such, of which the bus has a complete group and no request: it is another bus since.
        self._whole: set[_Key] = set()
        #: Trained by an earlier life, and not acknowledged yet.
        self._trained_open: Counter[_Key] = Counter()

    def request(
        self, instance_id: str | int, *, round: int | None = None, split: str = "train", **more: Any
    ) -> int:
        """Offer one group to the workers, as `shmbus.Consumer.request` does, which says how."""
        self._offers = True
        self._requested = self._requested or split == self._split
        key = (str(instance_id), round, split)
        if self._ahead[key] > 0:
            self._pass_ahead(key)
            return 0
        if key in self._whole:
            self._whole.discard(key)
            return 0
        return self._consumer.request(instance_id, round=round, split=split, **more)

    # -- prompts that are kept open ---------------------------------------------------------------

    def offer(self, prompts: Any, ahead: int = 2, group_size: int = 8) -> None:
        """Keep prompts open for the workers, whatever becomes of each, from now to their end."""
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
        """Find out whether a prompt was offered when an exception came between."""
        source, offering = self._source, self._offering
        if source is not None and offering is not None:
            number, key = offering
            if number == source.position and key in self._consumer.open_requests():
                source.passed()
        self._offering = None

    def look(self, asked: bool, deadline_s: float | None) -> float | None:
        """Offer what is lacking, and say after how many seconds to look again; None for never."""
        source = self._source if self._rank == 0 else None
        if source is None:
            return LOOK_S if self._requested else None
        if not source.ended:
            self._refill(source, deadline_s)
        if source.ended and self._has_ended(asked):
            raise PromptsEndedError(
                f"bus {self._consumer.name!r}: every prompt was offered, {source.position} of "
                "them, and is trained or given up; offer others, or stop here"
            )
        return LOOK_S

    def _refill(self, source: PromptSource, deadline_s: float | None) -> None:
        self.settle()
        if source.unchecked:
            source.next()
        lacking = self._ahead_batches * self._planner.batch_groups - self._count_coming()
        if self._whole:
            lacking = max(lacking, self._count_whole(source))
        # A deadline that is over leaves time for prompts that cost none.
        until_s = time.monotonic() + LOOK_S
        if deadline_s is None or deadline_s > until_s:
            until_s = float("inf") if deadline_s is None else deadline_s
        while lacking > 0 and (given := source.next()) is not None:
            try:
                lacking -= self._offer_one(source, given)
            except shmbus.BusFullError:
                return  # what is open must end first
            if time.monotonic() >= until_s:
                return

    def _count_whole(self, source: PromptSource) -> int:
        """Count the prompts to offer now, since the bus has groups of them and no request.

        Offered before it is trained, a group ends its request with it. One that the data reach much
        later is trained by then, and not offered.
        """
        places = {key: source.place_of(key[1] or 0) for key in self._whole}
        reach = self._ahead_batches * self._planner.batch_groups + len(places)
        self._whole = {key for key, at in places.items() if 0 <= at < reach}
        self._ahead.update(key for key, at in places.items() if at >= reach)
        return 1 + max((places[key] for key in self._whole), default=-1)

    def _offer_one(self, source: PromptSource, given: dict[str, Any]) -> bool:
        """Offer a prompt; False where an earlier life of this run has."""
        key = (str(given["instance_id"]), given["round"], self._split)
        if self._ahead[key] > 0:
            # In this order: rounds are unique, so a key that is left here is asked for by nobody.
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
        self._whole.discard(key)
        return True

    def _pass_ahead(self, key: _Key) -> None:
        left = self._ahead[key] - 1
        if left:
            self._ahead[key] = left
        else:
            del self._ahead[key]

    def _count_open(self, without: Counter[_Key] | None = None) -> int:
        """Count the requests of this split that have not ended, less those of some groups."""
        return self._consumer.count_open_requests(self._split, without=without)

    def _keys_in_batches(self) -> Counter[_Key]:
        planner = self._planner
        made = [one for one in planner.ready if isinstance(one, MadeBatch)]
        return _keys_of(
            one.group for each in (*made, *planner.out.values()) for one in each.planned
        )

    def _keys_out(self) -> Counter[_Key]:
        """Return the groups of batches that were yielded, and not acknowledged yet."""
        return _keys_of(one.group for made in self._planner.out.values() for one in made.planned)

    def groups_to_save(self) -> list[_Key]:
        """Return what rank 0 may not know of, where this is another: it may save before."""
        return [] if self._rank == 0 else list(self._keys_out().elements())

    def _count_coming(self) -> int:
        """Count the requests whose groups are open or on their way, and in no batch."""
        if self._world_size == 1:
            return self._count_open(self._keys_in_batches())
        # What other ranks hold is a shard, and so a batch.
        return max(0, self._count_open() - self._see().leased)

    def _see(self) -> _Seen:
        ledger = self._consumer.stats()
        splits = dict(ledger.splits)
        here = splits.pop(self._split, None)
        incomplete, ready, leased = (
            (0, 0, 0) if here is None else (here.groups_open, here.groups_ready, here.groups_leased)
        )
        if self._world_size > 1:
            # Groups that wait at the daemon for a step are ready, which the splits do not tell.
            ready = ledger.groups_ready - sum(of.groups_ready for of in splits.values())
            leased = ledger.groups_leased - sum(of.groups_leased for of in splits.values())
        return _Seen(incomplete, ready, leased, ledger.in_ring, ledger.producers)

    def _has_ended(self, asked: bool) -> bool:
        """Whether no batch comes any more; before that, have the groups that wait be the last."""
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
        """Whether what was requested has ended, and nobody is there who could complete a batch."""
        if not self._requested or (self._source is not None and self._rank == 0):
            return False
        planner = self._planner
        if planner.ready or planner.inbox or planner.left_s(time.monotonic()) is not None:
            return False
        if self._count_open(self._keys_in_batches() + _keys_of(planner.groups)):
            return False
        seen = self._see()
        return seen.is_empty and not seen.ready and not seen.producers

    def open_text(self) -> str:
        """Say how many prompts are open, for a message; nothing where this run uses none."""
        if not (self._offers or self._consumer.stats().requests.offered):
            return ""
        coming = self._count_coming() - len(self._planner.waiting)
        if coming > 0:
            return f"{several(coming, 'prompt', 'are')} open or on their way"
        if self._source is None:
            return "no prompt is open: offer more, or have handler.offer keep some open"
        return "no prompt is open" + (", and there are no more" if self._source.ended else "")

    # -- checkpoints ------------------------------------------------------------------------------

    def position(self) -> Any:
        """Return the position in the prompts; None where none are offered by `offer`."""
        if self._source is None:
            return self._source_state
        return self._source.state() if self._rank == 0 else rank_state(self._rank)

    def restore_position(self, saved: Any) -> None:
        """Stand where a state does; raises ValueError, and changes nothing, for one of others."""
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
        """Return the requests that are not trained, and what a restart must know of others."""
        if self._rank:
            return None
        state: Any = self._consumer.state_dict()
        trained = self._trained_open + (on_ranks | self._keys_out())
        found, opened = part_trained(state["open"], trained)
        self._trained_open &= Counter(found)  # the others have ended
        saved = {
            "open": opened,
            "trained": [list(key) for key in found],
            "ahead": [list(key) for key in (*self._ahead.elements(), *self._whole)],
            "offers": self._offers,
        }
        # The number says to feeders where the data stood, also where nothing is open.
        return {**state, **saved} if any(saved.values()) or state["number"] else None

    def restore_requests(self, saved: Any, here: bool) -> None:
        """Offer again what is not trained; a state without requests has none of them open."""
        if self._rank:
            return  # whoever saved the state: two ranks would offer twice
        state: Any = saved
        if saved is None:
            state = {**self._consumer.state_dict(), "open": []}
            # Of this bus it means that nothing had been offered; of another one, nothing is known.
            state["number"] = 0 if here else None
        restored = self._consumer.load_state_dict(state)
        self.restored = restored
        self._ahead = _keys(saved, "ahead") + Counter(restored.beyond)
        self._whole = {each for each in restored.whole if each[2] == self._split}
        self._whole -= self._ahead.keys()
        self._trained_open = Counter(restored.trained)
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
