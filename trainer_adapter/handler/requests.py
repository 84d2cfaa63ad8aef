"""Prompts that a trainer offers through its handler, and those of a checkpoint.

Invariants:

- A request counts as trained once its batch was yielded, as trajectories do; so a state has the
  requests that are open, less those of batches that are out.
- A trainer that goes back to a checkpoint goes over its data again from there. What an earlier life
  of it had offered, and a state or the bus has still, is not offered again.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

import shmbus

if TYPE_CHECKING:
    from trainer_adapter.batches.batch import Batch
    from trainer_adapter.handler.planner import BatchPlanner

__all__ = ["RequestingHandler"]

logger = logging.getLogger(__name__)


#: Instance id, epoch and split.
_Key = tuple[str, "int | None", str]


def _keys(state: Any, name: str) -> Counter[_Key]:
    return Counter((id_, epoch, split) for id_, epoch, split in (state or {}).get(name, ()))


class RequestingHandler:
    """What of a handler offers prompts; the rest of it is `OnlineDataHandler`."""

    _saves_requests: bool
    _consumer: shmbus.Consumer
    _planner: BatchPlanner[Batch]

    def _begin_requests(self, *, saves: bool) -> None:
        self._saves_requests = saves
        #: Whether this run offers prompts itself, and so goes over its data again by itself.
        self._offers = False
        self._restored_requests: shmbus.RestoredRequests | None = None
        #: Offered by an earlier life of this run, beyond where it stands in its data.
        self._ahead: Counter[_Key] = Counter()
        #: Trained by an earlier life, and not acknowledged yet.
        self._trained_open: Counter[_Key] = Counter()

    def request(
        self, instance_id: str | int, *, epoch: int | None = None, split: str = "train", **more: Any
    ) -> int:
        """Offer one group to the workers, as `shmbus.Consumer.request` does, which says how.

        After `load_state_dict` a trainer goes over its data again, from where the checkpoint stood.
        What it had offered after that and the bus has still is not offered twice.

        Parameters
        ----------
        instance_id : str or int
            The prompt's key.
        epoch : int, optional
            Which repetition of the prompt this is.
        split : str, default "train"
            What the group is for.
        **more
            All others of `shmbus.Consumer.request`, the prompt's fields too.

        Returns
        -------
        int
            The request's number; 0 where it was offered before the restart.
        """
        self._offers = True
        key = (str(instance_id), epoch, split)
        if self._ahead[key] > 0:
            self._ahead -= Counter([key])
            return 0
        return self._consumer.request(instance_id, epoch=epoch, split=split, **more)

    def _requests_to_save(self) -> Any:
        """Return the requests that are not trained, and what a restart must know of others."""
        if not self._saves_requests:
            return None
        state: Any = self._consumer.requests_state()
        trained = self._trained_open + Counter(
            (one.group.instance_id, one.group[0].epoch, one.group[0].split)
            for made in self._planner.out.values()
            for one in made.planned
        )
        found: list[_Key] = []
        opened = []
        for each in state["open"]:
            key = (each["instance_id"], each["epoch"], each["split"])
            if trained[key] > 0:
                trained[key] -= 1
                found.append(key)
            else:
                opened.append(each)
        self._trained_open &= Counter(found)  # the others have ended
        saved = {
            "open": opened,
            "trained": [list(key) for key in found],
            "ahead": [list(key) for key in self._ahead.elements()],
            "offers": self._offers,
        }
        # The number says to feeders where the data stood, also where nothing is open.
        return {**state, **saved} if any(saved.values()) or state["number"] else None

    def _restore_requests(self, saved: Any, here: bool) -> None:
        """Offer again what is not trained; a state without requests has none of them open."""
        if saved is None and not self._saves_requests:
            return
        state: Any = saved
        if saved is None:
            state = {**self._consumer.requests_state(), "open": []}
            # Of this bus it means that nothing had been offered; of another one, nothing is known.
            state["number"] = 0 if here else None
        restored = self._consumer.load_requests_state(state)
        self._restored_requests = restored
        self._ahead = _keys(saved, "ahead") + Counter(restored.beyond)
        self._trained_open = Counter(restored.trained)
        self._offers = bool(state.get("offers"))
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

    @property
    def restored_requests(self) -> shmbus.RestoredRequests | None:
        """What `load_state_dict` did with requests; None before, and on ranks other than 0."""
        return self._restored_requests
