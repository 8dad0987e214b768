from __future__ import annotations

import pytest

from rl.algorithms.dapo import DAPO, NothingToLearn
from rl.config.algorithms import DAPOConfig
from rl.types import RolloutGroup
from tests.made_groups import made_group


def dapo(**settings) -> DAPO:
    return DAPO(DAPOConfig(**({"prompts_per_step": 2, "group_size": 2, "response_limit": 20} | settings)))


def graded(correct: list[bool], rewards: list[float] | None = None) -> RolloutGroup:
    group = made_group(rewards or [float(right) for right in correct])
    for rollout, right in zip(group.rollouts, correct, strict=True):
        rollout.reward_parts = {"correct": float(right)}
    return group


@pytest.mark.parametrize(
    ("tokens", "lost"), [(1, 0.0), (16, 0.0), (17, 0.25), (18, 0.5), (20, 1.0)], ids=lambda value: str(value)
)
def test_overlong_shaping_by_hand(tokens, lost):
    """A limit of 20 with a buffer of 4: nothing up to 16 tokens, then a quarter a token."""
    (rollout,) = made_group([1.0], response_tokens=[tokens]).rollouts
    assert dapo().shape_reward(rollout) == pytest.approx(1.0 - lost)
    assert dapo(overlong_penalty=0.5).shape_reward(rollout) == pytest.approx(1.0 - 0.5 * lost)
    assert dapo(overlong_buffer=0).shape_reward(rollout) == 1.0


def test_the_buffer_is_a_fifth_of_the_limit_as_in_the_paper():
    assert DAPOConfig(response_limit=20480).overlong_tokens == 4096


def test_groups_that_are_all_right_or_all_wrong_are_not_kept():
    algorithm = dapo()
    assert [algorithm.keep(graded(c)) for c in ([False, False], [True, True], [False, True])] == [False, False, True]


def test_shaping_does_not_let_a_group_of_wrong_answers_through():
    group = graded([False, False], rewards=[-1.0, -0.5])
    group.rollouts[0].shaped_reward = -2.0
    assert not group.is_uniform and not dapo().keep(group)


def test_without_dynamic_sampling_every_group_is_kept():
    algorithm = dapo(dynamic_sampling=False, max_sampled_batches=1)
    assert all(algorithm.keep(graded([False, False])) for _ in range(10))


def test_a_search_in_vain_ends_with_a_table_of_pass_rates():
    algorithm = dapo(max_sampled_batches=3)
    outcomes = [[True, False], [False, False], [True, True], [False, False], [False, False]]
    for correct in outcomes:
        algorithm.keep(graded(correct))
    with pytest.raises(NothingToLearn) as caught:
        algorithm.keep(graded([True, True]))
    message = str(caught.value)
    assert "kept 1 of the last 6 groups, and a batch needs 2" in message
    assert [line.split()[-1] for line in message.splitlines() if line.startswith("  ")] == ["3", "1", "0", "2"]
    assert "algorithm.dynamic_sampling=false" in message


def test_one_batch_in_so_many_is_enough_to_go_on():
    algorithm = dapo(max_sampled_batches=3)
    for _ in range(10):
        for correct in ([False, False], [True, False], [False, False]):
            algorithm.keep(graded(correct))
