"""Sizes of a model from its config.json, without torch and without weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError
from rl.config.shape import ModelShape, VisionShape
from rl.model.positions import max_positions

_QKV_BIAS = {"qwen2", "qwen2_vl", "qwen2_5_vl"}
"""Model types whose q, k and v projections have biases although no key of the config says so."""
_QK_NORM = {"qwen3", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
"""Model types that normalize queries and keys per head."""
_GATED_ATTENTION = {"qwen3_next", "qwen3_5", "qwen3_5_moe"}
"""Model types whose query projection also holds a gate."""
_COUNTED_EXPERTS = {"qwen3_moe", "qwen3_next", "qwen3_vl_moe", "qwen3_5_moe"}
"""Model types with experts whose parameters `ModelShape` accounts for, each layer with experts."""
_COUNTED_TOWERS = {"qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"}
"""Model types with a vision tower that `VisionShape` accounts for."""
SIZE_KEYS = {
    *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size"),
    *("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size", "num_experts"),
    "num_local_experts",
    *("num_experts_per_tok", "layer_types", "tie_word_embeddings", "attention_bias", "mlp_bias"),
    *("linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"),
    "linear_conv_kernel_dim",
    *("depth", "embed_dim", "mlp_ratio", "in_channels", "patch_size", "temporal_patch_size", "spatial_merge_size"),
    *("num_position_embeddings", "deepstack_visual_indexes"),
}
"""Keys of config.json that a shape depends on."""
_NOT_COUNTED = ("num_experts", "num_local_experts", "n_routed_experts")


def read_config_json(folder: Path) -> dict[str, Any]:
    """The folder's config.json. Raises ConfigError if it is missing or no JSON object."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"model.path={folder}: the folder has no config.json. Give a folder in Hugging Face layout.")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"model.path={folder}: config.json is not valid JSON ({error}).") from error
    if not isinstance(values, dict) or "model_type" not in values:
        raise ConfigError(f"model.path={folder}: config.json has no model_type, so nothing says how to load the model.")
    return values


def shape_of(config: Mapping[str, Any]) -> ModelShape:
    """The shape that a config.json describes, its `text_config` where it has one."""
    text: Mapping[str, Any] = config.get("text_config") or config
    try:
        layers, hidden, heads = text["num_hidden_layers"], text["hidden_size"], text["num_attention_heads"]
        vocab = text["vocab_size"]
        ffn = text.get("intermediate_size") or text["moe_intermediate_size"]
    except KeyError as error:
        raise ConfigError(
            f"config.json of model type {config.get('model_type')!r} has no {error}: its shape cannot be read. "
            "Set model.num_params, or use a model that names its sizes as Llama and Qwen do."
        ) from error
    model_type = str(text.get("model_type", "")).removesuffix("_text")
    kinds: list[str] = list(text.get("layer_types") or ())
    is_hybrid = "linear_attention" in kinds
    has_experts = model_type in _COUNTED_EXPERTS
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        ffn=0 if has_experts else ffn,
        vocab=vocab,
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        qkv_bias=model_type in _QKV_BIAS or bool(text.get("attention_bias")),
        output_bias=bool(text.get("attention_bias")) and model_type != "qwen2",
        ffn_bias=bool(text.get("mlp_bias")),
        qk_norm=model_type in _QK_NORM,
        gated_attention=model_type in _GATED_ATTENTION,
        attention_layers=kinds.count("full_attention") if is_hybrid else None,
        **(_linear_sizes(text) if is_hybrid else {}),
        **(_expert_sizes(text) if has_experts else {}),
        vision=_vision(config),
    )
    is_counted = _is_counted(shape, text, model_type) and (shape.vision is not None or "vision_config" not in config)
    num_params = shape.counted_params() if is_counted else None
    return replace(shape, num_params=num_params, max_positions=max_positions(text))


def _vision(config: Mapping[str, Any]) -> VisionShape | None:
    """None: no tower, or not one that is known here."""
    vision, family = config.get("vision_config"), config.get("model_type")
    if not vision or family not in _COUNTED_TOWERS:
        return None
    is_first = family == "qwen2_vl"  # where hidden_size is the decoder's
    is_learned = family not in ("qwen2_vl", "qwen2_5_vl")
    try:
        hidden = vision["embed_dim" if is_first else "hidden_size"]
        rows, frames = vision["patch_size"], vision.get("temporal_patch_size", 2)
        return VisionShape(
            layers=vision["depth"],
            hidden=hidden,
            ffn=int(hidden * vision["mlp_ratio"]) if is_first else vision["intermediate_size"],
            patch_numbers=vision.get("in_channels", 3) * frames * rows * rows,
            merge=vision.get("spatial_merge_size", 2),
            positions=vision["num_position_embeddings"] if is_learned else 0,
            patch_bias=is_learned,
            deep_mergers=len(vision["deepstack_visual_indexes"]) if family in ("qwen3_vl", "qwen3_vl_moe") else 0,
            gated=family == "qwen2_5_vl",
        )
    except (KeyError, TypeError):  # sizes under other names, or patches that are no squares
        return None


def _linear_sizes(text: Mapping[str, Any]) -> dict[str, int]:
    """Of the Gated DeltaNets; empty for layers of another kind."""
    keys = {
        "linear_key_heads": "linear_num_key_heads",
        "linear_value_heads": "linear_num_value_heads",
        "linear_key_dim": "linear_key_head_dim",
        "linear_value_dim": "linear_value_head_dim",
        "linear_conv_kernel": "linear_conv_kernel_dim",
    }
    return {name: text[key] for name, key in keys.items()} if all(key in text for key in keys.values()) else {}


def _expert_sizes(text: Mapping[str, Any]) -> dict[str, int]:
    return {
        "experts": text.get("num_experts") or text.get("num_local_experts") or 0,
        "experts_per_token": text.get("num_experts_per_tok", 0),
        "expert_ffn": text.get("moe_intermediate_size", 0),
        "shared_expert_ffn": text.get("shared_expert_intermediate_size", 0),
    }


def _is_counted(shape: ModelShape, text: Mapping[str, Any], model_type: str) -> bool:
    """Whether the sizes account for every parameter."""
    kinds = set(text.get("layer_types") or ())
    if "linear_attention" in kinds and not (shape.linear_conv_kernel and model_type in _GATED_ATTENTION):
        return False
    if kinds - {"full_attention", "sliding_attention", "linear_attention"}:
        return False
    if not any(key in text for key in _NOT_COUNTED):
        return True
    all_have_experts = not text.get("mlp_only_layers") and text.get("decoder_sparse_step", 1) == 1
    return bool(shape.experts and shape.experts_per_token and shape.expert_ffn) and all_have_experts


def params_in_files(folder: Path) -> int | None:
    """Parameters that the headers of the folder's safetensors files list; None without such files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None
