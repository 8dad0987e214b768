"""Digests of what each stage of a training step made, so that two runs can be compared to the bit without their data.

Every run writes them to digests.jsonl, one row a step: 16 hex digits for each stage. Equal digests mean bitwise equal
values. Step 0 has the weights before training alone. The hash is xxh3 since commit 990e671, and
was blake2b: runs from before and after it differ in every row. Nobody forges a run, and it took a fifth of the loop.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

from rl.types import RolloutGroup, StepStats

STAGES = ("data", "tokens", "reward", "advantage", "loss", "weights")
"""In the order of a step: the first one that differs is where two runs part."""

FORWARD_METRICS = ("mismatch/kl_k3", "offpolicy/kl_k3")
"""Of the step's first update, from the log-probs of every loss token. The loss alone may not show them: on-policy, with
a ratio of 1, GRPO's does not depend on them at all."""


def rollout_digests(groups: Sequence[RolloutGroup]) -> dict[str, str]:
    """Of one batch, in its order: prompts, sampled tokens, rewards (raw, by part, shaped) and advantages."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    parts = sorted({name for rollout in rollouts for name in rollout.reward_parts})
    rewards = [[r.reward, r.shaped_reward, *(r.reward_parts.get(name, np.nan) for name in parts)] for r in rollouts]
    by_token = [r.token_advantages for r in rollouts if r.token_advantages is not None]
    return {
        "data": _digest(
            "\n".join(group.prompt.prompt_id for group in groups).encode(),
            np.array([group.group_id for group in groups], dtype=np.int64),
            *_ragged([group.prompt.token_ids for group in groups]),
        ),
        "tokens": _digest(
            *_ragged([rollout.token_ids for rollout in rollouts]),
            *(rollout.loss_mask for rollout in rollouts),
        ),
        "reward": _digest("\n".join(parts).encode(), np.array(rewards, dtype=np.float64)),
        "advantage": _digest(np.array([r.advantage for r in rollouts], dtype=np.float64), *_ragged(by_token)),
    }


def loss_digest(stats: StepStats) -> str:
    """Of the step's first update, before any weight of the step changes: its loss and its log-probs, as means."""
    values = [stats.first_loss, *(stats.metrics.get(key, np.nan) for key in FORWARD_METRICS)]
    return _digest(np.array(values, dtype=np.float64))


def _ragged(arrays: Sequence[NDArray]) -> list[NDArray]:
    """With their lengths, so that the same values divided otherwise are not the same."""
    return [np.array([len(array) for array in arrays], dtype=np.int64), *arrays]


def _digest(*parts: bytes | NDArray) -> str:
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part if isinstance(part, bytes) else np.ascontiguousarray(part).data)
    return state.hexdigest()
