"""Pieces of policy-gradient losses, on loss tokens only: [N], masked positions already left out."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl.config.algorithms import Aggregation, KlEstimator, KlGradient
from rl.protocols import MAX_LOG_RATIO, LossInputs
from rl.types import LossCounts


@dataclass(frozen=True, slots=True)
class LossTokens:
    """The loss tokens of one micro-batch, [N] each.

    They are selected, not multiplied by the mask: a value that is not finite elsewhere cannot enter.
    """

    logprobs: torch.Tensor
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    sequence: torch.Tensor
    """int64, which of the n sequences."""
    lengths: torch.Tensor
    """[n], loss tokens of each sequence."""
    group_loss_tokens: torch.Tensor
    """[n], loss tokens of each sequence's group in the whole update."""

    @classmethod
    def of(cls, inputs: LossInputs) -> LossTokens:
        chosen = inputs.loss_mask.nonzero().squeeze(-1)
        ends = inputs.cu_seqlens[1:].long()
        sequence = torch.bucketize(chosen, ends, right=True)

        def select(values: torch.Tensor) -> torch.Tensor:
            return values.index_select(0, chosen)

        return cls(
            logprobs=select(inputs.logprobs),
            entropy=select(inputs.entropy),
            old_logprobs=select(inputs.old_logprobs),
            rollout_logprobs=select(inputs.rollout_logprobs),
            ref_logprobs=None if inputs.ref_logprobs is None else select(inputs.ref_logprobs),
            advantages=select(inputs.advantages),
            sequence=sequence,
            lengths=torch.bincount(sequence, minlength=len(ends)),
            group_loss_tokens=inputs.group_loss_tokens,
        )

    @property
    def log_ratio(self) -> torch.Tensor:
        """[N], policy over old policy."""
        return self.logprobs - self.old_logprobs

    def sequence_sum(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [n]"""
        return values.new_zeros(len(self.lengths)).index_add(0, self.sequence, values)

    def sequence_mean(self, values: torch.Tensor) -> torch.Tensor:
        """[N] -> [n]; 0 for a sequence without loss tokens."""
        return self.sequence_sum(values) / self.lengths.clamp_min(1)

    def spread(self, of_sequence: torch.Tensor) -> torch.Tensor:
        """[n] -> [N]"""
        return of_sequence.index_select(0, self.sequence)


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


def kl_estimate(
    logprobs: torch.Tensor,
    ref_logprobs: torch.Tensor,
    estimator: KlEstimator,
    gradient: KlGradient = KlGradient.estimator,
) -> torch.Tensor:
    """KL(policy, reference) token by token. On samples of the policy k1 and k3 have the right mean, k2 to second order.

    As a loss term the estimators' own mean gradients differ: k1's is zero, k2's is that of KL(policy, reference), k3's
    (the choice of GRPO, arXiv:2402.03300, equation 4) is that of KL(reference, policy). `KlGradient.unbiased` keeps the
    value and takes k2's gradient. All of this is per token: what a token does to the KL of later ones is in none.
    """
    log_ratio = ref_logprobs - logprobs
    k2 = 0.5 * log_ratio.square()
    match estimator:
        case KlEstimator.k1:
            value = -log_ratio
        case KlEstimator.k2:
            value = k2
        case KlEstimator.k3:
            value = k3(log_ratio)
    if gradient is KlGradient.unbiased and estimator is not KlEstimator.k2:
        return value.detach() + (k2 - k2.detach())
    return value


@dataclass(frozen=True, slots=True)
class Clipped:
    """Losses [N], and where (bool) which bound took the gradient away."""

    losses: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    dual: torch.Tensor


def clipped_surrogate(
    ratio: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> Clipped:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), PPO (arXiv:1707.06347, equation 7) with separate bounds (DAPO,
    arXiv:2503.14476, equation 10).

    `dual_clip` c: where A < 0 the loss is at most -c A (the dual clip of arXiv:1912.09729).
    """
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1.0 - clip_low, 1.0 + clip_high) * advantages)
    low = (ratio < 1.0 - clip_low) & (advantages < 0)
    high = (ratio > 1.0 + clip_high) & (advantages > 0)
    dual = torch.zeros_like(low)
    if dual_clip is not None:
        dual = (ratio > dual_clip) & (advantages < 0)
        losses = torch.where(dual, -dual_clip * advantages, losses)
    return Clipped(losses, low, high, dual)


def reinforce(logprobs: torch.Tensor, advantages: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """-A log pi (REINFORCE), or -sg[w] A log pi."""
    losses = -advantages * logprobs
    return losses if weights is None else weights.detach() * losses


def loss_weights(
    tokens: LossTokens, counts: LossCounts, aggregation: Aggregation, horizon: int | None = None
) -> torch.Tensor:
    """[N]: what each token's loss is multiplied by, so that the sum over micro-batches and ranks is the aggregate."""
    ones = torch.ones_like(tokens.logprobs)
    match aggregation:
        case Aggregation.token_mean:
            return ones / counts.tokens
        case Aggregation.prompt_mean_token_mean:
            return ones / (counts.groups * tokens.spread(tokens.group_loss_tokens))
        case Aggregation.seq_mean_token_mean:
            return ones / (counts.sequences * tokens.spread(tokens.lengths))
        case Aggregation.seq_mean_token_sum:
            return ones / counts.sequences
        case Aggregation.seq_mean_token_sum_norm:
            assert horizon is not None
            return ones / (counts.sequences * horizon)
