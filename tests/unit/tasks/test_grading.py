"""The shuffled control, evaluation sets and graders, which every task shares."""

from __future__ import annotations

import asyncio

import pytest

from rl.config.tasks import ArithmeticConfig, EvalSamplingConfig, SamplingConfig, TrainReward
from rl.tasks.arithmetic import Arithmetic
from rl.tasks.controls import shuffled
from rl.types import Prompt, Reward, RewardError, Rollout
from tests.made_answers import answer
from tests.made_scores import Moody


def task_of(renderer, *, seed=0, eval_limit=None, samples=1, task_class=Arithmetic, **values) -> Arithmetic:
    config = ArithmeticConfig(
        digits=1,
        held_out=20,
        validation=0,
        warm_start=0,
        eval_limit=eval_limit,
        sampling=SamplingConfig(max_new_tokens=3),
        eval_sampling=EvalSamplingConfig(max_new_tokens=3, samples_per_problem=samples),
        **values,
    )
    return task_class(config, renderer=renderer, seed=seed)


async def numbered(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
    return [Reward(float(r.index), correct=r.index % 2 == 1, parts={"index": float(r.index)}) for r in rollouts]


def shuffled_values(prompt: Prompt, *, seed: int, group_id: int, num: int = 16) -> list[float]:
    rollouts = [answer("", index=index, group_id=group_id) for index in range(num)]
    return [reward.value for reward in asyncio.run(shuffled(numbered, seed=seed)(prompt, rollouts))]


def test_shuffled_rewards_are_a_permutation_by_seed_and_group(renderer):
    prompt = task_of(renderer).training[0]
    first = shuffled_values(prompt, seed=0, group_id=5)
    assert sorted(first) == [float(i) for i in range(16)] and first != sorted(first)
    assert first == shuffled_values(prompt, seed=0, group_id=5)
    others = [shuffled_values(prompt, seed=0, group_id=6), shuffled_values(prompt, seed=1, group_id=5)]
    assert all(other != first for other in others) and others[0] != others[1]


def test_shuffled_rewards_fall_on_every_answer_equally_often(renderer):
    """Of 2,000 groups the single reward of 4 answers lands on each about 500 times; 5 standard deviations are 97."""
    prompt = task_of(renderer).training[0]
    counts = [0] * 4
    for group_id in range(2000):
        counts[shuffled_values(prompt, seed=0, group_id=group_id, num=4).index(3.0)] += 1
    assert all(abs(count - 500) < 97 for count in counts)


def test_the_control_shuffles_training_and_leaves_truth_and_evaluation_alone(renderer):
    task = task_of(renderer, reward=TrainReward.shuffled)
    truth = task_of(renderer)
    prompt = task.training[0]

    def graded(grade, group_id: int) -> list[Reward]:
        texts = [prompt.answer, "x", "y", "z"]
        return asyncio.run(grade(prompt, [answer(t, index=i, group_id=group_id) for i, t in enumerate(texts)]))

    moved = [[reward.value for reward in graded(task.grade, group_id)] for group_id in range(20)]
    assert all(sorted(values) == [0.0, 0.0, 0.0, 1.0] for values in moved)
    assert any(values != [1.0, 0.0, 0.0, 0.0] for values in moved)
    for group_id in range(20):
        assert [reward.correct for reward in graded(task.grade, group_id)] == [True, False, False, False]
        assert [r.value for r in graded(task.eval_sets()[0].grader, group_id)] == [1.0, 0.0, 0.0, 0.0]
        assert [r.value for r in graded(truth.grade, group_id)] == [1.0, 0.0, 0.0, 0.0]


def test_an_evaluation_set_has_its_own_sampling_and_the_first_problems(renderer):
    (all_of_it,) = task_of(renderer).eval_sets()
    (some,) = task_of(renderer, eval_limit=7, samples=3).eval_sets()
    assert (len(all_of_it.prompts), len(some.prompts), some.samples_per_problem) == (20, 7, 3)
    assert some.sampling.is_greedy and some.sampling.max_new_tokens == 3
    assert [p.prompt_id for p in some.prompts] == [p.prompt_id for p in all_of_it.prompts[:7]]
    (other_seed,) = task_of(renderer, seed=1).eval_sets()
    assert other_seed.sampling.seed != all_of_it.sampling.seed


def test_a_grader_that_breaks_is_an_error_and_no_wrong_answer(renderer):
    task = task_of(renderer, task_class=Moody)
    with pytest.raises(RewardError, match=r"the grader of arithmetic:\d\+\d failed: ZeroDivisionError\('oops'\)"):
        asyncio.run(task.grade(task.training[0], [answer("fail")]))
