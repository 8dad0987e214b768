from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rl.config.compose import compose_run_config
from rl.config.schema import Architecture, ConfigError, MiniatureModelConfig, ModelConfig, TinyModelConfig
from rl.config.shape import ModelShape
from rl.model.miniature import MiniatureModel
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
        {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
        | {"mlp_only_layers": [0]},
        {"model_type": "mixtral", "num_local_experts": 4},
        {"model_type": "deepseek_v3", "n_routed_experts": 4},
        {"model_type": "qwen3_next", "layer_types": ["linear_attention", "full_attention", "full_attention"]},
    ],
)
def test_parameters_are_not_guessed_where_the_formula_would_be_wrong(overrides):
    assert shape_of({"model_type": "qwen3"} | SIZES | overrides).num_params is None


EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 8}
DELTA_NETS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 3,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"],
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_moe", EXPERTS),
        ("qwen3_next", EXPERTS | DELTA_NETS | {"shared_expert_intermediate_size": 12}),
        ("qwen3_5_moe_text", EXPERTS | DELTA_NETS | {"shared_expert_intermediate_size": 12}),
        ("qwen3_5_text", DELTA_NETS | {"head_dim": 8}),
    ],
)
def test_parameters_with_experts_and_delta_nets_are_those_of_the_real_model(family, overrides):
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(family, **SIZES, **overrides)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shape = shape_of(config.to_dict())
    assert shape.num_params == shape.counted_params() == num_params(model)
    if "layer_types" in overrides:
        assert (shape.full_attention_layers, shape.linear_layers) == (1, 2)


PUBLISHED = ("qwen3_8b", "qwen2_5_math_7b", "qwen3_5_35b_a3b")


def published_shape(name: str) -> ModelShape:
    model = compose_run_config([f"model={name}"]).model
    assert model.shape is not None
    return replace(model.shape, num_params=model.shape.counted_params())


@pytest.mark.parametrize(
    ("name", "params", "active", "kv_bytes"),
    [
        ("qwen3_8b", 8_190_735_360, 8_190_735_360 - 151936 * 4096, 147456),
        ("qwen2_5_math_7b", 7_615_616_512, 7_615_616_512 - 152064 * 3584, 57344),
        ("qwen3_5_35b_a3b", 34_660_610_688, 2_946_429_568, 20480),
    ],
)
def test_sizes_of_the_published_models(name: str, params: int, active: int, kv_bytes: int):
    """Counted by hand from the same shapes: 2 (keys and values) x layers x heads x width x 2 bytes of cache a token."""
    shape = published_shape(name)
    assert shape.num_params == params
    assert shape.active_params == active
    assert shape.kv_bytes_per_token(bytes_per_element=2) == kv_bytes


def test_parts_of_a_layer_with_experts_and_of_a_gated_delta_net():
    shape = published_shape("qwen3_5_35b_a3b")
    assert shape.linear_attention_params == 33_718_464
    assert shape.attention_params == 27_263_488
    assert shape.ffn_params == 808_978_432
    assert shape.all_expert_params == 40 * 256 * 3_145_728 == 32_212_254_720
    # 30 layers x 32 heads x 128 x 128 in fp32, and 3 earlier inputs of 8,192 channels in bf16.
    assert shape.state_bytes_per_sequence(bytes_per_element=2) == 62_914_560 + 1_474_560


def test_a_forward_pass_takes_two_operations_a_parameter_and_four_a_position_seen():
    shape = published_shape("qwen3_8b")
    assert shape.forward_flops(1, 0) == 2 * shape.active_params
    assert shape.forward_flops(10, 500) == 10 * (2 * shape.active_params + 4 * 36 * 32 * 128 * 500)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_written_shape_is_that_of_the_class_in_transformers(name: str):
    """With the sizes of config.json that decide it, as far as the class's defaults are not the model's."""
    from transformers import AutoConfig

    shape = published_shape(name)
    families = {"qwen3_8b": "qwen3", "qwen2_5_math_7b": "qwen2", "qwen3_5_35b_a3b": "qwen3_5_moe_text"}
    values: dict[str, Any] = {
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": False,
        "max_position_embeddings": shape.max_positions,
    }
    if shape.ffn:
        values["intermediate_size"] = shape.ffn
    config = AutoConfig.for_model(families[name], **values)
    assert shape_of(config.to_dict()) == replace(shape, vision=None)
    if shape.vision is not None:
        whole = AutoConfig.for_model(families[name].removesuffix("_text"))
        assert shape_of(whole.to_dict()).vision == shape.vision


VISION = {"depth": 3, "num_heads": 2, "patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2}
WIDE = {"hidden_size": 16, "intermediate_size": 20, "out_hidden_size": 24, "num_position_embeddings": 9}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("family", "vision", "text"),
    [
        ("qwen2_vl", {"embed_dim": 16, "hidden_size": 24, "mlp_ratio": 4}, {}),
        ("qwen2_5_vl", WIDE, {}),
        ("qwen3_vl", WIDE | {"deepstack_visual_indexes": [0, 2]}, {"head_dim": 8}),
        ("qwen3_vl_moe", WIDE | {"deepstack_visual_indexes": [1]}, EXPERTS),
        ("qwen3_5", WIDE, DELTA_NETS | {"head_dim": 8}),
        ("qwen3_5_moe", WIDE, EXPERTS | DELTA_NETS | {"shared_expert_intermediate_size": 12}),
    ],
)
def test_parameters_of_decoder_and_vision_tower_are_those_of_the_real_model(family, vision, text, tied):
    from transformers import AutoConfig, AutoModelForImageTextToText

    config = AutoConfig.for_model(
        family,
        text_config=SIZES | text | {"tie_word_embeddings": tied},
        vision_config=VISION | vision,
        tie_word_embeddings=tied,
    )
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    shape = shape_of(config.to_dict())
    tower = sum(parameter.numel() for name, parameter in model.named_parameters() if ".visual." in name)
    assert shape.vision_params == tower
    assert shape.num_params == num_params(model) - tower


def test_the_published_vision_tower_has_the_parameters_of_its_class_by_hand_and_by_count():
    """A layer: 4 x 1,152 x 1,153 of attention, 2 x 1,152 x 4,304 + 5,456 feed-forward, 4 x 1,152 of norms."""
    from transformers import AutoConfig
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeVisionModel

    shape = published_shape("qwen3_5_35b_a3b")
    assert shape.vision is not None
    assert shape.vision.layer_params == 15_239_504
    # Patches 1,152 x 1,537, positions 2,304 x 1,152, a norm, and 4,608 x 4,609 + 4,609 x 2,048 of the merger.
    assert shape.vision.outer_params(2048) == 35_104_640
    assert shape.vision_params == 27 * 15_239_504 + 35_104_640 == 446_571_248
    with torch.device("meta"):
        config = AutoConfig.for_model("qwen3_5_moe", vision_config={"out_hidden_size": 2048})
        assert num_params(Qwen3_5MoeVisionModel(config.vision_config)) == 446_571_248


@pytest.mark.parametrize("architecture", list(Architecture))
def test_a_miniature_has_the_parameters_that_its_shape_says(tmp_path, architecture: Architecture):
    config = MiniatureModelConfig(name="miniature", architecture=architecture)
    folder = MiniatureModel(config).prepare(tmp_path / "model", seed=0)
    shape = MiniatureModel.shape(config)
    assert shape.num_params is not None and (shape.vision_params > 0) == (architecture is Architecture.qwen3_5_moe)
    assert shape.num_params + shape.vision_params == params_in_files(folder)
    assert HuggingFaceModel.shape(ModelConfig(name="hf", path=str(folder))) == shape


def test_a_tower_of_another_kind_is_counted_in_the_files_alone(tmp_path):
    from transformers import AutoConfig, AutoModelForImageTextToText

    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4} | sizes
    config = AutoConfig.for_model("llava", text_config={"model_type": "llama"} | SIZES, vision_config=vision)
    assert shape_of(config.to_dict()).num_params is None
    model = AutoModelForImageTextToText.from_config(config)
    model.save_pretrained(tmp_path)
    shape = HuggingFaceModel.shape(ModelConfig(name="hf", path=str(tmp_path)))
    assert shape is not None and (shape.num_params, shape.vision_params) == (num_params(model), 0)


def test_the_shape_of_a_vision_model_is_that_of_its_text_part():
    shape = shape_of({"model_type": "qwen2_5_vl", "hidden_size": 999, "text_config": SIZES | {"hidden_size": 24}})
    assert (shape.hidden, shape.head_dim) == (24, 4)


def test_positions_are_those_of_the_text_part():
    assert shape_of(SIZES | {"text_config": SIZES | {"max_position_embeddings": 99}}).max_positions == 99
    longrope = {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 16}
    assert shape_of(SIZES | longrope).max_positions == 16


def test_sizes_under_unknown_names_name_the_missing_one():
    with pytest.raises(ConfigError, match=r"'gpt2' has no 'num_hidden_layers'.*model\.num_params"):
        shape_of({"model_type": "gpt2", "n_layer": 2, "n_embd": 8})


def test_num_params_of_the_config_wins(tiny_qwen3: Path):
    shape = HuggingFaceModel.shape(ModelConfig(name="hf", path=str(tiny_qwen3), num_params=7))
    assert shape is not None and shape.num_params == 7


def test_num_params_of_the_config_count_the_vision_tower_which_is_not_added_once_more():
    """34,660,610,688 of the decoder and 446,571,248 of the tower, as conf/model/qwen3_5_35b_a3b.yaml says."""
    plain = compose_run_config(["experiment=qwen3_5_35b_a3b_grpo_colocated"])
    config = compose_run_config(["experiment=qwen3_5_35b_a3b_grpo_colocated", "model.num_params=35107181936"])
    for model in (plain.model, config.model):
        shape = HuggingFaceModel.shape(model)
        assert shape is not None and (shape.num_params, shape.vision_params) == (34660610688, 446571248)


@pytest.mark.parametrize("sizes", [{}, {"layers": 1, "hidden": 16, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 8}])
def test_the_tiny_model_has_the_parameters_that_its_shape_says(tmp_path, sizes: dict[str, Any]):
    from transformers import AutoModelForCausalLM

    config = TinyModelConfig(name="tiny", **sizes)
    folder = TinyModel(config).prepare(tmp_path / "model", seed=0)
    shape = TinyModel.shape(config)
    assert shape.num_params == num_params(AutoModelForCausalLM.from_pretrained(folder)) == params_in_files(folder)
    if not sizes:
        assert shape.num_params == 298_112
