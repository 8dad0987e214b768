"""Prompts with images: positions and pixels through types, packing and the forward of tiny Qwen vision models."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.schema import Packing
from rl.model.vision import image_positions
from rl.trainer.packing import pack_to_score
from rl.trainer.policy import Policy, load_model
from rl.types import MicroBatch, Prompt, RolloutGroup
from tests.made_groups import answered as answered_group
from tests.made_groups import made_group, packed

VOCAB, IMAGE, VIDEO, START, END = 60, 50, 51, 52, 53
PATCH, MERGE = 14, 2

TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
TOKENS = {"image_token_id": IMAGE, "video_token_id": VIDEO, "vision_start_token_id": START, "vision_end_token_id": END}


def qwen2_5_vl() -> Any:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]}
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    sizes = {"patch_size": PATCH, "spatial_merge_size": MERGE, "window_size": 56, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(
        text_config=TEXT | {"rope_parameters": rope},
        vision_config=vision | sizes | {"initializer_range": 0.2},
        **TOKENS,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> Any:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    vision = {"depth": 2, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 32}
    sizes = {"patch_size": PATCH, "spatial_merge_size": MERGE, "deepstack_visual_indexes": [0]}
    config = Qwen3VLConfig(
        text_config=TEXT | {"rope_parameters": rope, "head_dim": 8},
        vision_config=vision | sizes | {"initializer_range": 0.2, "num_position_embeddings": 64},
        **TOKENS,
    )
    return Qwen3VLForConditionalGeneration(config)


@pytest.fixture(scope="module", params=[qwen2_5_vl, qwen3_vl])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = request.param().float()
    path = tmp_path_factory.mktemp(request.param.__name__)
    model.save_pretrained(path)
    return path


def plain_model(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()


def image_prompt(model: Any, height: int, width: int, *, seed: int) -> Prompt:
    """`text <start> image <end> text`, the image processed by the family's own processor."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    rng = np.random.default_rng(seed)
    image = rng.integers(0, 256, (height, width, 3), dtype=np.uint8)
    processor = Qwen2VLImageProcessorPil(
        patch_size=PATCH, merge_size=MERGE, size={"shortest_edge": 28 * 28, "longest_edge": 280 * 280}
    )
    made = processor(images=[image], return_tensors="np")
    num_image_tokens = int(made["image_grid_thw"].prod()) // MERGE**2
    tokens = [*rng.integers(2, 40, 3), START, *[IMAGE] * num_image_tokens, END, *rng.integers(2, 40, 2)]
    token_ids = np.array(tokens, dtype=np.int32)
    positions, _ = model.model.get_rope_index(
        torch.from_numpy(token_ids).long()[None],
        mm_token_type_ids=torch.from_numpy(token_ids == IMAGE).int()[None],
        image_grid_thw=torch.from_numpy(made["image_grid_thw"]),
    )
    return Prompt(
        prompt_id=f"image:{seed}",
        messages=(),
        token_ids=token_ids,
        answer="",
        task="vision",
        mm_inputs={name: np.asarray(made[name]) for name in ("pixel_values", "image_grid_thw")},
        position_ids=positions[:, 0].numpy().astype(np.int32),
    )


answered = partial(answered_group, drawn_from=(2, 40), logprob=-3.0, temperature=0.7)


def micro_batches(
    groups: list[RolloutGroup], *, num_ranks: int = 1, packing: Packing = Packing.tokens
) -> list[list[MicroBatch]]:
    return packed(groups, num_ranks=num_ranks, packing=packing).mini_batches[0]


def plain_logprobs(model: Any, group: RolloutGroup) -> np.ndarray:
    """Of one unpacked sequence, positions and masks made by the model itself; zero on the prompt."""
    (rollout,) = group.rollouts
    ids = torch.from_numpy(rollout.token_ids).long()
    images = {name: torch.from_numpy(value) for name, value in group.prompt.mm_inputs.items()}
    types = {"mm_token_type_ids": (ids == IMAGE).int()[None]} if images else {}
    with torch.no_grad():
        logits = model(input_ids=ids[None], **types, **images).logits[0, :-1].double() / rollout.temperature
    chosen = logits.log_softmax(-1).gather(-1, ids[1:, None])[:, 0]
    return np.where(rollout.loss_mask, np.concatenate([[0.0], chosen.numpy()]), 0.0)


def test_a_text_and_two_images_in_one_pack_equal_the_plain_model_one_by_one(folder):
    model = plain_model(folder)
    text = made_group([1.0], group_id=1, response_tokens=[5], vocab_size=40, temperature=0.7, advantages=[1.0])
    tall = answered(image_prompt(model, 84, 56, seed=2), group_id=2, num_tokens=4)
    wide = answered(image_prompt(model, 28, 112, seed=3), group_id=3, num_tokens=6)
    groups = [text, tall, wide]
    ((micro,),) = micro_batches(groups)
    assert micro.position_ids.shape == (3, len(micro.token_ids))
    assert micro.mm_inputs["image_grid_thw"].tolist() in ([[1, 6, 4], [1, 2, 8]], [[1, 2, 8], [1, 6, 4]])
    policy = Policy(load_model(folder, dtype=torch.float32), logprob_chunk_tokens=4)
    logprobs = policy(micro, micro.loss_mask)[0].detach().numpy()
    by_tokens = {tuple(g.rollouts[0].token_ids.tolist()): plain_logprobs(model, g) for g in groups}
    for start, end in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True):
        expected = by_tokens.pop(tuple(micro.token_ids[start:end].tolist()))
        np.testing.assert_allclose(logprobs[start:end], expected, atol=1e-5)
    assert not by_tokens


def test_the_pixels_and_their_places_reach_the_policy(folder):
    """Guards the comparison above against a model that ignores either."""
    prompt = image_prompt(plain_model(folder), 84, 56, seed=2)
    group = answered(prompt, group_id=2, num_tokens=4)
    ((micro,),) = micro_batches([group])
    policy = Policy(load_model(folder, dtype=torch.float32), logprob_chunk_tokens=100)
    logprobs = policy(micro, micro.loss_mask)[0]
    black = replace(micro, mm_inputs=micro.mm_inputs | {"pixel_values": np.zeros_like(micro.mm_inputs["pixel_values"])})
    flat = replace(micro, position_ids=None)
    for changed in (black, flat):
        assert (policy(changed, changed.loss_mask)[0] - logprobs).abs().max() > 1e-3


def test_an_update_reaches_language_and_vision_weights(folder):
    group = answered(image_prompt(plain_model(folder), 56, 56, seed=4), group_id=4, num_tokens=3)
    ((micro,),) = micro_batches([group])
    policy = Policy(load_model(folder, dtype=torch.float32), logprob_chunk_tokens=100)
    policy(micro, micro.loss_mask)[0].sum().backward()
    without = [name for name, p in policy.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    # A softmax over keys is blind to a shift of every key, so a bias of the key projection has no gradient but noise.
    assert [name for name in without if "k_proj.bias" not in name] == []


def test_positions_of_an_image_prompt_by_hand(folder):
    """28 x 84 pixels are 2 x 6 patches, merged to a grid of 1 x 3: columns count up, the row stays, text goes on."""
    prompt = image_prompt(plain_model(folder), 28, 84, seed=5)
    group = answered(prompt, group_id=5, num_tokens=2)
    text = made_group([1.0], group_id=1, prompt_tokens=1, response_tokens=[2], vocab_size=40, advantages=[1.0])
    ((micro,),) = micro_batches([group, text])
    image_first = [[0, 1, 2, 3, 4, 4, 4, 7, 8, 9, 10, 11, 0, 1, 2]]
    image_first += [[0, 1, 2, 3, 4, 4, 4, 7, 8, 9, 10, 11, 0, 1, 2]]
    image_first += [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 0, 1, 2]]
    assert micro.position_ids.tolist() == image_first
    assert micro.position_ids.dtype == np.int32


def test_rendering_gives_the_positions_that_each_family_computes(folder):
    model = plain_model(folder)
    for height, width in ((28, 84), (84, 56), (56, 56)):
        prompt = image_prompt(model, height, width, seed=height)
        grids = prompt.mm_inputs["image_grid_thw"]
        ours = image_positions(prompt.token_ids.tolist(), grids, placeholder_id=IMAGE, merge_size=MERGE)
        np.testing.assert_array_equal(ours, prompt.position_ids)


def test_a_filler_repeats_the_images_of_its_micro_batch(folder):
    """Every rank then runs the vision tower, whose collectives would otherwise wait for the others."""
    group = answered(image_prompt(plain_model(folder), 56, 56, seed=6), group_id=6, num_tokens=3)
    ranks = micro_batches([group], num_ranks=2)
    assert [bool(rank[0].loss_mask.any()) for rank in ranks] == [True, False]
    np.testing.assert_array_equal(ranks[1][0].mm_inputs["pixel_values"], group.prompt.mm_inputs["pixel_values"])
    np.testing.assert_array_equal(ranks[1][0].position_ids, ranks[0][0].position_ids)


@pytest.mark.parametrize("packing", list(Packing))
def test_at_every_place_either_all_ranks_run_the_vision_tower_or_none(folder, packing):
    """A rank with text alone would leave the others waiting in the tower's collectives."""
    model = plain_model(folder)
    prompts = [image_prompt(model, 56, 28 * (i + 1), seed=i) for i in range(3)]
    images = [answered(prompt, group_id=i, num_tokens=3) for i, prompt in enumerate(prompts)]
    texts = [made_group([1.0], group_id=9 + i, response_tokens=[i + 1], vocab_size=40) for i in range(4)]
    groups = [texts[0], images[0], texts[1], images[1], images[2], *texts[2:]]
    for num_ranks in (2, 3, 4):
        ranks = micro_batches(groups, num_ranks=num_ranks, packing=packing)
        kinds = [[bool(micro.mm_inputs) for micro in rank] for rank in ranks]
        assert all(rank == kinds[0] for rank in kinds)
        assert any(kinds[0]) and not all(kinds[0])
        packed = [
            tuple(micro.token_ids[start:end].tolist())
            for rank in ranks
            for micro in rank
            if micro.loss_mask.any()
            for start, end in zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True)
        ]
        assert sorted(packed) == sorted(tuple(group.rollouts[0].token_ids.tolist()) for group in groups)


def test_scores_of_images_and_texts_come_back_in_order(folder):
    model = plain_model(folder)
    groups = [
        made_group([1.0], group_id=1, response_tokens=[5], vocab_size=40, temperature=0.7),
        answered(image_prompt(model, 84, 56, seed=2), group_id=2, num_tokens=4),
        made_group([1.0], group_id=3, response_tokens=[2], vocab_size=40, temperature=0.7),
    ]
    batch = pack_to_score(
        [group.prompt for group in groups],
        [group.rollouts[0] for group in groups],
        num_ranks=2,
        max_tokens_per_micro_batch=1000,
        packing=Packing.tokens,
    )
    policy = Policy(load_model(folder, dtype=torch.float32), logprob_chunk_tokens=100)
    with torch.no_grad():
        scores = batch.unpack([[policy(m, m.loss_mask)[0].numpy() for m in rank] for rank in batch.micro_batches])
    for group, values in zip(groups, scores, strict=True):
        np.testing.assert_allclose(values, plain_logprobs(model, group), atol=1e-5)
