"""Evaluation through the embedded engine, over a random model whose own greedy answers are declared right or wrong."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from rl.config.schema import Dtype, LocalRolloutConfig
from rl.evaluation.evaluator import TaskEvaluator
from rl.rollout.local_engine import LocalEngine
from rl.types import EvalResult, EvalSet, Prompt, Reward, Rollout, Sampling
from tests.engine_use import publish

TEXTS: dict[str, str] = {}
"""Prompt id -> the answer that counts, from the first evaluation."""


async def grader(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
    """Rows 0 to 6 are right with the text that they had at first; rows 7 to 9 never."""
    for rollout in rollouts:
        TEXTS.setdefault(prompt.prompt_id, rollout.text)
    row = int(prompt.prompt_id.split(":")[1])
    return [Reward(0.0, correct=row < 7 and rollout.text == TEXTS[prompt.prompt_id]) for rollout in rollouts]


class Rows:
    def __init__(self, sampling: Sampling, samples: int) -> None:
        prompts = [
            Prompt(f"row:{row}", (), ((np.arange(3 + row, dtype=np.int32) * 7) % 40) + 2, "", "row")
            for row in range(10)
        ]
        self._set = EvalSet("rows", prompts, samples, sampling, grader)

    def eval_sets(self) -> list[EvalSet]:
        return [self._set]


async def evaluated(folder: Path, *, max_num_seqs: int, sampling: Sampling, samples: int = 1) -> list[EvalResult]:
    from transformers import AutoModelForCausalLM

    config = LocalRolloutConfig(dtype=Dtype.float32, max_num_seqs=max_num_seqs)
    engine = LocalEngine(config, model_folder=folder, device="cpu")
    await engine.start()
    try:
        await publish(engine, AutoModelForCausalLM.from_pretrained(folder), 0)
        evaluator = TaskEvaluator(
            Rows(sampling, samples),  # type: ignore[arg-type]
            max_concurrent_samples=2 * max_num_seqs,
            reward_timeout_s=300.0,
            stall_timeout_s=300.0,
        )
        return await evaluator.evaluate(engine, step=0)
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("sampling", "samples"),
    [
        (Sampling(temperature=0.0, max_new_tokens=8, seed=0), 1),
        (Sampling(temperature=1.0, max_new_tokens=8, seed=3), 1),
    ],
    ids=["greedy", "sampled"],
)
def test_accuracy_is_the_same_for_every_batch_size_and_reproducible_by_seed(tiny_qwen3, sampling, samples):
    TEXTS.clear()
    for max_num_seqs in (16, 1, 3):
        (result,) = asyncio.run(evaluated(tiny_qwen3, max_num_seqs=max_num_seqs, sampling=sampling, samples=samples))
        assert (result.num_problems, result.value) == (10, 0.7), max_num_seqs
    assert len(set(TEXTS.values())) > 3
