"""Connector that sends hidden states out of a vLLM engine, by configuration alone.

vLLM's speculative method ``extract_hidden_states`` keeps the states of chosen layers in a cache of
blocks beside the key-value cache: a prefix cache hit includes its states. The connector reads them
after a request finished, and sends them over a `TensorChannel`, a request a step.

Invariants:

- A request's blocks return to the engine only after its step was sent: a slow trainer costs memory
  for requests, and never a row. The engine itself is never blocked.
- A row not kept by the engine is never sent; the request's step is reported as failed.
- An aborted request sends nothing.

Source: vllm/distributed/kv_transfer/kv_connector/v1/base.py and
vllm/v1/spec_decode/extract_hidden_states.py of vLLM 0.32.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from shmbus.base.arguments import check_bytes
from shmbus.base.throttle import LimitedLog
from shmbus.channel import ChannelClosedError
from shmbus.errors import ShmbusError, WaitTimeoutError
from shmbus.tensors import TensorChannel, TensorSender
from shmbus.tensors.channel_group import GroupSender
from shmbus.tensors.step_table import encode_meta

try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        SupportsHMA,
    )
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
    from vllm.v1.request import RequestStatus
    from vllm.v1.spec_decode import extract_hidden_states  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"vLLM {version('vllm')} lacks the interface of hidden states ({error}); use vLLM 0.32"
    ) from error

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.shmbus")

#: Longest wait of an otherwise idle engine for the trainer, in seconds.
IDLE_S: Final = 0.05

#: Seconds until a trainer's step counts as slow, and between two such log lines.
SLOW_S: Final = 5.0
TOLD_S: Final = 60.0

#: Part of the cache layer's name.
_CACHE: Final = "cache_only_layers."

#: Bytes of a step beside its tensors and meta, with the rounding of their places.
_BESIDE_BYTES: Final = 64 << 10


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What ``kv_connector_extra_config`` says: engines of data parallelism, ranks of a trainer."""

    channel: str
    senders: int = 1
    receivers: int = 1
    slots: int = 2
    max_bytes: int | str = "1GiB"


@dataclass
class Finished:
    """A finished request with states to send."""

    request: str
    tokens: list[int]
    rows: int
    blocks: list[int]
    meta: dict[str, Any]
    problem: str = ""


@dataclass
class Metadata(KVConnectorMetadata):
    """Message from the scheduler to the worker in each step."""

    finished: list[Finished] = field(default_factory=list)
    idle: bool = False


class HiddenStatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Sends the hidden states of each finished request; the scheduler's side or a worker's."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = options_of(vllm_config.kv_transfer_config.kv_connector_extra_config)
        self._layers = layers_of(vllm_config)
        caches = [
            (index, group, name)
            for index, group in enumerate(kv_cache_config.kv_cache_groups)
            for name in group.layer_names
            if _CACHE in name
        ]
        if len(caches) != 1:
            raise ValueError(f"expected one cache of hidden states, got {len(caches)}: vLLM 0.32?")
        self._group, group, self._layer = caches[0]
        self._block_size = group.kv_cache_spec.block_size
        self._finished: list[Finished] = []
        self._worker: _Worker | None = None

    @property
    def requires_kv_delivery(self) -> bool:
        """Return True: a preempted request's rows in flight must be computed again."""
        return True

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Return zero loadable tokens."""
        return 0, False

    def update_state_after_alloc(
        self, request: Request, blocks: object, num_external_tokens: int
    ) -> None:
        """Ignore allocations: the connector loads nothing."""

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a finished request's blocks until the states are sent."""
        return self.request_finished(request, block_ids[self._group] if block_ids else [])

    def request_finished(
        self, request: Request, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a finished request's blocks until the states are sent."""
        if request.status not in _WHOLE:
            return False, None
        tokens = list(request.all_token_ids)
        # The last token was sampled, and never an input.
        rows = len(tokens) - 1
        there = min(request.num_computed_tokens, len(block_ids) * self._block_size)
        problem = "" if there >= rows else f"the engine has the states of {there} of {rows} tokens"
        meta = {
            "request": request.request_id,
            "layers": self._layers,
            "prompt": request.num_prompt_tokens,
            "finish": str(request.get_finished_reason()),
            "params": request.kv_transfer_params or {},
        }
        blocks = list(block_ids)
        self._finished.append(Finished(request.request_id, tokens, rows, blocks, meta, problem))
        return True, {"handle": request.request_id}

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Metadata:
        """Tell the worker about requests finished since the last step."""
        finished, self._finished = self._finished, []
        return Metadata(finished, idle=scheduler_output.total_num_scheduled_tokens == 0)

    def get_finished_count(self) -> int:
        """Return the number of sending workers: one, because every worker holds the same states."""
        return 1

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Become the sender, in the only sending worker."""
        cache = kv_caches.get(self._layer)
        if cache is None or get_tensor_model_parallel_rank() != 0:
            return
        if cache.dim() != 4 or cache.shape[1:3] != (len(self._layers), self._block_size):
            raise ValueError(
                f"hidden states: expected a cache of {len(self._layers)} layers in blocks of "
                f"{self._block_size} tokens, got {list(cache.shape)}; use vLLM 0.32"
            )
        rank = self._vllm_config.parallel_config.data_parallel_index
        self._worker = _Worker(self._options, rank, cache)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Record the expected places of this step's rows."""
        places = getattr(forward_context, "slot_mapping", None)
        if self._worker is not None and isinstance(places, dict):
            self._worker.expected = places.get(self._layer)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Return at once: the connector loads nothing."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Record this step's rows as kept."""
        if self._worker is not None and layer_name == self._layer:
            self._worker.kept(attn_metadata.slot_mapping)

    def wait_for_save(self) -> None:
        """Record lost rows: vLLM skips a whole step with a sequence at max_model_len."""
        if self._worker is not None:
            self._worker.end_step()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Send as much as the trainer takes now, and return its blocks."""
        if self._worker is None or not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Metadata)
        self._worker.pending.extend(metadata.finished)
        return self._worker.send(IDLE_S if metadata.idle else 0.0) or None, None

    def shutdown(self) -> None:
        """Leave the channel; sent steps stay for the trainer."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None


#: Statuses of normally finished requests.
_WHOLE: Final = (
    RequestStatus.FINISHED_STOPPED,
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
)


class _Worker:
    """Reads states out of the cache, and sends them in the order of requests' ends."""

    def __init__(self, options: Options, rank: int, cache: torch.Tensor) -> None:
        self._cache = cache
        self._block_size = cache.shape[2]
        self._most = check_bytes("max_bytes", options.max_bytes) - _BESIDE_BYTES
        self._log = LimitedLog(logger, TOLD_S)
        self._channel = sender_of(options, rank, cache)
        self.pending: deque[Finished] = deque()
        #: States read for the first pending request, and the start of their wait for the trainer.
        self._read: dict[str, torch.Tensor] = {}
        self._since_s = 0.0
        #: Expected places of this step's rows; None in a step without rows.
        self.expected: torch.Tensor | None = None
        #: Places in the cache with rows lost by the engine.
        self._lost: set[int] = set()

    def kept(self, places: torch.Tensor) -> None:
        """Record present rows."""
        self.expected = None
        if self._lost:
            self._lost.difference_update(places.tolist())

    def end_step(self) -> None:
        """Record expected but missing rows."""
        if self.expected is not None:
            self._lost.update(place for place in self.expected.tolist() if place >= 0)
            self.expected = None

    def send(self, patience: float) -> set[str]:
        """Send as much as possible; return requests sent, or never sendable."""
        done: set[str] = set()
        while self.pending and self._send(self.pending[0], patience):
            done.add(self.pending.popleft().request)
            self._read, self._since_s = {}, 0.0
        self._log.sum_up(time.monotonic())
        return done

    def _send(self, one: Finished, patience: float) -> bool:
        """Send a request's states; False to try again."""
        try:
            problem = self._problem(one)
            if problem:
                reason = f"request {one.request}: {problem}"
                self._log.warning("a request without rows", time.monotonic(), reason)
                self._channel.fail(reason=reason, timeout=patience)
                return True
            if not self._read:
                self._read = self._rows(one)
            meta = one.meta | {"next": one.tokens[one.rows]}
            self._channel.send(self._read, meta=meta, timeout=patience)
        except ChannelClosedError as error:
            self._tell(error, "the engine goes on, and sends to whoever opens it again")
            return True
        except ShmbusError as error:
            now_s = time.monotonic()
            self._since_s = self._since_s or now_s
            waits_s = now_s - self._since_s
            if not isinstance(error, WaitTimeoutError):
                time.sleep(patience)  # an immediate error must not cause an immediate retry
            if not isinstance(error, WaitTimeoutError) or waits_s >= SLOW_S:
                count = len(self.pending)
                self._tell(error, f"{count} requests keep their blocks, for {waits_s:.0f} s now")
            return False
        return True

    def _tell(self, error: ShmbusError, more: str) -> None:
        self._log.warning(type(error).__name__, time.monotonic(), f"{error}; {more}")

    def _problem(self, one: Finished) -> str:
        """Return the permanent reason against sending a request's states; empty for none."""
        if one.problem:
            return one.problem
        try:
            beside = len(encode_meta(one.meta))
        except (TypeError, ValueError) as error:
            return str(error)
        size = one.rows * (self._cache[0, :, 0].nbytes + 8) + beside
        if size > self._most:
            return (
                f"{one.rows} rows and params have {size} bytes, a slot has max_bytes={self._most}"
            )
        if self._lost and not self._lost.isdisjoint(self._places(one).tolist()):
            return "the engine kept no states in a step with a sequence as long as max_model_len"
        return ""

    def _places(self, one: Finished) -> torch.Tensor:
        blocks = torch.tensor(one.blocks, device="cpu").unsqueeze(1) * self._block_size
        return (blocks + torch.arange(self._block_size, device="cpu")).flatten()[: one.rows]

    def _rows(self, one: Finished) -> dict[str, torch.Tensor]:
        places = self._places(one).to(self._cache.device)
        hidden = self._cache[places // self._block_size, :, places % self._block_size]
        ids = torch.tensor(one.tokens[: one.rows], device=self._cache.device)
        return {"hidden": hidden.contiguous(), "token_ids": ids}

    def close(self) -> None:
        left = len(self.pending)
        self._channel.close(f"the engine ends; {left} requests were not sent" if left else "")


def sender_of(options: Options, rank: int, cache: torch.Tensor) -> TensorSender | GroupSender:
    """Become the sender of a channel, or a group's sender."""
    hidden = str(cache.dtype), (None, cache.shape[1], cache.shape[3])
    given: dict[str, Any] = {
        "slots": options.slots,
        "max_bytes": options.max_bytes,
        "device": str(cache.device),
        "specs": {"hidden": hidden, "token_ids": ("int64", (None,))},
        "label": f"vllm rank {rank}",
    }
    name, senders, receivers = options.channel, options.senders, options.receivers
    if senders == receivers == 1:
        return TensorChannel.create(name, **given)
    return TensorChannel.group(name, senders=senders, receivers=receivers).sender(rank, **given)


def options_of(extra: dict[str, Any]) -> Options:
    """Check the connector's options."""
    try:
        return msgspec.convert(extra, Options)
    except msgspec.ValidationError as error:
        fields = ", ".join(Options.__struct_fields__)
        raise ValueError(
            f"kv_connector_extra_config: expected {fields}, got {extra}: {error}"
        ) from error


def layers_of(vllm_config: VllmConfig) -> list[int]:
    """Check the configured layers."""
    speculative = vllm_config.speculative_config
    if speculative is None or speculative.method != "extract_hidden_states":
        got = speculative and speculative.method
        raise ValueError(f"expected the speculative method 'extract_hidden_states', got {got!r}")
    layers = list(speculative.draft_model_config.hf_config.eagle_aux_hidden_state_layer_ids)
    most = vllm_config.model_config.get_total_num_hidden_layers()
    # A GPU's fused RMSNorm adds later layers to the embedding's output, in place.
    least, first = 0, "the embedding"
    if vllm_config.device_config.device_type != "cpu":
        least, first = 1, "on a GPU vLLM overwrites 0, the embedding: compute it from token_ids"
    # vLLM hands them out in rising order, independent of the requested order.
    if not layers or layers != sorted(
        {each for each in layers if type(each) is int and least <= each <= most}
    ):
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids: expected layers from {least} ({first}) to {most} "
            f"(the last one's output, before the norm), each once, in order, got {layers}"
        )
    return layers
