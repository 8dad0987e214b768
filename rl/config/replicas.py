"""How many rollout engines a run has, and where. From the config alone, so that a plan can say it."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rl.config.build import target_class
from rl.config.schema import FullyAsyncConfig, RolloutConfig, RunConfig, ServerRolloutConfig

HOST_BOUND_PARAMS = 500_000_000
"""Below, a GPU waits for the host between two tokens; see `auto_replicas_per_device`."""


@dataclass(frozen=True, slots=True)
class Replicas:
    """Engine i is on device group `i % num_groups`: neighbours in order are on different devices."""

    num_groups: int
    """Engines with devices of their own."""
    per_device: int
    """Engines that share each of these groups of devices."""
    gpus_per_engine: int

    @property
    def count(self) -> int:
        return self.num_groups * self.per_device

    def first_gpu(self, engine: int) -> int:
        """Of the GPUs that the engines have."""
        return engine % self.num_groups * self.gpus_per_engine


def replicas_of(config: RunConfig) -> Replicas:
    rollout = config.backend.rollout
    per_device = rollout.replicas_per_device
    if per_device is None:
        is_split = rollout.num_gpus > 1 or config.hardware.device == "cpu"
        per_device = 1 if is_split else auto_replicas_per_device(num_params(config))
    return Replicas(rollout.replicas, per_device, rollout.num_gpus)


def engine_has_own_process(config: RunConfig) -> bool:
    """Whether it is outside this process: several engines are, and one that works beside the trainer."""
    return replicas_of(config).count > 1 or isinstance(config.placement, FullyAsyncConfig)


def engine_config(config: RunConfig) -> RolloutConfig:
    """What one engine is built from: `memory_fraction`, which is the device's, is split over those that share it."""
    rollout, per_device = config.backend.rollout, replicas_of(config).per_device
    if not isinstance(rollout, ServerRolloutConfig) or per_device == 1:
        return rollout
    return replace(rollout, memory_fraction=rollout.memory_fraction / per_device)


def auto_replicas_per_device(num_params: int | None) -> int:
    """Engines on one GPU for a model of so many parameters (None: unknown): 2 below 0.5 billion, else 1.

    One step of a small model is shorter than what the host does between two steps, so a second process fills the gap.
    Measured on one H200 with SmolLM2-135M and vLLM, 64 prompts x 8 samples: one process 4.3-4.7 s, two 1.9-2.8 s, four
    1.9-2.0 s. Two take nearly all that there is to gain, and each more divides the cache once more. A model of several
    billion parameters keeps the GPU busy by itself; nothing between was measured, so the bound is a cautious one.
    """
    return 2 if num_params is not None and num_params < HOST_BOUND_PARAMS else 1


def num_params(config: RunConfig) -> int | None:
    """Of the policy, a vision tower included. None: neither the config nor files that are here say it."""
    shape = target_class(config.model._target_).shape(config.model)
    if shape is None:
        return config.model.num_params
    return None if shape.num_params is None else shape.num_params + shape.vision_params
