from __future__ import annotations

import copy
import gc
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.config.algorithms import GRPOConfig
from rl.config.schema import Dtype, FSDPConfig, OptimizerConfig
from rl.trainer.attention import _by_runs, _flash, equal_length_runs
from rl.trainer.fsdp_trainer import FSDPTrainer
from tests.lone_rank import lone_rank
from tests.made_groups import made_batch, packed

pytestmark = pytest.mark.gpu


def trainer(folder: Path, device: str, **settings) -> FSDPTrainer:
    return lone_rank(
        FSDPConfig(optimizer=OptimizerConfig(lr=1e-3), **({"compute_dtype": Dtype.float32} | settings)),
        folder,
        GRPOConfig(prompts_per_step=4, group_size=4, prompts_per_mini_batch=2, kl_coef=0.01),
        total_updates=20,
        device=device,
    )


def batch(seed: int = 0):
    return packed(made_batch(4, 4, seed=seed), prompts_per_mini_batch=2, max_tokens_per_micro_batch=64)


def step(of: FSDPTrainer, seed: int = 0):
    made = batch(seed)
    return of.step([ranks[0] for ranks in made.mini_batches], made.loss_counts)


def weights(of: FSDPTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.cpu() for bucket in of.buckets() for name, tensor in bucket}


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("kv_heads", [2, 8])
def test_flash_attention_equals_attention_by_runs(kv_heads, window):
    torch.manual_seed(0)
    cu_seqlens = np.array([0, 37, 50, 50 + 129, 50 + 129 * 2], dtype=np.int32)
    shapes = [(1, heads, int(cu_seqlens[-1]), 64) for heads in (8, kv_heads, kv_heads)]
    states = [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    exact = [state.detach().float().requires_grad_() for state in states]
    bounds = torch.from_numpy(cu_seqlens).cuda()
    ours = _flash(*states, bounds, 129, 0.125, window)
    expected = _by_runs(*exact, equal_length_runs(cu_seqlens), 0.125, window)
    weight = torch.randn_like(expected)
    (ours.float() * weight).sum().backward()
    (expected * weight).sum().backward()
    torch.testing.assert_close(ours.float(), expected, atol=2e-2, rtol=2e-2)
    for state, reference in zip(states, exact, strict=True):
        torch.testing.assert_close(state.grad.float(), reference.grad, atol=6e-2, rtol=6e-2)


def test_gpu_steps_equal_cpu_steps(tiny_qwen3):
    on_gpu = trainer(tiny_qwen3, "cuda")
    on_cpu = trainer(tiny_qwen3, "cpu")
    for seed in range(3):
        ours, expected = step(on_gpu, seed).metrics, step(on_cpu, seed).metrics
        assert ours["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-4)
        assert ours["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-2)


@pytest.mark.parametrize("compute_dtype", list(Dtype))
def test_offload_frees_the_gpu_and_onload_brings_the_same_back(tiny_qwen3, compute_dtype):
    step(trainer(tiny_qwen3, "cuda", compute_dtype=compute_dtype))  # cuBLAS keeps a workspace of 64 MiB from now on
    gc.collect()
    kept = torch.cuda.memory_allocated()
    moved = trainer(tiny_qwen3, "cuda", compute_dtype=compute_dtype)
    step(moved)
    before, held = copy.deepcopy(weights(moved)), torch.cuda.memory_allocated() - kept
    moved.offload()
    assert torch.cuda.memory_allocated() - kept < held / 4
    assert all(parameter.device.type == "cpu" for parameter in moved.policy.parameters())
    moved.onload()
    assert all(parameter.device.type == "cuda" for parameter in moved.policy.parameters())
    after = weights(moved)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    stayed = trainer(tiny_qwen3, "cuda", compute_dtype=compute_dtype)
    step(stayed)
    assert step(moved, 1).metrics["train/loss"] == pytest.approx(step(stayed, 1).metrics["train/loss"], abs=1e-5)


def test_what_the_allocator_keeps_of_a_step_can_be_given_to_the_engine(tiny_qwen3):
    rank = trainer(tiny_qwen3, "cuda")
    activations = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    del activations
    kept = torch.cuda.memory_reserved()
    rank.release_cache()
    assert kept - torch.cuda.memory_reserved() >= 2**30
    assert step(rank).num_updates == 2


def test_resume_on_a_gpu_goes_on_as_before(tiny_qwen3, tmp_path):
    run = trainer(tiny_qwen3, "cuda", compute_dtype=Dtype.bfloat16)
    step(run, 0)
    run.save(tmp_path)
    expected = step(run, 1).metrics["train/loss"]
    run.load(tmp_path)
    assert step(run, 1).metrics["train/loss"] == pytest.approx(expected, abs=1e-5)


def test_bfloat16_with_recompute_stays_near_float32(tiny_qwen3):
    exact, rounded = trainer(tiny_qwen3, "cuda"), trainer(tiny_qwen3, "cuda", compute_dtype=Dtype.bfloat16)
    micro = batch().mini_batches[0][0][0]
    difference = np.abs(exact._score(exact.policy, micro) - rounded._score(rounded.policy, micro))
    assert 0.0 < difference.max() < 0.5
    assert step(rounded).num_updates == 2
