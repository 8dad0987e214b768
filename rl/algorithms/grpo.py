"""Group relative policy optimization (arXiv:2402.03300) with the token-mean loss of DAPO (arXiv:2503.14476)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from rl.algorithms.advantages import Rewards, batch_scaled, centered, group_scaled
from rl.algorithms.policy_gradient import PolicyGradient, Surrogate, largest
from rl.config.algorithms import AdvantageScale, ClippedConfig, GRPOConfig
from rl.config.schema import ConfigError

if TYPE_CHECKING:
    from rl.algorithms.losses import LossTokens

Config = TypeVar("Config", bound=ClippedConfig)


class ClippedPolicyGradient(PolicyGradient[Config]):
    """The clipped surrogate of token ratios."""

    @classmethod
    def check(cls, config: Config) -> None:
        super().check(config)
        if config.dual_clip is not None and config.dual_clip <= 1 + config.clip_high:
            raise ConfigError(
                f"algorithm.dual_clip={config.dual_clip} must be above 1 + clip_high = {1 + config.clip_high}: it "
                "bounds ratios that are far too large. verl uses 3, its DAPO scripts 10; null is none."
            )

    def surrogate(self, tokens: LossTokens) -> Surrogate:
        from rl.algorithms.losses import bounded, clipped_surrogate

        config = self.config
        ratio = bounded(tokens.log_ratio).exp()
        clipped = clipped_surrogate(
            ratio, tokens.advantages, clip_low=config.clip_low, clip_high=config.clip_high, dual_clip=config.dual_clip
        )
        sums = {
            "train/ratio_clipped_low_fraction": clipped.low.sum(),
            "train/ratio_clipped_high_fraction": clipped.high.sum(),
        }
        if config.dual_clip is not None:
            sums["train/ratio_clipped_dual_fraction"] = clipped.dual.sum()
        return Surrogate(clipped.losses, sums, {"train/ratio_max": largest(ratio)})


class GRPO(ClippedPolicyGradient[GRPOConfig]):
    """Equation 3 of the paper with its per-answer mean replaced by `aggregation`; KL as its equation 4 by default."""

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards]:
        match self.config.advantage_scale:
            case AdvantageScale.group:
                return [group_scaled(of_group) for of_group in rewards]
            case AdvantageScale.batch:
                return batch_scaled(rewards)
            case AdvantageScale.none:
                return [centered(of_group) for of_group in rewards]
