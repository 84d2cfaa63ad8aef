"""Prompts that a trainer offers through its handler, and those of a checkpoint.

Invariant: a request counts as trained once its batch was yielded, as trajectories do; so a state
has the requests that are open, less those of batches that are out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import shmbus

if TYPE_CHECKING:
    from trainer_adapter.batches.batch import Batch
    from trainer_adapter.handler.planner import BatchPlanner

__all__ = ["RequestingHandler"]


class RequestingHandler:
    """What of a handler offers prompts; the rest of it is `OnlineDataHandler`."""

    _saves_requests: bool
    _consumer: shmbus.Consumer
    _planner: BatchPlanner[Batch]

    def request(self, instance_id: str, **arguments: Any) -> int:
        """Offer one group to the workers, as `shmbus.Consumer.request` does, which says how.

        Parameters
        ----------
        instance_id : str
            The prompt's key.
        **arguments
            All others of `shmbus.Consumer.request`, the prompt's fields too.

        Returns
        -------
        int
            The request's number.
        """
        return self._consumer.request(instance_id, **arguments)

    def _requests_to_save(self) -> Any:
        """Return the requests that are not trained; None where there are none."""
        if not self._saves_requests:
            return None
        state = self._consumer.requests_state()
        out = {
            (one.group.instance_id, one.group[0].epoch)
            for made in self._planner.out.values()
            for one in made.planned
        }
        state["open"] = [
            each for each in state["open"] if (each["instance_id"], each["epoch"]) not in out
        ]
        return state if state["open"] else None
