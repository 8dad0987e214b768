"""The local engine on prompts with images, and on layers whose cache is a state: its log-probs are the trainer's."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rl.config.schema import Architecture, Dtype, LocalRolloutConfig, Packing
from rl.protocols import EngineError, PauseMode
from rl.rollout.local_engine import LocalEngine
from rl.trainer.packing import pack_to_score
from rl.trainer.policy import Policy, load_model
from rl.types import Prompt, Rollout, Sampling
from tests.engine_use import EngineSession, publish, sample_group
from tests.made_images import image_prompt, miniature, png, renderer_of, text_prompt

SAMPLING = Sampling(temperature=0.8, max_new_tokens=12, seed=3)
ATOL = 5e-5
"""Of a log-prob between engine and trainer, both in fp32. The canary of a run allows 1e-3 on average."""


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("models")
    return [miniature(root, seed=seed) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders]


@pytest.fixture(scope="module")
def prompts(folders: list[Path]) -> list[Prompt]:
    """One image, a text, two images, of different lengths."""
    renderer = renderer_of(folders[0])
    return [
        image_prompt(renderer, [png(64, 96, seed=1)], name="image:0"),
        text_prompt(renderer),
        image_prompt(renderer, [png(32, 32, seed=2), png(128, 40, seed=3)], text="Find y, and why.", name="image:1"),
    ]


@pytest.fixture(scope="module")
def session(folders: list[Path]):
    config = LocalRolloutConfig(dtype=Dtype.float32)
    session = EngineSession(LocalEngine(config, model_folder=folders[0], device="cpu"))
    yield session
    session.close()


def trainers_logprobs(folder: Path, prompts: list[Prompt], rollouts: list[Rollout]) -> list[np.ndarray]:
    policy = Policy(
        load_model(folder, dtype=torch.float32, packing=Packing.one_sequence), logprob_chunk_tokens=100
    ).eval()
    batch = pack_to_score(prompts, rollouts, num_ranks=1, max_tokens_per_micro_batch=1000, packing=Packing.one_sequence)
    with torch.no_grad():
        return batch.unpack([[policy(m, m.loss_mask)[0].numpy() for m in of_rank] for of_rank in batch.micro_batches])


async def groups_of(engine: Any, prompts: list[Prompt], sampling: Sampling) -> list[list[Rollout]]:
    return await asyncio.gather(
        *(sample_group(engine, prompt, n=3, group_id=at, sampling=sampling) for at, prompt in enumerate(prompts))
    )


def assert_trainers(folder: Path, prompts: list[Prompt], groups: list[list[Rollout]]) -> None:
    pairs = [(prompt, rollout) for prompt, group in zip(prompts, groups, strict=True) for rollout in group]
    of_trainer = trainers_logprobs(folder, [prompt for prompt, _ in pairs], [rollout for _, rollout in pairs])
    for (_, rollout), logprobs in zip(pairs, of_trainer, strict=True):
        np.testing.assert_allclose(rollout.rollout_logprobs, logprobs, atol=ATOL)


def test_images_and_text_in_one_round_have_the_trainers_logprobs(session, folders, models, prompts):
    session.run(publish(session.engine, models[0], 0))
    groups = session.run(groups_of(session.engine, prompts, SAMPLING))
    for prompt, group in zip(prompts, groups, strict=True):
        for rollout in group:
            np.testing.assert_array_equal(rollout.token_ids[: len(prompt.token_ids)], prompt.token_ids)
    assert_trainers(folders[0], prompts, groups)


def test_the_picture_reaches_the_answer(session, models, prompts):
    session.run(publish(session.engine, models[0], 0))
    inputs = dict(prompts[0].mm_inputs)
    other = replace(prompts[0], mm_inputs=inputs | {"pixel_values": np.zeros_like(inputs["pixel_values"])})
    greedy = replace(SAMPLING, temperature=0.0)
    (one,), (two,) = (session.run(groups_of(session.engine, [p], greedy)) for p in (prompts[0], other))
    assert np.abs(one[0].rollout_logprobs - two[0].rollout_logprobs).max() > 1e-3


def test_new_weights_see_the_picture_anew(session, folders, models, prompts):
    for version in (0, 1, 0):
        session.run(publish(session.engine, models[version], 10 + version))
        groups = session.run(groups_of(session.engine, prompts[:1], SAMPLING))
        assert_trainers(folders[version], prompts[:1], groups)


def test_greedy_answers_are_those_that_transformers_generates(session, models, prompts):
    session.run(publish(session.engine, models[0], 0))
    for prompt in prompts:
        (group,) = session.run(groups_of(session.engine, [prompt], replace(SAMPLING, temperature=0.0)))
        ids = torch.from_numpy(prompt.token_ids).long()[None]
        inputs = {name: torch.from_numpy(value) for name, value in prompt.mm_inputs.items()}
        if inputs:
            inputs["mm_token_type_ids"] = (ids == models[0].config.image_token_id).int()
        expected = models[0].generate(ids, **inputs, do_sample=False, max_new_tokens=12)[0].tolist()
        assert group[0].token_ids.tolist() == expected


def test_a_pause_in_the_middle_goes_on_after_the_images(session, folders, models, prompts):
    async def disturbed() -> list[list[Rollout]]:
        running = asyncio.ensure_future(groups_of(session.engine, prompts, replace(SAMPLING, max_new_tokens=60)))
        await asyncio.sleep(0)
        await sample_group(session.engine, prompts[1], n=1, group_id=9, sampling=replace(SAMPLING, max_new_tokens=8))
        await session.engine.pause(PauseMode.KEEP)
        await session.engine.resume()
        return await running

    session.run(publish(session.engine, models[0], 0))
    assert_trainers(folders[0], prompts, session.run(disturbed()))


def test_a_placeholder_that_the_policy_samples_is_text(session, folders, models, prompts):
    """transformers would look for an image there. Forced here: the token that is sampled most of all is one."""
    model = AutoModelForImageTextToText.from_pretrained(folders[0], dtype=torch.float32).eval()
    image_id = model.config.image_token_id
    with torch.no_grad():
        model.lm_head.weight[image_id] *= 20
    session.run(publish(session.engine, model, 0))
    groups = session.run(groups_of(session.engine, prompts, replace(SAMPLING, temperature=1.0)))
    responses = [rollout.token_ids[rollout.loss_mask] for group in groups for rollout in group]
    assert any((response == image_id).any() for response in responses)
    saved = folders[0].parent / "loud"
    model.save_pretrained(saved)
    assert_trainers(saved, prompts, groups)


def test_a_model_without_eyes_refuses_an_image_by_name(tmp_path, prompts):
    folder = miniature(tmp_path, Architecture.qwen3)
    session = EngineSession(LocalEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=folder, device="cpu"))
    try:
        from transformers import AutoModelForCausalLM

        session.run(publish(session.engine, AutoModelForCausalLM.from_pretrained(folder), 0))
        with pytest.raises(EngineError, match=r"image:0 has images, and the model of .* takes none"):
            session.run(groups_of(session.engine, prompts[:1], SAMPLING))
    finally:
        session.close()
