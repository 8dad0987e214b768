"""The Megatron trainer against the Hugging Face model, the FSDP trainer and the engine that samples for it."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.config.algorithms import GRPOConfig
from rl.config.schema import (
    ConfigError,
    Dtype,
    FSDPConfig,
    LocalRolloutConfig,
    MegatronConfig,
    OptimizerConfig,
    Packing,
    TrainerConfig,
)
from rl.rollout.local_engine import LocalEngine
from rl.trainer.group import TrainerGroup
from rl.trainer.packing import pack
from rl.types import Prompt, RolloutGroup, Sampling, StepStats, TrainBatch
from rl.weights.publish import publish_weights
from tests.lone_rank import lone_rank
from tests.made_groups import made_batch
from tests.tiny_models import write_tiny_qwen3

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("megatron_on_cpu")]

ALGORITHM = GRPOConfig(prompts_per_step=4, group_size=4, prompts_per_mini_batch=2, kl_coef=0.01)


def settings(config: type[TrainerConfig], **changed) -> TrainerConfig:
    defaults = {"compute_dtype": Dtype.float32, "recompute": False, "optimizer": OptimizerConfig(lr=1e-3)}
    return config(**(defaults | changed))


def trainer(folder: Path, config: type[TrainerConfig] = MegatronConfig, **changed):
    return lone_rank(settings(config, **changed), folder, ALGORITHM, total_updates=100)


def packed(groups: list[RolloutGroup], **changed) -> TrainBatch:
    defaults = {
        "prompts_per_mini_batch": len(groups) // 2,
        "num_ranks": 1,
        "max_tokens_per_micro_batch": 40,
        "packing": Packing.tokens,
        "policy_version": 0,
        "skip_zero_advantage": False,
    }
    return pack(groups, **(defaults | changed))


def step(of, batch: TrainBatch) -> StepStats:
    return of.step([ranks[0] for ranks in batch.mini_batches], batch.loss_counts)


def weights(of) -> dict[str, torch.Tensor]:
    return {name: tensor for bucket in of.buckets() for name, tensor in bucket}


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def model_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_tiny_qwen3(tmp_path / "model", tie_word_embeddings=request.param)


def test_weights_come_back_to_the_bit_in_the_manifest_s_order(model_folder):
    run = trainer(model_folder)
    sent = [pair for bucket in run.buckets() for pair in bucket]
    expected = dict(AutoModelForCausalLM.from_pretrained(model_folder).named_parameters())
    assert [name for name, _ in sent] == list(expected) == [spec.name for spec in run.manifest(0).tensors]
    for name, tensor in sent:
        assert torch.equal(tensor, expected[name]) and tensor.is_contiguous(), name
        tensor.zero_()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(run).items())


@pytest.mark.parametrize("packing", list(Packing))
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_those_of_the_hugging_face_model(model_folder, packing, temperature):
    """One sequence at a time through the plain model, in fp32."""
    batch = packed(made_batch(2, 4, temperature=temperature), packing=packing)
    run = trainer(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder)
    for micro in batch.mini_batches[0][0]:
        ours = run._score(run.policy, micro)
        for start, end in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
            ids = torch.from_numpy(micro.token_ids[start:end])
            with torch.no_grad():
                table = (model(ids[None]).logits[0, :-1] / temperature).log_softmax(-1)
            expected = table.gather(1, ids[1:, None])[:, 0].numpy()
            mask = micro.loss_mask[start:end]
            np.testing.assert_allclose(ours[start:end][mask], expected[mask[1:]], atol=1e-5)
            assert not ours[start:end][~mask].any()


@pytest.mark.parametrize("recompute", [False, True])
def test_steps_equal_those_of_the_fsdp_trainer(model_folder, recompute):
    """Two steps of two updates with a KL term; sums run in another order, hence the tolerances."""
    megatron = trainer(model_folder, recompute=recompute)
    fsdp = trainer(model_folder, FSDPConfig)
    before = weights(megatron)
    for seed in range(2):
        ours, theirs = (step(of, packed(made_batch(4, 4, seed=seed))) for of in (megatron, fsdp))
        assert ours.num_updates == theirs.num_updates == 2
        assert ours.metrics.keys() == theirs.metrics.keys()
        for key, value in theirs.metrics.items():
            assert ours.metrics[key] == pytest.approx(value, abs=1e-6, rel=1e-4), key
    after = weights(megatron)
    for name, tensor in weights(fsdp).items():
        torch.testing.assert_close(after[name], tensor, atol=1e-5, rtol=0, msg=name)
        assert (after[name] - before[name]).abs().max() > 1e-3, name


def test_bfloat16_steps_float32_masters_that_the_computing_copy_follows(tiny_qwen3):
    run = trainer(tiny_qwen3, compute_dtype=Dtype.bfloat16, optimizer=OptimizerConfig(lr=1e-5))
    before = {name: parameter.detach().clone() for name, parameter in run.masters.named_parameters()}
    exact = step(trainer(tiny_qwen3, optimizer=OptimizerConfig(lr=1e-5)), packed(made_batch(4, 4))).metrics
    metrics = step(run, packed(made_batch(4, 4))).metrics
    assert metrics["train/loss"] == pytest.approx(exact["train/loss"], abs=0.02)
    assert metrics["train/grad_norm"] == pytest.approx(exact["train/grad_norm"], rel=0.05)
    copy = dict(run.policy.model.named_parameters())
    for name, master in run.masters.named_parameters():
        moved = (master - before[name]).abs().max()
        assert master.dtype == torch.float32 and 0.0 < moved < 1e-4, name  # far below a bf16 step of a weight near 1
        assert torch.equal(copy[name], master.to(torch.bfloat16)), name
    assert {tensor.dtype for tensor in weights(run).values()} == {torch.bfloat16}


def test_a_gradient_that_is_not_finite_changes_nothing_but_the_count(tiny_qwen3):
    run = trainer(tiny_qwen3)
    before = weights(run)
    batch = packed(made_batch(2, 4), prompts_per_mini_batch=None, max_tokens_per_micro_batch=1000)
    micro = batch.mini_batches[0][0][0]
    micro.advantages[micro.loss_mask.nonzero()[0][0]] = np.nan
    stats = step(run, batch)
    assert stats.num_updates == 0 and stats.metrics["train/skipped_updates"] == 1.0
    assert not math.isfinite(stats.metrics["train/grad_norm"])
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(run).items())


@pytest.mark.parametrize("compute_dtype", list(Dtype))
def test_a_loaded_trainer_goes_on_to_the_bit(tiny_qwen3, tmp_path, compute_dtype):
    first = trainer(tiny_qwen3, compute_dtype=compute_dtype)
    step(first, packed(made_batch(4, 4, seed=0)))
    first.save(tmp_path)
    second = trainer(tiny_qwen3, compute_dtype=compute_dtype)
    second.load(tmp_path)
    expected, got = (step(of, packed(made_batch(4, 4, seed=1))).metrics for of in (first, second))
    assert got == expected
    assert all(torch.equal(tensor, weights(second)[name]) for name, tensor in weights(first).items())


def test_an_export_loads_with_the_trained_weights(model_folder, tmp_path):
    run = trainer(model_folder)
    step(run, packed(made_batch(4, 4)))
    folder = tmp_path / "export"
    folder.mkdir()
    run.export(folder)
    expected = weights(run)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_published_weights_give_the_engine_the_trainer_s_logprobs(model_folder):
    """Through the driver's handle and a real publish, before and after a step."""

    async def run() -> list[dict[str, float]]:
        group = TrainerGroup(
            settings(MegatronConfig),
            model_folder=model_folder,
            algorithm=ALGORITHM,
            device="cpu",
            num_ranks=1,
            seed=0,
            total_updates=100,
        )
        engine = LocalEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=model_folder, device="cpu")
        await group.start()
        await engine.start()
        seen = []
        for version in range(3):
            await publish_weights(group, engine, version=version)
            groups = [await sampled_group(engine, index, version) for index in range(4)]
            seen.append((await group.step(packed(groups, policy_version=version))).metrics)
        await engine.close()
        await group.close()
        return seen

    for metrics in asyncio.run(run()):
        assert metrics["mismatch/kl_k3"] < 1e-6
        assert metrics["mismatch/logprob_diff_max"] < 1e-4
        assert metrics["train/grad_norm"] > 0.0


async def sampled_group(engine: LocalEngine, group_id: int, version: int) -> RolloutGroup:
    ids = np.arange(2 + group_id, 7 + group_id, dtype=np.int32)
    prompt = Prompt(prompt_id=f"made:{group_id}", messages=(), token_ids=ids, answer="", task="made")
    sampling = Sampling(temperature=1.0, max_new_tokens=6, seed=version)
    rollouts = [r async for r in engine.generate(prompt, group_id=group_id, n=4, sampling=sampling)]
    for rollout in rollouts:
        rollout.advantage = 1.0 if rollout.index % 2 else -1.0
    return RolloutGroup(group_id=group_id, prompt=prompt, rollouts=rollouts)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, "rope_type=linear"),
        ({"use_sliding_window": True, "sliding_window": 4, "layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ],
)
def test_a_model_that_it_would_compute_wrongly_is_refused(tmp_path, overrides, message):
    folder = write_tiny_qwen3(tmp_path / "model", **overrides)
    with pytest.raises(ConfigError, match=message):
        trainer(folder)


def test_another_architecture_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model_type=llama"):
        trainer(tmp_path)


def test_the_schedule_of_a_resumed_run_goes_on(tiny_qwen3, tmp_path):
    optimizer = OptimizerConfig(lr=1.0, lr_warmup_updates=10)
    first = trainer(tiny_qwen3, optimizer=optimizer)
    step(first, packed(made_batch(4, 4)))
    first.save(tmp_path)
    second = trainer(tiny_qwen3, optimizer=optimizer)
    second.load(tmp_path)
    assert step(second, packed(made_batch(4, 4))).metrics["train/lr"] == pytest.approx(0.4)
