"""The plan's lines of a vision tower, beside what the real parts hold of one: trainer, reference, engine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig

from rl.config.compose import compose_run_config
from rl.config.schema import Packing, RunConfig
from rl.plan.memory import phases, trainable_params
from rl.plan.sizes import sizes_of
from rl.rollout.local_engine import empty_model
from rl.trainer.fsdp_trainer import FSDPTrainer
from tests.lone_rank import lone_rank
from tests.made_groups import answered, packed
from tests.made_images import image_prompt, miniature, png, renderer_of, text_prompt

TOWER = "vision tower"


def config_of(task: str, *words: str) -> RunConfig:
    settings = [f"task={task}", "hardware=h200x1", "algorithm.kl_coef=0.01", "backend.trainer.packing=one_sequence"]
    return compose_run_config(["model=miniature_qwen3_5_moe", *settings, *words])


def planned(config: RunConfig, phase: str) -> dict[str, float]:
    """Bytes of the lines about the tower."""
    run = sizes_of(config)
    assert run is not None
    (found,) = [one for one in phases(run) if one.name == phase]
    return {line.what: line.num_bytes for line in found.lines if TOWER in line.what}


def trained(folder: Path, config: RunConfig, *, has_image: bool) -> FSDPTrainer:
    """After one update on one answer."""
    renderer = renderer_of(folder)
    prompt = image_prompt(renderer, [png(64, 64, seed=0)]) if has_image else text_prompt(renderer)
    group = answered(prompt, group_id=0, num_tokens=4, drawn_from=(20, 200), logprob=-5.0)
    trainer = lone_rank(config.backend.trainer, folder, config.algorithm, total_updates=1)
    batch = packed([group], packing=Packing.one_sequence)
    trainer.step([ranks[0] for ranks in batch.mini_batches], batch.loss_counts)
    return trainer


def tower_of(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for name, parameter in module.named_parameters() if ".visual." in name]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    whole = [tensor.full_tensor() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.itemsize for tensor in whole)


@pytest.mark.parametrize(
    ("task", "held"),
    [
        ("geometry3k", f"{TOWER}: fp32 masters, AdamW"),
        ("gsm8k", f"{TOWER}: fp32 masters, no image to train it"),
    ],
)
def test_the_trainer_holds_of_a_tower_what_the_plan_says_trained_or_not(tmp_path, task, held):
    config = config_of(task)
    trainer = trained(miniature(tmp_path), config, has_image=task == "geometry3k")
    tower = tower_of(trainer.masters)
    moments = [
        value
        for parameter in tower
        for value in trainer.optimizer.state.get(parameter, {}).values()
        if value.dim() > 0  # AdamW's count of steps is none of the model
    ]
    assert trainer.reference is not None
    expected = planned(config, "publish")
    assert expected[held] == num_bytes([*tower, *moments])
    assert expected[f"{TOWER} of the reference policy"] == num_bytes(tower_of(trainer.reference))
    gradients = 4 * sum(parameter.numel() for parameter in tower) if moments else 0
    assert sum(planned(config, "train").values()) >= num_bytes([*tower, *moments]) + gradients
    trainer.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_engine_holds_a_tower_in_its_own_dtype_whatever_the_task(tmp_path, dtype):
    model = empty_model(AutoConfig.from_pretrained(miniature(tmp_path)), dtype=dtype, device=torch.device("cpu"))
    for task in ("geometry3k", "gsm8k"):
        config = config_of(task, f"backend.rollout.dtype={str(dtype).removeprefix('torch.')}")
        assert planned(config, "generate") == {f"{TOWER} of the engine": num_bytes(tower_of(model))}


def test_of_the_published_model_the_tower_is_in_each_phase_and_under_megatron_in_the_engine_alone():
    """446,571,248 parameters: 16 B of each over 8 ranks, 2 B of each over engines of 8 GPUs."""
    params, experiment = 446_571_248, "experiment=qwen3_5_35b_a3b_grpo_colocated"
    by_fsdp = compose_run_config([experiment, "backend/trainer=fsdp"])
    state = f"{TOWER}: fp32 masters, gradients, AdamW"
    assert planned(by_fsdp, "train") == {
        state: 2 * params,
        f"{TOWER} of the reference policy": params / 4,
    }
    engine = {f"{TOWER} of the engine": params / 4}
    assert planned(by_fsdp, "wake") == planned(by_fsdp, "generate") == engine
    by_megatron = compose_run_config([experiment])
    assert planned(by_megatron, "train") == {} and planned(by_megatron, "publish") == engine
    fsdp, megatron = sizes_of(by_fsdp), sizes_of(by_megatron)
    assert fsdp is not None and megatron is not None
    assert fsdp.trainer_params - megatron.trainer_params == params
    assert trainable_params(fsdp.shape, fsdp.trainer)[0] == 34_660_610_688 / 8
