from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rl.config.schema import ConfigError, ModelConfig, TinyModelConfig
from rl.model.shape import params_in_files, shape_of
from rl.model.source import HuggingFaceModel
from rl.model.tiny import TinyModel

SIZES = {
    "vocab_size": 50,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}


def num_params(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())  # tied ones once


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3", {"head_dim": 8}),
        ("qwen3", {"head_dim": 8, "attention_bias": True}),
        ("qwen2", {}),
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("mistral", {}),
    ],
)
def test_parameters_are_those_of_the_real_model(family, overrides, tied, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZES, **overrides, tie_word_embeddings=tied)
    model = AutoModelForCausalLM.from_config(config)
    assert shape_of(config.to_dict()).num_params == num_params(model)
    if family == "qwen3":
        model.save_pretrained(tmp_path)
        assert params_in_files(tmp_path) == num_params(model)


@pytest.mark.parametrize(
    "overrides",
    [
        {"model_type": "qwen3_moe", "num_experts": 4},
        {"model_type": "mixtral", "num_local_experts": 4},
        {"model_type": "deepseek_v3", "n_routed_experts": 4},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ],
)
def test_parameters_are_not_guessed_where_the_formula_would_be_wrong(overrides):
    assert shape_of({"model_type": "qwen3"} | SIZES | overrides).num_params is None


def test_the_shape_of_a_vision_model_is_that_of_its_text_part():
    shape = shape_of({"model_type": "qwen2_5_vl", "hidden_size": 999, "text_config": SIZES | {"hidden_size": 24}})
    assert (shape.hidden, shape.head_dim) == (24, 4)


def test_sizes_under_unknown_names_name_the_missing_one():
    with pytest.raises(ConfigError, match=r"'gpt2' has no 'num_hidden_layers'.*model\.num_params"):
        shape_of({"model_type": "gpt2", "n_layer": 2, "n_embd": 8})


def test_num_params_of_the_config_wins(tiny_qwen3: Path):
    shape = HuggingFaceModel.shape(ModelConfig(name="hf", path=str(tiny_qwen3), num_params=7))
    assert shape is not None and shape.num_params == 7


@pytest.mark.parametrize("sizes", [{}, {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 8}])
def test_the_tiny_model_has_the_parameters_that_its_shape_says(tmp_path, sizes: dict[str, Any]):
    from transformers import AutoModelForCausalLM

    config = TinyModelConfig(name="tiny", **sizes)
    folder = TinyModel(config).prepare(tmp_path / "model", seed=0)
    shape = TinyModel.shape(config)
    assert shape.num_params == num_params(AutoModelForCausalLM.from_pretrained(folder)) == params_in_files(folder)
    if not sizes:
        assert shape.num_params == 298_112
