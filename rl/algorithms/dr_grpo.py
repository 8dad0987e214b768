"""Dr. GRPO (arXiv:2503.20783, section 3.2): GRPO without division by the group's deviation and by answer lengths."""

from __future__ import annotations

from collections.abc import Sequence

from rl.algorithms.advantages import Rewards, centered
from rl.algorithms.grpo import ClippedPolicyGradient
from rl.config.algorithms import DrGRPOConfig


class DrGRPO(ClippedPolicyGradient[DrGRPOConfig]):
    """The paper's objective is GRPO's with A_i = r_i - mean and without 1 / |o_i|: it sums over tokens. Its code, and
    `aggregation` here, divides by a constant, `horizon`, as well. verl's code takes the width of its padded batch where
    no constant is given; here one must be.
    """

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards]:
        return [centered(of_group) for of_group in rewards]
