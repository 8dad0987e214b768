"""The plan's terms of a training step, beside what the CPU's allocator hands out in one: the real trainer, counted.

Only what a step allocates is counted, so masters and moments are not in it, but gradients are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from rl.config.algorithms import GRPOConfig
from rl.config.schema import Dtype, FSDPConfig
from rl.config.shape import ModelShape
from rl.model.shape import read_config_json, shape_of
from rl.plan.memory import activation_lines
from rl.plan.sizes import TrainerSizes
from rl.trainer.fsdp_trainer import FSDPTrainer
from tests.made_groups import made_group, packed
from tests.tiny_models import write_tiny_qwen3

TOKENS = 1024


def peak_of_a_step(folder: Path, *, chunk: int, recompute: bool, dtype: Dtype) -> int:
    """Bytes allocated at most beyond what was there before."""
    algorithm = GRPOConfig(prompts_per_step=1, group_size=4)
    config = FSDPConfig(compute_dtype=dtype, recompute=recompute, logprob_chunk_tokens=chunk)
    settings: dict[str, Any] = {"device": "cpu", "rank": 0, "num_ranks": 1, "store": None, "seed": 0}
    trainer = FSDPTrainer(config, model_folder=folder, algorithm=algorithm, total_updates=10, **settings)
    advantages = [-1.0, 1.0, -1.0, 1.0]
    group = made_group(
        [0.0, 1.0, 0.0, 1.0], prompt_tokens=4, response_tokens=[TOKENS // 4 - 4] * 4, advantages=advantages
    )

    def step() -> None:
        batch = packed([group], max_tokens_per_micro_batch=TOKENS)
        trainer.step([ranks[0] for ranks in batch.mini_batches], batch.loss_counts)

    step()  # moments are made, and the check for leaks is over
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    trainer.close()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    events = [event for event in recorded.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


def planned(shape: ModelShape, *, chunk: int, recompute: bool, dtype: Dtype) -> float:
    size = 4 if dtype is Dtype.float32 else 2
    trainer = TrainerSizes(1, 1, False, 1, 1, size, TOKENS, TOKENS, recompute, chunk, False, False)
    assert shape.num_params is not None
    gathered = size * shape.num_params  # on one rank all layers of so small a model may be
    return 4 * shape.num_params + gathered + sum(line.num_bytes for line in activation_lines(shape, trainer))


@pytest.mark.parametrize(
    ("vocab", "chunk", "recompute", "dtype"),
    [
        (512, 256, True, Dtype.float32),
        (512, 256, False, Dtype.float32),
        (512, 256, True, Dtype.bfloat16),
        (8000, 256, True, Dtype.float32),
        (8000, TOKENS, True, Dtype.float32),
    ],
)
def test_a_step_takes_what_the_plan_says_within_a_third(tmp_path, vocab, chunk, recompute, dtype):
    folder = write_tiny_qwen3(
        tmp_path, hidden_size=128, intermediate_size=384, num_hidden_layers=4, vocab_size=vocab, head_dim=32
    )
    torch.set_num_threads(1)
    counted = peak_of_a_step(folder, chunk=chunk, recompute=recompute, dtype=dtype)
    expected = planned(shape_of(read_config_json(folder)), chunk=chunk, recompute=recompute, dtype=dtype)
    assert counted / 1.33 < expected < counted * 1.33


def test_logits_of_a_chunk_are_the_peak_and_not_those_of_the_whole(tmp_path):
    """The option must hold in the pass that trains, not only where log-probs are scored."""
    folder = write_tiny_qwen3(tmp_path, hidden_size=32, num_hidden_layers=1, vocab_size=8000)
    peaks = [
        peak_of_a_step(folder, chunk=chunk, recompute=True, dtype=Dtype.float32) for chunk in (TOKENS, TOKENS // 8)
    ]
    whole = 4 * TOKENS * 8000
    assert peaks[0] > 3 * whole
    assert peaks[1] < 1.0 * whole
