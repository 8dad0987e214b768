"""Group relative policy optimization (arXiv:2402.03300) with the token-mean loss of DAPO (arXiv:2503.14476)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from rl.config.algorithms import GRPOConfig, KlEstimator
from rl.config.schema import ConfigError
from rl.protocols import LossInputs, LossOutput
from rl.types import Rollout, RolloutGroup

if TYPE_CHECKING:
    import torch

STD_EPS = 1e-6


class GRPO:
    def __init__(self, config: GRPOConfig):
        self.check(config)
        self.config = config
        self.uses_reference = config.kl_coef > 0.0

    @classmethod
    def check(cls, config: GRPOConfig) -> None:
        """What can be wrong with the settings of the loss, without torch."""
        if config.kl_coef > 0.0 and config.kl_estimator is KlEstimator.k1:
            raise ConfigError(
                f"algorithm.kl_estimator=k1 with algorithm.kl_coef={config.kl_coef}: as a term of the loss k1 has a "
                "mean gradient of zero, so it would hold the policy to nothing. Use algorithm.kl_estimator=k2 or k3, "
                "or algorithm.kl_coef=0."
            )

    def shape_reward(self, rollout: Rollout) -> float:
        return rollout.reward

    def keep(self, group: RolloutGroup) -> bool:
        return True

    def advantages(self, group: RolloutGroup) -> list[float]:
        """(r - mean) / (std + 1e-6), std over n - 1; without `normalize_std` only r - mean.

        Zero for a group whose rewards are all the same, compared exactly: the mean of equal floats need not equal them.
        A group of one is such a group.
        """
        rewards = np.array([rollout.shaped_reward for rollout in group.rollouts], dtype=np.float64)
        if np.all(rewards == rewards[0]):
            return [0.0] * len(rewards)
        centered = rewards - rewards.mean()
        if self.config.normalize_std:
            centered /= rewards.std(ddof=1) + STD_EPS
        return centered.tolist()

    def loss(self, inputs: LossInputs) -> LossOutput:
        """Sum over this micro-batch's loss tokens divided by `num_loss_tokens` of the whole update.

        Loss tokens are selected, not multiplied by the mask: a value that is not finite elsewhere cannot enter.
        """
        from rl.algorithms.losses import bounded, clipped_surrogate, k3, kl_estimate

        chosen = inputs.loss_mask.nonzero().squeeze(-1)

        def select(values: torch.Tensor) -> torch.Tensor:
            return values.index_select(0, chosen)

        logprobs = select(inputs.logprobs)
        log_ratio = logprobs - select(inputs.old_logprobs)
        ratio = bounded(log_ratio).exp()
        token_losses, clipped_low, clipped_high = clipped_surrogate(
            ratio, select(inputs.advantages), clip_low=self.config.clip_low, clip_high=self.config.clip_high
        )
        token_sums = {
            "train/ratio_clipped_low_fraction": clipped_low.sum(),
            "train/ratio_clipped_high_fraction": clipped_high.sum(),
            "train/approx_kl": k3(log_ratio.detach()).sum(),
        }
        if self.uses_reference:
            assert inputs.ref_logprobs is not None, "a KL term needs the reference policy's log-probs"
            kl = kl_estimate(logprobs, select(inputs.ref_logprobs), self.config.kl_estimator)
            token_losses = token_losses + self.config.kl_coef * kl
            token_sums["train/kl_ref"] = kl.detach().sum()
        largest = ratio.detach().max() if len(chosen) else ratio.new_tensor(-math.inf)
        return LossOutput(token_losses.sum() / inputs.num_loss_tokens, token_sums, {"train/ratio_max": largest})
