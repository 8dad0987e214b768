from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.config.algorithms import GRPOConfig, OldLogprobs
from rl.config.schema import ConfigError, Dtype, FSDPConfig, OptimizerConfig, Packing, Schedule
from rl.trainer.checkpoint import check_export
from rl.trainer.fsdp_trainer import FSDPTrainer
from rl.types import StepStats, TrainBatch
from tests.lone_rank import lone_rank
from tests.made_groups import made_batch, made_group, packed
from tests.tiny_models import write_tiny

GROUPS = 4


def trainer(
    folder: Path, *, lr: float = 1e-2, algorithm: dict | None = None, optimizer: dict | None = None, **settings
) -> FSDPTrainer:
    defaults = {"compute_dtype": Dtype.float32, "recompute": False}
    return lone_rank(
        FSDPConfig(optimizer=OptimizerConfig(lr=lr, **(optimizer or {})), **(defaults | settings)),
        folder,
        GRPOConfig(**({"prompts_per_step": GROUPS, "group_size": 4} | (algorithm or {}))),
        total_updates=100,
    )


def step(of: FSDPTrainer, batch: TrainBatch) -> StepStats:
    return of.step([ranks[0] for ranks in batch.mini_batches], batch.loss_counts)


def weights(of: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in of.buckets() for name, tensor in bucket}


def gradients(of: FSDPTrainer, batch: TrainBatch) -> dict[str, torch.Tensor]:
    """Of the first mini-batch, as they are handed to the optimizer."""
    caught: dict[str, torch.Tensor] = {}

    def catch(*_) -> None:
        for name, parameter in of.model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            caught[name] = parameter.grad.full_tensor().clone()

    handle = of.optimizer.register_step_pre_hook(catch)
    step(of, batch)
    handle.remove()
    return caught


def assert_equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_accumulation_equals_one_large_batch(tiny_qwen3):
    groups = made_batch(2, 4)
    results = {}
    for max_tokens, packing, num_micro in (
        (10_000, Packing.tokens, 1),
        (24, Packing.tokens, 4),
        (1, Packing.tokens, 8),
    ):
        batch = packed(groups, max_tokens_per_micro_batch=max_tokens, packing=packing)
        assert num_micro - 1 <= len(batch.mini_batches[0][0]) <= num_micro + 1
        run = trainer(tiny_qwen3, optimizer={"grad_clip": None})
        results[num_micro] = gradients(run, batch), step(run, batch)
    whole, _ = results[1]
    assert max(gradient.abs().max() for gradient in whole.values()) > 1e-3
    for num_micro in (4, 8):
        for name, gradient in results[num_micro][0].items():
            torch.testing.assert_close(gradient, whole[name], atol=1e-6, rtol=1e-5, msg=f"{num_micro} {name}")


def test_a_model_with_recurrent_layers_trains_on_one_sequence_at_a_time_only(tmp_path):
    folder = write_tiny("qwen3_5_text", tmp_path / "model", layer_types=["linear_attention", "full_attention"])
    with pytest.raises(ConfigError, match=r"backend\.trainer\.packing=one_sequence"):
        trainer(folder)
    run = trainer(folder, packing=Packing.one_sequence)
    batch = packed(made_batch(1, 4), packing=Packing.one_sequence)
    assert len(gradients(run, batch)) == len(list(run.model.parameters()))
    assert math.isfinite(step(run, batch).metrics["train/grad_norm"])


def test_gradient_is_that_of_the_loss_written_out(tiny_qwen3):
    """Against the plain model: minus the mean over loss tokens of advantage times log-prob, at ratio one."""
    groups = made_batch(2, 2)
    batch = packed(groups)
    ours = gradients(trainer(tiny_qwen3, optimizer={"grad_clip": None}), batch)
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    total = torch.zeros(())
    for rollout in (rollout for group in groups for rollout in group.rollouts):
        ids = torch.from_numpy(rollout.token_ids).long()
        logprobs = model(input_ids=ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        total = total - rollout.advantage * logprobs[torch.from_numpy(rollout.loss_mask[1:])].sum()
    (total / batch.loss_counts[0].tokens).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_recompute_changes_no_gradient(tiny_qwen3):
    batch = packed(made_batch(2, 4))
    plain = gradients(trainer(tiny_qwen3), batch)
    recomputed = gradients(trainer(tiny_qwen3, recompute=True), batch)
    for name, gradient in plain.items():
        torch.testing.assert_close(recomputed[name], gradient, atol=1e-7, rtol=1e-6, msg=name)


def test_recompute_really_runs_layers_again(tiny_qwen3):
    runs = {}
    for recompute in (False, True):
        run = trainer(tiny_qwen3, recompute=recompute)
        run.padding_leak = 0.0
        count = []
        run.model.base_model.layers[0].self_attn.register_forward_hook(lambda *_, count=count: count.append(1))
        step(run, packed(made_batch(1, 2)))
        runs[recompute] = len(count)
    assert runs == {False: 1, True: 2}


def test_first_update_has_ratio_one_to_the_bit(tiny_qwen3):
    run = trainer(tiny_qwen3)
    for seed in range(3):
        metrics = step(run, packed(made_batch(GROUPS, 4, seed=seed))).metrics
        assert metrics["train/ratio_max"] == 1.0
        assert metrics["train/approx_kl"] == 0.0
        assert metrics["train/ratio_clipped_low_fraction"] == metrics["train/ratio_clipped_high_fraction"] == 0.0


def test_old_logprobs_of_every_mini_batch_are_from_before_the_first_update(tiny_qwen3):
    batch = packed(made_batch(GROUPS, 4), prompts_per_mini_batch=1)
    reference = trainer(tiny_qwen3)
    expected = [reference._score(reference.policy, ranks[0][0]) for ranks in batch.mini_batches]
    run = trainer(tiny_qwen3)
    metrics = step(run, batch).metrics
    for ranks, logprobs in list(zip(batch.mini_batches, expected, strict=True))[1:]:
        np.testing.assert_array_equal(ranks[0][0].old_logprobs, logprobs)
    assert metrics["train/ratio_max"] > 1.0 and metrics["train/approx_kl"] > 0.0
    assert run.num_updates_done == 4


def test_scoring_does_not_leave_old_weights_behind(tiny_qwen3):
    """A no-grad pass gathers the root; the step after it must compute with the updated weights."""
    batch = packed(made_batch(GROUPS, 4))
    micro = batch.mini_batches[0][0][0]
    run = trainer(tiny_qwen3)
    before = run._score(run.policy, micro)
    step(run, batch)
    after = run._score(run.policy, micro)
    live, _ = run.policy(micro, micro.loss_mask)
    assert np.abs(after - before).max() > 1e-3
    np.testing.assert_array_equal(after, live.detach().numpy())


def test_rollout_logprobs_are_the_old_ones_in_bypass_mode(tiny_qwen3):
    run = trainer(tiny_qwen3, algorithm={"old_logprobs": OldLogprobs.rollout})
    batch = packed(made_batch(GROUPS, 4))
    micro = batch.mini_batches[0][0][0]
    live = run._score(run.policy, micro)[micro.loss_mask]
    metrics = step(run, batch).metrics
    ratios = np.exp(live - micro.rollout_logprobs[micro.loss_mask])
    assert metrics["train/ratio_max"] == pytest.approx(ratios.max(), rel=1e-5)


def test_mismatch_is_measured_on_fresh_sequences_only(tiny_qwen3):
    fresh, stale = made_batch(2, 2)
    for rollout in fresh.rollouts:
        rollout.policy_versions[rollout.loss_mask] = 1
    batch = packed([fresh, stale], policy_version=1, packing=Packing.one_sequence)
    run = trainer(tiny_qwen3)
    differences: dict[str, list[float]] = {"fresh": [], "all": []}
    for micro in batch.mini_batches[0][0]:
        gap = (run._score(run.policy, micro) - micro.rollout_logprobs)[micro.loss_mask].tolist()
        differences["all"] += gap
        differences["fresh"] += gap if micro.staleness[0] == 0 else []
    k3 = {key: np.mean([math.expm1(x) - x for x in gaps]) for key, gaps in differences.items()}
    metrics = step(run, batch).metrics
    assert metrics["mismatch/kl_k3"] == pytest.approx(k3["fresh"], rel=1e-4)
    assert metrics["offpolicy/kl_k3"] == pytest.approx(k3["all"], rel=1e-4)
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(max(map(abs, differences["fresh"])), rel=1e-4)
    assert k3["fresh"] != pytest.approx(k3["all"], rel=1e-2)


def test_without_fresh_sequences_mismatch_is_not_a_number(tiny_qwen3):
    metrics = step(trainer(tiny_qwen3), packed(made_batch(1, 2), policy_version=3)).metrics
    assert math.isnan(metrics["mismatch/kl_k3"]) and math.isnan(metrics["mismatch/logprob_diff_max"])
    assert metrics["offpolicy/kl_k3"] > 0.0


def test_skipping_zero_advantages_changes_no_gradient_and_no_loss(tiny_qwen3):
    groups = made_batch(2, 4)
    groups.insert(1, made_group([1.0] * 4, group_id=9, advantages=[0.0] * 4))
    caught, losses = [], []
    for skip in (False, True):
        batch = packed(groups, skip_zero_advantage=skip)
        run = trainer(tiny_qwen3, optimizer={"grad_clip": None})
        caught.append(gradients(run, batch))
        losses.append(step(trainer(tiny_qwen3), batch).metrics["train/loss"])
    assert losses[0] == pytest.approx(losses[1], abs=1e-7)
    for name, gradient in caught[0].items():
        torch.testing.assert_close(caught[1][name], gradient, atol=1e-7, rtol=1e-5, msg=name)


def test_gradient_of_zero_advantages_alone_is_exactly_zero(tiny_qwen3):
    groups = [made_group([1.0] * 4, advantages=[0.0] * 4)]
    for skip in (False, True):
        batch = packed(groups, skip_zero_advantage=skip)
        assert not any(gradient.any() for gradient in gradients(trainer(tiny_qwen3), batch).values())


def test_an_update_without_signal_still_moves_by_momentum(tiny_qwen3):
    run = trainer(tiny_qwen3)
    step(run, packed(made_batch(2, 4)))
    before = weights(run)
    flat = packed([made_group([1.0] * 4, advantages=[0.0] * 4)], skip_zero_advantage=True)
    metrics = step(run, flat).metrics
    assert metrics["train/grad_norm"] == 0.0 and metrics["train/skipped_updates"] == 0.0
    assert any(not torch.equal(tensor, before[name]) for name, tensor in weights(run).items())


def test_a_batch_without_loss_tokens_is_skipped_and_counted(tiny_qwen3):
    group = made_group([1.0, 0.0], advantages=[1.0, -1.0])
    for rollout in group.rollouts:
        rollout.loss_mask[:] = False
    run = trainer(tiny_qwen3)
    before = weights(run)
    stats = step(run, packed([group]))
    assert stats.num_updates == 0 and stats.metrics["train/skipped_updates"] == 1.0
    assert_equal_weights(weights(run), before)


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count(tiny_qwen3):
    run = trainer(tiny_qwen3)
    step(run, packed(made_batch(2, 4)))
    before = weights(run)
    batch = packed(made_batch(2, 4, seed=1))
    micro = batch.mini_batches[0][0][0]
    micro.advantages[micro.loss_mask.nonzero()[0][0]] = np.nan
    stats = step(run, batch)
    assert stats.num_updates == 0 and stats.metrics["train/skipped_updates"] == 1.0
    assert not math.isfinite(stats.metrics["train/grad_norm"])
    assert_equal_weights(weights(run), before)
    assert math.isfinite(step(run, packed(made_batch(2, 4, seed=2))).metrics["train/grad_norm"])


def test_poison_outside_the_mask_changes_no_weight(tiny_qwen3):
    results = []
    for poison in (False, True):
        batch = packed(made_batch(GROUPS, 4), prompts_per_mini_batch=2)
        if poison:
            for micro in (ranks[0][0] for ranks in batch.mini_batches):
                for values in (micro.advantages, micro.rollout_logprobs):
                    values[~micro.loss_mask] = np.nan
        run = trainer(tiny_qwen3)
        stats = step(run, batch)
        results.append((weights(run), stats.metrics))
    assert_equal_weights(results[0][0], results[1][0])
    assert results[0][1] == results[1][1]


def test_clipping_scales_to_the_limit_and_reports_the_norm_before(tiny_qwen3):
    batch = packed(made_batch(2, 4))
    free = gradients(trainer(tiny_qwen3, optimizer={"grad_clip": None}), batch)
    norm = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in free.values()))
    limit = norm / 3
    run = trainer(tiny_qwen3, optimizer={"grad_clip": limit})
    clipped = gradients(run, batch)
    for name, gradient in clipped.items():
        torch.testing.assert_close(gradient, free[name] / 3, atol=1e-7, rtol=1e-4, msg=name)
    assert step(trainer(tiny_qwen3), batch).metrics["train/grad_norm"] == pytest.approx(norm, rel=1e-4)


def test_learning_rate_follows_the_plan_update_by_update(tiny_qwen3):
    run = trainer(tiny_qwen3, lr=1.0, optimizer={"lr_warmup_updates": 10, "schedule": Schedule.linear})
    batch = packed(made_batch(GROUPS, 4), prompts_per_mini_batch=2)
    assert [step(run, batch).metrics["train/lr"] for _ in range(2)] == pytest.approx([0.2, 0.4])


def test_kl_to_the_reference_is_zero_before_and_positive_after_an_update(tiny_qwen3):
    run = trainer(tiny_qwen3, algorithm={"kl_coef": 0.1})
    first = step(run, packed(made_batch(GROUPS, 4))).metrics
    second = step(run, packed(made_batch(GROUPS, 4))).metrics
    assert first["train/kl_ref"] == 0.0
    assert second["train/kl_ref"] > 0.0


def test_an_update_raises_the_log_probs_of_better_answers(tiny_qwen3):
    batch = packed(made_batch(1, 2))
    micro = batch.mini_batches[0][0][0]
    run = trainer(tiny_qwen3)
    before = run._score(run.policy, micro)
    step(run, batch)
    gain = (run._score(run.policy, micro) - before) * micro.advantages
    assert gain.sum() > 0.0


def test_buckets_match_the_manifest_and_are_copies(tiny_qwen3):
    run = trainer(tiny_qwen3)
    manifest = run.manifest(7)
    sent = [(name, tensor) for bucket in run.buckets() for name, tensor in bucket]
    assert manifest.version == 7
    assert [(s.name, s.dtype, s.shape) for s in manifest.tensors] == [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in sent
    ]
    plain = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    expected = dict(plain.named_parameters())
    assert [name for name, _ in sent] == list(expected) and "lm_head.weight" not in expected
    for name, tensor in sent:
        assert torch.equal(tensor, expected[name]) and tensor.is_contiguous()
        tensor.zero_()
    assert_equal_weights(weights(run), {name: parameter.detach() for name, parameter in expected.items()})


def test_buckets_keep_to_their_size(tiny_qwen3, monkeypatch):
    monkeypatch.setattr("rl.trainer.rank.BUCKET_BYTES", 10_000)
    run = trainer(tiny_qwen3)
    buckets = list(run.buckets())
    assert len(buckets) > 1
    assert all(len(b) == 1 or sum(tensor.nbytes for _, tensor in b) <= 10_000 for b in buckets)
    assert [name for b in buckets for name, _ in b] == [spec.name for spec in run.manifest(0).tensors]


def test_bfloat16_computes_on_float32_masters(tiny_qwen3):
    run = trainer(tiny_qwen3, lr=1e-5, compute_dtype=Dtype.bfloat16)
    batch = packed(made_batch(GROUPS, 4), prompts_per_mini_batch=2)
    micro = batch.mini_batches[0][0][0]
    exact = trainer(tiny_qwen3)
    difference = np.abs(run._score(run.policy, micro) - exact._score(exact.policy, micro)).max()
    assert 0.0 < difference < 0.5
    stats = step(run, batch)
    assert math.isfinite(stats.metrics["train/loss"]) and stats.num_updates == 2
    assert all(parameter.dtype == torch.float32 for parameter in run.policy.parameters())
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.bfloat16}


@pytest.mark.parametrize("recompute", [False, True])
def test_resumed_run_equals_an_uninterrupted_one_to_the_bit(tiny_qwen3, tmp_path, recompute):
    """P137, by hand: six steps, and three, a resume, three; losses, rates and weights."""
    optimizer = {"lr_warmup_updates": 5, "schedule": Schedule.cosine}

    def run_steps(of: FSDPTrainer, seeds: range) -> list[dict[str, float]]:
        batches = [packed(made_batch(GROUPS, 4, seed=seed), prompts_per_mini_batch=2) for seed in seeds]
        return [step(of, batch).metrics for batch in batches]

    whole = trainer(tiny_qwen3, optimizer=optimizer, recompute=recompute)
    expected = run_steps(whole, range(6))
    first = trainer(tiny_qwen3, optimizer=optimizer, recompute=recompute)
    run_steps(first, range(3))
    first.save(tmp_path)
    first.close()
    second = trainer(tiny_qwen3, optimizer=optimizer, recompute=recompute)
    second.load(tmp_path)
    assert run_steps(second, range(3, 6)) == expected[3:]
    assert_equal_weights(weights(second), weights(whole))


@pytest.mark.parametrize("compute_dtype", list(Dtype))
def test_export_loads_with_the_logits_of_the_trained_policy(tiny_qwen3, tmp_path, compute_dtype):
    run = trainer(tiny_qwen3, compute_dtype=compute_dtype)
    batch = packed(made_batch(GROUPS, 4))
    step(run, batch)
    run.export(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto")
    assert str(model.dtype) == f"torch.{compute_dtype.value}"
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights(run)[name]), name
    if compute_dtype is Dtype.float32:
        micro = packed(made_batch(1, 1)).mini_batches[0][0][0]
        ours = run._score(run.policy, micro)[micro.loss_mask]
        ids = torch.from_numpy(micro.token_ids)
        logits = model(input_ids=ids.unsqueeze(0)).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(logits.detach().numpy()[micro.loss_mask[1:]], ours, atol=1e-5)
    assert (
        AutoTokenizer.from_pretrained(tmp_path)("1+2").input_ids
        == AutoTokenizer.from_pretrained(tiny_qwen3)("1+2").input_ids
    )
    assert model.generation_config.max_new_tokens == 16


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json"],
)
def test_an_export_that_lost_a_file_is_noticed(tiny_qwen3, tmp_path, name):
    run = trainer(tiny_qwen3)
    run.export(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(RuntimeError, match="export to"):
        check_export(tmp_path, model_class=type(run.model), model_folder=tiny_qwen3)


def test_seconds_are_reported_for_each_phase(tiny_qwen3):
    seconds = step(trainer(tiny_qwen3), packed(made_batch(GROUPS, 4), prompts_per_mini_batch=2)).seconds
    assert seconds.keys() == {"old_logprobs", "forward_backward", "optimizer"}
    assert all(value > 0.0 for value in seconds.values())
