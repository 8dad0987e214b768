"""REINFORCE leave-one-out (arXiv:2402.14740)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rl.algorithms.advantages import Rewards, leave_one_out
from rl.algorithms.policy_gradient import PolicyGradient, Surrogate
from rl.config.algorithms import RLOOConfig

if TYPE_CHECKING:
    from rl.algorithms.losses import LossTokens


class RLOO(PolicyGradient[RLOOConfig]):
    """The paper's RLOO estimator, 1/k sum over i of [R(y_i) - mean of the other R] grad log pi(y_i | x): the answer is
    one action, so its log-prob is the sum over tokens; the KL, if any, is in the reward, and there is no ratio or clip.
    verl's and TRL's code clip a ratio; TRL's, of whole answers, has the same gradient at the first update. For later
    updates and stale answers use `old_logprobs=rollout` with `correction`.
    """

    has_ratio = False

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards]:
        return [leave_one_out(of_group) for of_group in rewards]

    def surrogate(self, tokens: LossTokens) -> Surrogate:
        from rl.algorithms.losses import reinforce

        return Surrogate(reinforce(tokens.logprobs, tokens.advantages))
