"""Images in a trainer of several ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rl.config.algorithms import GRPOConfig
from rl.config.schema import Dtype, FSDPConfig, OptimizerConfig, Packing
from rl.placement.ray_runtime import ensure_ray, shutdown_ray
from rl.trainer.group import TrainerGroup
from rl.types import RolloutGroup
from tests.made_groups import answered, packed
from tests.made_images import image_prompt, miniature, png, renderer_of, text_prompt

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def ray() -> Iterator[None]:
    ensure_ray()
    yield
    shutdown_ray()


async def trained(folder: Path, groups: list[RolloutGroup], num_ranks: int) -> tuple[dict[str, torch.Tensor], list]:
    """Weights after one update, and the log-probs before it."""
    trainer = TrainerGroup(
        FSDPConfig(
            optimizer=OptimizerConfig(lr=1e-3),
            compute_dtype=Dtype.float32,
            packing=Packing.one_sequence,
            collective_timeout_s=60.0,  # a rank that waits for another is an error, and soon
        ),
        model_folder=folder,
        algorithm=GRPOConfig(prompts_per_step=len(groups), group_size=2),
        device="cpu",
        num_ranks=num_ranks,
        seed=0,
        total_updates=1,
    )
    await trainer.start()
    scores = await trainer.logprobs([g.prompt for g in groups], [g.rollouts[0] for g in groups])
    await trainer.step(packed(groups, num_ranks=num_ranks, packing=Packing.one_sequence))
    weights = {name: tensor.clone() async for bucket in trainer.buckets() for name, tensor in bucket}
    await trainer.close()
    return weights, scores


async def test_two_ranks_with_one_image_and_three_texts_train_as_one_rank_does(tmp_path: Path):
    """Without an image at the same place the second rank would leave the first waiting in the vision tower."""
    folder = miniature(tmp_path)
    renderer = renderer_of(folder)
    prompts = [text_prompt(renderer, f"What is {i} + 5?", name=f"text:{i}") for i in range(3)]
    prompts.insert(1, image_prompt(renderer, [png(64, 64, seed=0)]))
    groups = [
        answered(
            prompt,
            group_id=i,
            num_tokens=4 + i,
            drawn_from=(20, 200),
            logprob=-5.0,
            advantage=1.0 if i % 2 else -1.0,
        )
        for i, prompt in enumerate(prompts)
    ]
    (one, one_scores), (two, two_scores) = [await trained(folder, groups, num_ranks) for num_ranks in (1, 2)]
    for a, b in zip(one_scores, two_scores, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    start = _weights_of(folder)
    assert any("visual" in name and not torch.equal(tensor, start[name]) for name, tensor in one.items())
    for name, tensor in one.items():
        # AdamW's first step is the sign of the gradient: where that is next to nothing, rounding decides it.
        is_near = torch.isclose(two[name], tensor, atol=1e-5).float().mean()
        assert is_near > 0.99, f"{name}: {is_near:.3f}"


def _weights_of(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForImageTextToText

    return dict(AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).named_parameters())
