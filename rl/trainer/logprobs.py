"""Log-probs and entropies of tokens, without the logits of all positions at once. The only place that shifts."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.checkpoint import checkpoint

Head = Callable[[torch.Tensor], torch.Tensor]


def token_logprobs(
    head: Head,
    hidden: torch.Tensor,
    token_ids: torch.Tensor,
    temperatures: torch.Tensor,
    positions: torch.Tensor,
    *,
    chunk_tokens: int,
    entropy_gradient: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(log-probs [T] with gradient, entropies [T]), in nats and fp32, zero outside `positions`.

    Entropies have a gradient only if asked for: it costs a second tensor of a chunk's logits.

    hidden [T, H]; token_ids, temperatures [T]; positions [S] int64, each at least 1. Token i is predicted by the state
    at i - 1 and uses its own temperature. Logits of at most `chunk_tokens` positions exist at once, in the backward
    pass too: it computes them again, chunk by chunk, where there is more than one chunk.
    """
    states = hidden.index_select(0, positions - 1)
    targets = token_ids.index_select(0, positions)
    scales = temperatures.index_select(0, positions)
    chunks = list(zip(states.split(chunk_tokens), targets.split(chunk_tokens), scales.split(chunk_tokens), strict=True))
    if len(chunks) == 1:
        logprobs, entropy = _of_chunk(head, *chunks[0], entropy_gradient)
    else:
        parts = [
            checkpoint(_of_chunk, head, *chunk, entropy_gradient, use_reentrant=False, preserve_rng_state=False)
            for chunk in chunks
        ]
        logprobs, entropy = (torch.cat(values) for values in zip(*parts, strict=True))
    blank = torch.zeros(len(token_ids), dtype=torch.float32, device=hidden.device)
    return blank.index_copy(0, positions, logprobs), blank.index_copy(0, positions, entropy)


def _of_chunk(
    head: Head, states: torch.Tensor, targets: torch.Tensor, temperatures: torch.Tensor, entropy_gradient: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(states).float() / temperatures.unsqueeze(-1)
    log_z = logits.logsumexp(-1)
    logprobs = logits.gather(-1, targets.unsqueeze(-1)).squeeze(-1) - log_z
    if entropy_gradient:
        return logprobs, log_z - torch.linalg.vecdot((logits - log_z.unsqueeze(-1)).exp(), logits)
    with torch.no_grad():
        expected_logit = torch.linalg.vecdot((logits - log_z.unsqueeze(-1)).exp_(), logits)
        entropy = log_z - expected_logit
    return logprobs, entropy
