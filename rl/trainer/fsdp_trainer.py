"""The trainer on PyTorch FSDP2: one process on a CPU or many on GPUs, the same code."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from rl.config.build import build
from rl.config.schema import AlgorithmConfig, FSDPConfig, OldLogprobs
from rl.protocols import Algorithm, Bucket, LossInputs, TensorSpec, UpdateManifest
from rl.trainer import checkpoint
from rl.trainer.distributed import join_ranks
from rl.trainer.metrics import StepMetrics
from rl.trainer.policy import Policy, load_model
from rl.trainer.schedule import lr_at
from rl.types import MicroBatch, StepStats

BUCKET_BYTES = 64 * 2**20
MAX_LOG_RATIO = 20.0


class FSDPTrainer:
    """One data-parallel rank. Master weights and optimizer state are fp32, each rank holds a shard of them.

    `total_updates` are the optimizer updates of the whole run; the learning-rate plan ends there.
    """

    def __init__(
        self,
        config: FSDPConfig,
        *,
        model_folder: Path | str,
        algorithm: AlgorithmConfig,
        device: str,
        rank: int,
        num_ranks: int,
        store: str | None,
        seed: int,
        total_updates: int,
    ):
        self.config = config
        self.model_folder = Path(model_folder)
        self.old_logprobs = algorithm.old_logprobs
        self.algorithm: Algorithm = build(algorithm)
        self.rank, self.num_ranks = rank, num_ranks
        self.total_updates = total_updates
        self.num_updates_done = 0
        self.device = join_ranks(device=device, rank=rank, num_ranks=num_ranks, store=store)
        torch.manual_seed(seed + rank)
        self.compute_dtype: torch.dtype = getattr(torch, config.compute_dtype.value)
        self.policy = self._sharded_policy(master_dtype=torch.float32, recompute=config.recompute)
        self.reference: Policy | None = None
        if self.algorithm.uses_reference:
            self.reference = self._sharded_policy(master_dtype=self.compute_dtype, recompute=False)
            self.reference.requires_grad_(False)
        self.optimizer = torch.optim.AdamW(
            self.policy.parameters(),
            lr=config.optimizer.lr,
            betas=(config.optimizer.beta1, config.optimizer.beta2),
            weight_decay=config.optimizer.weight_decay,
            foreach=True,
        )

    @property
    def model(self) -> PreTrainedModel:
        return self.policy.model

    def _sharded_policy(self, *, master_dtype: torch.dtype, recompute: bool) -> Policy:
        """Loads, casts and shards layer by layer: the host holds the checkpoint in its own dtype, never twice."""
        model = load_model(self.model_folder)
        if recompute:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        policy = Policy(model, logprob_chunk_tokens=self.config.logprob_chunk_tokens).train()
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

    def step(
        self, mini_batches: list[list[MicroBatch]], num_loss_tokens: list[int], num_loss_sequences: list[int]
    ) -> StepStats:
        """One optimizer update per mini-batch. Token means are over the loss tokens that were run."""
        metrics = StepMetrics()
        seconds = {"old_logprobs": 0.0, "forward_backward": 0.0, "optimizer": 0.0}
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        with self._timed(seconds, "old_logprobs"):
            self._fill_fixed_logprobs(mini_batches)
        grad_norms: list[float] = []
        lr = math.nan
        skipped = 0
        for update, micro_batches in enumerate(mini_batches):
            lr = lr_at(self.num_updates_done, self.total_updates, self.config.optimizer)
            self.num_updates_done += 1
            if num_loss_tokens[update] == 0:
                skipped += 1
                continue
            with self._timed(seconds, "forward_backward"):
                metrics.add_mean("train/loss", 0.0, count=float(self.rank == 0))
                for micro in micro_batches:
                    self._forward_backward(
                        micro, num_loss_tokens[update], num_loss_sequences[update], metrics, is_first=update == 0
                    )
            with self._timed(seconds, "optimizer"):
                norm = self._update(lr)
            grad_norms.append(norm)
            skipped += not math.isfinite(norm)
        values = metrics.reduced()
        values |= {"train/lr": lr, "train/skipped_updates": float(skipped)}
        if grad_norms:
            values["train/grad_norm"] = sum(grad_norms) / len(grad_norms)
        if self.device.type == "cuda":
            values["memory/gpu_peak_gib"] = torch.cuda.max_memory_allocated(self.device) / 2**30
        return StepStats(num_updates=len(mini_batches) - skipped, metrics=values, seconds=seconds)

    def _fill_fixed_logprobs(self, mini_batches: list[list[MicroBatch]]) -> None:
        """Log-probs that stay fixed over the step: of the reference, and of the policy before the first update.

        The first mini-batch needs no extra pass for the latter: its live log-probs are the old ones.
        """
        if self.reference is not None:
            for micro in [micro for micro_batches in mini_batches for micro in micro_batches]:
                micro.ref_logprobs = self._score(self.reference, micro)
        if self.old_logprobs is OldLogprobs.trainer:
            for micro in [micro for micro_batches in mini_batches[1:] for micro in micro_batches]:
                micro.old_logprobs = self._score(self.policy, micro)

    @torch.no_grad()
    def _score(self, policy: Policy, micro: MicroBatch):
        logprobs, _ = policy(micro, micro.loss_mask)
        assert isinstance(policy, FSDPModule)
        policy.reshard()  # the root stays gathered after a forward pass, and would be stale after an update
        return logprobs.cpu().numpy()

    def _forward_backward(
        self,
        micro: MicroBatch,
        num_loss_tokens: int,
        num_loss_sequences: int,
        metrics: StepMetrics,
        *,
        is_first: bool,
    ) -> None:
        """Adds one micro-batch's gradient and metrics. `is_first`: of the mini-batch before any update of the step."""

        def tensor(array) -> torch.Tensor:
            return torch.from_numpy(array).to(self.device)

        logprobs, entropy = self.policy(micro, micro.loss_mask)
        loss_mask, rollout_logprobs = tensor(micro.loss_mask), tensor(micro.rollout_logprobs)
        if self.old_logprobs is OldLogprobs.rollout:
            old_logprobs = rollout_logprobs
        elif is_first:
            old_logprobs = logprobs.detach()
        else:
            old_logprobs = tensor(micro.old_logprobs)
        output = self.algorithm.loss(
            LossInputs(
                logprobs=logprobs,
                entropy=entropy,
                old_logprobs=old_logprobs,
                rollout_logprobs=rollout_logprobs,
                ref_logprobs=None if micro.ref_logprobs is None else tensor(micro.ref_logprobs),
                advantages=tensor(micro.advantages),
                loss_mask=loss_mask,
                cu_seqlens=tensor(micro.cu_seqlens),
                num_loss_tokens=num_loss_tokens,
                num_loss_sequences=num_loss_sequences,
            )
        )
        output.loss.backward()
        tokens_run = int(micro.loss_mask.sum())
        metrics.add_mean("train/loss", output.loss.detach(), count=0.0)
        metrics.add_mean("train/entropy", entropy[loss_mask].sum(), tokens_run)
        for key, total in output.token_sums.items():
            metrics.add_mean(key, total, tokens_run)
        for key, value in output.maxima.items():
            metrics.add_max(key, value)
        if is_first:
            _add_mismatch(metrics, logprobs.detach(), rollout_logprobs, micro)

    def _update(self, lr: float) -> float:
        """Clips, updates and zeroes gradients; returns the global norm before clipping.

        A norm that is not finite leaves weights and optimizer state untouched.
        """
        gradients = [_local(p.grad) for p in self.policy.parameters() if p.grad is not None]
        squares = get_total_norm(gradients).square()
        dist.all_reduce(squares)
        norm = squares.sqrt().item()
        if math.isfinite(norm):
            limit = self.config.optimizer.grad_clip
            if limit is not None and norm > limit:
                for gradient in gradients:
                    gradient.mul_(limit / norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return norm

    @contextmanager
    def _timed(self, seconds: dict[str, float], phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        seconds[phase] += time.perf_counter() - begin

    def manifest(self, version: int) -> UpdateManifest:
        """Each tensor once, under its Hugging Face name, in the dtype that the forward pass computes with.

        A tied output head travels as the embedding, as in Hugging Face checkpoints.
        """
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return UpdateManifest(
            version, tuple(TensorSpec(name, dtype, tuple(p.shape)) for name, p in self.model.named_parameters())
        )

    @torch.no_grad()
    def buckets(self) -> Iterator[Bucket]:
        """Full tensors in manifest order, about 64 MiB at a time; a larger tensor is a bucket of its own."""
        bucket: Bucket = []
        size = 0
        for name, parameter in self.model.named_parameters():
            full = parameter.to(self.compute_dtype)
            if isinstance(full, DTensor):
                full = full.full_tensor()
            full = full.clone(
                memory_format=torch.contiguous_format
            )  # one rank: full_tensor is the master weight itself
            if bucket and size + full.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, full))
            size += full.nbytes
        if bucket:
            yield bucket

    def offload(self) -> None:
        self._move(torch.device("cpu"))
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        if self.device.type == "cpu":
            return
        for policy in (self.policy, self.reference):
            if policy is not None:
                policy.to(device)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, DTensor):
                    state[key] = value.to(device)

    def save(self, folder: Path) -> None:
        checkpoint.save(
            folder, policy=self.policy, optimizer=self.optimizer, num_updates_done=self.num_updates_done, rank=self.rank
        )

    def load(self, folder: Path) -> None:
        self.num_updates_done = checkpoint.load(
            folder, policy=self.policy, optimizer=self.optimizer, rank=self.rank, num_ranks=self.num_ranks
        )

    def export(self, folder: Path) -> None:
        weights: dict[str, torch.Tensor] = {}
        for bucket in self.buckets():
            if self.rank == 0:
                weights.update((name, tensor.cpu()) for name, tensor in bucket)
        if self.rank == 0:
            checkpoint.export(folder, model=self.model, weights=weights, model_folder=self.model_folder)
        dist.barrier()

    def close(self) -> None:
        """Frees the model. The process group lives as long as the process: others in it may use it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.reference = None
        del self.policy


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _add_mismatch(
    metrics: StepMetrics, logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, micro: MicroBatch
) -> None:
    """How far the trainer's log-probs are from the engine's: on equal weights (staleness 0), and on all sequences."""
    lengths = torch.from_numpy(micro.cu_seqlens).diff()
    fresh = torch.repeat_interleave(torch.from_numpy(micro.staleness) == 0, lengths)
    loss_mask = torch.from_numpy(micro.loss_mask)
    for key, mask in (("mismatch", loss_mask & fresh), ("offpolicy", loss_mask)):
        chosen = mask.to(logprobs.device)
        log_ratio = (logprobs - rollout_logprobs)[chosen]
        bounded = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        metrics.add_mean(f"{key}/kl_k3", (torch.expm1(bounded) - bounded).sum(), int(mask.sum()))
        if key == "mismatch":
            largest = log_ratio.abs().max() if len(log_ratio) else -math.inf
            metrics.add_max("mismatch/logprob_diff_max", largest)
