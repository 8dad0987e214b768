"""Dr. GRPO (arXiv:2503.20783, section 3.2): GRPO without division by the group's deviation and by answer lengths."""

from __future__ import annotations

from collections.abc import Sequence

from rl.algorithms.advantages import Rewards, centered
from rl.algorithms.grpo import ClippedPolicyGradient
from rl.config.algorithms import DrGRPOConfig


class DrGRPO(ClippedPolicyGradient[DrGRPOConfig]):
    """The paper sums over tokens; its code, and `aggregation` here, divides by a constant, `horizon`, as well."""

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards]:
        return [centered(of_group) for of_group in rewards]
