"""A vLLM server: its routes for reinforcement learning, as of vLLM 0.32 and 0.33.

The routes exist in a server with ``VLLM_SERVER_DEV_MODE=1``, and weights require a server
started with ``--weight-transfer-config '{"backend": "shmbus"}'``
(`shmbus.engines.vllm_backend`).

Source: vllm/entrypoints/rl/online/api_router.py, vllm/distributed/weight_transfer/base.py; of sleep
`sleep` and `wake_up` in vllm/entrypoints/serve/dev/sleep/api_router.py, `EngineCore.sleep` and
`.wake_up` in vllm/v1/engine/core.py, `Executor` in vllm/v1/executor/abstract.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from shmbus.engines.engine_server import AGAIN, DRAFTS, WAKE, InferenceServer, PauseMode
from shmbus.engines.results import EngineError
from shmbus.engines.state_kinds import vllm_refusal
from shmbus.engines.vllm_plugin import LOAD_DRAFT, VERIFY
from shmbus.pool.server_rows import row_name
from shmbus.segment.fleet_note import DISCARDED

_ROUTES = "start the server with VLLM_SERVER_DEV_MODE=1, which has these routes"
_BACKEND = (
    'start the server with --weight-transfer-config \'{"backend": "shmbus"}\' in an environment '
    "that has shmbus installed"
)


_SLEEP_MODE = "start the server with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1"
_NEW_DRAFTS = "bring new ones by an EngineFleet of VllmDraft, or restart the server"
_OF_TARGET = "a draft model takes part in its server's steps: call this with VllmServer"
#: A rank's True in the answer of `/collective_rpc`, which sends texts.
_TRUE = "True"
#: Longest wait for the end of a pause, in seconds; a longer one is taken for sleep.
_PAUSE_S = 5.0
#: Draft methods without weights.
_WITHOUT_WEIGHTS = ("ngram", "ngram_gpu", "suffix")


class VllmServer(InferenceServer):
    """A vLLM server, by its address.

    Parameters
    ----------
    url : str
        ``http://host:port``.
    headers : mapping of str to str, optional
        Sent with each request, for example ``{"Authorization": "Bearer ..."}``.
    bus : str, optional
        Bus of its node, fed by a relay, with the server's weights; default: the fleet's.
    """

    kind: str = "vllm"
    modes: tuple[PauseMode, ...] = ("keep", "wait", "abort")
    # After a failure the remaining ranks' answers stay queued, and the next call mistakes them for
    # its own.
    answers_in_step: bool = False
    _adapter_routes = "/v1"
    _adapter_advice = (
        "start the server with --enable-lora, and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its "
        "environment"
    )

    #: Whether the server runs a draft model; None before the first question.
    _drafts: bool | None = None

    async def ranks(self, timeout: float) -> int:
        """Return the processes that load weights: tensor, pipeline and data parallel."""
        answer = await self.ask("get_world_size", "GET", "/get_world_size", timeout, advice=_ROUTES)
        size = answer.get("world_size")
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise self.refuse("get_world_size", answer, _ROUTES)
        return size

    async def check_reload(self, timeout: float) -> None:
        """Refuse state that no reload renews, by the engine's configuration."""
        config = await self._config(timeout)
        if config:
            parts = {
                name: SimpleNamespace(**part) if isinstance(part, dict) else part
                for name, part in config.items()
            }
            on_cpu = "cpu" in str(config.get("device_config"))
            refusal = vllm_refusal(SimpleNamespace(**parts), on_cpu=on_cpu)
            if refusal:
                advice = "nothing was touched"
                raise EngineError(self.address, "server_info", 200, refusal, advice)
            if config.get("speculative_config"):
                await self._note_drafts(timeout)

    async def _config(self, timeout: float) -> dict[str, Any]:
        """Ask for the engine's configuration; empty without the route."""
        query = {"config_format": "json"}
        status, text = await self.call(
            "server_info", "GET", "/server_info", timeout, query=query, advice=_ROUTES
        )
        said = self._object("server_info", text, _ROUTES) if status == 200 else {}
        config = said.get("vllm_config")
        return config if isinstance(config, dict) else {}

    async def prepare(self, bus: str, timeout: float) -> bool:
        """Make each rank attach to the weights of a bus."""
        await self._init({"bus": bus}, timeout)
        await self._note_drafts(timeout)
        return True

    async def _init(self, info: Mapping[str, object], timeout: float) -> None:
        body = {"init_info": {**info, "server": row_name(self.address)}}
        path = "/init_weight_transfer_engine"
        await self.ask("prepare", "POST", path, timeout, body=body, advice=_BACKEND)

    async def _note_drafts(self, timeout: float) -> None:
        """Ask, once, whether a draft model with own weights proposes tokens."""
        if self._drafts is not None:
            return
        status, text = await self.call(
            "drafts", "POST", "/collective_rpc", timeout,
            body={"method": "supports_draft_weight_updates"}, advice=AGAIN,
        )  # fmt: skip
        said = self._object("drafts", text, AGAIN) if status == 200 else {}
        self._drafts = _TRUE in said.get("results", [])
        self.caution = DRAFTS.format("speculative_config", _NEW_DRAFTS) if self._drafts else ""

    async def attach(self, bus: str, timeout: float) -> bool:
        """Return True: `prepare` has attached. The fleet calls this, not a user."""
        del bus, timeout
        return True

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Stop generating; vLLM's own three modes.

        In "keep" the requests in flight continue after `resume` with the old weights' keys and
        values, unless `clear_cache` makes vLLM preempt and recompute them.
        """
        answer = await self.ask(
            "pause",
            "POST",
            "/pause",
            timeout,
            query={"mode": mode, "clear_cache": "true" if clear_cache else "false"},
            advice=_ROUTES,
        )
        if answer.get("status") != "paused":
            raise self.refuse("pause", answer, AGAIN)

    async def load(self, version: int, clear_cache: bool, timeout: float) -> None:
        """Start, update and finish, with the version's number as vLLM's weight version."""
        del clear_cache  # handled by `pause`
        await self.post("start", "/start_weight_update", timeout)
        await self.post("update", "/update_weights", timeout, {"update_info": {"version": version}})
        # Before rows name the version: recovery after a trainer's death trusts rows.
        await self.forget_encoded(timeout)
        await self._finish({"weight_version": str(version)}, timeout)

    async def forget_encoded(self, timeout: float) -> None:
        """Drop encoder outputs of old weights."""
        path = "/reset_encoder_cache"
        # 404: no route, no encoder cache.
        await self.call("encoder", "POST", path, timeout, advice=AGAIN, good=(200, 404))

    async def _finish(self, body: Mapping[str, str], timeout: float) -> None:
        await self.post("finish", "/finish_weight_update", timeout, body)

    async def reload(self, path: str, version: int, clear_cache: bool, timeout: float) -> None:
        """Make each rank read a checkpoint; set the weight version and ask it back."""
        del clear_cache  # handled by `pause`
        call = {"method": "reload_weights", "kwargs": {"weights_path": path}, "timeout": timeout}
        answer = await self.post("reload", "/collective_rpc", timeout, call)
        results = answer.get("results")
        if (
            not isinstance(results, list)
            or not results
            or any(each is not None for each in results)
        ):
            raise self.refuse("reload", answer, AGAIN)
        await self.forget_encoded(timeout)
        said = str(version)
        await self.post("reload", "/update_weight_version", timeout, {"new_version": said})
        answer = await self.ask("reload", "GET", "/weight_info", timeout, advice=AGAIN)
        if answer.get("weight_version") != said:
            raise self.refuse("reload", answer, AGAIN)

    async def verify(self, asked: Mapping[str, object], timeout: float) -> list[object]:
        """Have each rank compare a slice of its weights; the ranks' answers."""
        call = {"method": VERIFY, "kwargs": {"asked": asked}}
        answer = await self.post("verify", "/collective_rpc", timeout, call)
        results = answer.get("results")
        if not isinstance(results, list):
            raise self.refuse("verify", answer, AGAIN)
        return results

    async def settle(self, loading: bool, timeout: float) -> bool:
        """Finish an update left open by a dead trainer or a lost answer.

        Only if a row shows the update: every rank raises after a finish without a start, or a
        second start, and with several ranks the answers are out of step from then on.
        """
        if loading:
            await self._finish({}, timeout)
        return loading

    async def check_sleep(self, level: int, timeout: float) -> None:
        """Refuse a server without sleep mode, whose ``/sleep`` answers 200 and frees nothing.

        Level 2 also loses adapters and a draft model's weights, which no update brings back.
        """
        await self.ask("sleep", "GET", "/is_sleeping", timeout, advice=_SLEEP_MODE)
        config = await self._config(timeout)
        said, advice = "", "no update brings them back after level 2: sleep at level=1"
        if (config.get("model_config") or {}).get("enable_sleep_mode") is False:
            said, advice = "model_config.enable_sleep_mode is False", _SLEEP_MODE
        elif level == DISCARDED and config.get("lora_config"):
            said = "lora_config has adapters"
        elif level == DISCARDED and config.get("speculative_config"):
            method = config["speculative_config"].get("method")
            said = "" if method in _WITHOUT_WEIGHTS else f"speculative_config has {method!r}"
        if said:
            raise EngineError(self.address, "sleep", 200, said, advice)

    async def sleep(self, level: int, timeout: float, *, cache: bool) -> None:
        """Free the GPU memory of a paused server; memory that sleeps already sleeps on.

        The pause has treated requests in flight, so ``mode=keep`` keeps the rest of them.
        """
        del cache  # memory that sleeps is left alone
        query = {"level": f"{level}", "mode": "keep"}
        path, good = "/sleep", (200,)
        await self.call("sleep", "POST", path, timeout, query=query, advice=_SLEEP_MODE, good=good)

    async def wake_weights(self, level: int, timeout: float, *, in_doubt: bool) -> None:
        """Take the weights' memory again.

        Memory in doubt is awake only where `sleep` never came: vLLM then resumes whole weights,
        and the fleet pauses it before the load.
        """
        del level, in_doubt
        await self._wake("weights", timeout)

    async def wake_cache(self, timeout: float, *, in_doubt: bool) -> None:
        """Take the cache's memory again, with which vLLM resumes; idempotent."""
        del in_doubt
        await self._wake("kv_cache", timeout)

    async def _wake(self, tag: str, timeout: float) -> None:
        query, advice = {"tags": tag}, "is the trainer's GPU memory free?"
        step, path, good = f"wake {tag}", "/wake_up", (200,)
        await self.call(step, "POST", path, timeout, query=query, advice=advice, good=good)

    async def resume(self, timeout: float) -> None:
        """Go on generating."""
        answer = await self.post("resume", "/resume", timeout)
        if answer.get("status") != "resumed":
            raise self.refuse("resume", answer, AGAIN)

    async def paused(self, timeout: float) -> bool:
        """Ask whether the server is paused."""
        answer = await self.ask("is_paused", "GET", "/is_paused", timeout, advice=_ROUTES)
        paused = answer.get("is_paused")
        if not isinstance(paused, bool):
            raise self.refuse("is_paused", answer, _ROUTES)
        return paused


class VllmDraft(VllmServer):
    """The draft model of a vLLM server, which proposes tokens for speculative decoding.

    An `EngineFleet` of drafts brings versions of a draft trainer, from a bus of their own. The
    server keeps generating: each rank loads between two steps of the engine, and answers stay
    those of the target model.

    Parameters
    ----------
    url, headers, bus
        As for `VllmServer`.

    Notes
    -----
    A draft model that shares tensors with its target (EAGLE: ``embed_tokens``, ``lm_head``) is
    published without them; a version with such a tensor is refused by name.
    """

    kind: str = "vllm-draft"

    async def prepare(self, bus: str, timeout: float) -> bool:
        """Make each rank attach its draft model to the weights of a bus."""
        await self._note_drafts(timeout)
        if not self._drafts:
            said, advice = "no draft model has weights of its own", "see --speculative-config"
            raise EngineError(self.address, "prepare", 200, said, advice)
        await self._require_awake("prepare", timeout)
        await self._init({"bus": bus, "draft": True}, timeout)
        self.caution = ""
        return True

    async def _require_awake(self, step: str, timeout: float) -> None:
        """Wait for the end of a pause, which vLLM reports like sleep; refuse a sleeping server."""
        deadline = time.monotonic() + min(timeout, _PAUSE_S)
        while True:
            status, text = await self.call(step, "GET", "/is_sleeping", timeout, advice=_SLEEP_MODE)
            # 404: a server without sleep mode.
            if status != 200 or not self._object(step, text, AGAIN).get("is_sleeping"):
                return
            if time.monotonic() >= deadline:
                raise EngineError(self.address, step, 200, "the server sleeps", WAKE)
            await asyncio.sleep(0.05)

    async def pause(self, mode: PauseMode, clear_cache: bool, timeout: float) -> None:
        """Do nothing: a draft's load needs no pause, which belongs to the target's fleet."""

    async def load(self, version: int, clear_cache: bool, timeout: float) -> None:
        """Load the version into each rank's draft model, in one call."""
        del clear_cache  # the cache holds the target's keys and values
        await self._require_awake("update", timeout)
        call = {"method": LOAD_DRAFT, "args": [version], "timeout": timeout}
        answer = await self.post("update", "/collective_rpc", timeout, call)
        results = answer.get("results")
        if not isinstance(results, list) or set(results) != {_TRUE}:
            raise self.refuse("update", answer, AGAIN)

    async def reload(self, path: str, version: int, clear_cache: bool, timeout: float) -> None:
        """Refuse: vLLM reads checkpoints into the target model."""
        raise EngineError(self.address, "reload", None, "no checkpoint is read", _OF_TARGET)

    async def verify(self, asked: Mapping[str, object], timeout: float) -> list[object]:
        """Refuse: the comparison knows the target model."""
        raise EngineError(self.address, "verify", None, "not compared", _OF_TARGET)

    async def settle(self, loading: bool, timeout: float) -> bool:
        """Return False: one call loads a draft, and leaves nothing open."""
        return False

    async def check_sleep(self, level: int, timeout: float) -> None:
        """Refuse: the draft model sleeps with its server."""
        raise EngineError(self.address, "sleep", None, "sleeps with its server", _OF_TARGET)

    async def resume(self, timeout: float) -> None:
        """Do nothing: the server never paused."""

    async def paused(self, timeout: float) -> bool:
        """Return False: the draft model pauses with its server."""
        return False
