"""A real vLLM with a log of sampled tokens, and a recorder before the engine."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engine_log import EngineLog
from http_requests import free_port

import shmbus

HERE = Path(__file__).parent
VLLM = HERE.parents[2] / "build" / "peers" / "vllm" / "bin" / "python"
PATIENCE = float(os.environ.get("SHMBUS_TEST_PATIENCE", "1"))
START_S, END_S = 240.0 * PATIENCE, 60.0


def answers(url: str) -> bool:
    with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
        return bool(answer.status == 200)
    return False


def end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


class Engine:
    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = EngineLog(folder / "tokens.jsonl")
        self._output = folder / "vllm.log"
        environment = dict(
            os.environ, VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
            VLLM_CPU_OMP_THREADS_BIND="0", VLLM_SERVER_DEV_MODE="1",
        )  # fmt: skip
        environment.pop("PYTHONPATH", None)
        with self._output.open("w") as output:
            self.process = subprocess.Popen(
                [
                    str(VLLM), str(HERE / "logged_vllm.py"), str(self.log.path),
                    "--model", str(folder / "model"), "--served-model-name", "m",
                    "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32",
                    "--enforce-eager", "--max-model-len", "32768", "--max-num-seqs", "64",
                    "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
                    "--reasoning-parser", "qwen3", "--trust-request-chat-template",
                ],
                env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def output(self) -> str:
        return self._output.read_text()

    def started(self) -> None:
        deadline = time.monotonic() + START_S
        while not answers(f"{self.url}/health"):
            assert self.process.poll() is None, self.output()[-3000:]
            assert time.monotonic() < deadline, self.output()[-3000:]
            time.sleep(0.5)


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if not VLLM.exists():
        pytest.skip("expected vLLM's environment; make build/peers/vllm/.made")
    folder = tmp_path_factory.mktemp("engine")
    (folder / "model").mkdir()
    command = [str(VLLM), str(HERE / "recorder_model.py"), str(folder / "model"), "0"]
    subprocess.run(command, check=True, timeout=START_S)
    engine = Engine(folder)
    try:
        engine.started()
        yield engine
        assert engine.process.poll() is None, engine.output()[-8000:]
    finally:
        end(engine.process)


class Proxy:
    def __init__(self, bus: str, engines: list[str], *options: str) -> None:
        words = [word for url in engines for word in ("--engine", url)]
        self.process = subprocess.Popen(
            [
                sys.executable, "-m", "shmbus", "proxy", bus, *words, "--http", "127.0.0.1:0",
                "--log-level", "info", *options,
            ],
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        self.url = line.rpartition(" ")[2].strip().removesuffix("/v1")

    def metrics(self) -> dict[str, float]:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = [line for line in answer.read().decode().splitlines() if line[0] != "#"]
        return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}

    def end(self) -> None:
        end(self.process)
        assert self.process.stdout is not None
        self.process.stdout.close()


@pytest.fixture
def proxy(bus: shmbus.Bus, engine: Engine) -> Iterator[Proxy]:
    proxy = Proxy(bus.name, [engine.url], "--train-grammar")
    try:
        yield proxy
    finally:
        proxy.end()


def opened(url: str, body: Any, key: str | None = None) -> Any:
    """Open the answer to a POST; a refusal shows its words."""
    headers = {"Content-Type": "application/json"}
    if key is not None:
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        return urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:
        with error:
            raise AssertionError(f"{error.code}: {error.read().decode()[:2000]}") from error


def post(url: str, body: Any, key: str | None = None) -> Any:
    with opened(url, body, key) as answer:
        return json.loads(answer.read() or b"null")
