"""Rollout groups with given lengths and rewards, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rl.config.schema import Packing
from rl.trainer.packing import pack
from rl.types import FinishReason, Prompt, Rollout, RolloutGroup, TrainBatch


def made_group(
    rewards: Sequence[float],
    *,
    prompt_tokens: int = 4,
    response_tokens: Sequence[int] | None = None,
    group_id: int = 0,
    policy_version: int = 0,
    advantages: Sequence[float] | None = None,
    temperature: float = 1.0,
    vocab_size: int = 40,
) -> RolloutGroup:
    """Token ids are drawn from (group_id, index), so that equal arguments give equal groups."""
    rng = np.random.default_rng([group_id, len(rewards)])
    prompt_ids = rng.integers(2, vocab_size, prompt_tokens).astype(np.int32)
    lengths = response_tokens or rng.integers(1, 7, len(rewards)).tolist()
    rollouts = []
    for index, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        is_response = np.arange(prompt_tokens + length) >= prompt_tokens
        rollout = Rollout(
            group_id=group_id,
            index=index,
            token_ids=np.concatenate([prompt_ids, rng.integers(2, vocab_size, length)]).astype(np.int32),
            loss_mask=is_response,
            rollout_logprobs=np.where(is_response, -rng.uniform(2, 5, len(is_response)), 0.0).astype(np.float32),
            temperature=temperature,
            policy_versions=np.where(is_response, policy_version, -1).astype(np.int32),
            finish_reason=FinishReason.STOP,
            reward=reward,
            shaped_reward=reward,
        )
        if advantages is not None:
            rollout.advantage = advantages[index]
        rollouts.append(rollout)
    prompt = Prompt(prompt_id=f"made:{group_id}", messages=(), token_ids=prompt_ids, answer="", task="made")
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts)


def answered(
    prompt: Prompt,
    *,
    group_id: int,
    num_tokens: int,
    drawn_from: tuple[int, int],
    logprob: float,
    temperature: float = 1.0,
    advantage: float = 1.0,
) -> RolloutGroup:
    """A group of one answer to `prompt`, of token ids in the half-open range `drawn_from`, each of one log-prob."""
    rng = np.random.default_rng([7, group_id])
    token_ids = np.concatenate([prompt.token_ids, rng.integers(*drawn_from, num_tokens)]).astype(np.int32)
    is_response = np.arange(len(token_ids)) >= len(prompt.token_ids)
    rollout = Rollout(
        group_id=group_id,
        index=0,
        token_ids=token_ids,
        loss_mask=is_response,
        rollout_logprobs=np.where(is_response, np.float32(logprob), np.float32(0.0)),
        temperature=temperature,
        policy_versions=np.where(is_response, 0, -1).astype(np.int32),
        finish_reason=FinishReason.STOP,
        advantage=advantage,
    )
    return RolloutGroup(group_id, prompt, [rollout])


def made_batch(num_groups: int, group_size: int, *, seed: int = 0, **options: Any) -> list[RolloutGroup]:
    """Groups of mixed rewards with advantages of plus and minus one."""
    rewards = [float(index % 2) for index in range(group_size)]
    advantages = [2.0 * reward - 1.0 for reward in rewards]
    return [
        made_group(rewards, group_id=1000 * seed + index, advantages=advantages, **options)
        for index in range(num_groups)
    ]


def packed(groups: Sequence[RolloutGroup], **settings: Any) -> TrainBatch:
    """One update of one rank in one micro-batch, unless `settings` of `pack` say otherwise."""
    defaults: dict[str, Any] = {
        "prompts_per_mini_batch": None,
        "num_ranks": 1,
        "max_tokens_per_micro_batch": 10_000,
        "packing": Packing.tokens,
        "policy_version": 0,
        "skip_zero_advantage": False,
    }
    return pack(groups, **(defaults | settings))
