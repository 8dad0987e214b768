"""Prompts with images, against the processors and the models of transformers."""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.schema import Architecture, ConfigError
from rl.config.tasks import Overlong
from rl.model.miniature import IMAGE, VOCABULARY
from rl.model.renderer import Renderer
from tests.made_images import image_prompt, miniature, png, question, renderer_of
from tests.tiny_models import write_char_tokenizer

SIZES = [(40, 50), (128, 20), (17, 90), (64, 64), (300, 200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return miniature(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def renderer(folder: Path) -> Renderer:
    return renderer_of(folder)


def whole_processor(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """transformers' own of the family. It wants a video processor, which wants torchvision; no video comes."""
    from transformers import AutoImageProcessor, AutoTokenizer
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

    monkeypatch.setattr(Qwen3VLProcessor, "check_argument_for_proper_class", lambda *_: None)
    return Qwen3VLProcessor(
        image_processor=AutoImageProcessor.from_pretrained(folder),
        tokenizer=AutoTokenizer.from_pretrained(folder),
        video_processor=None,
    )


@pytest.mark.parametrize("sizes", [SIZES[:1], SIZES[1:3], SIZES])
def test_tokens_and_pixels_are_those_of_the_whole_processor(folder, renderer, monkeypatch, sizes):
    images = [png(height, width, seed=at) for at, (height, width) in enumerate(sizes)]
    prompt = image_prompt(renderer, images)
    text = renderer.tokenizer.apply_chat_template(list(prompt.messages), tokenize=False, add_generation_prompt=True)
    made = whole_processor(folder, monkeypatch)(text=[text], images=[decoded(image) for image in images])
    assert prompt.token_ids.tolist() == list(made["input_ids"][0])
    np.testing.assert_array_equal(prompt.mm_inputs["pixel_values"], np.asarray(made["pixel_values"]))
    np.testing.assert_array_equal(prompt.mm_inputs["image_grid_thw"], np.asarray(made["image_grid_thw"]))


def decoded(image: bytes) -> Any:
    from PIL import Image

    return Image.open(io.BytesIO(image))


def test_positions_are_those_that_the_model_computes(folder, renderer):
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder)
    for sizes in (SIZES[:1], SIZES[1:3], SIZES):
        images = [png(height, width, seed=at) for at, (height, width) in enumerate(sizes)]
        prompt = image_prompt(renderer, images, text="What is x?")
        ids = torch.from_numpy(prompt.token_ids).long()
        expected, _ = model.model.get_rope_index(
            ids[None],
            mm_token_type_ids=(ids == VOCABULARY[IMAGE]).int()[None],
            image_grid_thw=torch.from_numpy(prompt.mm_inputs["image_grid_thw"]),
        )
        assert prompt.position_ids is not None
        np.testing.assert_array_equal(prompt.position_ids, expected[:, 0].numpy())


def test_positions_by_hand(renderer):
    """64 x 128 pixels are 4 x 8 patches of 16, merged by two: 2 rows of 4. The text goes on 4 after their start."""
    prompt = image_prompt(renderer, [png(64, 128, seed=0)], text="x")
    at = prompt.token_ids.tolist().index(VOCABULARY[IMAGE])
    positions = prompt.position_ids
    assert positions is not None
    assert (prompt.token_ids == VOCABULARY[IMAGE]).sum() == 8
    assert positions[:, at : at + 9].tolist() == [
        [at] * 8 + [at + 4],
        [at] * 4 + [at + 1] * 4 + [at + 4],
        [at, at + 1, at + 2, at + 3] * 2 + [at + 4],
    ]


def test_a_prompt_with_images_is_sent_as_files_and_not_as_pixels(renderer):
    prompt = image_prompt(renderer, [png(128, 128, seed=0)])
    again = pickle.loads(pickle.dumps(prompt))
    assert len(pickle.dumps(prompt)) < prompt.mm_inputs["pixel_values"].nbytes / 2
    np.testing.assert_array_equal(again.mm_inputs["pixel_values"], prompt.mm_inputs["pixel_values"])


@pytest.mark.parametrize(
    ("messages", "count"),
    [(question("Find x."), 0), (question(None, None, "Find x."), 2), (question(None, IMAGE), 2)],
)
def test_images_without_their_places_are_refused(renderer, messages, count):
    with pytest.raises(ConfigError, match=rf"row:7 has 1 image\(s\), and {count} time\(s\) <\|image_pad\|>"):
        renderer.render_with_images(messages, [png(40, 40, seed=0)], name="row:7")


def test_bytes_that_are_no_image_are_refused_by_name(renderer):
    with pytest.raises(ConfigError, match="an image of prompt row:7 cannot be read"):
        renderer.render_with_images(question(None, "x"), [b"GIF89?"], name="row:7")


def test_over_long_prompts_are_counted_with_their_images_and_never_cut(folder):
    length = len(image_prompt(renderer_of(folder), [png(128, 128, seed=0)]).token_ids)
    arguments = (question(None, "Find x."), [png(128, 128, seed=0)])
    dropping = renderer_of(folder, max_prompt_tokens=length - 1, overlong=Overlong.drop)
    assert dropping.render_with_images(*arguments, name="row:7") is None
    assert dropping.num_dropped == 1
    with pytest.raises(ConfigError, match=rf"row:7 has {length} tokens.*cannot be cut"):
        renderer_of(folder, max_prompt_tokens=length - 1, overlong=Overlong.truncate_left).render_with_images(
            *arguments, name="row:7"
        )
    assert renderer_of(folder, max_prompt_tokens=length).render_with_images(*arguments, name="row:7") is not None


def test_models_and_templates_without_images_are_refused(tmp_path, folder):
    text_model = miniature(tmp_path, Architecture.qwen3)
    with pytest.raises(ConfigError, match=r"is a qwen3\. Images work with qwen2_vl, .*qwen3_5_moe"):
        renderer_of(text_model).render_with_images(question(None, "x"), [png(40, 40, seed=0)], name="p")
    with pytest.raises(ConfigError, match="chat_template=plain knows none"):
        renderer_of(folder, chat_template="plain").render_with_images(
            question(None, "x"), [png(40, 40, seed=0)], name="p"
        )
    write_char_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "image_token_id": 1}')
    with pytest.raises(ConfigError, match=r"no preprocessor_config\.json or processor_config\.json"):
        renderer_of(tmp_path).render_with_images(question(None, "x"), [png(40, 40, seed=0)], name="p")


def test_thinking_is_an_argument_of_the_miniatures_template(folder):
    off = renderer_of(folder, chat_template_kwargs={"enable_thinking": False})
    on = renderer_of(folder, chat_template_kwargs={"enable_thinking": True})
    texts = [r.tokenizer.decode(r.render([question("hi")], names=["p"])[0]) for r in (off, on)]
    assert texts[0] == texts[1] + "<think>\n\n</think>\n\n"
    assert texts[1] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
