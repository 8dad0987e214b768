"""Advantages by hand, at their limits, and by group identity."""

from __future__ import annotations

import math

import numpy as np
import pytest

from rl.algorithms.advantages import batch_scaled, group_scaled, leave_one_out, returns_to_go, whitened
from rl.algorithms.dr_grpo import DrGRPO
from rl.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rl.algorithms.rloo import RLOO
from rl.config.algorithms import (
    DrGRPOConfig,
    KlEstimator,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    RLOOConfig,
)
from tests.made_groups import made_group

SIZES = {"prompts_per_step": 2, "group_size": 4}


def array(*values: float, dtype: type = np.float64) -> np.ndarray:
    return np.array(values, dtype=dtype)


@pytest.mark.parametrize("function", [group_scaled, leave_one_out, lambda r: batch_scaled([r])[0], whitened])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("count", [1, 2, 3, 7, 8])
def test_equal_rewards_have_an_advantage_of_exactly_zero(function, dtype, count):
    assert function(np.full(count, 0.1, dtype=dtype)).tolist() == [0.0] * count


def test_leave_one_out_by_hand():
    """Rewards 1, 0, 2: 1 - 1, 0 - 1.5, 2 - 0.5."""
    assert leave_one_out(array(1.0, 0.0, 2.0)).tolist() == pytest.approx([0.0, -1.5, 1.5])
    assert leave_one_out(array(1.0, 0.0)).tolist() == [1.0, -1.0]


def test_whitened_by_hand():
    """Values 0, 0, 4 of one, one and two tokens: mean 2, variance 16 / 3 over n - 1."""
    expected = [-2 / math.sqrt(16 / 3), -2 / math.sqrt(16 / 3), 2 / math.sqrt(16 / 3)]
    assert whitened(array(0.0, 0.0, 4.0), np.array([1, 1, 2])).tolist() == pytest.approx(expected, abs=1e-6)
    assert whitened(array(0.0, 0.0, 4.0, 4.0)).tolist() == pytest.approx([*expected, expected[-1]], abs=1e-6)


@pytest.mark.parametrize(("gamma", "expected"), [(1.0, [1.0, 0.0, 0.0, 1.0]), (0.9, [0.9, 0.0, 0.0, 1.0])])
def test_tokens_that_no_policy_sampled_do_not_discount_a_return(gamma, expected):
    is_loss_token = np.array([True, False, False, True])
    assert returns_to_go(array(0.0, 0.0, 0.0, 1.0), is_loss_token, gamma).tolist() == pytest.approx(expected)


def test_statistics_are_those_of_the_group_that_a_rollout_is_in_however_many_came_back():
    """Groups a of three (one member failed) and b of one: b learns nothing, a is centered on its own mean."""
    a = made_group([1.0, 0.0, 7.0, 0.5], group_id=1)
    del a.rollouts[2]
    b = made_group([5.0], group_id=2)
    for groups in ([a, b], [b, a]):
        for rollouts in (a.rollouts, a.rollouts[::-1]):
            a.rollouts = rollouts
            DrGRPO(DrGRPOConfig(**SIZES, horizon=8)).assign_advantages(groups)
            by_index = {rollout.index: rollout.advantage for rollout in a.rollouts}
            assert by_index == pytest.approx({0: 0.5, 1: -0.5, 3: 0.0})
            assert b.rollouts[0].advantage == 0.0


def test_rloo_subtracts_the_kl_of_the_whole_answer_from_its_reward():
    group = made_group([1.0, 1.0], response_tokens=[2, 3])
    for rollout, gap in zip(group.rollouts, (0.5, 0.1), strict=True):
        rollout.ref_logprobs = np.where(rollout.loss_mask, rollout.rollout_logprobs - gap, 0.0)
    algorithm = RLOO(RLOOConfig(**SIZES, kl_coef=0.1))
    assert algorithm.penalizes_reward and algorithm.uses_reference and algorithm.skips_zero_advantage
    algorithm.assign_advantages([group])
    # KLs of 1.0 and 0.3 take 0.1 and 0.03: rewards 0.9 and 0.97.
    assert [r.advantage for r in group.rollouts] == pytest.approx([-0.07, 0.07], abs=1e-6)


def test_a_kl_in_the_reward_of_reinforce_pp_weighs_on_the_tokens_up_to_it():
    """One answer of three tokens, KL 1 on the second only: returns 0.5, 0.5, 1 before normalization."""
    group = made_group([1.0], response_tokens=[3])
    (rollout,) = group.rollouts
    places = np.flatnonzero(rollout.loss_mask)
    rollout.ref_logprobs = rollout.rollout_logprobs.copy()
    rollout.ref_logprobs[places[1]] -= 1.0
    algorithm = ReinforcePP(
        ReinforcePPConfig(prompts_per_step=1, group_size=1, kl_coef=0.5, kl_estimator=KlEstimator.k1)
    )
    algorithm.assign_advantages([group])
    expected = (np.array([0.5, 0.5, 1.0]) - 2 / 3) / np.std([0.5, 0.5, 1.0], ddof=1)
    assert rollout.token_advantages is not None
    np.testing.assert_allclose(rollout.token_advantages[places], expected, rtol=1e-5)
    assert not rollout.token_advantages[~rollout.loss_mask].any()


def test_reinforce_pp_normalizes_over_the_tokens_of_the_step():
    groups = [made_group([1.0, 0.0], response_tokens=[3, 1], group_id=i) for i in range(2)]
    ReinforcePP(ReinforcePPConfig(**SIZES)).assign_advantages(groups)
    values = np.concatenate([r.token_advantages[r.loss_mask] for g in groups for r in g.rollouts])
    assert values.mean() == pytest.approx(0.0, abs=1e-6) and values.std(ddof=1) == pytest.approx(1.0, abs=1e-6)


def test_the_baseline_form_takes_the_group_mean_before_it_normalizes():
    """A hard and an easy prompt: without a baseline the one right answer of the hard one counts like all the others."""
    hard = made_group([1.0, 0.0, 0.0, 0.0], response_tokens=[2] * 4, group_id=1)
    easy = made_group([1.0, 1.0, 1.0, 0.0], response_tokens=[2] * 4, group_id=2)
    ReinforcePPBaseline(ReinforcePPBaselineConfig(**SIZES)).assign_advantages([hard, easy])
    hard_right, easy_right = hard.rollouts[0].advantage, easy.rollouts[0].advantage
    assert hard_right / easy_right == pytest.approx(3.0) and easy.rollouts[3].advantage == pytest.approx(-hard_right)
    ReinforcePP(ReinforcePPConfig(**SIZES)).assign_advantages([hard, easy])
    assert hard.rollouts[0].advantage == pytest.approx(easy.rollouts[0].advantage)
