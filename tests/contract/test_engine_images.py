"""What every rollout engine that declares images does with them. The others refuse them: see the engines' suite."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rl.config.schema import Dtype, LocalRolloutConfig, VLLMRolloutConfig
from rl.placement.ray_runtime import ensure_ray, shutdown_ray
from rl.protocols import RolloutEngine
from rl.types import Prompt, Rollout, Sampling
from tests.engine_use import EngineSession, publish, sample_group
from tests.made_images import image_prompt, miniature, png, renderer_of, text_prompt

SAMPLING = Sampling(temperature=0.7, max_new_tokens=12, seed=3)
ATOL = 5e-5
GPU_ATOL = 2e-4
"""The model that an engine is compared with is on the CPU."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [miniature(root, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]


def new_engine(kind: str, folder: Path) -> RolloutEngine:
    if kind == "local":
        from rl.rollout.local_engine import LocalEngine

        return LocalEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=folder, device="cpu")
    if kind == "remote":
        from rl.rollout.remote import RemoteEngine

        return RemoteEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=folder, device="cpu")
    from rl.rollout.vllm_engine import VLLMEngine

    config = VLLMRolloutConfig(dtype=Dtype.float32, enforce_eager=True, memory_fraction=0.2)
    return VLLMEngine(config, model_folder=folder, device="cuda")


@pytest.fixture(
    scope="module",
    params=[
        "local",
        pytest.param("remote", marks=pytest.mark.slow),
        # vLLM's processors want torchvision, which the environment for CPUs cannot have.
        pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.gpu]),
    ],
)
def session(request: pytest.FixtureRequest, folders: list[Path]) -> Iterator[EngineSession]:
    if request.param == "remote":
        ensure_ray()
    engine = new_engine(request.param, folders[0])
    if request.param == "vllm" and not engine.capabilities.takes_images:
        pytest.skip("vLLM's processors want torchvision, which is not installed")
    session = EngineSession(engine)
    yield session
    assert session.engine.capabilities.takes_images
    session.close()
    shutdown_ray()


def logprobs_of(model: Any, prompt: Prompt, rollout: Rollout) -> np.ndarray:
    """[L], of one sequence alone, positions made by the model itself."""
    ids = torch.from_numpy(rollout.token_ids).long()
    inputs = {name: torch.from_numpy(value) for name, value in prompt.mm_inputs.items()}
    if inputs:
        inputs["mm_token_type_ids"] = (ids == model.config.image_token_id).int()[None]
    with torch.no_grad():
        logits = model(input_ids=ids[None], **inputs).logits[0, :-1].float() / SAMPLING.temperature
    chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0].numpy()
    return np.where(rollout.loss_mask, np.concatenate([[0.0], chosen]), 0.0)


def is_plain(model: Any, prompt: Prompt, rollout: Rollout) -> bool:
    """Whether the answer holds no placeholder of an image, at which transformers, asked like this, would fail."""
    return not (rollout.token_ids[len(prompt.token_ids) :] == model.config.image_token_id).any()


def test_images_and_text_have_the_models_logprobs_on_old_and_new_weights(session, folders, models):
    renderer = renderer_of(folders[0])
    prompts = [
        image_prompt(renderer, [png(64, 96, seed=1)], name="image:0"),
        text_prompt(renderer),
        image_prompt(renderer, [png(32, 32, seed=2), png(128, 40, seed=3)], name="image:1"),
    ]

    async def sample() -> list[list[Rollout]]:
        return await asyncio.gather(
            *(sample_group(session.engine, p, n=4, group_id=at, sampling=SAMPLING) for at, p in enumerate(prompts))
        )

    atol = GPU_ATOL if type(session.engine).__name__ == "VLLMEngine" else ATOL
    for version, model in enumerate([*models, models[0]]):
        session.run(publish(session.engine, model, version))
        compared = 0
        for prompt, group in zip(prompts, session.run(sample()), strict=True):
            for rollout in group:
                np.testing.assert_array_equal(rollout.token_ids[: len(prompt.token_ids)], prompt.token_ids)
                assert rollout.min_policy_version == version
                if is_plain(model, prompt, rollout):
                    expected = logprobs_of(model, prompt, rollout)
                    np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=atol)
                    compared += 1
        assert compared >= 6
