"""Digests of a step: equal for equal values, and each stage changed by what belongs to it alone."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from rl.digests import loss_digest, rollout_digests
from rl.types import RolloutGroup, StepStats
from tests.made_groups import made_batch


def batch() -> list[RolloutGroup]:
    groups = made_batch(3, 4, seed=0)
    for group in groups:
        for rollout in group.rollouts:
            rollout.reward_parts = {"correct": float(rollout.index == 1)}
    return groups


def swap_two_prompts(groups: list[RolloutGroup]) -> None:
    groups[0], groups[1] = groups[1], groups[0]


def change_one_token(groups: list[RolloutGroup]) -> None:
    rollout = groups[1].rollouts[2]
    rollout.token_ids = rollout.token_ids.copy()
    rollout.token_ids[-1] += 1


def change_the_mask(groups: list[RolloutGroup]) -> None:
    rollout = groups[1].rollouts[2]
    rollout.loss_mask = rollout.loss_mask.copy()
    rollout.loss_mask[-1] = False


def nudge_a_reward(groups: list[RolloutGroup]) -> None:
    rollout = groups[2].rollouts[0]
    rollout.reward = float(np.nextafter(rollout.reward, 2.0))


def shape_a_reward(groups: list[RolloutGroup]) -> None:
    groups[2].rollouts[0].shaped_reward -= 0.5


def change_a_part(groups: list[RolloutGroup]) -> None:
    groups[0].rollouts[0].reward_parts["correct"] = 1.0


def nudge_an_advantage(groups: list[RolloutGroup]) -> None:
    rollout = groups[0].rollouts[3]
    rollout.advantage = float(np.nextafter(rollout.advantage, 2.0))


def give_tokens_their_own_advantages(groups: list[RolloutGroup]) -> None:
    rollout = groups[0].rollouts[3]
    rollout.token_advantages = np.full(len(rollout.token_ids), rollout.advantage, dtype=np.float32)


@pytest.mark.parametrize(
    ("change", "stage"),
    [
        (change_one_token, "tokens"),
        (change_the_mask, "tokens"),
        (nudge_a_reward, "reward"),
        (shape_a_reward, "reward"),
        (change_a_part, "reward"),
        (nudge_an_advantage, "advantage"),
        (give_tokens_their_own_advantages, "advantage"),
    ],
)
def test_a_change_shows_in_its_own_stage_alone(change: Callable[[list[RolloutGroup]], None], stage: str):
    before, after = batch(), batch()
    change(after)
    digests = rollout_digests(before), rollout_digests(after)
    assert {name for name in digests[0] if digests[0][name] != digests[1][name]} == {stage}


def test_equal_batches_have_equal_digests_and_another_order_has_others():
    assert rollout_digests(batch()) == rollout_digests(batch())
    swapped = batch()
    swap_two_prompts(swapped)
    assert rollout_digests(swapped)["data"] != rollout_digests(batch())["data"]


def test_the_loss_stage_sees_the_loss_and_the_log_probs_and_nothing_of_later_updates():
    stats = StepStats(2, {"offpolicy/kl_k3": 0.1, "train/loss": 0.3}, first_loss=0.5)
    digest = loss_digest(stats)
    assert loss_digest(StepStats(2, {"offpolicy/kl_k3": 0.1, "train/loss": 0.9}, first_loss=0.5)) == digest
    assert loss_digest(StepStats(2, {"offpolicy/kl_k3": 0.1}, first_loss=math.nextafter(0.5, 1.0))) != digest
    assert loss_digest(StepStats(2, {"offpolicy/kl_k3": 0.2}, first_loss=0.5)) != digest


def test_a_step_without_a_loss_has_a_digest():
    assert loss_digest(StepStats(0)) == loss_digest(StepStats(0))
