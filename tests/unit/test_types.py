"""What a rollout says of itself."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl.types import FinishReason, Rollout, sample_seed

EOS = 1

ROLLOUT = Rollout(
    group_id=0,
    index=0,
    token_ids=np.array([5, 6, 7, 8], dtype=np.int32),
    loss_mask=np.array([False, False, True, True]),
    rollout_logprobs=np.array([0.0, 0.0, -1.0, -2.0], dtype=np.float32),
    temperature=1.0,
    policy_versions=np.array([-1, -1, 0, 3], dtype=np.int32),
    finish_reason=FinishReason.STOP,
)


@pytest.mark.parametrize("last_token", [EOS, 8])
@pytest.mark.parametrize("reason", list(FinishReason))
def test_truncated_is_what_ended_at_the_length_limit_whatever_its_last_token_is(reason: FinishReason, last_token: int):
    """A stop string ends a whole answer without an end-of-text token; a cut answer may end with one by chance."""
    token_ids = np.array([5, 6, 7, last_token], dtype=np.int32)
    rollout = replace(ROLLOUT, token_ids=token_ids, finish_reason=reason)
    assert rollout.is_truncated == (reason is FinishReason.LENGTH)


@pytest.mark.parametrize("change", [slice(0, 3), [0, 1, 2, 3, 3]])
@pytest.mark.parametrize("name", ["token_ids", "loss_mask", "rollout_logprobs", "policy_versions"])
def test_arrays_of_different_lengths_are_refused(name: str, change: Any):
    with pytest.raises(AssertionError, match="differ in length"):
        replace(ROLLOUT, **{name: getattr(ROLLOUT, name)[change]})


def test_versions_are_those_of_sampled_tokens():
    assert (ROLLOUT.min_policy_version, ROLLOUT.max_policy_version, ROLLOUT.num_response_tokens) == (0, 3, 2)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_the_oldest_version_is_found_whatever_the_width_of_the_array(kind: type):
    assert replace(ROLLOUT, policy_versions=np.array([-1, -1, 7, 3], dtype=kind)).min_policy_version == 3


def test_a_rollout_that_no_policy_sampled_has_no_oldest_version():
    with pytest.raises(AssertionError, match="no policy sampled a token"):
        _ = replace(ROLLOUT, policy_versions=np.full(4, -1, dtype=np.int32)).min_policy_version


def test_seeds_of_a_sample_depend_on_run_group_and_place_and_on_nothing_else():
    seeds = {sample_seed(seed, group, index) for seed in range(4) for group in range(-4, 12) for index in range(8)}
    assert len(seeds) == 4 * 16 * 8
    assert sample_seed(7, 12, 3) == sample_seed(7, 12, 3)
    assert sample_seed(1, 23, 4) != sample_seed(12, 3, 4)  # not merely written one after the other
