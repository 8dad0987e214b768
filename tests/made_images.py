"""Pictures, and prompts with them, without a data set."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.schema import Architecture, MiniatureModelConfig
from rl.config.tasks import Overlong
from rl.model.miniature import MiniatureModel
from rl.model.renderer import Renderer
from rl.types import Prompt


def png(height: int, width: int, *, seed: int) -> bytes:
    from PIL import Image

    file = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file, format="PNG")
    return file.getvalue()


def miniature(folder: Path, architecture: Architecture = Architecture.qwen3_5_moe, *, seed: int = 0) -> Path:
    config = MiniatureModelConfig(name="miniature", architecture=architecture)
    return MiniatureModel(config).prepare(folder / f"{architecture.value}-{seed}", seed=seed)


def renderer_of(folder: Path, **options: Any) -> Renderer:
    defaults: dict[str, Any] = {"chat_template_kwargs": {}, "max_prompt_tokens": 400, "overlong": Overlong.error}
    return Renderer(folder, **(defaults | options))


def question(*parts: str | None) -> list[dict[str, Any]]:
    """One user turn; None is an image."""
    content = [{"type": "image"} if part is None else {"type": "text", "text": part} for part in parts]
    return [{"role": "user", "content": content}]


def image_prompt(renderer: Renderer, images: list[bytes], *, text: str = "Find x.", name: str = "image:0") -> Prompt:
    """The images, then the text."""
    messages = question(*(None for _ in images), text)
    made = renderer.render_with_images(messages, images, name=name)
    assert made is not None
    return Prompt(
        prompt_id=name,
        messages=tuple(messages),
        token_ids=made.token_ids,
        answer="",
        task="image",
        images=tuple(images),
        mm_inputs=made.mm_inputs,
        position_ids=made.position_ids,
    )


def text_prompt(renderer: Renderer, text: str = "What is 7 + 5?", *, name: str = "text:0") -> Prompt:
    messages = [{"role": "user", "content": text}]
    (token_ids,) = renderer.render([messages], names=[name])
    assert token_ids is not None
    return Prompt(name, tuple(messages), token_ids, "", "text")
