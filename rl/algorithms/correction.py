"""Importance weights for engine-trainer difference and staleness: detached, on loss tokens [N]."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl.algorithms.losses import LossTokens, bounded
from rl.config.algorithms import CorrectionConfig, Outside, WeightLevel


@dataclass(frozen=True, slots=True)
class Correction:
    weights: torch.Tensor
    """[N]"""
    outside: torch.Tensor
    """[N] bool, raw weight outside its bounds."""
    rejected: torch.Tensor
    """[n] bool, sequences whose geometric mean is outside its bounds."""


def correction(config: CorrectionConfig, log_ratio: torch.Tensor, tokens: LossTokens) -> Correction:
    """Weights from `log_ratio` [N], trainer's policy minus the engine's log-probs.

    Three policies (the decoupled objective of arXiv:2110.00641 and of AReaL, arXiv:2505.24298): the ratio of the old
    policy to the engine's, beside a loss that clips the ratio of the policy to the old one. Bypass: the ratio of the
    policy itself to the engine's, for losses that clip nothing. Truncation: min(r, high), of a token or of a product
    over an answer; masking: r inside [low, high], else 0. Log-ratios are bounded to +-20 before exp, the product's
    after its sum. verl's code takes rejected tokens out of its denominators; here they stay.
    """
    log_ratio = log_ratio.detach()
    match config.weights:
        case WeightLevel.none:
            raw = torch.ones_like(log_ratio)
        case WeightLevel.token:
            raw = bounded(log_ratio).exp()
        case WeightLevel.sequence:
            raw = tokens.spread(bounded(tokens.sequence_sum(log_ratio)).exp())
    match config.outside:
        case Outside.truncate:
            outside = raw > config.high
            weights = raw.clamp_max(config.high)
        case Outside.mask:
            outside = (raw < config.low) | (raw > config.high)
            weights = torch.where(outside, 0.0, raw)
    rejected = _rejected(config, tokens.sequence_mean(log_ratio), tokens)
    return Correction(torch.where(tokens.spread(rejected), 0.0, weights), outside, rejected)


def _rejected(config: CorrectionConfig, mean_log_ratio: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    geometric = bounded(mean_log_ratio).exp()
    rejected = torch.zeros_like(geometric, dtype=torch.bool)
    if config.geometric_low is not None:
        rejected |= geometric < config.geometric_low
    if config.geometric_high is not None:
        rejected |= geometric > config.geometric_high
    return rejected & (tokens.lengths > 0)
