"""Inputs of a loss, from the values of its sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rl.protocols import LossInputs
from rl.types import LossCounts


def loss_inputs(
    logprobs: Sequence[Sequence[float]],
    *,
    advantages: Sequence[Sequence[float]] | Sequence[float],
    old: Sequence[Sequence[float]] | None = None,
    rollout: Sequence[Sequence[float]] | None = None,
    ref: Sequence[Sequence[float]] | None = None,
    entropy: Sequence[Sequence[float]] | None = None,
    mask: Sequence[Sequence[bool]] | None = None,
    groups: Sequence[int] | None = None,
    prompt_tokens: int = 0,
    counts: LossCounts | None = None,
    dtype: torch.dtype = torch.float64,
) -> LossInputs:
    """One micro-batch that is the whole update, unless `counts` says otherwise.

    Each argument is [sequence][token]; one advantage may stand for a whole sequence. `groups` names the group of each
    sequence (None: one for all). `prompt_tokens` masked tokens of log-prob NaN stand before each sequence. Only
    `logprobs` and `entropy` have gradients.
    """
    poison = [float("nan")] * prompt_tokens
    masks = mask or [[True] * len(row) for row in logprobs]
    groups = groups or [0] * len(logprobs)

    def flat(rows: Any, **options: Any) -> torch.Tensor:
        return torch.tensor([x for row in rows for x in [*poison, *row]], dtype=dtype, **options)

    def spread(values: Any) -> Any:
        return [row if isinstance(row, Sequence) else [row] * len(logprobs[i]) for i, row in enumerate(values)]

    is_loss_token = [x for row in masks for x in [*[False] * prompt_tokens, *row]]
    lengths = [sum(row) for row in masks]
    of_group = [sum(n for n, other in zip(lengths, groups, strict=True) if other == group) for group in groups]
    ends = torch.tensor([prompt_tokens + len(row) for row in logprobs]).cumsum(0)
    return LossInputs(
        logprobs=flat(logprobs, requires_grad=True),
        entropy=flat(entropy or [[0.0] * len(row) for row in logprobs], requires_grad=True),
        old_logprobs=flat(old or logprobs),
        rollout_logprobs=flat(rollout or old or logprobs),
        ref_logprobs=None if ref is None else flat(ref),
        advantages=flat(spread(advantages)),
        loss_mask=torch.tensor(is_loss_token),
        cu_seqlens=torch.cat([torch.zeros(1), ends]).to(torch.int32),
        group_loss_tokens=torch.tensor(of_group, dtype=torch.int32),
        counts=counts
        or LossCounts(
            tokens=sum(lengths),
            sequences=sum(n > 0 for n in lengths),
            groups=len({group for group, n in zip(groups, lengths, strict=True) if n}),
        ),
    )


def gradient(inputs: LossInputs, loss: torch.Tensor) -> torch.Tensor:
    """[T], of the log-probs."""
    (result,) = torch.autograd.grad(loss, inputs.logprobs, retain_graph=True)
    return result
