"""A rollout worker without verl: ``verl_answering.py BUS [own | version N | fail]``."""

import sys
from typing import Any

import shmbus


def sample(word: int, index: int) -> dict[str, Any]:
    """A prompt of two tokens, and as many sampled ones as the index says, and one more."""
    count = index + 1
    return {
        "tokens": [1, word, *([word] * count)], "loss_mask": [0, 0, *([1] * count)],
        "logprobs": [0.0, 0.0, *([-0.5] * count)], "score": 0.25 * index,
    }  # fmt: skip


def main() -> None:
    with shmbus.Producer(sys.argv[1], wait=60.0) as producer:
        if sys.argv[2:] == ["own"]:
            samples = [{**sample(9, index), "policy_version": 3} for index in range(2)]
            producer.put_group("their own", samples, round=producer.next_round())
            return
        while True:
            request = producer.requests.next(timeout=None)
            assert request is not None
            word = int(request.meta["raw_prompt"][0]["content"])
            version = producer.policy_version
            if sys.argv[2:3] == ["version"]:
                version = int(sys.argv[3])
            if sys.argv[2:] == ["fail"]:
                producer.requests.fail(request, "the sandbox is gone")
            elif request.index == 1 and request.meta.get("fork"):
                row = sample(word, 1)
                score = row.pop("score")
                other = {**row, "loss_mask": [0, 0, 0, 1]}
                producer.requests.answer(
                    request, score=score, rows=[row, other], policy_version=version
                )
            else:
                producer.requests.answer(
                    request, policy_version=version, **sample(word, request.index)
                )


if __name__ == "__main__":
    main()
