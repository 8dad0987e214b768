"""The numbers that a plan's arithmetic takes, out of a run's config."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from rl.config.algorithms import OldLogprobs
from rl.config.build import target_class
from rl.config.replicas import engine_config, replicas_of
from rl.config.schema import (
    Dtype,
    FullyAsyncConfig,
    LocalRolloutConfig,
    MegatronConfig,
    Packing,
    RunConfig,
    ServerRolloutConfig,
    SGLangRolloutConfig,
    VLLMRolloutConfig,
    WeightTransport,
)
from rl.config.shape import ModelShape
from rl.config.transport import weight_transport

PROMPT_TOKENS = 200
"""Assumed mean length of a prompt, where task.max_prompt_tokens is not less."""

BYTES = {Dtype.float32: 4, Dtype.bfloat16: 2}


class Sharing(Enum):
    """How trainer and engines have the devices."""

    turns = "turns"
    """The same ones, one after the other."""
    apart = "apart"
    """Each their own."""
    together = "together"
    """The same ones at the same time."""


@dataclass(frozen=True, slots=True)
class TrainerSizes:
    ranks: int
    data_ranks: int
    """Over which masters, gradients and optimizer state are divided; with Megatron-Core, copies of the model."""
    is_megatron: bool
    tensor_parallel: int
    expert_parallel: int
    compute_bytes: int
    """Of one number in forward and backward."""
    micro_batch_tokens: int
    """The most that one forward pass of one rank can hold."""
    budget_tokens: int
    """That a micro-batch of shorter sequences is filled up to."""
    recompute: bool
    chunk_tokens: int
    """Positions whose logits exist at once."""
    has_reference: bool
    trains_on_images: bool
    """Without, no gradient reaches a vision tower, which then has no moments either."""


@dataclass(frozen=True, slots=True)
class EngineSizes:
    name: str
    """`local`, `vllm` or `sglang`."""
    count: int
    gpus: int
    """Of one engine, over which it is split."""
    per_device: int
    """Engines on each of these."""
    weight_bytes: int
    """Of one number."""
    max_num_seqs: int
    memory_fraction: float | None
    """Of one engine. None: the engine takes what it needs."""
    cpu_cache_gib: int

    @property
    def total_gpus(self) -> int:
        return self.count // self.per_device * self.gpus


@dataclass(frozen=True, slots=True)
class StepSizes:
    prompts: int
    group_size: int
    updates: int
    publish_every: int
    max_prompt_tokens: int
    max_new_tokens: int
    prompt_tokens: float
    """Mean, assumed."""
    response_tokens: float
    """Mean, assumed or told."""
    scored_share: float
    """Share of the tokens that go through an extra forward pass for old log-probs."""
    max_staleness: float
    """As set: of one publish's groups, the share started beyond them."""

    @property
    def rollouts(self) -> int:
        return self.prompts * self.group_size

    @property
    def max_sequence(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def new_tokens(self) -> float:
        return self.rollouts * self.response_tokens

    @property
    def tokens(self) -> float:
        return self.rollouts * (self.prompt_tokens + self.response_tokens)


@dataclass(frozen=True, slots=True)
class DeviceSizes:
    is_cpu: bool
    count: int
    nodes: int
    gpus_per_node: int
    memory_gib: float
    """Of one GPU, or of the host."""
    bandwidth_tb_s: float | None
    tflops: float | None
    link_gb_s: float | None
    """Of one GPU to the others of its node, both directions together."""
    network_gb_s: float | None
    """Of one node, in one direction."""


@dataclass(frozen=True, slots=True)
class RunSizes:
    shape: ModelShape
    """With its parameters counted."""
    trainer: TrainerSizes
    engine: EngineSizes
    step: StepSizes
    device: DeviceSizes
    sharing: Sharing
    transport: WeightTransport

    @property
    def trainer_tower_params(self) -> int:
        """Of the vision tower in the trainer. Megatron builds the decoder alone."""
        return 0 if self.trainer.is_megatron else self.shape.vision_params

    @property
    def trainer_params(self) -> int:
        """Of all that the trainer holds, publishes and saves."""
        assert self.shape.num_params is not None
        return self.shape.num_params + self.trainer_tower_params

    @property
    def engine_params(self) -> int:
        """Engines load the model as its config.json says, its tower also where no prompt has an image."""
        assert self.shape.num_params is not None
        return self.shape.num_params + self.shape.vision_params


def sizes_of(config: RunConfig) -> RunSizes | None:
    """None where the model's sizes, or parameters, are not known here."""
    shape = target_class(config.model._target_).shape(config.model)
    if shape is None or shape.num_params is None:
        return None
    hardware = config.hardware
    return RunSizes(
        shape=shape,
        trainer=_trainer(config),
        engine=_engine(config),
        step=_step(config),
        device=DeviceSizes(
            is_cpu=hardware.device == "cpu",
            count=hardware.nodes * hardware.gpus_per_node,
            nodes=hardware.nodes,
            gpus_per_node=hardware.gpus_per_node,
            memory_gib=hardware.memory_gib,
            bandwidth_tb_s=hardware.memory_bandwidth_tb_s,
            tflops=hardware.bf16_tflops,
            link_gb_s=hardware.link_gb_s,
            network_gb_s=hardware.network_gb_s,
        ),
        sharing=_sharing(config),
        transport=weight_transport(config),
    )


def _sharing(config: RunConfig) -> Sharing:
    if not isinstance(config.placement, FullyAsyncConfig):
        return Sharing.turns
    return Sharing.apart if config.has_engine_devices else Sharing.together


def _trainer(config: RunConfig) -> TrainerSizes:
    trainer, ranks = config.backend.trainer, config.placement.trainer_ranks
    longest = config.task.max_prompt_tokens + config.task.sampling.max_new_tokens
    rollouts = config.algorithm.prompts_per_step * config.algorithm.group_size
    of_an_update = -(-rollouts // config.algorithm.updates_per_step // ranks) * longest
    packs = trainer.packing is Packing.tokens
    tensor = getattr(trainer, "tensor_parallel", 1)
    return TrainerSizes(
        ranks=ranks,
        data_ranks=max(1, ranks // tensor),
        is_megatron=isinstance(trainer, MegatronConfig),
        tensor_parallel=tensor,
        expert_parallel=getattr(trainer, "expert_parallel", 1),
        compute_bytes=BYTES[trainer.compute_dtype],
        micro_batch_tokens=max(longest, min(trainer.max_tokens_per_micro_batch, of_an_update)) if packs else longest,
        budget_tokens=trainer.max_tokens_per_micro_batch if packs else 0,
        recompute=trainer.recompute,
        chunk_tokens=trainer.logprob_chunk_tokens,
        has_reference=config.algorithm.kl_coef > 0,
        trains_on_images=trains_on_images(config),
    )


def trains_on_images(config: RunConfig) -> bool:
    """A task of one's own that does not say so has text alone."""
    task = target_class(config.task._target_)
    return hasattr(task, "trains_on_images") and task.trains_on_images(config.task)


def _engine(config: RunConfig) -> EngineSizes:
    replicas, engine = replicas_of(config), engine_config(config)
    is_server = isinstance(engine, ServerRolloutConfig)
    names = {LocalRolloutConfig: "local", VLLMRolloutConfig: "vllm", SGLangRolloutConfig: "sglang"}
    return EngineSizes(
        name=names.get(type(engine), "local"),
        count=replicas.count,
        gpus=replicas.gpus_per_engine,
        per_device=replicas.per_device,
        weight_bytes=BYTES[engine.dtype],
        max_num_seqs=engine.max_num_seqs,
        memory_fraction=engine.memory_fraction if is_server else None,
        cpu_cache_gib=engine.cpu_cache_gib if is_server else 0,
    )


def _step(config: RunConfig) -> StepSizes:
    algorithm, task = config.algorithm, config.task
    limit, updates = task.sampling.max_new_tokens, algorithm.updates_per_step
    scores = algorithm.old_logprobs is OldLogprobs.trainer
    return StepSizes(
        prompts=algorithm.prompts_per_step,
        group_size=algorithm.group_size,
        updates=updates,
        publish_every=config.placement.publish_every,
        max_prompt_tokens=task.max_prompt_tokens,
        max_new_tokens=limit,
        prompt_tokens=min(PROMPT_TOKENS, task.max_prompt_tokens),
        response_tokens=config.plan.response_tokens or limit / 2,
        scored_share=(updates - 1) / updates if scores else 0.0,  # the first update's live log-probs are the old ones
        max_staleness=config.placement.max_staleness,
    )
