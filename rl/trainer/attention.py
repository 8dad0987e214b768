"""Attention over packed sequences: each token sees its own sequence only, and no [T, T] mask exists.

`packed_attention` is registered with transformers under `PACKED`. transformers builds no mask for an implementation
that it has no mask function for.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rl.config.schema import ConfigError
from rl.types import IntArray

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    varlen_attn = None

PACKED = "packed"

_WITHOUT_EFFECT = frozenset(
    {
        # Bounds and positions that are known already.
        *("cu_seq_lens_k", "max_length_k", "position_ids", "position_embeddings", "cache_position"),
        # What a forward pass returns; there is no cache.
        *("use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "config"),
        "dropout",  # off on purpose
    }
)
"""Keyword arguments of transformers' attention layers that change no output here."""


def equal_length_runs(cu_seqlens: IntArray) -> list[tuple[int, int]]:
    """Neighbors of equal length as (number of sequences, length): such a run is a rectangular batch without padding."""
    runs: list[tuple[int, int]] = []
    for length in np.diff(cu_seqlens).tolist():
        if runs and runs[-1][1] == length:
            runs[-1] = (runs[-1][0] + 1, length)
        else:
            runs.append((1, length))
    return runs


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    sequence_runs: Sequence[tuple[int, int]],
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """query [1, heads, T, head_dim], key, value [1, kv_heads, T, head_dim] -> [1, T, heads, head_dim]. No dropout.

    Without `cu_seq_lens_q` and `max_length_q` the T tokens are one sequence.

    ConfigError for a keyword argument that would change the output and is not implemented, such as the sinks of GPT-OSS
    (`s_aux`) or the `softcap` of Gemma 2: without it log-probs would be silently wrong.
    """
    assert attention_mask is None, "packed attention takes sequence bounds, not a mask"
    unknown = sorted(name for name, value in others.items() if value is not None and name not in _WITHOUT_EFFECT)
    if unknown:
        raise _unsupported(module, f"{', '.join(unknown)}, which the trainer's attention does not implement")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise _unsupported(module, "is_causal=False, and the trainer's attention is causal")
    if max_length_q is None:
        max_length_q = query.shape[2]
    if cu_seq_lens_q is None:
        cu_seq_lens_q = torch.tensor([0, query.shape[2]], dtype=torch.int32, device=query.device)
    if sliding_window is not None and sliding_window >= max_length_q:
        sliding_window = None
    if varlen_attn is not None and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16):
        output = _flash(query, key, value, cu_seq_lens_q, max_length_q, scaling, sliding_window)
    else:
        output = _by_runs(query, key, value, sequence_runs, scaling, sliding_window)
    return output.unsqueeze(0), None


def _unsupported(module: nn.Module, what: str) -> ConfigError:
    return ConfigError(f"model: {type(module).__name__} needs {what}: its log-probs would be wrong. Use another model.")


def _flash(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens: torch.Tensor,
    max_length: int,
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    assert varlen_attn is not None
    options: dict[str, Any] = {
        "scale": scaling,
        "window_size": (-1 if sliding_window is None else sliding_window - 1, 0),
    }
    if key.shape[1] != query.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            options["enable_gqa"] = True
        else:
            groups = query.shape[1] // key.shape[1]
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    return varlen_attn(query, key, value, cu_seqlens, cu_seqlens, max_length, max_length, **options)  # type: ignore[return-value]


def _by_runs(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    runs: Sequence[tuple[int, int]],
    scaling: float | None,
    sliding_window: int | None,
) -> torch.Tensor:
    """One batched call per run of equal lengths. The packer sorts by length, so there are few runs."""
    sizes = [num * length for num, length in runs]
    outputs = []
    for (num, length), run in zip(
        runs, zip(*(states[0].split(sizes, dim=1) for states in (query, key, value)), strict=True), strict=True
    ):
        q, k, v = (states.unflatten(1, (num, length)).transpose(0, 1) for states in run)
        band = None
        if sliding_window is not None and length > sliding_window:
            ones = torch.ones(length, length, dtype=torch.bool, device=q.device)
            band = ones.tril().triu(1 - sliding_window)
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=band, is_causal=band is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1]
        )
        outputs.append(out.transpose(1, 2).flatten(0, 1))
    return torch.cat(outputs)


AttentionInterface.register(PACKED, packed_attention)
