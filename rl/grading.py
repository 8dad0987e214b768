"""What the stream and the evaluator share: the answers to one prompt, and their rewards, each with its own failures."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from rl.protocols import RequestError, RolloutEngine
from rl.types import Grader, Prompt, Reward, RewardTimeoutError, Rollout, Sampling

REQUEST_RETRIES = 2
"""Of a prompt whose request a living engine refused or ended by itself."""
RETRY_PAUSE_S = 1.0
"""Before the first; each next pause is twice as long."""

log = logging.getLogger(__name__)


async def sample(
    engine: RolloutEngine,
    prompt: Prompt,
    *,
    group_id: int,
    n: int,
    sampling: Sampling,
    on_retry: Callable[[], None] = lambda: None,
) -> list[Rollout]:
    """n answers in the order of their indices. The engine is asked before this first suspends.

    All n are asked for again where one request fails: with equal seeds and weights the others come out as before.
    `on_retry` is called each time. Raises the last `RequestError`, and any other `EngineError` at once.
    """
    pause_s = RETRY_PAUSE_S
    for num_left in reversed(range(REQUEST_RETRIES + 1)):
        try:
            samples = engine.generate(prompt, group_id=group_id, n=n, sampling=sampling)
            rollouts = sorted([rollout async for rollout in samples], key=lambda rollout: rollout.index)
        except RequestError as error:
            if num_left == 0:
                raise
            log.warning("group %d (%s) is sampled again: %s", group_id, prompt.prompt_id, error)
            on_retry()
            await asyncio.sleep(pause_s)
            pause_s *= 2
        else:
            indices = [rollout.index for rollout in rollouts]
            assert indices == list(range(n)), f"group {group_id} ({prompt.prompt_id}) came back with samples {indices}"
            return rollouts
    raise AssertionError("the last attempt returns or raises")


async def grade(grader: Grader, prompt: Prompt, rollouts: list[Rollout], *, limit_s: float) -> list[Reward]:
    """One reward per rollout, in order. Raises RewardTimeoutError after `limit_s`, in which the grader is cancelled."""
    limit = asyncio.timeout(limit_s)
    try:
        async with limit:
            rewards = await grader(prompt, rollouts)
    except TimeoutError as error:
        if limit.expired():
            raise RewardTimeoutError(
                f"the rewards of {prompt.prompt_id} took over {limit_s:g} s (stream.reward_timeout_s): the grader "
                "hangs, or it is slow and that should be raised"
            ) from error
        raise RewardTimeoutError(f"the grader of {prompt.prompt_id} waited in vain: {error!r}") from error
    assert len(rewards) == len(rollouts), "a grader returns one reward per rollout"
    return rewards
