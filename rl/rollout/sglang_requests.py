"""What needs no SGLang to be tested: the requests that leave the adapter, and what comes back."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl.protocols import EngineError
from rl.rollout.sampler import Part, Sampled
from rl.types import FinishReason, Sampling

MIN_TEMPERATURE = 1e-6
"""SGLang silently samples greedily below this."""


@dataclass(frozen=True, slots=True)
class Request:
    """One sample, as it crosses to the engine's process."""

    rid: str
    token_ids: list[int]
    sampling: dict[str, Any]
    """Keys of SGLang's `SamplingParams`."""


def request_of(part: Part, *, is_seeded: bool) -> Request:
    seed = part.seed if is_seeded else None
    return Request(rid_of(part.request_id), part.token_ids.tolist(), sampling_params(part.sampling, seed=seed))


def rid_of(request_id: str) -> str:
    """SGLang aborts every request whose id begins with the given one: `1` would end `10` as well."""
    return f"{request_id}."


def sampling_params(sampling: Sampling, *, seed: int | None) -> dict[str, Any]:
    if not (sampling.is_greedy or sampling.temperature >= MIN_TEMPERATURE):
        raise EngineError(
            f"SGLang samples at temperature 0 or {MIN_TEMPERATURE} and more, not at {sampling.temperature}."
        )
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "max_new_tokens": sampling.max_new_tokens,
        "stop": list(sampling.stop) or None,
        "no_stop_trim": True,
        "ignore_eos": False,
        "skip_special_tokens": True,
    }
    if seed is not None:
        params["sampling_seed"] = seed
    return params


def sampled(
    output: Mapping[str, Any],
    request: Request,
    *,
    was_aborted: bool,
    end_ids: Collection[int],
    decode: Callable[[list[int]], str],
) -> Sampled:
    """What SGLang returned for `request`. `was_aborted`: we asked for it. `end_ids` end an answer.

    Raises `EngineError` for an end that nobody asked for, and unless every token has its own log-prob.
    """
    meta = output["meta_info"]
    token_ids = list(output["output_ids"])
    reason = finish_reason(meta["finish_reason"], was_aborted=was_aborted)
    if reason is FinishReason.ABORT and token_ids and token_ids[-1] in end_ids:
        reason = FinishReason.STOP  # an abort takes one more token, and SGLang does not look whether it is the last
    wanted = request.sampling["max_new_tokens"]
    if reason is FinishReason.LENGTH and len(token_ids) != wanted:
        raise EngineError(f"SGLang ended a request at {len(token_ids)} tokens as if they were the {wanted} asked for.")
    return Sampled(
        token_ids=np.asarray(token_ids, dtype=np.int32),
        logprobs=np.asarray(logprobs_of(token_ids, meta.get("output_token_logprobs") or ()), dtype=np.float32),
        text=decode(token_ids),
        finish_reason=reason,
    )


def finish_reason(reason: Mapping[str, Any] | None, *, was_aborted: bool) -> FinishReason:
    """SGLang's `stop` (end of text, stop string), `length`, and `abort` if we asked for it."""
    kind = None if reason is None else reason.get("type")
    if kind not in set(FinishReason) or (kind == FinishReason.ABORT and not was_aborted):
        message = (reason or {}).get("message") or "its log says why"
        raise EngineError(f"SGLang ended a request with finish reason {kind!r}: {message}")
    return FinishReason(kind)


def logprobs_of(token_ids: Sequence[int], entries: Sequence[Sequence[Any]]) -> list[float]:
    """Values of SGLang's (log-prob, token id, text) entries, which must be of exactly these tokens."""
    if len(entries) != len(token_ids):
        raise EngineError(f"SGLang returned {len(token_ids)} tokens but {len(entries)} log-probs.")
    values = []
    for i, (token_id, (value, owner, *_)) in enumerate(zip(token_ids, entries, strict=True)):
        if owner != token_id:
            raise EngineError(f"SGLang returned the log-prob of token {owner} for token {token_id} at position {i}.")
        if value is None or not math.isfinite(value):
            raise EngineError(f"SGLang returned log-prob {value} for token {token_id} at position {i}.")
        values.append(value)
    return values


def context_limit(*, model_length: int, cache_tokens: int, page_size: int) -> int:
    """Prompt and response together. SGLang shortens a response that its cache could not hold beside a spare page."""
    return min(model_length, cache_tokens - 2 * max(page_size, 4))
