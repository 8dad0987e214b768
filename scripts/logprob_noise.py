"""How far log-probs of equal weights are apart in the trainer: what `sentinels.old_logprobs.limit` must leave room for.

    python scripts/logprob_noise.py MODEL_FOLDER [cpu|cuda]

The model answers a few prompts at temperature 1. Then, in each dtype, these tokens are scored twice: by the two passes
that the sentinel compares, of which one trains (equal micro-batches), and in packs against one sequence at a time
(other shapes, so other kernels and orders of summation). Prints the differences in nats.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rl.config.algorithms import GRPOConfig
from rl.config.schema import Dtype, FSDPConfig, OptimizerConfig, Packing
from rl.trainer.fsdp_trainer import FSDPTrainer
from rl.trainer.packing import pack, pack_to_score
from rl.types import FinishReason, Prompt, Rollout, RolloutGroup

NUM_PROMPTS, GROUP_SIZE, MAX_TOKENS = 4, 4, 1024


def answered(folder: str, device: str) -> Iterator[RolloutGroup]:
    """Groups of answers of at most 16, 24, 32 and 40 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model.to(device)
    torch.manual_seed(0)
    for place in range(NUM_PROMPTS):
        messages = [{"role": "user", "content": f"Tell me something about the number {place + 2}, and why it matters."}]
        ids = tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        limits = {"max_new_tokens": 16 + 8 * place, "num_return_sequences": GROUP_SIZE}
        answers = model.generate(ids.to(device), do_sample=True, temperature=1.0, top_k=0, top_p=1.0, **limits)
        prompt_ids = ids[0].numpy().astype(np.int32)
        prompt = Prompt(f"made:{place}", (), prompt_ids, answer="", task="made")
        rollouts = []
        for index, padded in enumerate(answers.cpu().numpy().astype(np.int32)):
            ends = np.flatnonzero(padded[len(prompt_ids) :] == tokenizer.eos_token_id)
            row = padded[: len(prompt_ids) + ends[0] + 1] if len(ends) else padded
            mask = np.arange(len(row)) >= len(prompt_ids)
            zeros = np.zeros(len(row), dtype=np.float32)
            versions = np.where(mask, 0, -1).astype(np.int32)
            rollout = Rollout(place, index, row, mask, zeros, 1.0, versions, FinishReason.STOP)
            rollout.advantage = float(index % 2) - 0.5
            rollouts.append(rollout)
        yield RolloutGroup(place, prompt, rollouts)


def measure(folder: str, device: str, dtype: Dtype, groups: list[RolloutGroup]) -> str:
    trainer = FSDPTrainer(
        FSDPConfig(optimizer=OptimizerConfig(lr=1e-6), compute_dtype=dtype),
        model_folder=folder,
        algorithm=GRPOConfig(prompts_per_step=NUM_PROMPTS, group_size=GROUP_SIZE),
        device=device,
        rank=0,
        num_ranks=1,
        store=None,
        seed=0,
        total_updates=2,
    )
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    prompts, rollouts = [prompt for prompt, _ in pairs], [rollout for _, rollout in pairs]
    scored = []
    for packing in Packing:
        made = pack_to_score(prompts, rollouts, num_ranks=1, max_tokens_per_micro_batch=MAX_TOKENS, packing=packing)
        values = made.unpack([trainer.logprobs(made.micro_batches[0])])
        scored.append(np.concatenate([v[r.loss_mask] for v, r in zip(values, rollouts, strict=True)]))
    gaps = np.abs(scored[0] - scored[1])
    batch = pack(
        groups,
        prompts_per_mini_batch=NUM_PROMPTS // 2,
        num_ranks=1,
        max_tokens_per_micro_batch=MAX_TOKENS,
        packing=Packing.tokens,
        policy_version=0,
        skip_zero_advantage=False,
    )
    metrics = trainer.step([ranks[0] for ranks in batch.mini_batches], batch.loss_counts).metrics
    return (
        f"{dtype.value}: equal micro-batches at most {metrics['train/old_logprob_difference_max']:.2g}; packs against "
        f"one sequence at a time at most {gaps.max():.2g}, 99 of 100 below {np.quantile(gaps, 0.99):.2g}, mean "
        f"{gaps.mean():.2g}; neighbors changed {metrics['sentinel/padding_leak']:.2g}; {len(gaps):,} tokens"
    )


def main(folder: str, device: str = "cpu") -> None:
    groups = list(answered(folder, device))
    for dtype in Dtype:
        print(measure(folder, device, dtype, groups), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
