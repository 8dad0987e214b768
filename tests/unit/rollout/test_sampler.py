"""Seeds and parts of samples."""

from __future__ import annotations

import numpy as np
import pytest

from rl.rollout.sampler import Sampled, part_seed, stop_reach
from rl.types import FinishReason, Sampling, sample_seed

SAMPLING = Sampling(temperature=1.0, max_new_tokens=8, seed=5)


def test_a_whole_sample_draws_from_the_seed_of_its_identity():
    assert part_seed(SAMPLING, 3, 2, 0) == sample_seed(5, 3, 2)


def test_samples_of_a_group_and_of_groups_and_later_parts_have_seeds_of_their_own():
    seeds = {part_seed(SAMPLING, g, i, before) for g in range(4) for i in range(8) for before in (0, 1, 7)}
    assert len(seeds) == 4 * 8 * 3
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_a_stop_string_is_searched_in_as_many_tokens_as_it_has_bytes_and_a_few_more():
    assert stop_reach(("ab", "</answer>", "é")) == 9 + 4


@pytest.mark.parametrize("num_logprobs", [2, 4])
def test_every_token_has_one_log_prob(num_logprobs: int):
    """One too many or too few in a part would shift those of the parts after it, or be cut off unseen."""
    with pytest.raises(AssertionError, match=f"3 tokens came with {num_logprobs} log-probs"):
        Sampled(np.zeros(3, np.int32), np.zeros(num_logprobs, np.float32), "", FinishReason.STOP)
