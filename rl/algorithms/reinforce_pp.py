"""REINFORCE++ and its form with a group baseline (arXiv:2501.03262)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rl.algorithms.advantages import centered, returns_to_go, whitened
from rl.algorithms.grpo import ClippedPolicyGradient
from rl.config.algorithms import ReinforcePPBaselineConfig, ReinforcePPConfig
from rl.types import Rollout, RolloutGroup


class ReinforcePP(ClippedPolicyGradient[ReinforcePPConfig]):
    """A_t = r - beta sum over i >= t of KL(i), normalized over all loss tokens of the step, under PPO's clip.

    KL(i) is the k1 of the policy that sampled and the reference; the reward comes with the last loss token. As in
    OpenRLHF's and verl's code the normalization is over tokens. The loss is a token mean.
    """

    min_group_size = 1

    def assign_advantages(self, groups: Sequence[RolloutGroup]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        returns = [self._returns(rollout)[rollout.loss_mask] for rollout in rollouts]
        normalized = whitened(np.concatenate(returns))
        ends = np.cumsum([len(values) for values in returns])[:-1]
        for rollout, values in zip(rollouts, np.split(normalized, ends), strict=True):
            rollout.token_advantages = np.zeros(len(rollout.token_ids), dtype=np.float32)
            rollout.token_advantages[rollout.loss_mask] = values
            rollout.advantage = float(values.mean()) if len(values) else 0.0

    def _returns(self, rollout: Rollout) -> np.ndarray:
        rewards = np.zeros(len(rollout.token_ids))
        if rollout.loss_mask.any():
            rewards[np.flatnonzero(rollout.loss_mask)[-1]] = rollout.shaped_reward
        if self.penalizes_reward:
            rewards -= self.config.kl_coef * self.token_kl(rollout)
        return returns_to_go(rewards, rollout.loss_mask, self.config.gamma)


class ReinforcePPBaseline(ClippedPolicyGradient[ReinforcePPBaselineConfig]):
    """Reward less the group's mean, normalized over all loss tokens of the step. The paper adds a k2 KL to the loss; a
    `kl_coef` above 0 does so here."""

    def assign_advantages(self, groups: Sequence[RolloutGroup]) -> None:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        outcomes = [np.array([self._outcome(rollout) for rollout in group.rollouts]) for group in groups]
        values = np.concatenate([centered(of_group) for of_group in outcomes])
        counts = np.array([rollout.num_response_tokens for rollout in rollouts])
        counted = counts > 0
        normalized = np.zeros(len(rollouts))
        normalized[counted] = whitened(values[counted], counts[counted])
        for rollout, value in zip(rollouts, normalized, strict=True):
            rollout.advantage = float(value)
