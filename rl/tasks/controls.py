"""Controls: training rewards that carry no signal, to show that a curve rises because of the reward."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rl.tasks.order import named_seed
from rl.types import Grader, Prompt, Reward, Rollout


def shuffled(grader: Grader, *, seed: int) -> Grader:
    """`grader` with the values of each group dealt out at random among its members, by (seed, group).

    The group keeps its multiset of values, so mean, spread and the groups without spread stay as they are. `correct`
    and the parts stay with the answer that earned them: logs show the truth beside the shuffled value.
    """
    stream = named_seed(seed, "shuffled rewards")

    async def grade(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        rewards = await grader(prompt, rollouts)
        if not rewards:
            return rewards
        order = np.random.default_rng([stream, rollouts[0].group_id]).permutation(len(rewards))
        return [replace(reward, value=rewards[source].value) for reward, source in zip(rewards, order, strict=True)]

    return grade
