"""Which settings may differ while a published claim can still be compared with a run. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatch

from rl.config.published import ClaimConfig, Statistic, is_speed

NOT_OF_OUTCOME = ("seed", "model.path", "task.data.*.path", "ray.*")
"""Settings whose change leaves every claim comparable: another sample of the same run, or where the same things lie.
Whoever changes a path answers for what lies there."""
LENGTH = ("steps", "task.epochs")
"""How much of a run is done: that moves the largest value and where a curve settles, unless the window ends before."""
NOT_OF_LEARNING = (
    *NOT_OF_OUTCOME,
    "hardware.*",
    "checkpoint.*",
    "canary.*",
    "sentinels.*",
    "evaluation.at_*",
    "task.checker.*",
    "backend.trainer.max_tokens_per_micro_batch",
    "backend.trainer.recompute",
    "backend.trainer.logprob_chunk_tokens",
    "backend.trainer.collective_timeout_s",
    "backend.rollout.replicas*",
    "backend.rollout.tensor_parallel",
    "backend.rollout.memory_fraction",
    "backend.rollout.max_num_seqs",
    "backend.rollout.max_graph_batch",
    "backend.rollout.cpu_cache_gib",
    "backend.rollout.enforce_eager",
    "backend.rollout.attention_backend",
    "backend.rollout.custom_all_reduce",
    "placement.trainer_ranks",
    "placement.share_devices",
    "placement.weight_transport",
    "stream.reward_timeout_s",
    "stream.stall_timeout_s",
    "stream.max_failed_fraction",
)
"""And those that change how fast a run is and not, beyond rounding, what it learns."""


def keys_that_matter(claim: ClaimConfig, changed: Iterable[str]) -> list[str]:
    """For this claim, of settings that differ. Hardware has a rule of its own.

    How often is evaluated moves the largest of the values, and no other statistic.
    """
    free = (*NOT_OF_OUTCOME, "hardware.*") if is_speed(claim) else NOT_OF_LEARNING
    if claim.statistic is not Statistic.max:
        free += ("evaluation.every",)
    if claim.statistic not in (Statistic.max, Statistic.settles_at) or claim.last_step is not None:
        free += LENGTH
    return [key for key in changed if not any(fnmatch(key, pattern) for pattern in free)]


def named(keys: Sequence[str], most: int = 4) -> str:
    rest = f" and {len(keys) - most} more" if len(keys) > most else ""
    return ", ".join(keys[:most]) + rest
