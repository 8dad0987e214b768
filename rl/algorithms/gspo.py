"""Group sequence policy optimization (arXiv:2507.18071)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.algorithms.advantages import Rewards, group_scaled
from rl.algorithms.policy_gradient import PolicyGradient, Surrogate, largest
from rl.config.algorithms import Aggregation, GSPOConfig

if TYPE_CHECKING:
    from rl.algorithms.losses import LossTokens


class GSPO(PolicyGradient[GSPOConfig]):
    """Equation 5 of the paper with the ratio of its equation 7, the geometric mean of an answer's token ratios, clipped
    answer by answer; the loss is the mean over answers. Advantages are GRPO's. Since one advantage holds for all tokens
    of an answer, the token form with its stopped gradients (equations 13 and 14) has the same value and gradient.
    verl's code bounds the log-ratio to 10 where this one bounds it to 20.
    """

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards]:
        return [group_scaled(of_group) for of_group in rewards]

    def aggregation(self) -> tuple[Aggregation, int | None]:
        return Aggregation.seq_mean_token_mean, None

    def surrogate(self, tokens: LossTokens) -> Surrogate:
        from rl.algorithms.losses import bounded, clipped_surrogate

        ratio = tokens.spread(bounded(tokens.sequence_mean(tokens.log_ratio)).exp())
        clipped = clipped_surrogate(
            ratio, tokens.advantages, clip_low=self.config.clip_low, clip_high=self.config.clip_high
        )
        share = 1.0 / tokens.spread(tokens.lengths)  # all tokens of an answer are clipped, or none
        return Surrogate(
            clipped.losses,
            maxima={"train/ratio_max": largest(ratio)},
            sequence_sums={
                "train/sequence_clipped_low_fraction": (share * clipped.low).sum(),
                "train/sequence_clipped_high_fraction": (share * clipped.high).sum(),
            },
        )
