"""Importance weights by hand, and the settings that would count a difference twice or not at all."""

from __future__ import annotations

import math

import pytest

from rl.algorithms.correction import Correction, correction
from rl.algorithms.grpo import GRPO
from rl.algorithms.losses import LossTokens
from rl.algorithms.rloo import RLOO
from rl.config.algorithms import CorrectionConfig, GRPOConfig, OldLogprobs, Outside, RLOOConfig, WeightLevel
from rl.config.schema import ConfigError
from tests.made_losses import gradient, loss_inputs

RATIOS = [[1.0, 6.0], [0.9, 1.1]]
SIZES = {"prompts_per_step": 1, "group_size": 2}


def corrected(config: CorrectionConfig, ratios: list[list[float]] = RATIOS) -> Correction:
    inputs = loss_inputs(
        [[math.log(r) for r in row] for row in ratios],
        rollout=[[0.0] * len(row) for row in ratios],
        advantages=[1.0] * len(ratios),
    )
    tokens = LossTokens.of(inputs)
    return correction(config, tokens.old_logprobs - tokens.rollout_logprobs, tokens)


@pytest.mark.parametrize(
    ("config", "weights"),
    [
        (CorrectionConfig(WeightLevel.token, high=2.0), [1.0, 2.0, 0.9, 1.1]),
        (CorrectionConfig(WeightLevel.token, outside=Outside.mask, high=2.0), [1.0, 0.0, 0.9, 1.1]),
        (CorrectionConfig(WeightLevel.token, outside=Outside.mask, low=0.95, high=10.0), [1.0, 6.0, 0.0, 1.1]),
        (CorrectionConfig(WeightLevel.sequence, high=2.0), [2.0, 2.0, 0.99, 0.99]),
        (CorrectionConfig(WeightLevel.sequence, Outside.mask, high=2.0), [0.0, 0.0, 0.99, 0.99]),
        (CorrectionConfig(WeightLevel.none, geometric_high=2.0), [0.0, 0.0, 1.0, 1.0]),
        (CorrectionConfig(WeightLevel.none, geometric_low=1.0), [1.0, 1.0, 0.0, 0.0]),
        (CorrectionConfig(WeightLevel.token, high=2.0, geometric_low=0.9), [1.0, 2.0, 0.9, 1.1]),
    ],
)
def test_weights_by_hand(config, weights):
    assert corrected(config).weights.tolist() == pytest.approx(weights)


def test_shares_outside_are_counted_before_the_cap():
    algorithm = GRPO(GRPOConfig(**SIZES, correction=CorrectionConfig(WeightLevel.token, high=2.0)))
    rollout = [[-math.log(r) for r in row] for row in RATIOS]
    output = algorithm.loss(loss_inputs([[0.0, 0.0]] * 2, rollout=rollout, advantages=[1.0, 1.0]))
    assert output.token_sums["correction/outside_fraction"].item() == 1  # of 4 tokens
    assert output.sequence_sums["correction/outside_sequence_fraction"].item() == 1  # of 2 answers
    assert output.maxima["correction/weight_max"].item() == 2.0
    assert output.token_sums["correction/weight_mean"].item() == pytest.approx(1 + 2 + 0.9 + 1.1)


def test_a_weight_scales_the_loss_and_is_not_differentiated():
    config = GRPOConfig(**SIZES, correction=CorrectionConfig(WeightLevel.token, high=2.0))
    inputs = loss_inputs([[0.0, 0.0]], old=[[0.0, 0.0]], rollout=[[0.0, -math.log(6.0)]], advantages=[1.0])
    loss = GRPO(config).loss(inputs).loss
    assert loss.item() == pytest.approx(-(1.0 + 2.0) / 2)
    assert gradient(inputs, loss).tolist() == pytest.approx([-0.5, -1.0])


def test_a_rejected_answer_stays_in_the_denominator():
    config = GRPOConfig(**SIZES, correction=CorrectionConfig(WeightLevel.none, geometric_high=2.0))
    rollout = [[-math.log(r) for r in row] for row in RATIOS]
    output = GRPO(config).loss(loss_inputs([[0.0, 0.0]] * 2, rollout=rollout, advantages=[1.0, 1.0]))
    assert output.loss.item() == pytest.approx(-2.0 / 4)
    assert output.sequence_sums["correction/rejected_sequence_fraction"].item() == 1


def test_in_bypass_mode_a_weight_is_that_of_the_policy_itself():
    """Three policies: log-probs 0 (policy), -log 2 (old), -log 6 (engine): weights 3 of the old, 6 of the policy."""
    inputs = loss_inputs([[0.0]], old=[[-math.log(2.0)]], rollout=[[-math.log(6.0)]], advantages=[1.0])
    for old, expected in ((OldLogprobs.trainer, 3.0), (OldLogprobs.rollout, 6.0)):
        config = RLOOConfig(**SIZES, old_logprobs=old, correction=CorrectionConfig(WeightLevel.token, high=10.0))
        assert gradient(inputs, RLOO(config).loss(inputs).loss).item() == pytest.approx(-expected)


@pytest.mark.parametrize("level", [WeightLevel.token, WeightLevel.sequence])
def test_a_far_log_ratio_is_bounded_before_exp(level):
    weights = corrected(CorrectionConfig(level, high=1e30), [[math.exp(300.0), math.exp(300.0)]]).weights
    assert weights.tolist() == pytest.approx([math.exp(20.0)] * 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"old_logprobs": OldLogprobs.rollout, "correction": CorrectionConfig(WeightLevel.token)},
            "count the difference twice",
        ),
        ({"correction": CorrectionConfig(WeightLevel.token, high=0.0)}, "0 <= low < high"),
        ({"correction": CorrectionConfig(WeightLevel.token, low=0.5)}, "outside=truncate"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        GRPO(GRPOConfig(**SIZES, **settings))


def test_bypass_may_reject_whole_answers():
    config = CorrectionConfig(WeightLevel.none, geometric_high=2.0)
    GRPO(GRPOConfig(**SIZES, old_logprobs=OldLogprobs.rollout, correction=config))


def test_without_weights_and_bounds_nothing_is_corrected_and_nothing_is_reported():
    inputs = loss_inputs([[0.0, 0.0]], rollout=[[-1.0, -3.0]], advantages=[1.0])
    output = GRPO(GRPOConfig(**SIZES)).loss(inputs)
    assert output.loss.item() == -1.0 and not any("correction" in key for key in output.token_sums)
