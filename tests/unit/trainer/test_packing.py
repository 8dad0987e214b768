from __future__ import annotations

import itertools

import numpy as np
import pytest

from rl.config.schema import Packing
from rl.loggers.names import unlisted
from rl.trainer.packing import pack_to_score
from rl.types import FinishReason, LossCounts, MicroBatch, TrainBatch
from tests.made_groups import made_batch, made_group, packed


def sequences(micro: MicroBatch) -> list[tuple[int, ...]]:
    bounds = micro.cu_seqlens
    return [tuple(micro.token_ids[a:b].tolist()) for a, b in itertools.pairwise(bounds)]


def real_sequences(batch: TrainBatch, update: int) -> list[tuple[int, ...]]:
    ranks = batch.mini_batches[update]
    return sorted(s for rank in ranks for micro in rank if micro.loss_mask.any() for s in sequences(micro))


def test_two_sequences_by_hand():
    group = made_group([1.0, 0.0], prompt_tokens=2, response_tokens=[1, 3], advantages=[0.5, -0.5], temperature=0.7)
    micro = packed([group]).mini_batches[0][0][0]
    short, long = group.rollouts
    assert micro.token_ids.tolist() == [*long.token_ids, *short.token_ids]
    assert micro.cu_seqlens.tolist() == [0, 5, 8]
    assert micro.places().tolist() == [0, 1, 2, 3, 4, 0, 1, 2]
    assert micro.loss_mask.tolist() == [False, False, True, True, True, False, False, True]
    assert micro.advantages.tolist() == [0.0, 0.0, -0.5, -0.5, -0.5, 0.0, 0.0, 0.5]
    assert micro.temperatures.tolist() == pytest.approx([0.7, 0.7])
    assert micro.is_prompt().tolist() == [True, True, False, False, False, True, True, False]
    assert micro.rollout_logprobs.tolist() == [*long.rollout_logprobs, *short.rollout_logprobs]
    assert (micro.token_ids.dtype, micro.cu_seqlens.dtype) == (np.int32, np.int32)


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [1, 16, 40, 1000])
def test_every_sequence_is_packed_exactly_once(num_ranks, max_tokens):
    groups = made_batch(6, 4)
    batch = packed(groups, num_ranks=num_ranks, max_tokens_per_micro_batch=max_tokens, prompts_per_mini_batch=3)
    for update, chosen in enumerate([groups[:3], groups[3:]]):
        expected = sorted(tuple(r.token_ids.tolist()) for g in chosen for r in g.rollouts)
        assert real_sequences(batch, update) == expected
        assert batch.loss_counts[update].tokens == sum(r.num_response_tokens for g in chosen for r in g.rollouts)
        assert batch.loss_counts[update].sequences == 12


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("num_groups", [1, 5])
def test_ranks_get_equal_counts_and_fillers_carry_no_loss(packing, num_groups):
    groups = made_batch(num_groups, 3, response_tokens=[9, 1, 1])
    batch = packed(groups, num_ranks=4, max_tokens_per_micro_batch=12, packing=packing)
    (ranks,) = batch.mini_batches
    assert len({len(rank) for rank in ranks}) == 1 and len(ranks[0]) >= 1
    assert sum(int(micro.loss_mask.sum()) for rank in ranks for micro in rank) == batch.loss_counts[0].tokens
    fillers = [micro for rank in ranks for micro in rank if not micro.loss_mask.any()]
    assert all(len(f.token_ids) > 1 and not f.advantages.any() and not f.rollout_logprobs.any() for f in fillers)


def test_a_rank_without_any_sequence_still_gets_a_micro_batch():
    batch = packed([made_group([1.0], advantages=[1.0])], num_ranks=4)
    assert [len(rank) for rank in batch.mini_batches[0]] == [1, 1, 1, 1]
    assert [bool(rank[0].loss_mask.any()) for rank in batch.mini_batches[0]] == [True, False, False, False]


def test_micro_batches_keep_to_the_token_budget_unless_one_sequence_is_longer():
    groups = made_batch(8, 4)
    groups.append(made_group([0.0, 1.0], response_tokens=[60, 2], group_id=77, advantages=[-1.0, 1.0]))
    for micro in packed(groups, max_tokens_per_micro_batch=32).mini_batches[0][0]:
        assert len(micro.token_ids) <= 32 or micro.num_sequences == 1


def test_one_sequence_packing_packs_one():
    batch = packed(made_batch(2, 4), packing=Packing.one_sequence)
    assert [micro.num_sequences for micro in batch.mini_batches[0][0]] == [1] * 8


def test_ranks_get_nearly_equal_tokens():
    batch = packed(made_batch(16, 8), num_ranks=4)
    loads = [sum(len(micro.token_ids) for micro in rank) for rank in batch.mini_batches[0]]
    assert max(loads) - min(loads) <= 10


def test_staleness_is_in_published_versions_for_each_sequence():
    old, new = made_group([1.0], policy_version=3, group_id=1), made_group([1.0], policy_version=5, group_id=2)
    batch = packed([old, new], policy_version=5, packing=Packing.one_sequence)
    assert sorted(int(m.staleness[0]) for m in batch.mini_batches[0][0]) == [0, 2]
    assert (batch.metrics["staleness/mean"], batch.metrics["staleness/max"]) == (1.0, 2.0)


def test_rollouts_are_counted_by_staleness_in_a_row_of_fixed_keys():
    groups = [made_group([1.0] * n, policy_version=9 - stale, group_id=stale) for n, stale in [(3, 0), (2, 2), (1, 7)]]
    metrics = packed([*groups, made_group([1.0], policy_version=5, group_id=9)], policy_version=9).metrics
    counts = {key.removeprefix("staleness/count_"): n for key, n in metrics.items() if "count" in key}
    assert counts == {"0": 3.0, "1": 0.0, "2": 2.0, "3": 0.0, "4_or_more": 2.0}
    assert unlisted(metrics) == []


def test_responses_of_several_versions_are_as_stale_as_their_oldest_token():
    groups = [made_group([1.0, 0.0], response_tokens=[3, 4], policy_version=3)]
    first, second = groups[0].rollouts
    first.policy_versions[-2:] = [4, 6]
    second.num_discarded_tokens = 5
    metrics = packed(groups, policy_version=6).metrics
    assert (metrics["staleness/mean"], metrics["staleness/max"], metrics["staleness/count_3"]) == (3.0, 3.0, 2.0)
    assert (metrics["rollout/mixed_version_fraction"], metrics["rollout/version_spread_max"]) == (0.5, 3.0)
    assert (metrics["rollout/restarted_fraction"], metrics["rollout/discarded_tokens"]) == (0.5, 5.0)


def test_skipped_rollouts_still_count_in_the_denominators():
    flat = made_group([1.0, 1.0], response_tokens=[3, 4], advantages=[0.0, 0.0], group_id=1)
    mixed = made_group([1.0, 0.0], response_tokens=[2, 5], advantages=[1.0, -1.0], group_id=2)
    batch = packed([flat, mixed], skip_zero_advantage=True)
    assert batch.loss_counts == [LossCounts(tokens=14, sequences=4, groups=2)]
    assert len(real_sequences(batch, 0)) == 2
    assert batch.metrics["reward/uniform_group_fraction"] == 0.5


def test_an_update_of_skipped_rollouts_only_runs_one_filler_on_each_rank():
    flat = made_group([1.0, 1.0], response_tokens=[3, 4], advantages=[0.0, 0.0])
    batch = packed([flat], num_ranks=2, skip_zero_advantage=True)
    assert [len(rank) for rank in batch.mini_batches[0]] == [1, 1]
    assert not any(micro.loss_mask.any() for rank in batch.mini_batches[0] for micro in rank)
    assert [counts.tokens for counts in batch.loss_counts] == [7]


def test_an_empty_response_is_not_run_and_not_counted():
    group = made_group([1.0, 0.0], response_tokens=[2, 3], advantages=[1.0, -1.0])
    group.rollouts[1].loss_mask[:] = False
    batch = packed([group])
    assert batch.loss_counts == [LossCounts(tokens=2, sequences=1, groups=1)]
    assert len(real_sequences(batch, 0)) == 1


def test_a_loss_on_the_first_token_is_refused():
    group = made_group([1.0], advantages=[1.0])
    group.rollouts[0].loss_mask[0] = True
    with pytest.raises(AssertionError, match="first token"):
        packed([group])


def test_metrics_by_hand():
    group = made_group([1.0, 0.0, 0.0, 1.0], response_tokens=[1, 2, 3, 6])
    for rollout in group.rollouts[:2]:
        rollout.reward_parts = {"correct": rollout.reward, "format": 0.5}
    group.rollouts[3].finish_reason = FinishReason.LENGTH
    metrics = packed([group]).metrics
    assert metrics["reward/mean"] == 0.5 and metrics["reward/std"] == 0.5
    assert metrics["reward/correct"] == 0.5 and metrics["reward/part/format"] == 0.5
    assert metrics["rollout/response_tokens_mean"] == 3.0 and metrics["rollout/response_tokens_max"] == 6.0
    assert metrics["rollout/truncated_fraction"] == 0.25
    assert metrics["reward/uniform_group_fraction"] == 0.0
    assert metrics["rollout/duplicate_fraction"] == 0.0


def test_answers_count_as_duplicates_within_their_group_alone():
    """Of 4 + 4 responses the first group has 3 that are the same, so that 2 of 8 repeat another one."""
    groups = [made_group([1.0, 0.0, 0.0, 1.0], response_tokens=[2, 2, 2, 2], group_id=g) for g in range(2)]
    first, *others = groups[0].rollouts
    for other in others[1:]:
        other.token_ids = first.token_ids.copy()
    groups[1].rollouts[0].token_ids = first.token_ids.copy()
    assert packed(groups).metrics["rollout/duplicate_fraction"] == 2 / 8


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 9])
@pytest.mark.parametrize("max_tokens", [1, 16, 1000])
def test_what_is_packed_to_score_is_unpacked_in_its_order(num_ranks, max_tokens):
    """Each token's own id stands for its log-prob."""
    groups = made_batch(2, 4)
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    batch = pack_to_score(
        [prompt for prompt, _ in pairs],
        [rollout for _, rollout in pairs],
        num_ranks=num_ranks,
        max_tokens_per_micro_batch=max_tokens,
        packing=Packing.tokens,
    )
    assert len({len(of_rank) for of_rank in batch.micro_batches}) == 1
    scored = [[micro.token_ids.astype(np.float32) for micro in of_rank] for of_rank in batch.micro_batches]
    expected = [np.where(rollout.loss_mask, rollout.token_ids, 0).tolist() for _, rollout in pairs]
    assert [values.tolist() for values in batch.unpack(scored)] == expected
