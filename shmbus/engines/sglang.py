"""An SGLang server: its routes for reinforcement learning, as of SGLang 0.5.23.

Weights require a server started with ``--custom-weight-loader`` and the name of
`shmbus.engines.sglang_loader.load`. Differences to vLLM:

- A custom loader runs only between ``begin_weight_update`` and ``end_weight_update``; with a
  quantised model `begin` cannot be undone without loading: its ranks attach at the first load.
- Its scheduler does not catch a loader's exceptions: ours raises nothing, and the rows report.
- ``/ready`` tells whether the server is paused.

Source: sglang/srt/entrypoints/http_server.py, sglang/srt/managers/io_struct.py,
sglang/srt/managers/scheduler_components/weight_updater.py (`release_memory_occupation`,
`resume_memory_occupation`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Literal

from shmbus.engines.engine_server import AGAIN, DRAFTS, InferenceServer, PauseMode
from shmbus.engines.results import EngineError
from shmbus.engines.sglang_order import LOADER, Order, order_for_rank
from shmbus.engines.state_kinds import sglang_refusal
from shmbus.pool.server_rows import row_name
from shmbus.segment.fleet_note import DISCARDED

_LOADER = (
    f"start the server with --custom-weight-loader {LOADER} in an environment that has shmbus "
    "installed"
)
#: Limit of ranks: a pool's table holds 128 rows.
MOST_RANKS = 128
#: Status of an answer without an open session.
_NO_SESSION = 400
_VERSION = "is it an SGLang server of 0.5.23 or later?"
_REPLICAS = (
    "SGLang takes weights from tensors with one data-parallel replica only: start one server for "
    "each replica, and give the fleet all of them"
)


Verb = Literal["attach", "load"]
_SAVER = "start the server with --enable-memory-saver"
_NEW_DRAFT = "restart the server with a new draft model"
_LEVEL_1 = "no update brings it back after level 2: sleep at level=1"
#: Memory that wakes after the weights.
_CACHES = ["kv_cache", "cuda_graph"]
_RENEWED = "no update renews it: start the server without that option"


class SglangServer(InferenceServer):
    """An SGLang server, by its address.

    Parameters
    ----------
    url : str
        ``http://host:port``.
    headers : mapping of str to str, optional
        Sent with each request, for example ``{"Authorization": "Bearer ..."}``: the admin key, if
        set.
    bus : str, optional
        Bus of its node, fed by a relay, with the server's weights; default: the fleet's.
    """

    kind: str = "sglang"
    #: SGLang cannot await the requests in flight.
    modes: tuple[PauseMode, ...] = ("keep", "abort")
    answers_in_step: bool = True
    _adapter_advice = "start the server with --enable-lora and --max-lora-rank"

    def __init__(
        self, url: str, *, headers: Mapping[str, str] | None = None, bus: str | None = None
    ) -> None:
        super().__init__(url, headers=headers, bus=bus)
        self._tensor_parallel = 1
        self._quantised = False
        self._bus = ""

    async def ranks(self, timeout: float) -> int:
        """Return the processes that load weights: tensor and pipeline parallel."""
        answer = await self._info(timeout)
        sizes = [answer.get(name) for name in ("tp_size", "pp_size", "dp_size")]
        tensor, pipeline, data = (self._size(answer, size) for size in sizes)
        if data != 1:
            raise self._refuse_field("dp_size", data, _REPLICAS)
        loaders = answer.get("custom_weight_loader") or []
        if LOADER not in loaders:
            raise self._refuse_field("custom_weight_loader", loaders, _LOADER)
        self._tensor_parallel = tensor
        self._quantised = answer.get("quantization") is not None
        return tensor * pipeline

    async def _info(self, timeout: float) -> dict[str, Any]:
        """Ask for the server's options; refuse state that no update renews."""
        answer = await self.ask("server_info", "GET", "/server_info", timeout, advice=_VERSION)
        refused = sglang_refusal(answer)
        if refused:
            raise self._refuse_field(refused, answer[refused], _RENEWED)
        drafts = answer.get("speculative_algorithm") not in (None, "NGRAM")
        self.caution = DRAFTS.format("speculative_algorithm", _NEW_DRAFT) if drafts else ""
        return answer

    def _size(self, answer: Mapping[str, Any], size: object) -> int:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_RANKS:
            raise self._refuse_field("tp_size, pp_size, dp_size", size, _VERSION)
        return size

    def _refuse_field(self, name: str, value: object, advice: str) -> EngineError:
        return EngineError(self.address, "server_info", 200, f"{name} is {value!r}", advice)

    async def prepare(self, bus: str, timeout: float) -> bool:
        """Record the bus; ranks can be reached only during the pause."""
        del timeout
        self._bus = bus
        return False

    async def attach(self, bus: str, timeout: float) -> bool:
        """Make each rank attach, unless a session would change weights."""
        self._bus = bus
        if self._quantised:
            return False
        await self._whole_session("attach", None, timeout)
        return True

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop generating.

        "keep" is SGLang's ``in_place``, and with `clear_cache` its ``retract``: requests return to
        the queue, and their keys and values are computed again. "abort" is SGLang's own.
        """
        names = {"keep": "retract" if clear_cache else "in_place", "abort": "abort"}
        await self._succeed("pause", "/pause_generation", {"mode": names[mode]}, timeout)

    async def load(self, version: int, clear_cache: bool, timeout: float) -> None:
        """Begin, update and end, with the version's number as SGLang's weight version."""
        await self._whole_session("load", version, timeout)
        if clear_cache:
            await self._flush(timeout)

    async def check_reload(self, timeout: float) -> None:
        """Refuse state that no reload renews, like encoder outputs of images and sounds."""
        await self._info(timeout)
        status, text = await self.call("model_info", "GET", "/model_info", timeout, advice=_VERSION)
        said = self._object("model_info", text, _VERSION) if status == 200 else {}
        for name in ("has_image_understanding", "has_audio_understanding"):
            if said.get(name):
                advice = "bring weights by EngineFleet.update, whose loader forgets encoder outputs"
                raise EngineError(self.address, "model_info", 200, f"{name} is True", advice)

    async def reload(self, path: str, version: int, clear_cache: bool, timeout: float) -> None:
        """Read a checkpoint from a directory on the server's machine; the pause continues."""
        body = {
            "model_path": path,
            "weight_version": str(version),
            "flush_cache": clear_cache,
            "keep_pause": True,
        }
        await self._succeed("reload", "/update_weights_from_disk", body, timeout)

    async def check_sleep(self, level: int, timeout: float) -> None:
        """Refuse a server that frees nothing, or loses state that no update brings back."""
        info = await self._info(timeout)
        refused = {
            "enable_memory_saver": (info.get("enable_memory_saver") is False, _SAVER),
            "enable_weights_cpu_backup": (
                level != DISCARDED and info.get("enable_weights_cpu_backup") is False,
                "start the server with --enable-weights-cpu-backup, or sleep at level=2",
            ),
            "enable_lora": (level == DISCARDED and bool(info.get("enable_lora")), _LEVEL_1),
            "speculative_algorithm": (level == DISCARDED and bool(self.caution), _LEVEL_1),
        }
        for name, (is_so, advice) in refused.items():
            if is_so:
                raise self._refuse_field(name, info.get(name), advice)

    async def sleep(self, level: int, timeout: float, *, cache: bool) -> None:
        """Free the GPU memory of a paused server; at level 1 by its own copy on the host."""
        del level
        tags = ["weights", *(_CACHES if cache else [])]
        await self._move("sleep", "/release_memory_occupation", tags, timeout)

    async def wake_weights(self, level: int, timeout: float, *, in_doubt: bool) -> None:
        """Take the weights' memory again."""
        del level
        await self._resume_memory(["weights"], timeout, in_doubt)

    async def wake_cache(self, timeout: float, *, in_doubt: bool) -> None:
        """Take the memory of the cache and of CUDA graphs again."""
        await self._resume_memory(_CACHES, timeout, in_doubt)

    async def _resume_memory(self, tags: list[str], timeout: float, in_doubt: bool) -> None:
        step = "wake weights" if "weights" in tags else "wake kv_cache"
        try:
            await self._move(step, "/resume_memory_occupation", tags, timeout)
        except EngineError as error:
            # SGLang tells nobody what sleeps, and refuses memory that is awake.
            if not in_doubt or error.status is None:
                raise

    async def _move(self, step: str, path: str, tags: list[str], timeout: float) -> None:
        body, advice = {"tags": tags}, "see the server's own log; is the trainer's GPU memory free?"
        await self.call(step, "POST", path, timeout, body=body, advice=advice, good=(200,))

    async def _whole_session(self, verb: Verb, version: int | None, timeout: float) -> None:
        await self._begin(timeout)
        try:
            await self._order(verb, version, timeout)
        except EngineError:
            with contextlib.suppress(EngineError):  # the first cause counts
                await self._end(timeout)
            raise
        await self._end(timeout)

    async def _begin(self, timeout: float) -> None:
        body = {"selector": "target"}
        try:
            await self._succeed("begin", "/begin_weight_update", body, timeout)
        except EngineError as error:
            if error.status is None:
                raise
            # A session with a lost answer is still open, and SGLang allows one at a time.
            with contextlib.suppress(EngineError):
                await self._end(timeout)
            await self._succeed("begin", "/begin_weight_update", body, timeout)

    async def _end(self, timeout: float) -> None:
        await self._succeed("end", "/end_weight_update", {}, timeout)

    async def _order(self, verb: Verb, version: int | None, timeout: float) -> None:
        body: dict[str, Any] = {
            "serialized_named_tensors": [
                order_for_rank(Order(verb, self._bus, row_name(self.address), rank, version))
                for rank in range(self._tensor_parallel)
            ],
            "load_format": LOADER,
            # The default, true, would report a failed flush as a failed update.
            "flush_cache": False,
            "selector": "target",
        }
        if version is not None:
            body["weight_version"] = str(version)
        await self._succeed("update", "/update_weights_from_tensor", body, timeout)

    async def _flush(self, timeout: float) -> None:
        status, text = await self.call("flush", "POST", "/flush_cache", timeout, advice=AGAIN)
        if status != 200:
            raise EngineError(
                self.address,
                "flush",
                status,
                text,
                "the weights are new, and keys and values of the old ones may be served",
            )

    async def settle(self, loading: bool, timeout: float) -> bool:
        """End a session left open by a dead trainer or a lost answer; the status tells."""
        del loading
        path, good = "/end_weight_update", (200, _NO_SESSION)
        status, _ = await self.call("end", "POST", path, timeout, body={}, advice=AGAIN, good=good)
        return status == 200

    async def resume(self, timeout: float) -> None:
        """Go on generating."""
        await self._succeed("resume", "/continue_generation", {}, timeout)

    async def paused(self, timeout: float) -> bool:
        """Ask whether the server takes requests, SGLang's only sign of a pause."""
        good = (200, 503)
        status, _ = await self.call("ready", "GET", "/ready", timeout, advice=_VERSION, good=good)
        return status == 503

    async def _succeed(
        self, step: str, path: str, body: Mapping[str, Any], timeout: float
    ) -> dict[str, Any]:
        """Post, and believe neither a status nor a body alone."""
        answer = await self.post(step, path, timeout, body)
        if answer.get("success") is not True and answer.get("status") != "ok":
            raise self.refuse(step, answer, AGAIN)
        return answer
