"""Sizes of a model from its config.json: what a plan needs, without torch and without weights."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError

_QKV_BIAS = {"qwen2"}
"""Model types whose q, k and v projections have biases although no key of the config says so."""
_QK_NORM = {"qwen3"}
"""Model types that normalize queries and keys per head."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Of the language model; a vision tower is not counted."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool
    num_params: int | None
    """Counted for dense models; None for others (experts, linear attention), where the formula would be wrong."""


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
    shape = ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or hidden // heads,
        ffn=ffn,
        vocab=vocab,
        tied_embeddings=bool(text.get("tie_word_embeddings", config.get("tie_word_embeddings", False))),
        num_params=None,
    )
    is_dense = not any(key in text for key in ("num_experts", "num_local_experts", "n_routed_experts")) and all(
        kind in ("full_attention", "sliding_attention") for kind in text.get("layer_types") or ()
    )
    if not is_dense:
        return shape
    return replace(shape, num_params=_dense_params(shape, text))


def _dense_params(shape: ModelShape, text: Mapping[str, Any]) -> int:
    """Parameters of a decoder with gated feed-forward layers and RMS norms: Llama, Mistral, Qwen2, Qwen3."""
    model_type = str(text.get("model_type", "")).removesuffix("_text")
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = shape.hidden * (2 * queries + 2 * keys)
    if text.get("attention_bias") and model_type != "qwen2":
        attention += queries + 2 * keys + shape.hidden
    elif model_type in _QKV_BIAS:
        attention += queries + 2 * keys
    if model_type in _QK_NORM:
        attention += 2 * shape.head_dim
    feed_forward = 3 * shape.hidden * shape.ffn
    if text.get("mlp_bias"):
        feed_forward += 2 * shape.ffn + shape.hidden
    embeddings = shape.vocab * shape.hidden * (1 if shape.tied_embeddings else 2)
    return shape.layers * (attention + feed_forward + 2 * shape.hidden) + shape.hidden + embeddings


def params_in_files(folder: Path) -> int | None:
    """Parameters that the headers of the folder's safetensors files list; None without such files."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
        total += sum(math.prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total or None
