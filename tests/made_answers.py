"""Finished answers with a given text, and a renderer over one token per character."""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.tasks import Overlong
from rl.types import FinishReason, Rollout
from tests.tiny_models import write_char_tokenizer


def answer(text: str, *, index: int = 0, group_id: int = 0, finish: FinishReason = FinishReason.STOP) -> Rollout:
    return Rollout(
        group_id=group_id,
        index=index,
        token_ids=np.array([2, 1], dtype=np.int32),
        loss_mask=np.array([False, True]),
        rollout_logprobs=np.array([0.0, -0.5], dtype=np.float32),
        temperature=1.0,
        policy_versions=np.array([-1, 0], dtype=np.int32),
        finish_reason=finish,
        text=text,
    )


def char_renderer(folder: Path, **options: Any) -> Any:
    """Every printable ASCII character is a token; the text is the contents of the messages."""
    from rl.model.renderer import Renderer

    if not (folder / "tokenizer.json").exists():
        write_char_tokenizer(folder, string.printable)
    defaults: dict[str, Any] = {"chat_template_kwargs": {}, "max_prompt_tokens": 1000, "overlong": Overlong.error}
    return Renderer(folder, **(defaults | options))
