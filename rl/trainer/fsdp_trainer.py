"""The trainer on PyTorch FSDP2: one process on a CPU or many on GPUs, the same code."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from rl.config.schema import FSDPConfig
from rl.trainer.policy import Policy, load_model
from rl.trainer.rank import PolicyRank
from rl.types import FloatArray, MicroBatch


class FSDPTrainer(PolicyRank[Policy]):
    """One data-parallel rank. Master weights and optimizer state are fp32, each rank holds a shard of them."""

    def __init__(self, config: FSDPConfig, **arguments: Any):
        """`arguments` are `PolicyRank`'s."""
        super().__init__(config, **arguments)
        self.policy = self._sharded_policy(master_dtype=torch.float32, recompute=config.recompute)
        self.masters = self.policy
        self.reference = None
        if self.algorithm.uses_reference:
            self.reference = self._sharded_policy(master_dtype=self.compute_dtype, recompute=False)
            self.reference.requires_grad_(False)
        self._make_optimizer()

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    def _sharded_policy(self, *, master_dtype: torch.dtype, recompute: bool) -> Policy:
        """Loads, casts and shards layer by layer: the host holds the checkpoint in its own dtype, never twice."""
        model = load_model(self.model_folder, packing=self.config.packing)
        if recompute:
            _recompute_activations(model)
        policy = Policy(
            model,
            logprob_chunk_tokens=self.config.logprob_chunk_tokens,
            entropy_gradient=self.algorithm.uses_entropy_gradient,
        ).train()
        mesh = init_device_mesh(self.device.type, (self.num_ranks,), mesh_dim_names=("data",))
        cast = None if self.compute_dtype == torch.float32 else self.compute_dtype
        layer_names = set(model._no_split_modules or ())
        for module in [m for m in model.modules() if type(m).__name__ in layer_names]:
            precision = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32)
            fully_shard(module.to(master_dtype), mesh=mesh, mp_policy=precision)
        # The root's inputs are not cast: temperatures and pixels would lose bits before anyone asked for it.
        precision = MixedPrecisionPolicy(param_dtype=cast, reduce_dtype=torch.float32, cast_forward_inputs=False)
        fully_shard(policy.to(master_dtype), mesh=mesh, mp_policy=precision)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # The loss is already divided by the count over all ranks, so gradients are added up, not averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
        policy.to(self.device)
        return policy

    def _score(self, policy: Policy, micro: MicroBatch) -> FloatArray:
        logprobs = super()._score(policy, micro)
        assert isinstance(policy, FSDPModule)
        policy.reshard()  # the root stays gathered after a forward pass, and would be stale after an update
        return logprobs

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(parameter.shape) for name, parameter in self.model.named_parameters()}

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.model.named_parameters():
            full = parameter.to(self.compute_dtype)
            if isinstance(full, DTensor):
                full = full.full_tensor()
            # On one rank full_tensor is the master weight itself.
            yield name, full.clone(memory_format=torch.contiguous_format)

    def _hugging_face_model(self) -> PreTrainedModel:
        return self.model


def _recompute_activations(model: PreTrainedModel) -> None:
    """Under its newer name where transformers has it."""
    enable: Any = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable()
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
