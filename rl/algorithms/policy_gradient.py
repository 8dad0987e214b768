"""What all algorithms share: advantages of a step's groups, and a loss of surrogate, weights, KL and entropy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

import numpy as np

from rl.algorithms.advantages import Rewards
from rl.config.algorithms import (
    Aggregation,
    AlgorithmConfig,
    KlEstimator,
    KlGradient,
    KlPlacement,
    OldLogprobs,
    Outside,
    TokenLossConfig,
    WeightLevel,
)
from rl.config.schema import ConfigError
from rl.protocols import MAX_LOG_RATIO, LossInputs, LossOutput
from rl.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    import torch

    from rl.algorithms.losses import LossTokens

Config = TypeVar("Config", bound=AlgorithmConfig)


@dataclass(slots=True)
class Surrogate:
    """Losses [N] of the loss tokens, before weights, KL and entropy; the rest are metrics as in `LossOutput`."""

    losses: torch.Tensor
    token_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    sequence_sums: dict[str, torch.Tensor] = field(default_factory=dict)


class PolicyGradient(ABC, Generic[Config]):
    """Implements `rl.protocols.Algorithm`. A subclass says what an advantage and what a token's loss is.

    The modules of the algorithms import no torch, so that a plan can check their settings without it.
    """

    min_group_size: ClassVar[int] = 2
    has_ratio: ClassVar[bool] = True
    """The surrogate holds the ratio of the policy to the old one, which in bypass mode is the importance weight."""

    def __init__(self, config: Config):
        self.check(config)
        self.config = config
        has_kl = config.kl_coef > 0.0
        self.uses_reference = has_kl
        self.penalizes_reward = has_kl and config.kl_in is KlPlacement.reward
        self.has_kl_loss = has_kl and config.kl_in is KlPlacement.loss
        self.uses_entropy_gradient = config.entropy_coef != 0.0
        self.skips_zero_advantage = not self.has_kl_loss and not self.uses_entropy_gradient

    @classmethod
    def check(cls, config: Config) -> None:
        """What can be wrong with the settings, without torch."""
        if config.group_size < cls.min_group_size:
            raise ConfigError(
                f"algorithm.group_size={config.group_size} must be at least {cls.min_group_size}: advantages are "
                "relative to the group. Raise it, or use algorithm=reinforce_pp."
            )
        _check_kl(config)
        if isinstance(config, TokenLossConfig):
            _check_aggregation(config)
        _check_correction(config, has_ratio=cls.has_ratio)

    def shape_reward(self, rollout: Rollout) -> float:
        return rollout.reward

    def keep(self, group: RolloutGroup) -> bool:
        return True

    def assign_advantages(self, groups: Sequence[RolloutGroup]) -> None:
        rewards = [np.array([self._outcome(rollout) for rollout in group.rollouts]) for group in groups]
        for group, values in zip(groups, self.advantages(rewards), strict=True):
            for rollout, value in zip(group.rollouts, values, strict=True):
                rollout.advantage = float(value)

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards]:
        """One array [G] per group of the step; groups may differ in size, since failed members are missing."""
        raise NotImplementedError

    def _outcome(self, rollout: Rollout) -> float:
        """Shaped reward less the KL of the whole answer, where that belongs to the reward."""
        if not self.penalizes_reward:
            return rollout.shaped_reward
        return rollout.shaped_reward - self.config.kl_coef * float(self.token_kl(rollout).sum())

    def token_kl(self, rollout: Rollout) -> Rewards:
        """[L] estimates of KL(policy that sampled, reference); 0 where `loss_mask` is False."""
        import torch

        from rl.algorithms.losses import kl_estimate

        assert rollout.ref_logprobs is not None, "a KL in the reward needs the reference policy's log-probs"
        mask = rollout.loss_mask & np.isfinite(rollout.rollout_logprobs) & np.isfinite(rollout.ref_logprobs)
        sampled, reference = (
            torch.from_numpy(v[mask]).double() for v in (rollout.rollout_logprobs, rollout.ref_logprobs)
        )
        kl = np.zeros(len(mask))
        kl[mask] = kl_estimate(sampled, reference, self.config.kl_estimator).numpy()
        return kl

    @abstractmethod
    def surrogate(self, tokens: LossTokens) -> Surrogate:
        """The part of the loss that holds the advantages."""

    def aggregation(self) -> tuple[Aggregation, int | None]:
        """With the horizon, which only one aggregation has."""
        assert isinstance(self.config, TokenLossConfig)
        return self.config.aggregation, self.config.horizon

    def loss(self, inputs: LossInputs) -> LossOutput:
        """This micro-batch's share of the update's loss; every denominator is one of `inputs.counts`."""
        from rl.algorithms.correction import correction
        from rl.algorithms.losses import LossTokens, k3, kl_estimate, loss_weights

        tokens, config = LossTokens.of(inputs), self.config
        part = self.surrogate(tokens)
        losses = part.losses
        part.token_sums["train/approx_kl"] = k3(tokens.log_ratio.detach()).sum()
        if config.correction.is_active:
            is_bypass = config.old_logprobs is OldLogprobs.rollout
            policy = tokens.logprobs if is_bypass else tokens.old_logprobs
            corrected = correction(config.correction, policy - tokens.rollout_logprobs, tokens)
            losses = losses * corrected.weights
            _add_correction_metrics(part, tokens, corrected.weights, corrected.outside, corrected.rejected)
        if self.has_kl_loss:
            assert tokens.ref_logprobs is not None, "a KL term needs the reference policy's log-probs"
            kl = kl_estimate(tokens.logprobs, tokens.ref_logprobs, config.kl_estimator, config.kl_gradient)
            losses = losses + config.kl_coef * kl
            part.token_sums["train/kl_ref"] = kl.detach().sum()
            gap = (tokens.logprobs.detach() - tokens.ref_logprobs).abs()
            part.token_sums["train/kl_bounded_fraction"] = (gap > MAX_LOG_RATIO).sum()
        if self.uses_entropy_gradient:
            losses = losses - config.entropy_coef * tokens.entropy
        weights = loss_weights(tokens, inputs.counts, *self.aggregation())
        return LossOutput((losses * weights).sum(), part.token_sums, part.maxima, part.sequence_sums)


def _add_correction_metrics(
    part: Surrogate, tokens: LossTokens, weights: torch.Tensor, outside: torch.Tensor, rejected: torch.Tensor
) -> None:
    part.token_sums["correction/weight_mean"] = weights.sum()
    part.token_sums["correction/outside_fraction"] = outside.sum()
    part.maxima["correction/weight_max"] = largest(weights)
    part.sequence_sums["correction/outside_sequence_fraction"] = (tokens.sequence_sum(outside.float()) > 0).sum()
    part.sequence_sums["correction/rejected_sequence_fraction"] = rejected.sum()


def largest(values: torch.Tensor) -> torch.Tensor:
    return values.detach().max() if len(values) else values.new_tensor(-math.inf)


def _check_kl(config: AlgorithmConfig) -> None:
    has_kl_loss = config.kl_coef > 0.0 and config.kl_in is KlPlacement.loss
    if has_kl_loss and config.kl_estimator is KlEstimator.k1 and config.kl_gradient is KlGradient.estimator:
        raise ConfigError(
            f"algorithm.kl_estimator=k1 with algorithm.kl_coef={config.kl_coef}: as a term of the loss k1 has a "
            "mean gradient of zero, so it would hold the policy to nothing. Use algorithm.kl_estimator=k2 or k3, "
            "algorithm.kl_gradient=unbiased, algorithm.kl_in=reward, or algorithm.kl_coef=0."
        )


def _check_aggregation(config: TokenLossConfig) -> None:
    needs_horizon = config.aggregation is Aggregation.seq_mean_token_sum_norm
    if needs_horizon != (config.horizon is not None):
        raise ConfigError(
            f"algorithm.horizon={config.horizon} with algorithm.aggregation={config.aggregation.value}: "
            "seq_mean_token_sum_norm divides by it, and no other aggregation does. Set both, or horizon=null."
        )
    if config.horizon is not None and config.horizon < 1:
        raise ConfigError(f"algorithm.horizon={config.horizon} is out of range: it must be at least 1.")


def _check_correction(config: AlgorithmConfig, *, has_ratio: bool) -> None:
    correction = config.correction
    if not correction.is_active:
        return
    if correction.high <= 0 or not 0 <= correction.low < correction.high:
        raise ConfigError(
            f"algorithm.correction.low={correction.low} and high={correction.high} are out of range: they must be "
            "0 <= low < high."
        )
    if correction.low > 0 and correction.outside is Outside.truncate:
        raise ConfigError(
            f"algorithm.correction.low={correction.low} with outside=truncate: a small weight is not raised, since "
            "that would add what was hardly sampled. Use algorithm.correction.outside=mask, or low=0."
        )
    is_bypass = config.old_logprobs is OldLogprobs.rollout
    if has_ratio and is_bypass and correction.weights is not WeightLevel.none:
        raise ConfigError(
            f"algorithm.correction.weights={correction.weights.value} with algorithm.old_logprobs=rollout: the policy "
            "ratio of the loss is then already over the engine's policy, and a weight would count the difference "
            "twice. Use algorithm.old_logprobs=trainer, or correction.weights=none with geometric bounds."
        )
