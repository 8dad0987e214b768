"""What a trainer's rank measures of itself for the sentinels, on a tiny model."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from rl.config.algorithms import GRPOConfig, OldLogprobs
from rl.config.schema import Dtype, FSDPConfig, OptimizerConfig
from rl.config.sentinels import SentinelAction, SentinelConfig, SentinelsConfig
from rl.sentinels import DTYPE_LIMITS, WATCHES, Sentinels
from rl.trainer.fsdp_trainer import FSDPTrainer
from rl.types import TrainBatch
from tests.lone_rank import lone_rank
from tests.made_groups import made_batch, packed


def trainer(folder, *, dtype: Dtype = Dtype.float32, **algorithm) -> FSDPTrainer:
    return lone_rank(
        FSDPConfig(optimizer=OptimizerConfig(lr=1e-2), compute_dtype=dtype, recompute=False),
        folder,
        GRPOConfig(prompts_per_step=2, group_size=4, **algorithm),
        total_updates=10,
    )


def step(of: FSDPTrainer, batch: TrainBatch) -> dict[str, float]:
    return of.step([ranks[0] for ranks in batch.mini_batches], batch.loss_counts).metrics


@pytest.mark.parametrize("dtype", list(Dtype))
def test_the_pass_for_old_log_probs_and_the_training_pass_agree(tiny_qwen3, dtype):
    """Measured: exactly 0 in both dtypes; far below the limits of `sentinels.old_logprobs`."""
    run = trainer(tiny_qwen3, dtype=dtype)
    for seed in range(2):
        metrics = step(run, packed(made_batch(2, 4, seed=seed), prompts_per_mini_batch=1))
        difference = metrics["train/old_logprob_difference_max"]
        assert difference <= DTYPE_LIMITS[dtype] / 10


def test_a_pass_that_computes_otherwise_is_seen(tiny_qwen3, monkeypatch):
    run = trainer(tiny_qwen3)
    monkeypatch.setattr(run, "_score", lambda _, micro: np.full(len(micro.token_ids), -1.0, dtype=np.float32))
    assert step(run, packed(made_batch(2, 4), prompts_per_mini_batch=1))["train/old_logprob_difference_max"] > 0.1


def test_with_one_update_there_is_no_pass_to_compare(tiny_qwen3):
    metrics = step(trainer(tiny_qwen3), packed(made_batch(2, 4)))
    assert math.isnan(metrics["train/old_logprob_difference_max"]) and metrics["train/ratio_max"] == 1.0


def test_padding_is_checked_at_the_first_step_alone_and_nothing_leaks(tiny_qwen3):
    run = trainer(tiny_qwen3)
    passes = []
    run.policy.register_forward_hook(lambda *_: passes.append(1))
    for expected in (3, 1):
        passes.clear()
        metrics = step(run, packed(made_batch(2, 4)))
        assert metrics["sentinel/padding_leak"] <= 1e-6 and len(passes) == expected


def test_attention_over_the_bounds_of_a_sequence_is_seen(tiny_qwen3, monkeypatch):
    """All sequences of the pack as one, as a model without packed attention would take them."""
    run = trainer(tiny_qwen3)
    hidden_states = run.policy.hidden_states

    def over_the_bounds(micro, token_ids, position_ids):
        as_one = replace(micro, cu_seqlens=np.array([0, len(token_ids)], dtype=np.int32))
        return hidden_states(as_one, token_ids, position_ids)

    monkeypatch.setattr(run.policy, "hidden_states", over_the_bounds)
    assert step(run, packed(made_batch(2, 4), prompts_per_mini_batch=1))["sentinel/padding_leak"] > 1e-3


def test_a_loss_that_multiplies_by_the_mask_is_seen(tiny_qwen3, monkeypatch):
    run = trainer(tiny_qwen3)
    right = run.algorithm.loss

    def wrong(inputs):
        output = right(inputs)
        return replace(output, loss=output.loss + 0.0 * (inputs.advantages * inputs.loss_mask).sum())

    monkeypatch.setattr(run.algorithm, "loss", wrong)
    assert step(run, packed(made_batch(2, 4), prompts_per_mini_batch=1))["sentinel/padding_leak"] == math.inf


def test_tokens_without_an_old_log_prob_are_in_no_denominator(tiny_qwen3, monkeypatch):
    """One of the tokens of the second update: counted, masked, and its loss divided by the rest."""
    batch = packed(made_batch(2, 4), prompts_per_mini_batch=1)
    tokens = [counts.tokens for counts in batch.loss_counts]
    run = trainer(tiny_qwen3)
    score, seen = run._score, []

    def with_a_hole(policy, micro):
        logprobs = score(policy, micro)
        if micro is batch.mini_batches[1][0][0]:
            logprobs[np.flatnonzero(micro.loss_mask)[0]] = np.nan
        return logprobs

    loss = run.algorithm.loss
    monkeypatch.setattr(run, "_score", with_a_hole)
    monkeypatch.setattr(run.algorithm, "loss", lambda inputs: (seen.append(inputs.counts), loss(inputs))[1])
    metrics = step(run, batch)
    assert metrics["train/nonfinite_logprobs"] == 1.0 and metrics["train/skipped_updates"] == 0.0
    assert [counts.tokens for counts in seen[-2:]] == [tokens[0], tokens[1] - 1]
    assert math.isfinite(metrics["train/loss"]) and math.isfinite(metrics["train/grad_norm"])


def test_tokens_whose_log_prob_the_engine_did_not_give_are_in_no_denominator():
    groups = made_batch(2, 2, response_tokens=[2, 3])
    rollout = groups[1].rollouts[0]
    rollout.rollout_logprobs[rollout.loss_mask] = [np.nan, -1.0]
    batch = packed(groups, prompts_per_mini_batch=1)
    assert [counts.tokens for counts in batch.loss_counts] == [5, 4]
    assert batch.metrics["rollout/nonfinite_logprobs"] == 1.0
    assert sum(int(micro.loss_mask.sum()) for micro in batch.mini_batches[1][0]) == 4


def test_in_bypass_mode_the_engine_trainer_difference_trips_and_nothing_else_is_missing(tiny_qwen3):
    """The engine's log-probs are 0.3 above the trainer's: k3 is exp(-0.3) - 1 + 0.3 = 0.0408 nats."""
    run = trainer(tiny_qwen3, old_logprobs=OldLogprobs.rollout)
    batch = packed(made_batch(2, 4), prompts_per_mini_batch=1)
    for (micro,) in (ranks[0] for ranks in batch.mini_batches):
        micro.rollout_logprobs = np.where(
            micro.loss_mask, run._score(run.policy, micro) + np.float32(0.3), np.float32(0.0)
        )
    metrics = batch.metrics | step(run, batch)
    assert metrics["mismatch/kl_k3"] == pytest.approx(math.exp(-0.3) - 0.7, abs=1e-4)
    not_known = [watch.sentinel for watch in WATCHES if all(math.isnan(metrics.get(k, math.nan)) for k in watch.keys)]
    assert not_known == ["old_logprobs"]  # there is no pass of the trainer to compare
    for action in SentinelAction:
        config = SentinelsConfig(mismatch=SentinelConfig(0.01, action))
        trips = Sentinels(config, compute_dtype=Dtype.float32).find(metrics)
        assert [(trip.sentinel, trip.action) for trip in trips] == [("mismatch", action)]


def test_a_policy_without_finite_log_probs_is_counted_and_not_updated(tiny_qwen3):
    run = trainer(tiny_qwen3)
    with torch.no_grad():
        run.policy.model.get_output_embeddings().weight.fill_(math.nan)
    batch = packed(made_batch(2, 4))
    metrics = step(run, batch)
    assert metrics["train/nonfinite_logprobs"] == batch.loss_counts[0].tokens
    assert metrics["train/skipped_updates"] == 1.0


def test_the_effective_sample_size_is_that_of_the_ratios(tiny_qwen3):
    batch = packed(made_batch(2, 4))
    run = trainer(tiny_qwen3)
    (micro,) = batch.mini_batches[0][0]
    ratios = np.exp(run._score(run.policy, micro) - micro.rollout_logprobs)[micro.loss_mask].astype(np.float64)
    expected = ratios.sum() ** 2 / (len(ratios) * (ratios**2).sum())
    assert step(run, batch)["offpolicy/effective_sample_fraction"] == pytest.approx(expected, rel=1e-4)


def test_an_entropy_bonus_raises_the_entropy(tiny_qwen3):
    """Advantages of zero: nothing else moves the policy."""
    groups = made_batch(2, 4)
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        rollout.advantage = 0.0
    run = trainer(tiny_qwen3, entropy_coef=0.1)
    entropies = [step(run, packed(groups))["train/entropy"] for _ in range(4)]
    assert entropies == sorted(entropies) and entropies[-1] > entropies[0]


def test_the_gradient_of_entropy_is_the_same_in_chunks(tiny_qwen3):
    run = trainer(tiny_qwen3, entropy_coef=0.1)
    (micro,) = packed(made_batch(2, 4)).mini_batches[0][0]
    gradients = []
    for chunk in (7, 10_000):
        run.policy.logprob_chunk_tokens = chunk
        run.policy.zero_grad()
        run.policy(micro, micro.loss_mask)[1].sum().backward()
        gradients.append([p.grad.full_tensor().clone() for p in run.policy.parameters() if p.grad is not None])
    assert max(g.abs().max() for g in gradients[0]) > 1e-3
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-4)


def test_reference_log_probs_stay_those_of_the_initial_policy(tiny_qwen3):
    run = trainer(tiny_qwen3, kl_coef=0.1)
    batch = packed(made_batch(2, 4))
    before = run.reference_logprobs(batch.mini_batches[0][0])
    step(run, batch)
    np.testing.assert_array_equal(before[0], run.reference_logprobs(batch.mini_batches[0][0])[0])
    assert np.abs(run.logprobs(batch.mini_batches[0][0])[0] - before[0]).max() > 1e-3
