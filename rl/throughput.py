"""Rates of a step: over all GPUs of a run, over those that train, and how much of their peak these use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rl.config.shape import ModelShape
from rl.types import RolloutGroup, TrainBatch


@dataclass(frozen=True, slots=True)
class Devices:
    """What a run works on. The defaults are a CPU."""

    num_gpus: int = 0
    """Of trainer and engines together, a shared one once; 0: they are on a CPU."""
    training_gpus: int = 0
    peak_flops: float | None = None
    """Dense bf16 rate of one GPU, a second. None: `hardware.bf16_tflops` does not say."""
    shape: ModelShape | None = None
    """Of the policy. None: unknown."""


def throughput(groups: Sequence[RolloutGroup], *, step_s: float, devices: Devices) -> dict[str, float]:
    """Of a step that trained on `groups`. Rates per GPU count tokens of prompts and answers, every answer with its
    prompt, as verl's perf/throughput does; on a CPU there are none."""
    rates = {"throughput/prompts_per_s": len(groups) / step_s}
    if devices.num_gpus:
        num_tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
        rates["throughput/tokens_per_s_per_gpu"] = num_tokens / step_s / devices.num_gpus
        rates["throughput/tokens_per_s_per_training_gpu"] = num_tokens / step_s / devices.training_gpus
    return rates


def utilization(batch: TrainBatch, *, seconds: Mapping[str, float], devices: Devices) -> dict[str, float | None]:
    """The trainer's model FLOPs utilization in its updates, whose time is in `seconds`; nothing on a CPU.

    Forward and backward of each sequence once, three times its forward pass: what is computed again to save memory
    does not count, nor do other passes. None where the GPU's peak or the model's shape is unknown, never 0.
    """
    if not devices.num_gpus:
        return {}
    if devices.peak_flops is None or devices.shape is None or devices.shape.num_params is None:
        return {"throughput/mfu": None}
    lengths = [
        length
        for ranks in batch.mini_batches
        for micro_batches in ranks
        for micro in micro_batches
        for length, is_trained in zip(
            np.diff(micro.cu_seqlens), np.logical_or.reduceat(micro.loss_mask, micro.cu_seqlens[:-1]), strict=True
        )
        if is_trained  # what only fills a rank's share up is no work
    ]
    update_s = seconds["forward_backward"] + seconds["optimizer"]
    flops = 3 * sum(devices.shape.forward_flops(length, length / 2) for length in lengths)
    return {"throughput/mfu": float(flops / (update_s * devices.training_gpus * devices.peak_flops))}
