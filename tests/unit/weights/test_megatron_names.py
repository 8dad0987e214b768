from __future__ import annotations

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rl.weights.megatron_names import (
    AttentionShape,
    Correspondence,
    Fusion,
    dense_qwen3,
    fuse_qkv,
    split_qkv,
    to_hugging_face,
    to_megatron,
)


def rows(*values: float) -> torch.Tensor:
    """One column, so that a row is a number."""
    return torch.tensor(values).unsqueeze(1)


def test_each_key_value_head_keeps_its_queries_beside_it():
    """Four heads, two key-value heads, head dimension 1: queries 0 and 1 belong to key-value head 0."""
    attention = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=1)
    fused = fuse_qkv(rows(0, 1, 2, 3), rows(10, 11), rows(20, 21), attention=attention)
    assert fused.flatten().tolist() == [0, 1, 10, 20, 2, 3, 11, 21]


def test_rows_of_one_head_stay_together():
    attention = AttentionShape(num_heads=2, num_kv_heads=1, head_dim=2)
    fused = fuse_qkv(rows(0, 1, 2, 3), rows(10, 11), rows(20, 21), attention=attention)
    assert fused.flatten().tolist() == [0, 1, 2, 3, 10, 11, 20, 21]


def test_gate_comes_before_up():
    entry = Correspondence("fc1", ("gate", "up"), Fusion.gate_up)
    attention = AttentionShape(1, 1, 1)
    fused = to_megatron(entry, {"up": rows(3, 4), "gate": rows(1, 2)}, attention)
    assert fused.flatten().tolist() == [1, 2, 3, 4]
    assert [(name, part.flatten().tolist()) for name, part in to_hugging_face(entry, fused, attention)] == [
        ("gate", [1, 2]),
        ("up", [3, 4]),
    ]


@pytest.mark.parametrize("attention", [AttentionShape(8, 2, 4), AttentionShape(4, 4, 3), AttentionShape(6, 1, 5)])
def test_splitting_undoes_fusing(attention):
    parts = [
        torch.randn(heads * attention.head_dim, 7)
        for heads in (attention.num_heads, attention.num_kv_heads, attention.num_kv_heads)
    ]
    fused = fuse_qkv(*parts, attention=attention)
    assert fused.shape == (sum(len(part) for part in parts), 7)
    for part, back in zip(parts, split_qkv(fused, attention=attention), strict=True):
        assert torch.equal(part, back)


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_table_is_the_order_of_the_hugging_face_model(is_tied):
    config = Qwen3Config(num_hidden_layers=3, tie_word_embeddings=is_tied)
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    named = [name for entry in dense_qwen3(3, is_tied=is_tied) for name in entry.hugging_face]
    assert named == [name for name, _ in model.named_parameters()]


def test_a_missing_weight_is_named():
    entry = Correspondence("fc1", ("gate", "up"), Fusion.gate_up)
    with pytest.raises(KeyError, match="up"):
        to_megatron(entry, {"gate": rows(1)}, AttentionShape(1, 1, 1))
