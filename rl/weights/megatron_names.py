"""Names and fused tensors of a dense Qwen3: Megatron-Core's GPTModel on one side, Hugging Face on the other.

Shapes: H hidden, D head dimension, A attention heads, K key-value heads, F feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch


class Fusion(Enum):
    """How the Hugging Face tensors of one Megatron tensor are joined."""

    none = "none"
    qkv = "qkv"
    gate_up = "gate_up"


@dataclass(frozen=True, slots=True)
class Correspondence:
    megatron: str
    hugging_face: tuple[str, ...]
    fusion: Fusion = Fusion.none


@dataclass(frozen=True, slots=True)
class AttentionShape:
    num_heads: int
    num_kv_heads: int
    head_dim: int


def dense_qwen3(num_layers: int, *, is_tied: bool) -> list[Correspondence]:
    """Every weight once, in the order of Hugging Face's `named_parameters()`; a tied output head has none."""
    table = [Correspondence("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))]
    for layer in range(num_layers):
        table += _layer(f"decoder.layers.{layer}.", f"model.layers.{layer}.")
    table.append(Correspondence("decoder.final_layernorm.weight", ("model.norm.weight",)))
    if not is_tied:
        table.append(Correspondence("output_layer.weight", ("lm_head.weight",)))
    return table


def _layer(megatron: str, hugging_face: str) -> list[Correspondence]:
    def same(ours: str, theirs: str) -> Correspondence:
        return Correspondence(f"{megatron}{ours}.weight", (f"{hugging_face}{theirs}.weight",))

    def fused(ours: str, theirs: Sequence[str], fusion: Fusion) -> Correspondence:
        return Correspondence(f"{megatron}{ours}.weight", tuple(f"{hugging_face}{t}.weight" for t in theirs), fusion)

    return [
        fused("self_attention.linear_qkv", [f"self_attn.{x}_proj" for x in "qkv"], Fusion.qkv),
        same("self_attention.linear_proj", "self_attn.o_proj"),
        same("self_attention.q_layernorm", "self_attn.q_norm"),
        same("self_attention.k_layernorm", "self_attn.k_norm"),
        fused("mlp.linear_fc1", ["mlp.gate_proj", "mlp.up_proj"], Fusion.gate_up),
        same("mlp.linear_fc2", "mlp.down_proj"),
        same("input_layernorm", "input_layernorm"),
        same("pre_mlp_layernorm", "post_attention_layernorm"),
    ]


def to_megatron(entry: Correspondence, weights: Mapping[str, torch.Tensor], attention: AttentionShape) -> torch.Tensor:
    """The Megatron tensor of `entry`, from `weights` by Hugging Face name. Raises KeyError if one is missing."""
    parts = [weights[name] for name in entry.hugging_face]
    match entry.fusion:
        case Fusion.none:
            return parts[0]
        case Fusion.qkv:
            return fuse_qkv(*parts, attention=attention)
        case Fusion.gate_up:
            return torch.cat(parts)


def to_hugging_face(
    entry: Correspondence, weight: torch.Tensor, attention: AttentionShape
) -> list[tuple[str, torch.Tensor]]:
    """(Hugging Face name, tensor) pairs; tensors may be views of `weight`."""
    match entry.fusion:
        case Fusion.none:
            parts: Sequence[torch.Tensor] = (weight,)
        case Fusion.qkv:
            parts = split_qkv(weight, attention=attention)
        case Fusion.gate_up:
            parts = weight.chunk(2)
    return list(zip(entry.hugging_face, parts, strict=True))


def fuse_qkv(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, attention: AttentionShape) -> torch.Tensor:
    """[A D, H], [K D, H], [K D, H] -> [(A + 2 K) D, H]: for each key-value head its A / K queries, its key, its value.

    So a slice of whole groups is what one tensor-parallel rank holds.
    """
    groups = [part.unflatten(0, (attention.num_kv_heads, -1)) for part in (query, key, value)]
    return torch.cat(groups, dim=1).flatten(0, 1)


def split_qkv(fused: torch.Tensor, *, attention: AttentionShape) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The inverse of `fuse_qkv`."""
    queries = attention.num_heads // attention.num_kv_heads
    sizes = [queries * attention.head_dim, attention.head_dim, attention.head_dim]
    query, key, value = fused.unflatten(0, (attention.num_kv_heads, -1)).split(sizes, dim=1)
    return query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
