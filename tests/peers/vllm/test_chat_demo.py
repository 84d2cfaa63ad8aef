"""``shmbus demo --engine vllm``: resumes after a kill of all processes; refusals leave nothing."""

import base64
import contextlib
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from safetensors import safe_open
from serving import kill_all, process_with
from transformers import AutoTokenizer
from vllm_model import save

import shmbus

TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}assistant "
TIMEOUT_S = 400.0


def chat_model(folder: Path, template: str | None = TEMPLATE) -> Path:
    save(str(folder), 0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def command(model: Path, output: Path, *more: str) -> list[str]:
    begin = [sys.executable, "-m", "shmbus", "demo", "--engine", "vllm"]
    return [*begin, "--model", str(model), "--output", str(output), *more]


def buses() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "demo-" in name}


@contextlib.contextmanager
def begun(run: list[str], folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Start a run with a file of its output; afterwards end the run, and remove its bus."""
    said = folder / "said"
    with said.open("wb") as file:
        process = subprocess.Popen(run, stdout=file, stderr=file, start_new_session=True)
    try:
        yield process, said
    finally:
        kill_all(process)
        bus = f"demo-{zlib.crc32(os.fsencode((folder / 'out').resolve())):08x}"
        with contextlib.suppress(shmbus.BusNotFoundError):
            shmbus.unlink(bus)


def await_step(process: subprocess.Popen[bytes], said: Path, step: str) -> None:
    end = time.monotonic() + TIMEOUT_S
    while f"step   {step}" not in said.read_text():
        assert process.poll() is None and time.monotonic() < end, said.read_text()[-3000:]
        time.sleep(0.1)


@pytest.mark.timeout(900)
def test_a_killed_demo_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    run = command(chat_model(tmp_path / "model"), tmp_path / "out", "--steps", "6")
    before = buses()
    with begun(run, tmp_path) as (process, output):
        await_step(process, output, "5/6")
        kill_all(process)
        assert buses() > before
        ended = subprocess.run(run, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert "resumed after step 4 from" in ended.stdout, ended.stderr[-3000:]
        assert "after 6 steps in" in ended.stdout and buses() == before
    with safe_open(tmp_path / "out" / "checkpoint.safetensors", "pt") as saved:
        said = base64.b64decode(saved.metadata()["state"])
    _, training, held_out = msgspec.msgpack.decode(said)
    assert [point["step"] for point in training] == [1, 2, 3, 4, 5, 6]
    assert [point["step"] for point in held_out] == [0, 4, 6]
    assert (tmp_path / "out" / "reward.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.timeout(900)
def test_a_dead_server_or_worker_starts_again_within_the_run(tmp_path: Path) -> None:
    run = command(chat_model(tmp_path / "model"), tmp_path / "out", "--steps", "8")
    before = buses()
    with begun(run, tmp_path) as (process, output):
        for step, word in (("2/8", "demo.chat_task"), ("5/8", "vllm.entrypoints.openai")):
            await_step(process, output, step)
            os.kill(process_with(word), signal.SIGKILL)
        process.wait(TIMEOUT_S)
        text = output.read_text()
        assert "after 8 steps in" in text and "resumed" not in text, text[-3000:]
        assert "the workers' process ended" in text and "the server ended" in text
        assert buses() == before


#: On a CPU vLLM sleeps too, and keeps its memory.
TURNS = """
import sys
from trainer_adapter.demo import chat, chat_task

class Sleeping(chat.VllmServer):
    async def check_sleep(self, level, timeout):
        pass

def server_of(folder, port, dtype, options, *more, of=chat_task.server_of):
    options.remove("--enable-sleep-mode")
    return of(folder, port, dtype, options, *more)

chat.VllmServer, chat_task.server_of = Sleeping, server_of
config = chat.ChatConfig(model=sys.argv[1], output=sys.argv[2], steps=6, turns=True)
run = chat.ChatRun(config, chat.CPU)
run.run()
print([row["sleep_s"] > 0.001 for row in run.figures])
"""


@pytest.mark.timeout(900)
def test_trainer_and_server_take_turns(tmp_path: Path) -> None:
    model, before = chat_model(tmp_path / "model"), buses()
    ended = subprocess.run(
        [sys.executable, "-c", TURNS, str(model), str(tmp_path / "out")],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert ended.stdout.endswith(f"{[True] * 6}\n"), ended.stderr[-3000:]
    log = (tmp_path / "out" / "server.log").read_text()
    assert log.count("POST /sleep?level=2") == log.count("POST /wake_up?tags=kv_cache") == 6
    assert buses() == before


@pytest.mark.parametrize("fault", ["no model", "no template", "no weights"])
def test_an_unusable_model_is_refused_in_a_sentence(fault: str, tmp_path: Path) -> None:
    before, folder = buses(), tmp_path / "model"
    if fault != "no model":
        chat_model(folder, None if fault == "no template" else TEMPLATE)
    if fault == "no weights":
        (folder / "model.safetensors").unlink()
    ended = subprocess.run(
        command(folder, tmp_path / "out"), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    said = [line for line in ended.stderr.splitlines() if line.startswith("shmbus demo: ")]
    assert ended.returncode == 1 and len(said) == 1 and str(folder) in said[0], ended.stderr
    assert buses() == before
