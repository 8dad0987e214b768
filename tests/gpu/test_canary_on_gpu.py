"""The canary with a trainer in bfloat16 and an engine on the same GPU, one of whose updates leaves a layer out."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.canary import BFLOAT16_BOUND, Canary, CanaryError, Trip
from rl.config.algorithms import GRPOConfig
from rl.config.schema import (
    CanaryAction,
    CanaryConfig,
    FSDPConfig,
    OptimizerConfig,
    SGLangRolloutConfig,
    VLLMRolloutConfig,
)
from rl.protocols import RolloutEngine
from rl.trainer.group import TrainerGroup
from rl.types import Prompt, Sampling
from rl.weights.outlet import WeightOutlet
from rl.weights.publish import publish_weights
from rl.weights.transport import Shared
from tests.engine_use import Source
from tests.tiny_models import write_tiny_qwen3

pytestmark = pytest.mark.gpu

LATE_LAYER = "model.layers.1."
SIZES = {"head_dim": 64, "hidden_size": 128, "intermediate_size": 256}
PROMPTS = [
    Prompt(f"test:{length}", (), (np.arange(length, dtype=np.int32) * 7 % 40) + 2, "", "test") for length in (5, 9, 17)
]


def new_engine(kind: str, folder: Path) -> RolloutEngine:
    if kind == "vllm":
        from rl.rollout.vllm_engine import VLLMEngine

        return VLLMEngine(
            VLLMRolloutConfig(memory_fraction=0.2, enforce_eager=True), model_folder=folder, device="cuda"
        )
    from rl.rollout.sglang_engine import SGLangEngine

    config = SGLangRolloutConfig(
        memory_fraction=0.2, enforce_eager=True, attention_backend=os.environ.get("RL_TEST_SGLANG_ATTENTION")
    )
    return SGLangEngine(config, model_folder=folder, device="cuda")


@pytest.mark.parametrize(
    "kind", [pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("sglang", marks=pytest.mark.sglang)]
)
def test_a_layer_that_an_update_left_as_it_was_trips_it_and_is_named(kind: str, tmp_path: Path):
    old, new = (write_tiny_qwen3(tmp_path / str(seed), seed=seed, **SIZES) for seed in (0, 1))

    async def watch() -> tuple[Trip | None, Trip | None]:
        engine = new_engine(kind, old)
        trainer = TrainerGroup(
            FSDPConfig(optimizer=OptimizerConfig()),
            model_folder=new,
            algorithm=GRPOConfig(prompts_per_step=4, group_size=4),
            device="cuda",
            num_ranks=1,
            seed=0,
            total_updates=1,
        )
        canary = Canary(
            CanaryConfig(every=1, action=CanaryAction.stop),
            bound=BFLOAT16_BOUND,
            prompts=PROMPTS,
            sampling=Sampling(temperature=1.0, max_new_tokens=32, seed=0),
            engine=engine,
            trainer=trainer,
        )

        async def compared(version: int, source: Any) -> Trip | None:
            await publish_weights(source, engine, version=version, transport=Shared())
            await canary.watch(version)
            await canary.settle()
            return await canary.check()

        try:
            await engine.start()
            await trainer.start()
            whole = [(name, t.clone()) for name, t in weights_of_folder(new)]
            before = dict(weights_of_folder(old))
            late = [(name, before[name] if name.startswith(LATE_LAYER) else t) for name, t in whole]
            outlet = WeightOutlet(device=torch.device("cuda"), host="127.0.0.1")
            sound = await compared(0, trainer)
            tripped = await compared(1, Source(whole, outlet=outlet, sent=late))
            assert tripped is not None
            await publish_weights(trainer, engine, version=1, transport=Shared())
            with pytest.raises(CanaryError, match=r"weights of version 1 were not the trainer's.*layers\.1\."):
                await canary.report(tripped)
            return sound, tripped
        finally:
            await trainer.close()
            await engine.close()

    sound, tripped = asyncio.run(watch())
    assert sound is None
    assert tripped is not None and tripped.comparison.mean > 2 * BFLOAT16_BOUND


def weights_of_folder(folder: Path) -> list[tuple[str, torch.Tensor]]:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).cuda()
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]
