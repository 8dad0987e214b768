"""Image placeholders that the policy sampled itself: text to engine and trainer alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

TEXT_TOKEN = 0
"""Stands for a sampled placeholder where a model looks for the places of its images."""


@contextmanager
def placeholders_of_images(
    model: Any, token_ids: torch.Tensor, is_prompt: torch.Tensor | None
) -> Iterator[torch.Tensor]:
    """The `input_ids` for one forward pass of a model with images; None: of one without, where nothing is to do.

    transformers puts image features wherever the placeholder's id is, and fails if it counts one too many. Here a
    placeholder outside the prompt is hidden from that search, while the embedding still sees the token that it is.
    """
    if is_prompt is None:
        yield token_ids
        return
    is_sampled = (token_ids == model.config.image_token_id) & ~is_prompt
    if not is_sampled.any():
        yield token_ids
        return
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda _module, _arguments: (token_ids,))
    try:
        yield token_ids.masked_fill(is_sampled, TEXT_TOKEN)
    finally:
        hook.remove()
