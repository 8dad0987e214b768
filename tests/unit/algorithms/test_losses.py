from __future__ import annotations

import math

import pytest
import torch

from rl.algorithms.losses import bounded, clipped_surrogate, k3, kl_estimate
from rl.config.algorithms import KlEstimator


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
    losses, clipped_low, clipped_high = clipped_surrogate(
        ratios, torch.tensor([advantage]), clip_low=clip_low, clip_high=clip_high
    )
    losses.sum().backward()
    assert losses.item() == pytest.approx(loss)
    assert ratios.grad is not None and ratios.grad.item() == pytest.approx(gradient)
    assert (clipped_low.item(), clipped_high.item()) == (low, high)


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
def test_mean_of_k1_and_k3_is_the_kl(estimator):
    p, q = torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.15, 0.5, 0.35])
    estimate = (p * kl_estimate(p.log(), q.log(), estimator)).sum()
    kl = (p * (p / q).log()).sum()
    tolerance = 0.1 if estimator is KlEstimator.k2 else 1e-5  # k2 is right to second order
    assert estimate.item() == pytest.approx(kl.item(), rel=tolerance)
