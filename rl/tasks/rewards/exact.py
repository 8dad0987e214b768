"""Equality of whole answers."""

from __future__ import annotations

from rl.types import FinishReason, Rollout


def is_exact(rollout: Rollout, answer: str, *, strip: bool = False) -> bool:
    """True if the response is `answer`, nothing before or after it, and the policy itself ended there.

    `strip` forgives white space around the response.

    `rollout.text` is what stands before the end of text; an answer cut at the length limit never counts, even if all
    of it is there.
    """
    text = rollout.text.strip() if strip else rollout.text
    return rollout.finish_reason is FinishReason.STOP and text == answer
