"""What one data-parallel rank of a trainer does, whichever library holds and shards the model."""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import get_total_norm
from transformers import PreTrainedModel

from rl.config.algorithms import AlgorithmConfig, OldLogprobs
from rl.config.build import build
from rl.config.schema import TrainerConfig
from rl.protocols import MAX_LOG_RATIO, Algorithm, Bucket, LossInputs, TensorSpec, UpdateManifest
from rl.trainer import checkpoint
from rl.trainer.distributed import join_ranks
from rl.trainer.metrics import StepMetrics
from rl.trainer.phases import enter_phase
from rl.trainer.poison import poison
from rl.trainer.schedule import lr_at
from rl.types import FloatArray, LossCounts, MicroBatch, StepStats
from rl.weights.digest import tensors_digest

BUCKET_BYTES = 64 * 2**20
FIRST_LOSS = "first_loss"
"""Among the sums of a step, but no metric: see `StepStats.first_loss`."""

PolicyModule = TypeVar("PolicyModule", bound=nn.Module)


@dataclass(slots=True)
class _Part:
    """What a part of a step took."""

    seconds: float = 0.0
    peak_bytes: int = 0
    """Of the allocator; 0 on a CPU."""


class PolicyRank(ABC, Generic[PolicyModule]):
    """Implements `protocols.TrainerRank` over the modules that a subclass makes.

    A subclass sets `policy`, `reference` (None unless the algorithm uses one) and `masters`, the module of the fp32
    weights, then calls `_make_optimizer()`. Policy and reference map (micro-batch, score mask) to log-probs [T] and
    entropies [T]. `total_updates` are the optimizer updates of the whole run; the learning-rate plan ends there.
    """

    policy: PolicyModule
    reference: PolicyModule | None
    masters: nn.Module
    optimizer: torch.optim.Optimizer

    def __init__(
        self,
        config: TrainerConfig,
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
        self.padding_leak: float | None = None
        """None: not checked yet."""
        self.compute_dtype: torch.dtype = getattr(torch, config.compute_dtype.value)
        self.device = join_ranks(
            device=device,
            rank=rank,
            num_ranks=num_ranks,
            store=store,
            collective_timeout_s=config.collective_timeout_s,
        )
        torch.manual_seed(seed + rank)

    def _make_optimizer(self) -> None:
        settings = self.config.optimizer
        self.optimizer = torch.optim.AdamW(
            self.masters.parameters(),
            lr=settings.lr,
            betas=(settings.beta1, settings.beta2),
            weight_decay=settings.weight_decay,
            foreach=True,
        )

    @abstractmethod
    def _shapes(self) -> dict[str, tuple[int, ...]]:
        """Full shapes by Hugging Face name, in the order in which weights are sent."""

    @abstractmethod
    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Contiguous copies in the compute dtype, in the names and order of `_shapes`. Collective over the ranks."""

    @abstractmethod
    def _hugging_face_model(self) -> PreTrainedModel:
        """The model whose class and config an export writes; its own weights are not looked at."""

    def step(self, mini_batches: list[list[MicroBatch]], loss_counts: list[LossCounts]) -> StepStats:
        """One optimizer update per mini-batch. Token means are over the loss tokens that were run."""
        metrics = StepMetrics()
        if self.padding_leak is None:
            self.padding_leak = self._find_padding_leak(mini_batches[0][0])
        metrics.add_max("sentinel/padding_leak", self.padding_leak)
        metrics.add_mean(FIRST_LOSS, 0.0, count=float(self.rank == 0))
        parts = {"old_logprobs": _Part(), "forward_backward": _Part(), "optimizer": _Part()}
        with self._measured(parts, "old_logprobs"):
            self._fill_fixed_logprobs(mini_batches)
        loss_counts, num_masked = self._mask_nonfinite(mini_batches, loss_counts)
        is_first_rank = float(self.rank == 0)
        metrics.add_mean("train/nonfinite_logprobs", num_masked * is_first_rank, count=is_first_rank)
        grad_norms: list[float] = []
        lr = math.nan
        skipped = 0
        for update, micro_batches in enumerate(mini_batches):
            lr = lr_at(self.num_updates_done, self.total_updates, self.config.optimizer)
            self.num_updates_done += 1
            if loss_counts[update].tokens == 0:
                skipped += 1
                continue
            with self._measured(parts, "forward_backward"):
                metrics.add_mean("train/loss", 0.0, count=float(self.rank == 0))
                for micro in micro_batches:
                    self._forward_backward(micro, loss_counts[update], metrics, is_first=update == 0)
            with self._measured(parts, "optimizer"):
                norm = self._update(lr)
            grad_norms.append(norm)
            skipped += not math.isfinite(norm)
        enter_phase("metrics")
        if self.device.type == "cuda":
            for name, part in parts.items():
                metrics.add_max(f"memory/gpu_{name}_gib", part.peak_bytes / 2**30)
            metrics.add_max("memory/gpu_peak_gib", max(part.peak_bytes for part in parts.values()) / 2**30)
        values = metrics.reduced()
        values |= {"train/lr": lr, "train/skipped_updates": float(skipped)}
        mean, mean_square = (values.pop(f"offpolicy/{name}", math.nan) for name in ("ratio_mean", "ratio_square_mean"))
        values["offpolicy/effective_sample_fraction"] = mean**2 / mean_square if mean_square else math.nan
        if grad_norms:
            values["train/grad_norm"] = sum(grad_norms) / len(grad_norms)
        seconds = {name: part.seconds for name, part in parts.items()}
        first_loss = values.pop(FIRST_LOSS)
        return StepStats(len(mini_batches) - skipped, values, seconds, first_loss)

    def _fill_fixed_logprobs(self, mini_batches: list[list[MicroBatch]]) -> None:
        """Log-probs that stay fixed over the step: of the reference, and of the policy before the first update.

        The first mini-batch needs no extra pass for the latter: its live log-probs are the old ones. Where the others
        do, its first micro-batch is scored too, so that the pass can be compared with the forward pass that trains.
        """
        if self.reference is not None and not self.algorithm.penalizes_reward:
            for micro in [micro for micro_batches in mini_batches for micro in micro_batches]:
                micro.ref_logprobs = self._score(self.reference, micro)
        if self.old_logprobs is OldLogprobs.trainer:
            for micro in [micro for micro_batches in mini_batches[1:] for micro in micro_batches]:
                micro.old_logprobs = self._score(self.policy, micro)
            if len(mini_batches) > 1:
                mini_batches[0][0].old_logprobs = self._score(self.policy, mini_batches[0][0])

    def _find_padding_leak(self, micro: MicroBatch) -> float:
        """Two forward passes, once in a trainer's life: what a sequence must not depend on is changed in between.

        The largest change of a log-prob that follows; infinite where a loss over masked values changes.
        """
        poisoned, kept = poison(micro)
        clean, changed = self._score(self.policy, micro), self._score(self.policy, poisoned)
        leak = float(np.abs(clean - changed)[kept].max()) if kept.any() else -math.inf
        losses = [self._share_of_loss(of, clean) for of in (micro, poisoned)]
        return leak if losses[0] == losses[1] else math.inf

    @torch.no_grad()
    def _share_of_loss(self, micro: MicroBatch, logprobs: FloatArray) -> float:
        """With `logprobs` for all policies, only masked values differ between a micro-batch and its poison."""
        values = torch.from_numpy(logprobs).to(self.device)
        counts = LossCounts(len(logprobs), micro.num_sequences, micro.num_sequences)
        inputs = self._loss_inputs(micro, values, torch.zeros_like(values), values, counts)
        return float(self.algorithm.loss(replace(inputs, ref_logprobs=values)).loss)

    def _mask_nonfinite(
        self, mini_batches: list[list[MicroBatch]], loss_counts: list[LossCounts]
    ) -> tuple[list[LossCounts], int]:
        """Takes tokens without a finite old or reference log-prob out of the masks and the counts, and counts them.

        A group's own token count (`MicroBatch.group_loss_tokens`) stays as it was.
        """
        lost = np.zeros((len(mini_batches), 2), dtype=np.int64)
        for update, micro_batches in enumerate(mini_batches):
            for micro in micro_batches:
                is_finite = np.ones_like(micro.loss_mask)
                for logprobs in (micro.old_logprobs, micro.ref_logprobs):
                    if logprobs is not None:
                        is_finite &= np.isfinite(logprobs)
                if not is_finite[micro.loss_mask].all():
                    before = np.add.reduceat(micro.loss_mask, micro.cu_seqlens[:-1], dtype=np.int64)
                    micro.loss_mask = micro.loss_mask & is_finite
                    after = np.add.reduceat(micro.loss_mask, micro.cu_seqlens[:-1], dtype=np.int64)
                    lost[update] += [(before - after).sum(), ((before > 0) & (after == 0)).sum()]
        total = torch.from_numpy(lost).to(self.device)
        if self.num_ranks > 1:
            dist.all_reduce(total)
        counts = [
            replace(of_update, tokens=of_update.tokens - tokens, sequences=of_update.sequences - sequences)
            for of_update, (tokens, sequences) in zip(loss_counts, total.tolist(), strict=True)
        ]
        return counts, int(total[:, 0].sum())

    def reference_logprobs(self, micro_batches: list[MicroBatch]) -> list[FloatArray]:
        assert self.reference is not None, "the algorithm keeps no reference policy"
        return [self._score(self.reference, micro) for micro in micro_batches]

    def logprobs(self, micro_batches: list[MicroBatch]) -> list[FloatArray]:
        return [self._score(self.policy, micro) for micro in micro_batches]

    @torch.no_grad()
    def _score(self, policy: PolicyModule, micro: MicroBatch) -> FloatArray:
        logprobs, _ = policy(micro, micro.loss_mask)
        return logprobs.cpu().numpy()

    def _forward_backward(
        self,
        micro: MicroBatch,
        counts: LossCounts,
        metrics: StepMetrics,
        *,
        is_first: bool,
    ) -> None:
        """Adds one micro-batch's gradient and metrics. `is_first`: of the mini-batch before any update of the step."""
        logprobs, entropy = self.policy(micro, micro.loss_mask)
        if self.old_logprobs is OldLogprobs.rollout:
            old_logprobs = self._tensor(micro.rollout_logprobs)
        elif is_first:
            old_logprobs = logprobs.detach()
        else:
            assert micro.old_logprobs is not None
            old_logprobs = self._tensor(micro.old_logprobs)
        inputs = self._loss_inputs(micro, logprobs, entropy, old_logprobs, counts)
        output = self.algorithm.loss(inputs)
        output.loss.backward()
        tokens_run = int(micro.loss_mask.sum())
        metrics.add_mean("train/loss", output.loss.detach(), count=0.0)
        metrics.add_mean("train/nonfinite_logprobs", (~logprobs.detach().isfinite()).sum(), count=0.0)
        metrics.add_mean("train/entropy", entropy.detach()[inputs.loss_mask].sum(), tokens_run)
        for key, total in output.token_sums.items():
            metrics.add_mean(key, total, tokens_run)
        for key, total in output.sequence_sums.items():
            metrics.add_mean(key, total, micro.num_loss_sequences)
        for key, value in output.maxima.items():
            metrics.add_max(key, value)
        if is_first:
            metrics.add_mean(FIRST_LOSS, output.loss.detach(), count=0.0)
            _add_mismatch(metrics, logprobs.detach(), inputs.rollout_logprobs, micro)
            _add_pass_difference(metrics, logprobs.detach(), micro)

    def _loss_inputs(
        self,
        micro: MicroBatch,
        logprobs: torch.Tensor,
        entropy: torch.Tensor,
        old_logprobs: torch.Tensor,
        counts: LossCounts,
    ) -> LossInputs:
        return LossInputs(
            logprobs=logprobs,
            entropy=entropy,
            old_logprobs=old_logprobs,
            rollout_logprobs=self._tensor(micro.rollout_logprobs),
            ref_logprobs=None if micro.ref_logprobs is None else self._tensor(micro.ref_logprobs),
            advantages=self._tensor(micro.advantages),
            loss_mask=self._tensor(micro.loss_mask),
            cu_seqlens=self._tensor(micro.cu_seqlens),
            group_loss_tokens=self._tensor(micro.group_loss_tokens),
            counts=counts,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.device)

    def _update(self, lr: float) -> float:
        """Clips, updates and zeroes gradients; returns the global norm before clipping.

        A norm that is not finite leaves weights and optimizer state untouched.
        """
        gradients = [_local(p.grad) for p in self.masters.parameters() if p.grad is not None]
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
    def _measured(self, parts: dict[str, _Part], phase: str) -> Iterator[None]:
        """Adds to the phase's time; its peak is the largest of all its turns."""
        enter_phase(phase)
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        begin = time.perf_counter()
        yield
        part = parts[phase]
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            part.peak_bytes = max(part.peak_bytes, torch.cuda.max_memory_allocated(self.device))
        part.seconds += time.perf_counter() - begin

    def manifest(self, version: int) -> UpdateManifest:
        """Each tensor once, under its Hugging Face name, in the dtype that the forward pass computes with.

        A tied output head travels as the embedding, as in Hugging Face checkpoints.
        """
        dtype = str(self.compute_dtype).removeprefix("torch.")
        return UpdateManifest(version, tuple(TensorSpec(name, dtype, shape) for name, shape in self._shapes().items()))

    @torch.no_grad()
    def buckets(self) -> Iterator[Bucket]:
        """Full tensors in manifest order, about 64 MiB at a time; a larger tensor is a bucket of its own."""
        bucket: Bucket = []
        size = 0
        for name, full in self._full_weights():
            if bucket and size + full.nbytes > BUCKET_BYTES:
                yield bucket
                bucket, size = [], 0
            bucket.append((name, full))
            size += full.nbytes
        if bucket:
            yield bucket

    @torch.no_grad()
    def weights_digest(self) -> str:
        """Of the fp32 masters of this rank, as they lie."""
        return tensors_digest(_local(master) for master in self.masters.parameters())

    def release_cache(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def offload(self) -> None:
        self._move(torch.device("cpu"))
        self.release_cache()

    def onload(self) -> None:
        self._move(self.device)

    def _move(self, device: torch.device) -> None:
        """By copies that do not wait for each other. PyTorch pins the host's side of them and keeps it for the next."""
        if self.device.type == "cpu":
            return
        for module in (self.masters, self.policy, self.reference):
            if module is not None:
                module.to(device, non_blocking=True)
        for state in self.optimizer.state.values():
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.dim() > 0:  # AdamW keeps its step count on the CPU
                    state[key] = value.to(device, non_blocking=True)
        torch.cuda.synchronize(self.device)

    def save(self, folder: Path) -> None:
        checkpoint.save(
            folder,
            policy=self.masters,
            optimizer=self.optimizer,
            num_updates_done=self.num_updates_done,
            rank=self.rank,
        )

    def load(self, folder: Path) -> None:
        self.num_updates_done = checkpoint.load(
            folder, policy=self.masters, optimizer=self.optimizer, rank=self.rank, num_ranks=self.num_ranks
        )

    def export(self, folder: Path) -> None:
        weights: dict[str, torch.Tensor] = {}
        for bucket in self.buckets():
            if self.rank == 0:
                weights.update((name, tensor.cpu()) for name, tensor in bucket)
        if self.rank == 0:
            checkpoint.export(folder, model=self._hugging_face_model(), weights=weights, model_folder=self.model_folder)
        dist.barrier()

    def close(self) -> None:
        """Frees the model. The process group lives as long as the process: others in it may use it."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        self.reference = None
        del self.policy, self.masters


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
        if key == "offpolicy":
            ratio = bounded.double().exp()
            metrics.add_mean("offpolicy/ratio_mean", ratio.sum(), int(mask.sum()))
            metrics.add_mean("offpolicy/ratio_square_mean", ratio.square().sum(), int(mask.sum()))
        if key == "mismatch":
            largest = log_ratio.abs().max() if len(log_ratio) else -math.inf
            metrics.add_max("mismatch/logprob_diff_max", largest)


def _add_pass_difference(metrics: StepMetrics, logprobs: torch.Tensor, micro: MicroBatch) -> None:
    """Between the pass for old log-probs and the one that trains, on equal weights; nothing where there was no pass."""
    largest: torch.Tensor | float = -math.inf
    if micro.old_logprobs is not None and micro.loss_mask.any():
        chosen = torch.from_numpy(micro.loss_mask).to(logprobs.device)
        largest = (logprobs - torch.from_numpy(micro.old_logprobs).to(logprobs.device))[chosen].abs().max()
    metrics.add_max("train/old_logprob_difference_max", largest)
