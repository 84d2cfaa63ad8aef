"""The weight transfer of TRL's AsyncGRPOTrainer, over `shmbus.weights`.

TRL hands the parameters over one by one, under the names of the checkpoint. Workers of this machine
read them by `shmbus.weights.WeightSubscriber`, whole versions only.

Invariant: the number of a version of weights is the policy version that the bus has right after it,
so a worker that samples with weights N puts samples of policy version N.
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
    """TRL's WeightTransferProtocol: each weight sync publishes a version on a bus.

    Pass it as ``weight_transfer=ShmbusWeights("run1")``, beside a `ShmbusRolloutWorker` of the same
    bus, which publishes the version's number.

    Parameters
    ----------
    bus : str
    **publisher_options
        Those of `shmbus.weights.WeightPublisher`, such as `slots` or `carrier`.

    Notes
    -----
    TRL's main process has each whole tensor, so the version has one writer. The first sync keeps
    all tensors until it has seen their shapes; the others hold one at a time.
    """

    def __init__(self, bus: str, **publisher_options: Any) -> None:
        self.bus: Final = check_name(bus)
        self._options: Final = publisher_options
        #: What is published now.
        self._tensors: Iterable[tuple[str, torch.Tensor]] = ()
        self._publisher: WeightPublisher | None = None

    def init_weight_transfer(self) -> None:
        """Do nothing yet: the first sync makes the publisher, which needs names and shapes."""

    def pause(self) -> None:
        """Do nothing: workers go on with the version that they have leased."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Publish a version.

        Parameters
        ----------
        iterator : iterator of (str, Tensor)
            All parameters, in the same order each time.

        Raises
        ------
        WeightsError, WaitTimeoutError
            As for `shmbus.weights.WeightPublisher`.
        ValueError
            The first sync has no parameters: workers would load a version of nothing.
        """
        from shmbus.weights import ExportedSource, WeightPublisher

        with shmbus.Bus.open(self.bus) as bus:
            version = bus.policy_version + 1
        self._tensors = iterator
        if self._publisher is None:
            # It goes through the first ones twice: to learn their shapes, and to write them.
            self._tensors = list(iterator)
            if not self._tensors:
                raise ValueError(
                    "send_weights: expected the model's parameters, got none, and nothing was "
                    "published; pass an iterator of its names and tensors that is not used up"
                )
            source = ExportedSource(lambda: self._tensors)
            self._publisher = WeightPublisher(self.bus, source, **self._options)
        if self._publisher.version is not None:  # whoever sets the bus's may not have done so yet
            version = max(version, self._publisher.version + 1)
        self._publisher.publish(version)
        self._tensors = ()

    def resume(self) -> None:
        """Do nothing: workers see the version when they next look."""

    def destroy(self) -> None:
        """Leave; workers that have leased a version keep it."""
        publisher, self._publisher = self._publisher, None
        if publisher is not None:
            publisher.close()
