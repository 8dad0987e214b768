from __future__ import annotations

import math

import pytest
import torch

from rl.algorithms.grpo import GRPO
from rl.config.algorithms import AdvantageScale, GRPOConfig, KlEstimator
from rl.config.schema import ConfigError
from rl.protocols import Algorithm, LossInputs
from rl.types import LossCounts, RolloutGroup
from tests.made_groups import made_group
from tests.made_losses import loss_inputs


def grpo(**settings) -> GRPO:
    return GRPO(GRPOConfig(prompts_per_step=1, group_size=4, **settings))


def advantages(algorithm: GRPO, *groups: RolloutGroup) -> list[float]:
    algorithm.assign_advantages(groups)
    return [rollout.advantage for group in groups for rollout in group.rollouts]


def one_sequence(
    logprobs, *, old=None, advantages, mask=None, ref=None, num_loss_tokens=None, dtype=torch.float32
) -> LossInputs:
    return loss_inputs(
        [logprobs],
        old=None if old is None else [old],
        advantages=[advantages],
        mask=[mask or [True] * len(logprobs)],
        ref=None if ref is None else [ref],
        counts=None if num_loss_tokens is None else LossCounts(num_loss_tokens, 1, 1),
        dtype=dtype,
    )


def test_grpo_is_an_algorithm():
    algorithm: Algorithm = grpo()
    assert not algorithm.uses_reference
    assert grpo(kl_coef=0.001).uses_reference


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1.0, 0.0, 0.0, 0.0], [1.5, -0.5, -0.5, -0.5]),
        ([0.0, 1.0], [-math.sqrt(0.5), math.sqrt(0.5)]),
        ([10.0, 11.0], [-math.sqrt(0.5), math.sqrt(0.5)]),
        ([0.1] * 8, [0.0] * 8),
        ([0.1] * 7, [0.0] * 7),
        ([0.0] * 3, [0.0] * 3),
        ([0.7], [0.0]),
    ],
)
def test_advantages_by_hand(rewards, expected):
    assert advantages(grpo(), made_group(rewards)) == pytest.approx(expected, abs=1e-5)


def test_uniform_rewards_give_advantages_of_exactly_zero():
    """The mean of 7 times 0.1 is not 0.1 in floating point."""
    assert advantages(grpo(), made_group([0.1] * 7)) == [0.0] * 7
    assert advantages(grpo(advantage_scale=AdvantageScale.none), made_group([0.1] * 7)) == [0.0] * 7


def test_group_of_one_has_zero_advantage():
    assert advantages(grpo(), made_group([3.0])) == [0.0]


def test_without_std_the_advantage_is_the_distance_from_the_mean():
    assert advantages(grpo(advantage_scale=AdvantageScale.none), made_group([10.0, 11.0])) == [-0.5, 0.5]


def test_advantages_come_from_the_shaped_reward():
    group = made_group([1.0, 1.0])
    group.rollouts[1].shaped_reward = 0.5
    assert advantages(grpo(advantage_scale=AdvantageScale.none), group) == [0.25, -0.25]


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(AdvantageScale.group, 0.70711), (AdvantageScale.batch, 0.08617), (AdvantageScale.none, 0.5)],
)
def test_what_advantages_are_divided_by(scale, expected):
    """Groups of 0, 1 and of 10, 11: a deviation of 0.7071 in each, of 5.8023 over all four."""
    groups = made_group([0.0, 1.0]), made_group([10.0, 11.0], group_id=1)
    assert advantages(grpo(advantage_scale=scale), *groups) == pytest.approx([-expected, expected] * 2, abs=1e-5)


def test_advantages_do_not_depend_on_the_order_of_rollouts():
    rewards = [0.3, 0.9, 0.0, 0.4]
    forward = advantages(grpo(), made_group(rewards))
    backward = advantages(grpo(), made_group(rewards[::-1]))
    assert forward == pytest.approx(backward[::-1])


def test_loss_is_divided_by_the_count_of_the_whole_update():
    """Two tokens of loss 1 here and eight of loss 0 elsewhere make 0.2, not the 0.5 of a mean of means."""
    inputs = one_sequence([-1.0, -1.0], advantages=[-1.0, -1.0], mask=[True, True], num_loss_tokens=10)
    assert grpo().loss(inputs).loss.item() == pytest.approx(0.2)


def test_splits_of_a_batch_have_the_same_loss():
    advantages = [-1.0, 0.0, 0.0, 0.0]
    whole = grpo().loss(one_sequence([-1.0] * 4, advantages=advantages, mask=[True] * 4)).loss
    parts = [grpo().loss(one_sequence([-1.0], advantages=[a], mask=[True], num_loss_tokens=4)).loss for a in advantages]
    assert sum(part.item() for part in parts) == pytest.approx(whole.item()) == pytest.approx(0.25)


def test_values_outside_the_mask_cannot_enter():
    clean = one_sequence([-0.1, -7.0], advantages=[1.0, 0.0], mask=[True, False])
    poisoned = one_sequence(
        [-0.1, math.nan], old=[-0.1, math.inf], advantages=[1.0, math.nan], mask=[True, False], ref=[-0.2, math.nan]
    )
    algorithm = grpo(kl_coef=0.1)
    clean.ref_logprobs = torch.tensor([-0.2, -7.0])
    results = [algorithm.loss(inputs) for inputs in (clean, poisoned)]
    for result in results:
        result.loss.backward()
    assert results[0].loss.item() == results[1].loss.item()
    assert clean.logprobs.grad is not None and poisoned.logprobs.grad is not None
    assert clean.logprobs.grad.tolist() == poisoned.logprobs.grad.tolist()
    assert poisoned.logprobs.grad[1].item() == 0.0
    assert {k: v.item() for k, v in results[0].token_sums.items()} == {
        k: v.item() for k, v in results[1].token_sums.items()
    }


def test_micro_batch_without_loss_tokens_has_zero_loss_and_gradient():
    inputs = one_sequence([-1.0, -2.0], advantages=[0.0, 0.0], mask=[False, False], num_loss_tokens=5)
    output = grpo().loss(inputs)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert inputs.logprobs.grad is not None and inputs.logprobs.grad.tolist() == [0.0, 0.0]
    assert output.maxima["train/ratio_max"].item() == -math.inf


def test_equal_policies_have_ratio_one_and_the_policy_gradient():
    inputs = one_sequence([-1.3, -0.2], advantages=[2.0, -1.0], mask=[True, True])
    output = grpo().loss(inputs)
    output.loss.backward()
    assert output.maxima["train/ratio_max"].item() == 1.0
    assert output.token_sums["train/approx_kl"].item() == 0.0
    assert output.token_sums["train/ratio_clipped_low_fraction"].item() == 0
    assert output.token_sums["train/ratio_clipped_high_fraction"].item() == 0
    assert inputs.logprobs.grad is not None and inputs.logprobs.grad.tolist() == [-1.0, 0.5]


def test_separate_bounds_clip_their_own_side():
    old = [math.log(1 / 1.5), math.log(1 / 0.5), math.log(1 / 10.0)]
    inputs = one_sequence([0.0, 0.0, 0.0], old=old, advantages=[1.0, -1.0, -1.0], mask=[True] * 3)
    output = grpo(clip_low=0.2, clip_high=0.28).loss(inputs)
    output.loss.backward()
    assert output.loss.item() == pytest.approx((-1.28 + 0.8 + 10.0) / 3)
    assert output.token_sums["train/ratio_clipped_high_fraction"].item() == 1
    assert output.token_sums["train/ratio_clipped_low_fraction"].item() == 1
    assert inputs.logprobs.grad is not None
    assert inputs.logprobs.grad.tolist() == pytest.approx([0.0, 0.0, 10.0 / 3])


def test_zero_advantage_has_a_gradient_of_exactly_zero_at_any_ratio():
    inputs = one_sequence([0.0, -80.0, -0.5], old=[-90.0, 0.0, -0.4], advantages=[0.0] * 3, mask=[True] * 3)
    output = grpo().loss(inputs)
    output.loss.backward()
    assert output.loss.item() == 0.0
    assert inputs.logprobs.grad is not None and not inputs.logprobs.grad.any()


def test_kl_term_is_weighted_and_reported():
    inputs = one_sequence([-1.0], advantages=[0.0], mask=[True], ref=[-1.5])
    output = grpo(kl_coef=0.1, kl_estimator=KlEstimator.k2).loss(inputs)
    assert output.loss.item() == pytest.approx(0.1 * 0.125)
    assert output.token_sums["train/kl_ref"].item() == pytest.approx(0.125)


def test_a_kl_term_without_a_gradient_is_refused():
    with pytest.raises(ConfigError, match=r"algorithm\.kl_estimator=k1 with algorithm\.kl_coef=0\.1"):
        grpo(kl_coef=0.1, kl_estimator=KlEstimator.k1)
    assert not grpo(kl_coef=0.0, kl_estimator=KlEstimator.k1).uses_reference


def test_pairs_of_groups_do_not_share_statistics():
    first, second = made_group([0.0, 1.0]), made_group([10.0, 11.0])
    assert advantages(grpo(advantage_scale=AdvantageScale.none), first) == advantages(
        grpo(advantage_scale=AdvantageScale.none), second
    )
