"""CISPO: clipped importance weights (MiniMax-M1, arXiv:2506.13585)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.algorithms.advantages import Rewards, group_scaled
from rl.algorithms.policy_gradient import PolicyGradient, Surrogate, largest
from rl.config.algorithms import CISPOConfig
from rl.config.schema import ConfigError

if TYPE_CHECKING:
    from rl.algorithms.losses import LossTokens


class CISPO(PolicyGradient[CISPOConfig]):
    """Equations 4 and 5 of the paper: -sg[clip(r)] A log pi, token mean, with GRPO's advantages. No token's gradient is
    cut off. The token mean is over the whole update, where the equation as printed takes one for each group
    (`aggregation=prompt_mean_token_mean`). The paper's ratio is over the policy that sampled, so `old_logprobs` is the
    engine's by default: over a later pass of the trainer the bounds would see no staleness. TRL's code has the upper
    bound only; verl's defaults are PPO's bounds.
    """

    @classmethod
    def check(cls, config: CISPOConfig) -> None:
        super().check(config)
        if not 0 <= config.weight_low < 1 < config.weight_high:
            raise ConfigError(
                f"algorithm.weight_low={config.weight_low} and weight_high={config.weight_high} are out of range: they "
                "must be 0 <= weight_low < 1 < weight_high."
            )

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards]:
        return [group_scaled(of_group) for of_group in rewards]

    def surrogate(self, tokens: LossTokens) -> Surrogate:
        from rl.algorithms.losses import bounded, reinforce

        low, high = self.config.weight_low, self.config.weight_high
        ratio = bounded(tokens.log_ratio.detach()).exp()
        return Surrogate(
            reinforce(tokens.logprobs, tokens.advantages, ratio.clamp(low, high)),
            token_sums={
                "train/weight_clipped_low_fraction": (ratio < low).sum(),
                "train/weight_clipped_high_fraction": (ratio > high).sum(),
            },
            maxima={"train/ratio_max": largest(ratio)},
        )
