"""Where one method turns into another: each is held against the formula of its neighbor, not against itself."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from rl.algorithms.advantages import batch_scaled, centered, group_scaled, leave_one_out
from rl.algorithms.cispo import CISPO
from rl.algorithms.correction import correction
from rl.algorithms.dapo import DAPO
from rl.algorithms.dr_grpo import DrGRPO
from rl.algorithms.grpo import GRPO
from rl.algorithms.gspo import GSPO
from rl.algorithms.losses import LossTokens, kl_estimate
from rl.algorithms.policy_gradient import PolicyGradient
from rl.algorithms.reinforce_pp import ReinforcePP, ReinforcePPBaseline
from rl.algorithms.rloo import RLOO
from rl.config.algorithms import (
    AdvantageScale,
    Aggregation,
    CISPOConfig,
    CorrectionConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KlEstimator,
    OldLogprobs,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    RLOOConfig,
    WeightLevel,
)
from rl.protocols import LossInputs
from tests.made_groups import made_group
from tests.made_losses import gradient, loss_inputs

SIZES: dict[str, Any] = {"prompts_per_step": 2, "group_size": 2}


def random_inputs(lengths: list[int], *, spread: float = 0.4, **changes: Any) -> LossInputs:
    rng = np.random.default_rng(len(lengths))
    old = [-2.0 * rng.random(n) - 0.2 for n in lengths]
    values: dict[str, Any] = {
        name: [(row + spread * rng.standard_normal(len(row))).tolist() for row in old]
        for name in ("logprobs", "rollout", "ref")
    }
    values["old"] = [row.tolist() for row in old]
    values["advantages"] = rng.standard_normal(len(lengths)).tolist()
    return loss_inputs(**(values | {"groups": [i // 2 for i in range(len(lengths))]} | changes))


def assert_equal_losses(one: PolicyGradient, other: PolicyGradient, inputs: LossInputs) -> None:
    losses = [algorithm.loss(inputs).loss for algorithm in (one, other)]
    assert losses[0].item() == pytest.approx(losses[1].item(), abs=1e-12)
    torch.testing.assert_close(gradient(inputs, losses[0]), gradient(inputs, losses[1]), atol=1e-12, rtol=1e-9)
    assert gradient(inputs, losses[0]).any()


def advantages(algorithm: PolicyGradient, groups: list) -> list[float]:
    algorithm.assign_advantages(groups)
    return [rollout.advantage for group in groups for rollout in group.rollouts]


def test_gspo_on_answers_of_one_token_is_grpo():
    gspo = GSPO(GSPOConfig(**SIZES, clip_low=0.2, clip_high=0.28))
    grpo = GRPO(GRPOConfig(**SIZES, clip_high=0.28, aggregation=Aggregation.seq_mean_token_mean))
    assert_equal_losses(gspo, grpo, random_inputs([1] * 8))


def test_gspo_has_the_value_and_gradient_of_its_token_form():
    """Equation 14 of the paper: s_i,t = sg[s_i] pi_t / sg[pi_t], with the geometric mean s_i of the ratios."""
    inputs = random_inputs([3, 1, 4, 2])
    gspo = GSPO(GSPOConfig(**SIZES, clip_low=0.1, clip_high=0.15))
    terms = []
    for live, old, advantage in zip(
        inputs.logprobs.split([3, 1, 4, 2]),
        inputs.old_logprobs.split([3, 1, 4, 2]),
        inputs.advantages[[0, 3, 4, 8]],
        strict=True,
    ):
        ratio = (live - old).mean().exp().detach() * (live - live.detach()).exp()
        terms.append(torch.minimum(ratio * advantage, ratio.clamp(0.9, 1.15) * advantage).mean())
    expected = -torch.stack(terms).mean()
    loss = gspo.loss(inputs).loss
    assert loss.item() == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(gradient(inputs, loss), gradient(inputs, expected), atol=1e-12, rtol=1e-9)


def test_dapo_without_its_parts_is_grpo():
    parts_off = {"clip_high": 0.2, "dynamic_sampling": False, "overlong_buffer": 0}
    paper = {"aggregation": Aggregation.seq_mean_token_mean}
    dapo = DAPO(DAPOConfig(**SIZES, response_limit=8, **parts_off, **paper))
    grpo = GRPO(GRPOConfig(**SIZES, **paper))
    assert_equal_losses(dapo, grpo, random_inputs([3, 1, 4, 2]))
    groups = [made_group([1.0, 0.0, 0.0]), made_group([0.0, 0.0], group_id=1)]
    assert all(dapo.keep(group) for group in groups)
    assert [dapo.shape_reward(rollout) for rollout in groups[0].rollouts] == [1.0, 0.0, 0.0]
    assert advantages(dapo, groups) == advantages(grpo, groups)


def test_dr_grpo_on_answers_of_one_length_is_unscaled_grpo_with_a_token_mean():
    dr_grpo = DrGRPO(DrGRPOConfig(**SIZES, horizon=3))
    grpo = GRPO(GRPOConfig(**SIZES, advantage_scale=AdvantageScale.none))
    assert_equal_losses(dr_grpo, grpo, random_inputs([3] * 4))
    groups = [made_group([1.0, 0.0, 0.0])]
    assert advantages(dr_grpo, groups) == advantages(grpo, groups) == pytest.approx([2 / 3, -1 / 3, -1 / 3])


def test_dr_grpo_has_the_gradient_of_rloo_up_to_constants_where_the_policy_is_the_old_one():
    """n / (n - 1) in the advantage and the horizon in the loss."""
    inputs = random_inputs([3, 1, 4, 2], spread=0.0)
    dr_grpo, rloo = DrGRPO(DrGRPOConfig(**SIZES, horizon=7)), RLOO(RLOOConfig(**SIZES))
    torch.testing.assert_close(
        7 * gradient(inputs, dr_grpo.loss(inputs).loss), gradient(inputs, rloo.loss(inputs).loss)
    )
    rewards = np.array([1.0, 0.0, 0.5, 0.0])
    np.testing.assert_allclose(leave_one_out(rewards), 4 / 3 * centered(rewards))


def test_cispo_inside_its_bounds_has_the_gradient_of_the_unclipped_surrogate():
    cispo = CISPO(CISPOConfig(**SIZES, old_logprobs=OldLogprobs.trainer, weight_high=1e6))
    wide = GRPO(GRPOConfig(**SIZES, clip_low=1.0, clip_high=1e6))
    inputs = random_inputs([3, 1, 4, 2])
    torch.testing.assert_close(
        gradient(inputs, cispo.loss(inputs).loss), gradient(inputs, wide.loss(inputs).loss), atol=1e-12, rtol=1e-9
    )


def test_cispo_raises_a_small_weight_to_its_lower_bound():
    """Ratios 0.1, 1 and 7 in [0.5, 5]."""
    config = CISPOConfig(**SIZES, weight_low=0.5, weight_high=5.0)
    inputs = loss_inputs([[math.log(0.1), 0.0, math.log(7.0)]], old=[[0.0] * 3], advantages=[1.0])
    output = CISPO(config).loss(inputs)
    assert gradient(inputs, output.loss).tolist() == pytest.approx([-w / 3 for w in (0.5, 1.0, 5.0)])
    assert output.token_sums["train/weight_clipped_low_fraction"].item() == 1
    assert output.token_sums["train/weight_clipped_high_fraction"].item() == 1


def test_a_dual_clip_above_every_ratio_is_none():
    assert_equal_losses(
        GRPO(GRPOConfig(**SIZES, dual_clip=1e6)), GRPO(GRPOConfig(**SIZES)), random_inputs([3, 1, 4, 2])
    )


def test_rloo_of_two_answers_is_their_difference():
    assert leave_one_out(np.array([0.25, 1.0])).tolist() == [-0.75, 0.75]


def test_one_group_is_a_batch():
    rewards = np.array([1.0, 0.0, 0.5, 0.0])
    np.testing.assert_array_equal(batch_scaled([rewards])[0], group_scaled(rewards))


def test_reinforce_pp_without_discount_and_kl_gives_every_token_the_normalized_reward():
    """Rewards 1, 0 and 1 over 1, 2 and 1 tokens: mean 1/2, variance 1/3 over n - 1."""
    answers = [(1.0, 1), (0.0, 2), (1.0, 1)]
    groups = [made_group([reward], response_tokens=[n], group_id=i) for i, (reward, n) in enumerate(answers)]
    values = advantages(ReinforcePP(ReinforcePPConfig(prompts_per_step=3, group_size=1)), groups)
    assert values == pytest.approx([0.5 * math.sqrt(3), -0.5 * math.sqrt(3), 0.5 * math.sqrt(3)], abs=1e-6)


def test_the_baseline_form_is_dr_grpos_advantage_over_its_deviation():
    graded = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 0.5, 0.0]]
    groups = [made_group(rewards, response_tokens=[3] * 4, group_id=i) for i, rewards in enumerate(graded)]
    ours = advantages(ReinforcePPBaseline(ReinforcePPBaselineConfig(**SIZES)), groups)
    plain = np.concatenate([centered(np.array(rewards)) for rewards in graded])
    np.testing.assert_allclose(ours, plain / np.repeat(plain, 3).std(ddof=1), rtol=1e-6)


def test_sequence_weights_of_answers_of_one_token_are_token_weights():
    tokens = LossTokens.of(random_inputs([1] * 6))
    log_ratio = tokens.old_logprobs - tokens.rollout_logprobs
    by_token, by_sequence = (
        correction(CorrectionConfig(level, high=1.2), log_ratio, tokens).weights
        for level in (WeightLevel.token, WeightLevel.sequence)
    )
    torch.testing.assert_close(by_token, by_sequence)
    assert by_token.max() == pytest.approx(1.2) and by_token.min() < 1


@pytest.mark.parametrize("level", list(WeightLevel))
def test_where_the_engine_samples_from_the_old_policy_nothing_is_corrected(level):
    inputs = random_inputs([3, 1, 4, 2])
    inputs.rollout_logprobs = inputs.old_logprobs
    corrected = GRPO(GRPOConfig(**SIZES, correction=CorrectionConfig(level, geometric_low=0.9, geometric_high=1.1)))
    assert_equal_losses(corrected, GRPO(GRPOConfig(**SIZES)), inputs)


def test_three_policies_within_all_bounds_are_the_ratio_to_the_engine():
    """(old / engine) (policy / old) = policy / engine, which is bypass mode, where neither clips."""
    wide = {"clip_low": 1.0, "clip_high": 1e6}
    inputs = random_inputs([3, 1, 4, 2])
    decoupled = GRPO(GRPOConfig(**SIZES, **wide, correction=CorrectionConfig(WeightLevel.token, high=1e6)))
    bypass = GRPO(GRPOConfig(**SIZES, **wide, old_logprobs=OldLogprobs.rollout))
    loss = decoupled.loss(inputs).loss
    of_decoupled = gradient(inputs, loss)
    inputs.old_logprobs = inputs.rollout_logprobs  # as the trainer fills it in bypass mode
    assert bypass.loss(inputs).loss.item() == pytest.approx(loss.item(), abs=1e-12)
    torch.testing.assert_close(gradient(inputs, bypass.loss(inputs).loss), of_decoupled)


def test_prompt_mean_of_groups_with_equally_many_tokens_is_the_token_mean():
    by_prompt = GRPO(GRPOConfig(**SIZES, aggregation=Aggregation.prompt_mean_token_mean))
    assert_equal_losses(by_prompt, GRPO(GRPOConfig(**SIZES)), random_inputs([3, 1, 2, 2]))


def test_kl_estimates_meet_where_the_policies_do():
    """k3 - k2 is of third order: a tenth of the gap makes a thousandth of the difference."""
    gaps = torch.tensor([0.1, 0.01], dtype=torch.float64)
    k2, k3 = (kl_estimate(gaps, torch.zeros(2, dtype=torch.float64), kind) for kind in (KlEstimator.k2, KlEstimator.k3))
    assert ((k3 - k2)[0] / (k3 - k2)[1]).item() == pytest.approx(1000, rel=0.05)
