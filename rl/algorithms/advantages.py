"""Advantages from rewards: pure numpy, float64. A group is one array [G], of as many answers as it has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Rewards = NDArray[np.float64]

STD_EPS = 1e-6
WHITEN_EPS = 1e-8


def centered(rewards: Rewards) -> Rewards:
    """r - mean of the group; exactly 0 where all are equal, because the mean of equal floats need not equal them."""
    if np.all(rewards == rewards[0]):
        return np.zeros_like(rewards)
    return rewards - rewards.mean()


def group_scaled(rewards: Rewards) -> Rewards:
    """(r - mean) / (std + 1e-6), std over n - 1: GRPO, arXiv:2402.03300, section 4.1.2.

    The paper gives neither epsilon nor n - 1; both are common code's. A group of one has advantage 0, where verl's code
    gives it its reward.
    """
    if len(rewards) == 1:
        return np.zeros(1)
    return centered(rewards) / (rewards.std(ddof=1) + STD_EPS)


def batch_scaled(groups: Sequence[Rewards]) -> list[Rewards]:
    """(r - mean of the group) / (std of all rewards of the batch, over n - 1, + 1e-6): no paper's, TRL's
    `scale_rewards="batch"`."""
    everything = np.concatenate(groups)
    std = everything.std(ddof=1) if len(everything) > 1 else 0.0
    return [centered(rewards) / (std + STD_EPS) for rewards in groups]


def leave_one_out(rewards: Rewards) -> Rewards:
    """r_i - 1 / (n - 1) sum over j != i of r_j: the baseline of the RLOO estimator, arXiv:2402.14740.

    Equals n / (n - 1) times (r_i - mean). A group of one has advantage 0, where verl's code gives it its reward.
    """
    n = len(rewards)
    return centered(rewards) * (n / (n - 1)) if n > 1 else np.zeros(1)


def returns_to_go(rewards: Rewards, is_loss_token: NDArray[np.bool_], gamma: float) -> Rewards:
    """[L]: reward from each loss token on, a factor `gamma` per later loss token; 0 elsewhere.

    With gamma = 1, the final reward and -beta KL at each token it is A_t = r - beta sum over i >= t of KL(i), the
    advantage of REINFORCE++ (arXiv:2501.03262) before it is normalized; the paper has no discount. Tokens between that
    the policy did not sample neither end nor discount a return, and may hold no reward.
    """
    returns = np.zeros(len(rewards))
    ahead = 0.0
    for place in np.flatnonzero(is_loss_token)[::-1]:
        ahead = rewards[place] + gamma * ahead
        returns[place] = ahead
    return returns


def whitened(values: Rewards, counts: NDArray[np.int64] | None = None) -> Rewards:
    """(v - mean) / sqrt(var + 1e-8), var over n - 1: the global advantage normalization of arXiv:2501.03262, which is
    (A - mean) / std over the batch; epsilon and n - 1 are those of verl's code.

    `counts`: how many tokens have each value, since the batch it is taken over is one of tokens. None: one. Exactly 0
    where all values are equal.
    """
    if len(values) == 0 or np.all(values == values[0]):
        return np.zeros_like(values)
    weights = np.ones(len(values)) if counts is None else counts.astype(np.float64)
    total = weights.sum()
    deviations = values - (weights * values).sum() / total
    variance = (weights * deviations**2).sum() / (total - 1)
    return deviations / np.sqrt(variance + WHITEN_EPS)
