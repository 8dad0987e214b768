"""What needs no vLLM to be tested: the requests that leave the adapter, and what comes back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from rl.protocols import EngineError
from rl.types import FinishReason, FloatArray, IntArray, Sampling

MIN_TEMPERATURE = 0.01
"""vLLM silently raises a positive temperature below this."""
MAX_TEMPERATURE = 2.0


class FlatLogprobs(Protocol):
    """vLLM's log-probs of one answer: entries of position i are start_indices[i]:end_indices[i] of the other lists."""

    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def sampling_kwargs(sampling: Sampling, *, seed: int) -> dict[str, Any]:
    """Arguments of vLLM's `SamplingParams` for one sample: one request each, so that it has a seed of its own.

    Text is decoded while sampling only where a stop string must be found in it.
    """
    if not (sampling.is_greedy or MIN_TEMPERATURE <= sampling.temperature <= MAX_TEMPERATURE):
        raise EngineError(
            f"vLLM samples at temperature 0 or {MIN_TEMPERATURE} to {MAX_TEMPERATURE}, not at {sampling.temperature}."
        )
    return {
        "n": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": seed,
        "max_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "include_stop_str_in_output": True,
        "ignore_eos": False,
        "logprobs": 0,  # the sampled token's alone
        "flat_logprobs": True,
        "detokenize": bool(sampling.stop),
        # A stop string may hold special tokens, so they must be in the text that is searched.
        "skip_special_tokens": False,
    }


def finish_reason(reason: str | None) -> FinishReason:
    """vLLM's `stop` (end of text, stop string), `length` and `abort`; any other end is a failure of the engine."""
    if reason not in set(FinishReason):
        raise EngineError(f"vLLM ended a request with finish reason {reason!r}; its log says why.")
    return FinishReason(reason)


def sampled_logprobs(token_ids: Sequence[int], logprobs: FlatLogprobs) -> FloatArray:
    """Log-prob of each sampled token, found by its id and never by its place among the entries."""
    if len(logprobs.start_indices) != len(token_ids):
        raise EngineError(f"vLLM returned {len(token_ids)} tokens but {len(logprobs.start_indices)} log-probs.")
    values = np.empty(len(token_ids), dtype=np.float32)
    for i, token_id in enumerate(token_ids):
        start, end = logprobs.start_indices[i], logprobs.end_indices[i]
        try:
            entry = logprobs.token_ids.index(token_id, start, end)
        except ValueError:
            present = logprobs.token_ids[start:end]
            raise EngineError(
                f"vLLM returned no log-prob for sampled token {token_id} at position {i}, only for {present}."
            ) from None
        values[i] = logprobs.logprobs[entry]
    return values


def collapse_placeholders(token_ids: IntArray, placeholder_id: int, *, num_images: int) -> list[int]:
    """One placeholder per image: vLLM expands each by itself, so the run that stands for an image must not be sent."""
    is_placeholder = token_ids == placeholder_id
    continues = np.concatenate(([False], is_placeholder[1:] & is_placeholder[:-1]))
    num_runs = int((is_placeholder & ~continues).sum())
    if num_runs != num_images:
        raise EngineError(f"the prompt has {num_images} images but {num_runs} runs of image token {placeholder_id}.")
    return token_ids[~continues].tolist()
