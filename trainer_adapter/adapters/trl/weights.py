"""The weight transfer of TRL's AsyncGRPOTrainer, over `shmbus.weights`.

TRL passes the parameters one by one, under the names of the checkpoint. Workers of this machine
read them by `shmbus.weights.WeightSubscriber`, whole versions only.

Invariant: the number of a weights version equals the bus's policy version right after the
publication, so a worker sampling with weights N puts samples of policy version N.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import shmbus
from shmbus.segment.names import check_name

if TYPE_CHECKING:
    import torch

    from shmbus.weights import WeightPublisher


class ShmbusWeights:
    """TRL's WeightTransferProtocol: every weight sync publishes a version on a bus.

    Pass ``weight_transfer=ShmbusWeights("run1")`` beside a `ShmbusRolloutWorker` of the same
    bus, the publisher of the version's number.

    Parameters
    ----------
    bus : str
    **publisher_options
        Options of `shmbus.weights.WeightPublisher`, for example `slots` or `carrier`.

    Notes
    -----
    TRL's main process holds whole tensors: a version needs a single writer. The first sync keeps
    every tensor until their shapes are known; later syncs hold one at a time.
    """

    def __init__(self, bus: str, **publisher_options: Any) -> None:
        self.bus: Final = check_name(bus)
        self._options: Final = publisher_options
        #: The tensors under publication.
        self._tensors: Iterable[tuple[str, torch.Tensor]] = ()
        self._publisher: WeightPublisher | None = None

    def init_weight_transfer(self) -> None:
        """Do nothing yet: the first sync makes the publisher with names and shapes."""

    def pause(self) -> None:
        """Do nothing: workers keep their leased version."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish a version.

        Parameters
        ----------
        iterator : iterator of (str, Tensor)
            Every parameter, always in the same order.

        Raises
        ------
        WeightsError, WaitTimeoutError
            As for `shmbus.weights.WeightPublisher`.
        ValueError
            The first sync is empty: workers would load a version of nothing.
        """
        from shmbus.weights import ExportedSource, WeightPublisher

        with shmbus.Bus.open(self.bus) as bus:
            version = bus.policy_version + 1
        self._tensors = iterator
        if self._publisher is None:
            # The first sync reads its tensors twice: to learn their shapes, and to write them.
            self._tensors = list(iterator)
            if not self._tensors:
                raise ValueError(
                    "send_weights: expected the model's parameters, got none, and nothing was "
                    "published; pass an iterator of its names and tensors that is not used up"
                )
            source = ExportedSource(lambda: self._tensors)
            self._publisher = WeightPublisher(self.bus, source, **self._options)
        if self._publisher.version is not None:  # the bus's own may still be unset
            version = max(version, self._publisher.version + 1)
        self._publisher.publish(version)
        self._tensors = ()

    def resume(self) -> None:
        """Do nothing: workers see the version on their next poll."""

    def destroy(self) -> None:
        """Leave; workers keep their leased version."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
