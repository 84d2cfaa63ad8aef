"""A rollout worker without SkyRL: ``skyrl_answering.py BUS [fail]``."""

import sys

import shmbus


def main() -> None:
    with shmbus.Producer(sys.argv[1], wait=60.0) as producer:
        while True:
            request = producer.requests.next(timeout=None)
            assert request is not None
            if sys.argv[2:] == ["fail"] and request.index == 1 and request.attempt == 0:
                producer.requests.fail(request, "the sandbox is gone")
                continue
            word, count = request.meta["env_extras"]["word"], request.index + 1
            producer.requests.answer(
                request, score=0.25 * request.index, policy_version=producer.policy_version,
                tokens=[1, 2, *([word] * count)], loss_mask=[0, 0, *([1] * count)],
                logprobs=[0.0, 0.0, *([-0.5] * count)], meta={"finish_reason": "length"},
            )  # fmt: skip


if __name__ == "__main__":
    main()
