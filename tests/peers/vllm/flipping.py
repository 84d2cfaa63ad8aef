"""A worker extension of vLLM that damages weights on request."""

from typing import Any

import torch


class Flipper:
    """Methods that vLLM's worker gets by ``--worker-extension-cls flipping.Flipper``."""

    def flip_bit(self, parameter: str, rank: int) -> None:
        worker: Any = self
        if worker.rank == rank:
            model = worker.get_model()
            model.get_parameter(parameter).data.view(torch.int32).view(-1)[5] ^= 1
