from __future__ import annotations

import math

import pytest
import torch

from rl.algorithms.losses import LossTokens, bounded, clipped_surrogate, k3, kl_estimate, loss_weights
from rl.config.algorithms import Aggregation, KlEstimator, KlGradient
from tests.made_losses import loss_inputs


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip_low", "clip_high", "loss", "gradient", "low", "high"),
    [
        (1.5, 1.0, 0.2, 0.28, -1.28, 0.0, False, True),
        (0.5, -1.0, 0.2, 0.28, 0.8, 0.0, True, False),
        (1.5, -1.0, 0.2, 0.28, 1.5, 1.0, False, False),
        (0.5, 1.0, 0.2, 0.28, -0.5, -1.0, False, False),
        (1.1, 1.0, 0.2, 0.28, -1.1, -1.0, False, False),
        (1.0, 0.0, 0.2, 0.28, 0.0, 0.0, False, False),
    ],
)
def test_clipped_surrogate_by_hand(ratio, advantage, clip_low, clip_high, loss, gradient, low, high):
    ratios = torch.tensor([ratio], requires_grad=True)
    clipped = clipped_surrogate(ratios, torch.tensor([advantage]), clip_low=clip_low, clip_high=clip_high)
    clipped.losses.sum().backward()
    assert clipped.losses.item() == pytest.approx(loss)
    assert ratios.grad is not None and ratios.grad.item() == pytest.approx(gradient)
    assert (clipped.low.item(), clipped.high.item(), clipped.dual.item()) == (low, high, False)


def test_each_bound_of_a_dual_clip_takes_its_own_token():
    """Ratios 1.5, 0.5 and 10 with advantages +1, -1 and -1: held above, below, and at c = 3."""
    ratios = torch.tensor([1.5, 0.5, 10.0, 1.5], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    clipped = clipped_surrogate(ratios, advantages, clip_low=0.2, clip_high=0.28, dual_clip=3.0)
    clipped.losses.sum().backward()
    assert clipped.losses.tolist() == pytest.approx([-1.28, 0.8, 3.0, 1.5])
    assert [c.tolist() for c in (clipped.high, clipped.low, clipped.dual)] == [
        [True, False, False, False],
        [False, True, False, False],
        [False, False, True, False],
    ]
    assert ratios.grad is not None and ratios.grad.tolist() == [0.0, 0.0, 0.0, 1.0]


def test_a_dual_clip_leaves_positive_advantages_alone():
    clipped = clipped_surrogate(torch.tensor([10.0, 1.1]), torch.ones(2), clip_low=0.2, clip_high=20.0, dual_clip=3.0)
    assert clipped.losses.tolist() == pytest.approx([-10.0, -1.1]) and not clipped.dual.any()


@pytest.mark.parametrize(
    ("estimator", "value"), [(KlEstimator.k1, 0.5), (KlEstimator.k2, 0.125), (KlEstimator.k3, 0.10653)]
)
def test_kl_estimates_by_hand(estimator, value):
    estimate = kl_estimate(torch.tensor([-1.0]), torch.tensor([-1.5]), estimator)
    assert estimate.item() == pytest.approx(value, abs=1e-5)


@pytest.mark.parametrize("estimator", list(KlEstimator))
@pytest.mark.parametrize("gap", [0.0, 1e-7, 0.5, 20.0, 100.0, -100.0, 1e9, -1e9])
def test_kl_and_its_gradient_are_finite_at_any_gap(estimator, gap):
    logprobs = torch.tensor([-1.0], requires_grad=True)
    estimate = kl_estimate(logprobs, torch.tensor([-1.0 + gap]), estimator)
    estimate.sum().backward()
    assert logprobs.grad is not None
    assert torch.isfinite(estimate).all() and torch.isfinite(logprobs.grad).all()
    if estimator is not KlEstimator.k1:
        assert estimate.item() >= 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gap", [0.0, 0.5, 15.0, -15.0])
def test_k3_agrees_with_double_precision_inside_the_bound(dtype, gap):
    log_ratio = torch.tensor([gap], dtype=dtype, requires_grad=True)
    value = k3(log_ratio)
    value.sum().backward()
    tolerance = 1e-5 if dtype is torch.float32 else 0.02
    assert value.item() == pytest.approx(math.expm1(gap) - gap, rel=tolerance)
    assert log_ratio.grad is not None and log_ratio.grad.item() == pytest.approx(math.expm1(gap), rel=tolerance)


def test_bound_caps_the_value_and_keeps_the_gradient():
    log_ratio = torch.tensor([100.0, -100.0, 3.0], requires_grad=True)
    value = bounded(log_ratio)
    value.sum().backward()
    assert value.tolist() == [20.0, -20.0, 3.0]
    assert log_ratio.grad is not None and log_ratio.grad.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("estimator", "exact"),
    [
        (KlEstimator.k1, lambda p, q: 0.0 * p.sum()),
        (KlEstimator.k2, lambda p, q: (p * (p / q).log()).sum()),
        (KlEstimator.k3, lambda p, q: (q * (q / p).log()).sum()),
    ],
)
def test_mean_gradient_of_each_kl_term_over_all_symbols(estimator, exact):
    """A vocabulary of three, summed exactly: k1 gives no gradient, k2 that of KL(p, q), k3 that of KL(q, p)."""
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    sampled_with = logprobs.exp().detach()
    estimate = (sampled_with * kl_estimate(logprobs, reference.log(), estimator)).sum()
    (gradient,) = torch.autograd.grad(estimate, logits)
    (expected,) = torch.autograd.grad(exact(logits.softmax(0), reference), logits)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_an_unbiased_kl_term_has_the_value_of_its_estimator_and_the_mean_gradient_of_the_kl(estimator):
    logits = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    logprobs = logits.log_softmax(0)
    values = kl_estimate(logprobs, reference.log(), estimator, KlGradient.unbiased)
    torch.testing.assert_close(values, kl_estimate(logprobs, reference.log(), estimator))
    (gradient,) = torch.autograd.grad((logprobs.exp().detach() * values).sum(), logits)
    p = logits.softmax(0)
    (expected,) = torch.autograd.grad((p * (p / reference).log()).sum(), logits)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("estimator", list(KlEstimator))
def test_mean_of_k1_and_k3_is_the_kl(estimator):
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.15, 0.5, 0.35])
    estimate = (p * kl_estimate(p.log(), q.log(), estimator)).sum()
    kl = (p * (p / q).log()).sum()
    tolerance = 0.1 if estimator is KlEstimator.k2 else 1e-5  # k2 is right to second order
    assert estimate.item() == pytest.approx(kl.item(), rel=tolerance)


# Two groups: A of one answer of 2 tokens and loss 1, B of two answers of 2 and 6 tokens and loss 0 but for 0.6 on one.
TOKEN_LOSSES = [[1.0, 1.0], [0.0, 0.0], [0.6, 0.0, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        (Aggregation.token_mean, 2.6 / 10),
        (Aggregation.prompt_mean_token_mean, (2 / 2 + 0.6 / 8) / 2),
        (Aggregation.seq_mean_token_mean, (2 / 2 + 0 / 2 + 0.6 / 6) / 3),
        (Aggregation.seq_mean_token_sum, 2.6 / 3),
        (Aggregation.seq_mean_token_sum_norm, 2.6 / 3 / 20),
    ],
)
def test_aggregations_by_hand(aggregation, expected):
    inputs = loss_inputs(TOKEN_LOSSES, advantages=[0.0] * 3, groups=[0, 1, 1])
    tokens = LossTokens.of(inputs)
    weights = loss_weights(tokens, inputs.counts, aggregation, 20)
    assert (weights * tokens.logprobs).sum().item() == pytest.approx(expected)


def test_the_two_token_means_of_the_documentation():
    """Group A of 2 tokens of loss 1, group B of 8 of loss 0: 0.2 over the batch, 0.5 over prompts."""
    inputs = loss_inputs([[1.0] * 2, [0.0] * 8], advantages=[0.0] * 2, groups=[0, 1])
    tokens = LossTokens.of(inputs)
    for aggregation, expected in ((Aggregation.token_mean, 0.2), (Aggregation.prompt_mean_token_mean, 0.5)):
        weights = loss_weights(tokens, inputs.counts, aggregation)
        assert (weights * tokens.logprobs).sum().item() == pytest.approx(expected)


@pytest.mark.parametrize("aggregation", list(Aggregation))
def test_a_masked_answer_is_in_no_denominator(aggregation):
    """Answers of 4 and 6 tokens, the second masked: as if it were not there."""
    whole = loss_inputs([[1.0, 2.0, 3.0, 4.0]], advantages=[0.0])
    masked = loss_inputs(
        [[1.0, 2.0, 3.0, 4.0], [math.nan] * 6], advantages=[0.0] * 2, groups=[0, 1], mask=[[True] * 4, [False] * 6]
    )
    results = []
    for inputs in (whole, masked):
        tokens = LossTokens.of(inputs)
        results.append((loss_weights(tokens, inputs.counts, aggregation, 8) * tokens.logprobs).sum().item())
    assert masked.counts.tokens == 4
    assert results[0] == results[1] > 0
