"""vLLM on a GPU that it shares with this process: sleep frees memory; weights, rotary tables and cache come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.schema import VLLMRolloutConfig
from rl.protocols import EngineError, EngineUnfit, RolloutEngine
from rl.types import Prompt, Rollout, Sampling
from tests.engine_use import logprobs_of, manifest_of, publish, sample_group, weights_of
from tests.tiny_models import write_tiny_qwen3

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

PROMPT = Prompt("test:0", (), (np.arange(120, dtype=np.int32) % 40) + 2, "", "test")
"""Several blocks of the prefix cache, and positions far enough for the rotary tables to matter."""
SAMPLING = Sampling(temperature=0.7, max_new_tokens=32, seed=3)
MEMORY_FRACTION = 0.3


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    sizes = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256, "initializer_range": 0.1}
    return [write_tiny_qwen3(root / str(seed), seed=seed, **sizes) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    from transformers import AutoModelForCausalLM

    load = AutoModelForCausalLM.from_pretrained
    return [load(folder, dtype=torch.bfloat16).cuda().eval() for folder in folders]


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[RolloutEngine]:
    from rl.rollout.vllm_engine import VLLMEngine

    engine = VLLMEngine(VLLMRolloutConfig(memory_fraction=MEMORY_FRACTION), model_folder=folder, device="cuda")
    try:
        await engine.start()
        yield engine
    finally:
        await engine.close()


async def sample(engine: RolloutEngine, group_id: int = 0) -> list[Rollout]:
    return await sample_group(engine, PROMPT, n=8, group_id=group_id, sampling=SAMPLING)


async def check_samples_from(engine: RolloutEngine, model: Any, other: Any, *, version: int) -> None:
    """bf16 on both sides but other kernels: close to the right model on average, far from the other one."""
    assert await engine.policy_version() == version
    distances = {"right": 0.0, "other": 0.0}
    rollouts = await sample(engine)
    for rollout in rollouts:
        assert rollout.min_policy_version == version
        for name, candidate in (("right", model), ("other", other)):
            difference = np.abs(rollout.rollout_logprobs - logprobs_of(candidate, rollout, SAMPLING.temperature))
            distances[name] += float(difference[rollout.loss_mask].mean()) / len(rollouts)
    assert distances["right"] < 0.05, distances
    assert distances["other"] > 10 * distances["right"], distances


def test_weights_published_between_sleep_and_wake_are_sampled_from(folders: list[Path], models: list[Any]):
    held = torch.zeros(4 * 2**30, dtype=torch.uint8, device="cuda")  # a trainer's share of the device

    async def run() -> None:
        async with running(folders[0]) as engine:
            with pytest.raises(EngineUnfit):
                await sample(engine)
            await publish(engine, models[0], 0)
            await check_samples_from(engine, models[0], models[1], version=0)
            for version in (1, 2, 3):
                model, other = models[version % 2], models[1 - version % 2]
                awake, total = torch.cuda.mem_get_info()
                await engine.sleep()
                asleep, _ = torch.cuda.mem_get_info()
                assert asleep - awake > 0.8 * MEMORY_FRACTION * total
                with pytest.raises(EngineError, match="'asleep'"):
                    await sample(engine)
                await engine.wake_weights()
                await publish(engine, model, version)
                await engine.wake()
                await check_samples_from(engine, model, other, version=version)

    asyncio.run(run())
    assert not held.any()


def test_only_a_complete_publish_heals_a_gpu_engine(folders: list[Path], models: list[Any]):
    async def run() -> None:
        async with running(folders[0]) as engine:
            await publish(engine, models[0], 0)
            first, again, other = await sample(engine), await sample(engine), await sample(engine, group_id=1)
            tokens = [[rollout.token_ids.tolist() for rollout in rollouts] for rollouts in (first, again, other)]
            assert tokens[0] == tokens[1] != tokens[2]

            await engine.sleep()
            await engine.wake()
            with pytest.raises(EngineUnfit, match="dropped"):
                await sample(engine)
            await publish(engine, models[1], 1)
            await check_samples_from(engine, models[1], models[0], version=1)

            weights = weights_of(models[0])
            update = await engine.open_update(manifest_of(weights, 2))
            await update.send(weights[: len(weights) // 2])
            with pytest.raises(EngineError, match="never arrived"):
                await update.commit(2)
            assert await engine.policy_version() == 1
            with pytest.raises(EngineUnfit, match="did not complete"):
                await sample(engine)
            await publish(engine, models[0], 3)
            await check_samples_from(engine, models[0], models[1], version=3)

    asyncio.run(run())
