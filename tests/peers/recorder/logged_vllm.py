"""vLLM's own server with a log of each sampled token: ``logged_vllm.py LOG ...``."""

import json
import runpy
import sys
from collections.abc import AsyncIterator
from typing import Any


def log_outputs(path: str) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    generate = AsyncLLM.generate

    async def logged(self: Any, *arguments: Any, **more: Any) -> AsyncIterator[Any]:
        async for found in generate(self, *arguments, **more):
            for output in found.outputs:
                ids = list(output.token_ids)
                logprobs = output.logprobs or [None] * len(ids)
                values = [
                    None if at is None else at[token].logprob
                    for token, at in zip(ids, logprobs, strict=True)
                ]
                line = [found.request_id, output.index, list(found.prompt_token_ids or ()), ids]
                log.write(json.dumps([*line, values]) + "\n")
            log.flush()
            yield found

    AsyncLLM.generate = logged
    log = open(path, "a")  # noqa: SIM115  (for the life of the process)


if __name__ == "__main__":
    log_outputs(sys.argv.pop(1))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
