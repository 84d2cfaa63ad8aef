"""The demo's learning part: the task is fair, sampler and trainer agree, and GRPO steps help."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

torch = pytest.importorskip("torch")

from trainer_adapter.advantages import group_advantages  # noqa: E402
from trainer_adapter.demo import policy as learning  # noqa: E402
from trainer_adapter.demo import task as sorting  # noqa: E402
from trainer_adapter.demo.policy import Policy  # noqa: E402
from trainer_adapter.demo.sampler import PolicyConfig, Sample, Sampler, evaluate  # noqa: E402
from trainer_adapter.demo.task import SortTask  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_thread")

TASK = SortTask()
# Float32 sums in another order: two blocks of width 64 stay well below this.
LOGPROB_TOLERANCE = 1e-4


def pack(groups: list[list[Sample]], scores: list[list[float]]) -> Any:
    samples = [sample for group in groups for sample in group]
    lens = np.array([len(sample.tokens) for sample in samples])
    rewards = np.array(scores, np.float32)
    relative = group_advantages(rewards)

    def joined(arrays: list[npt.NDArray[np.generic]], dtype: type) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays).astype(dtype))

    return SimpleNamespace(
        tokens=joined([s.tokens for s in samples], np.int64),
        position_ids=joined([np.arange(n) for n in lens], np.int64),
        cu_seqlens=torch.from_numpy(np.append(0, lens.cumsum()).astype(np.int32)),
        max_seqlen=int(lens.max()),
        loss_mask=joined([s.loss_mask for s in samples], np.bool_),
        logprobs=joined([s.logprobs for s in samples], np.float32),
        advantages=torch.from_numpy(np.repeat(relative.reshape(-1), lens)),
        scores=torch.from_numpy(rewards.reshape(-1)),
    )


def sample_groups(
    sampler: Sampler,
    prompts: list[npt.NDArray[np.int32]],
    size: int,
    limit: int,
    rng: np.random.Generator,
) -> list[list[Sample]]:
    found = sampler.sample([prompt for prompt in prompts for _ in range(size)], limit, rng)
    return [found[at : at + size] for at in range(0, len(found), size)]


def random_policy(config: PolicyConfig, seed: int) -> Policy:
    """A policy with a random head, too: distributions differ between contexts."""
    policy = Policy(config, seed=seed)
    head = policy.weights["head"]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        head.copy_(torch.randn(head.shape, generator=generator) * 0.3)
    return policy


def test_only_the_right_answer_earns_the_whole_reward(seed: int) -> None:
    rng = np.random.default_rng(seed)
    for _ in range(200):
        prompt = TASK.sample_prompt(rng)
        right = sorting.answer(prompt)
        assert sorting.reward(prompt, right) == 1.0
        assert sorting.solved(prompt, right)
        wrong = right.copy()
        at = rng.integers(len(wrong))
        wrong[at] = (wrong[at] + rng.integers(1, sorting.VOCAB_SIZE)) % sorting.VOCAB_SIZE
        assert 0.0 <= sorting.reward(prompt, wrong) < 1.0
        assert not sorting.solved(prompt, wrong)


def test_no_held_out_prompt_is_a_training_prompt_in_any_order(seed: int) -> None:
    rng = np.random.default_rng(seed)
    train = {tuple(sorted(TASK.sample_prompt(rng)[:-1])) for _ in range(3_000)}
    assert not train & {tuple(sorted(prompt[:-1])) for prompt in TASK.held_out_prompts(500)}


def test_the_held_out_set_is_fixed_and_has_no_prompt_twice() -> None:
    prompts = [prompt.tolist() for prompt in TASK.held_out_prompts(300)]
    assert prompts == [prompt.tolist() for prompt in TASK.held_out_prompts(300)]
    assert len({tuple(prompt) for prompt in prompts}) == 300
    assert {len(prompt) - 1 for prompt in prompts} == set(
        range(TASK.min_digits, TASK.max_digits + 1)
    )


def test_evaluation_refuses_a_prompt_that_training_may_draw(seed: int) -> None:
    rng = np.random.default_rng(seed)
    sampler = Sampler(PolicyConfig())
    with pytest.raises(ValueError, match="training split"):
        evaluate(sampler, TASK, [TASK.sample_prompt(rng, "train")], rng)


@pytest.mark.parametrize("layers", [1, 2])
def test_sampled_logprobs_agree_with_the_packed_forward(layers: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    policy = random_policy(PolicyConfig(layers=layers), seed)
    sampler = Sampler(policy.config, policy.export_weights())
    prompts = [TASK.sample_prompt(rng) for _ in range(24)]
    # Lengths must differ for this to prove anything, and some policies never end by themselves.
    groups = sample_groups(sampler, prompts[:16], 4, TASK.max_completion_len, rng)
    groups += sample_groups(sampler, prompts[16:], 4, TASK.max_completion_len // 2, rng)
    assert len({len(sample.completion) for group in groups for sample in group}) > 1
    batch = pack(groups, [[0.0, 0.0, 0.0, 1.0]] * len(groups))
    with torch.no_grad():
        logprobs, _ = learning.token_logprobs(policy, batch)
    torch.testing.assert_close(
        batch.logprobs[batch.loss_mask], logprobs, rtol=0, atol=LOGPROB_TOLERANCE
    )


def test_a_few_dozen_grpo_steps_on_stale_batches_raise_the_reward(seed: int) -> None:
    rng = np.random.default_rng(seed)
    task = SortTask(min_digits=2, max_digits=3)
    policy = Policy(PolicyConfig(max_len=task.max_len), seed=seed)
    learner = learning.Learner(policy, learning_rate=6e-3)
    sampler = Sampler(policy.config, policy.export_weights())
    held_out = task.held_out_prompts(100)
    before = evaluate(sampler, task, held_out * 4, rng)
    steps, lag = 30, 2
    waiting: list[Any] = []
    for _ in range(steps + lag):
        prompts = [task.sample_prompt(rng) for _ in range(16)]
        groups = sample_groups(sampler, prompts, 8, task.max_completion_len, rng)
        scores = [
            [sorting.reward(prompt, sample.completion) for sample in group]
            for prompt, group in zip(prompts, groups, strict=True)
        ]
        waiting.append(pack(groups, scores))
        if len(waiting) > lag:
            assert learner.step(waiting.pop(0)).applied
            sampler.load(policy.export_weights())
    after = evaluate(sampler, task, held_out * 4, rng)
    assert learner.steps == steps
    assert before.mean_reward < 0.3
    print(f"reward {before.mean_reward:.3f} -> {after.mean_reward:.3f}")
    assert after.mean_reward > before.mean_reward + 0.15


def some_batch(sampler: Sampler, rng: np.random.Generator) -> Any:
    prompts = [TASK.sample_prompt(rng) for _ in range(4)]
    groups = sample_groups(sampler, prompts, 4, TASK.max_completion_len, rng)
    return pack(groups, [[0.0, 0.25, 0.5, 1.0]] * 4)


def test_a_batch_that_is_not_finite_changes_no_weight(seed: int) -> None:
    policy = Policy(PolicyConfig(), seed=seed)
    learner = learning.Learner(policy)
    before = policy.export_weights()
    batch = some_batch(Sampler(policy.config, before), np.random.default_rng(seed))
    batch.advantages[batch.loss_mask.nonzero()[0]] = float("nan")
    assert not learner.step(batch).applied
    assert learner.steps == 0
    np.testing.assert_array_equal(policy.export_weights(), before)
    batch.advantages.nan_to_num_()
    assert learner.step(batch).applied
    assert (policy.export_weights() != before).any()
