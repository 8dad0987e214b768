"""What holds of every algorithm: gradients, limits and invariances of its loss."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.algorithms import (
    Aggregation,
    AlgorithmConfig,
    CISPOConfig,
    CorrectionConfig,
    DAPOConfig,
    DrGRPOConfig,
    GRPOConfig,
    GSPOConfig,
    KlEstimator,
    KlGradient,
    KlPlacement,
    OldLogprobs,
    Outside,
    ReinforcePPBaselineConfig,
    ReinforcePPConfig,
    RLOOConfig,
    WeightLevel,
)
from rl.config.build import build
from rl.loggers.names import unlisted
from rl.protocols import Algorithm, LossInputs
from rl.types import Rollout
from tests.made_groups import made_group
from tests.made_losses import gradient, loss_inputs

SIZES: dict[str, Any] = {"prompts_per_step": 2, "group_size": 4}
CONFIGS: dict[str, AlgorithmConfig] = {
    "grpo": GRPOConfig(**SIZES),
    "grpo_prompt_mean": GRPOConfig(**SIZES, aggregation=Aggregation.prompt_mean_token_mean),
    "grpo_paper": GRPOConfig(**SIZES, aggregation=Aggregation.seq_mean_token_mean, kl_coef=0.1),
    "grpo_dual": GRPOConfig(**SIZES, dual_clip=3.0),
    "grpo_kl_unbiased": GRPOConfig(
        **SIZES, kl_coef=0.1, kl_estimator=KlEstimator.k1, kl_gradient=KlGradient.unbiased, entropy_coef=0.01
    ),
    "grpo_token_weights": GRPOConfig(**SIZES, correction=CorrectionConfig(WeightLevel.token)),
    "grpo_sequence_weights": GRPOConfig(
        **SIZES, correction=CorrectionConfig(WeightLevel.sequence, Outside.mask, 0.3, 3.0, geometric_high=1.5)
    ),
    "dr_grpo": DrGRPOConfig(**SIZES, horizon=10),
    "dapo": DAPOConfig(**SIZES, response_limit=10),
    "rloo": RLOOConfig(**SIZES),
    "rloo_bypass": RLOOConfig(
        **SIZES, old_logprobs=OldLogprobs.rollout, correction=CorrectionConfig(WeightLevel.token)
    ),
    "reinforce_pp": ReinforcePPConfig(**SIZES),
    "reinforce_pp_baseline": ReinforcePPBaselineConfig(**SIZES, kl_coef=0.1),
    "gspo": GSPOConfig(**SIZES, clip_low=0.1, clip_high=0.1),
    "cispo": CISPOConfig(**SIZES),
}
STRAIGHT_THROUGH = {"grpo_kl_unbiased", "rloo_bypass", "cispo"}
"""Whose gradient is by design not the derivative of the loss."""

LENGTHS = [3, 1, 5, 2]
GROUPS = [0, 0, 1, 1]


def algorithm_of(name: str) -> Algorithm:
    return build(CONFIGS[name])


def random_values(seed: int = 0) -> dict[str, list[list[float]]]:
    """Ratios within about half and twice, so that some are clipped and none is exactly at a bound."""
    rng = np.random.default_rng(seed)
    old = [(-2.0 * rng.random(n) - 0.2) for n in LENGTHS]
    near = {name: [row + scale * rng.standard_normal(len(row)) for row in old] for name, scale in SCALES.items()}
    values = near | {"old": old, "advantages": [np.full(n, rng.standard_normal()) for n in LENGTHS]}
    values["entropy"] = [rng.random(n) for n in LENGTHS]
    return {name: [row.tolist() for row in rows] for name, rows in values.items()}


SCALES = {"logprobs": 0.4, "rollout": 0.3, "ref": 0.5}


def made(values: dict[str, list[list[float]]], **options: Any) -> LossInputs:
    return loss_inputs(**({"groups": GROUPS} | values | options))  # type: ignore[arg-type]


def part_of(values: dict[str, list[list[float]]], places: list[int], **options: Any) -> LossInputs:
    """A micro-batch of some of the sequences, of the update that all of them are."""
    whole = made(values)
    chosen = {name: [rows[i] for i in places] for name, rows in values.items()}
    part = made(chosen, groups=[GROUPS[i] for i in places], counts=whole.counts, **options)
    return replace(part, group_loss_tokens=whole.group_loss_tokens[places])


@pytest.mark.parametrize("name", sorted(set(CONFIGS) - STRAIGHT_THROUGH))
@pytest.mark.parametrize("seed", range(3))
def test_gradients_are_finite_differences_of_the_loss(name, seed):
    """At the inputs themselves: importance weights and old policies are held, as the loss holds them."""
    algorithm, values = algorithm_of(name), random_values(seed)
    inputs = made(values)
    exact = gradient(inputs, algorithm.loss(inputs).loss)
    step = 1e-6
    for place in range(sum(LENGTHS)):
        moved = []
        for sign in (1, -1):
            shifted = inputs.logprobs.detach().clone()
            shifted[place] += sign * step
            moved.append(algorithm.loss(replace(inputs, logprobs=shifted)).loss.item())
        assert exact[place].item() == pytest.approx((moved[0] - moved[1]) / (2 * step), abs=1e-7), place


@pytest.mark.parametrize(
    ("name", "weight_of"),
    [
        ("cispo", lambda v: np.clip(np.exp(v["logprobs"] - v["old"]), 0.0, 5.0)),
        ("rloo_bypass", lambda v: np.minimum(np.exp(v["logprobs"] - v["rollout"]), 2.0)),
    ],
)
def test_gradients_of_held_weights_are_those_of_weighted_log_probs(name, weight_of):
    values = random_values()
    inputs = made(values)
    flat = {key: np.concatenate(rows) for key, rows in values.items()}
    denominator = inputs.counts.sequences if name.startswith("rloo") else inputs.counts.tokens
    expected = -flat["advantages"] * weight_of(flat) / denominator
    actual = gradient(inputs, algorithm_of(name).loss(inputs).loss)
    np.testing.assert_allclose(actual.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("split", [[[0, 1], [2, 3]], [[0], [1], [2], [3]], [[3, 0, 2], [1]]])
def test_any_split_over_micro_batches_and_ranks_has_the_same_loss_and_gradient(name, split):
    """Every share divides by the counts of the whole update, so shares add up; also where a group is torn apart."""
    algorithm, values = algorithm_of(name), random_values()
    whole = made(values)
    loss = algorithm.loss(whole).loss
    gradients = gradient(whole, loss).split(LENGTHS)
    total = 0.0
    for places in split:
        part = part_of(values, places)
        share = algorithm.loss(part).loss
        total += share.item()
        for place, values_of in zip(places, gradient(part, share).split([LENGTHS[i] for i in places]), strict=True):
            torch.testing.assert_close(values_of, gradients[place])
    assert total == pytest.approx(loss.item())


@pytest.mark.parametrize("name", CONFIGS)
def test_order_and_padding_change_nothing(name):
    """Prompt tokens before each sequence hold NaN."""
    algorithm, values = algorithm_of(name), random_values()
    plain = made(values)
    loss = algorithm.loss(plain).loss
    gradients = gradient(plain, loss).split(LENGTHS)
    order = [2, 0, 3, 1]
    moved = part_of(values, order, prompt_tokens=3)
    moved_loss = algorithm.loss(moved).loss
    assert moved_loss.item() == pytest.approx(loss.item())
    parts = gradient(moved, moved_loss).split([LENGTHS[i] + 3 for i in order])
    for place, part in zip(order, parts, strict=True):
        assert not part[:3].any()
        torch.testing.assert_close(part[3:], gradients[place])


@pytest.mark.parametrize("name", CONFIGS)
def test_masked_tokens_may_hold_anything(name):
    algorithm, values = algorithm_of(name), random_values()
    mask = [[True] * n for n in LENGTHS]
    mask[2][4] = mask[0][0] = False
    clean = made(values, mask=mask)
    poisoned = {key: [list(row) for row in rows] for key, rows in values.items()}
    for rows in poisoned.values():
        rows[2][4], rows[0][0] = math.nan, math.inf
    dirty = made(poisoned, mask=mask)
    outputs = [algorithm.loss(inputs) for inputs in (clean, dirty)]
    assert outputs[0].loss.item() == outputs[1].loss.item()
    assert torch.equal(gradient(clean, outputs[0].loss), gradient(dirty, outputs[1].loss))
    for one, other in zip(*[(o.token_sums, o.maxima, o.sequence_sums) for o in outputs], strict=True):
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", CONFIGS)
def test_without_loss_tokens_the_share_is_zero(name):
    inputs = made(random_values(), mask=[[False] * n for n in LENGTHS], counts=made(random_values()).counts)
    output = algorithm_of(name).loss(inputs)
    assert output.loss.item() == 0.0
    assert not gradient(inputs, output.loss).any()
    assert all(value.item() == -math.inf for value in output.maxima.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_where_all_policies_are_one_the_gradient_is_that_of_reinforce(name):
    """The limit that every method shares: minus the advantage, times the weight of its aggregation."""
    values = random_values()
    values |= dict.fromkeys(("old", "rollout", "ref"), values["logprobs"])
    inputs = made(values)
    algorithm = algorithm_of(name)
    output = algorithm.loss(inputs)
    lengths = np.repeat(LENGTHS, LENGTHS)
    of_group = np.repeat([4, 4, 7, 7], LENGTHS)
    weight = {
        "grpo_prompt_mean": 1 / (2 * of_group),
        "grpo_paper": 1 / (4 * lengths),
        "gspo": 1 / (4 * lengths),
        "dr_grpo": np.full(11, 1 / 40),
        "rloo": np.full(11, 1 / 4),
        "rloo_bypass": np.full(11, 1 / 4),
    }.get(name, np.full(11, 1 / 11))
    expected = -np.concatenate(values["advantages"]) * weight
    np.testing.assert_allclose(gradient(inputs, output.loss).numpy(), expected, atol=1e-12)
    clipped = [key for key in output.token_sums | output.sequence_sums if "clipped" in key or "outside" in key]
    assert all((output.token_sums | output.sequence_sums)[key].item() == 0 for key in clipped)


@pytest.mark.parametrize("name", CONFIGS)
def test_zero_advantage_has_a_zero_gradient_exactly_where_it_is_said_to(name):
    values = random_values() | {"advantages": [[0.0] * n for n in LENGTHS]}
    inputs = made(values)
    algorithm = algorithm_of(name)
    output = algorithm.loss(inputs).loss
    assert algorithm.skips_zero_advantage == (not gradient(inputs, output).any())


@pytest.mark.parametrize("name", CONFIGS)
def test_far_policies_have_finite_losses_and_gradients(name):
    values = random_values()
    for gap in (30.0, 300.0, -300.0):
        values["logprobs"] = [[x + gap for x in row] for row in values["old"]]
        inputs = made(values)
        output = algorithm_of(name).loss(inputs).loss
        assert output.isfinite() and gradient(inputs, output).isfinite().all(), gap


@pytest.mark.parametrize("name", CONFIGS)
def test_every_metric_of_a_loss_is_in_the_table(name):
    output = algorithm_of(name).loss(made(random_values()))
    assert unlisted([*output.token_sums, *output.maxima, *output.sequence_sums]) == []
    assert "train/approx_kl" in output.token_sums


def test_a_reference_far_away_is_counted():
    values = random_values() | {"ref": [[-60.0] * n for n in LENGTHS]}
    output = algorithm_of("grpo_paper").loss(made(values))
    assert output.token_sums["train/kl_bounded_fraction"].item() == sum(LENGTHS)


def test_an_entropy_bonus_pulls_on_the_entropy_with_its_coefficient():
    algorithm = build(GRPOConfig(**SIZES, entropy_coef=0.5))
    inputs = made(random_values())
    (of_entropy,) = torch.autograd.grad(algorithm.loss(inputs).loss, inputs.entropy)
    torch.testing.assert_close(of_entropy, torch.full_like(of_entropy, -0.5 / 11))
    assert algorithm.uses_entropy_gradient and not algorithm.skips_zero_advantage


def test_gspo_clips_answers_and_not_tokens():
    """Token ratios 2 and 1/2 are a ratio of 1: nothing is clipped. Both 2 are a ratio of 2: 1.1 counts."""
    log2 = math.log(2)
    inputs = loss_inputs([[log2, -log2], [log2, log2]], old=[[0.0, 0.0]] * 2, advantages=[1.0, 1.0])
    output = algorithm_of("gspo").loss(inputs)
    assert output.loss.item() == pytest.approx(-(1.0 + 1.1) / 2)
    assert gradient(inputs, output.loss).tolist() == pytest.approx([-0.25, -0.25, 0.0, 0.0])
    assert output.sequence_sums["train/sequence_clipped_high_fraction"].item() == pytest.approx(1.0)


def test_cispo_weighs_and_never_cuts_off():
    """Ratios 0.1, 1 and 7 in [0, 5] weigh 0.1, 1 and 5, whatever the sign of the advantage."""
    log = [math.log(0.1), 0.0, math.log(7.0)]
    for sign in (1.0, -1.0):
        inputs = loss_inputs([log], old=[[0.0] * 3], advantages=[sign])
        output = algorithm_of("cispo").loss(inputs)
        assert gradient(inputs, output.loss).tolist() == pytest.approx([-sign * w / 3 for w in (0.1, 1.0, 5.0)])
        assert output.token_sums["train/weight_clipped_high_fraction"].item() == 1


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kl_coef", [0.0, 0.1])
def test_advantages_go_by_identity_whatever_the_order_of_groups_and_answers(name, kl_coef):
    """One member of the first group failed, and one group has a single answer."""
    config = CONFIGS[name]
    algorithm = build(replace(config, kl_coef=kl_coef, kl_in=KlPlacement.reward))
    found = []
    for shuffled in (False, True):
        groups = [
            made_group([1.0, 0.0, 0.5, 1.0], group_id=0),
            made_group([0.0, 1.0], group_id=1),
            made_group([0.7], group_id=2),
        ]
        del groups[0].rollouts[1]
        for group in groups:
            for rollout in group.rollouts:
                rollout.ref_logprobs = np.where(rollout.loss_mask, 0.9 * rollout.rollout_logprobs, np.float32(0.0))
        if shuffled:
            groups = [groups[i] for i in (2, 0, 1)]
            for group in groups:
                group.rollouts.reverse()
        algorithm.assign_advantages(groups)
        found.append({(r.group_id, r.index): _of_tokens(r) for group in groups for r in group.rollouts})
    assert found[0].keys() == found[1].keys()
    for identity, values in found[0].items():
        np.testing.assert_allclose(found[1][identity], values, atol=1e-6)
    assert any(np.any(values != 0) for values in found[0].values())
    if not isinstance(config, ReinforcePPConfig | ReinforcePPBaselineConfig):  # whose baseline or scale is the batch's
        assert not np.any(found[0][2, 0])


def _of_tokens(rollout: Rollout) -> np.ndarray:
    values = rollout.token_advantages
    return np.array([rollout.advantage]) if values is None else values[rollout.loss_mask]


@pytest.mark.parametrize("name", CONFIGS)
def test_better_answers_get_larger_advantages(name):
    group = made_group([0.0, 1.0, 0.0, 1.0], response_tokens=[2, 2, 2, 2])
    algorithm = algorithm_of(name)
    algorithm.assign_advantages([group])
    advantages: Callable[[float], list[float]] = lambda r: [x.advantage for x in group.rollouts if x.reward == r]  # noqa: E731
    assert max(advantages(0.0)) < 0.0 < min(advantages(1.0))
