"""Pieces of policy-gradient losses, on loss tokens only: [N], masked positions already left out."""

from __future__ import annotations

import torch

from rl.config.algorithms import KlEstimator
from rl.protocols import MAX_LOG_RATIO


def bounded(log_ratio: torch.Tensor) -> torch.Tensor:
    """Clamps the value to +-MAX_LOG_RATIO and leaves the gradient alone, so that a far outlier is still pulled back."""
    excess = (log_ratio - log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)).detach()
    return log_ratio - excess


def k3(log_ratio: torch.Tensor) -> torch.Tensor:
    """Schulman's k3 estimate (http://joschu.net/blog/kl-approx.html), exp(x) - 1 - x >= 0.

    With x = log(q / p) of samples from p its mean is KL(p, q).
    """
    log_ratio = bounded(log_ratio)
    return (torch.expm1(log_ratio) - log_ratio).clamp_min(0.0)


def kl_estimate(logprobs: torch.Tensor, ref_logprobs: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """KL(policy, reference) token by token. On samples of the policy every estimator has the right mean.

    As a loss term the mean gradients differ: k1's is zero, k2's is that of KL(policy, reference), k3's (the choice of
    GRPO, arXiv:2402.03300, equation 4) is that of KL(reference, policy).
    """
    log_ratio = ref_logprobs - logprobs
    match estimator:
        case KlEstimator.k1:
            return -log_ratio
        case KlEstimator.k2:
            return 0.5 * log_ratio.square()
        case KlEstimator.k3:
            return k3(log_ratio)


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), PPO (arXiv:1707.06347, equation 7) with separate bounds.

    Returns the loss and, as bool, where the lower and where the upper bound took the gradient away.
    """
    loss = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    clipped_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    clipped_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    return loss, clipped_low, clipped_high
