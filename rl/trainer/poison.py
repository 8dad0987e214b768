"""What a log-prob and a loss must not depend on, changed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from rl.types import BoolArray, FloatArray, MicroBatch


def poison(micro: MicroBatch) -> tuple[MicroBatch, BoolArray]:
    """A micro-batch whose other sequences and masked values differ, and the loss tokens [T] that must not notice.

    Those are of every second sequence; the tokens of the sequences between are reversed. With images no token moves,
    because the places of their tokens mean something.
    """
    token_ids = micro.token_ids.copy()
    is_kept = np.ones_like(micro.loss_mask)
    if not micro.mm_inputs:
        for begin, end in list(zip(micro.cu_seqlens[:-1], micro.cu_seqlens[1:], strict=True))[1::2]:
            token_ids[begin:end] = token_ids[begin:end][::-1]
            is_kept[begin:end] = False

    def masked_to_nan(values: FloatArray) -> FloatArray:
        return np.where(micro.loss_mask, values, np.float32(np.nan))

    poisoned = replace(
        micro,
        token_ids=token_ids,
        advantages=masked_to_nan(micro.advantages),
        rollout_logprobs=masked_to_nan(micro.rollout_logprobs),
    )
    return poisoned, micro.loss_mask & is_kept
