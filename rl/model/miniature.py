"""Random models of the published runs' architectures, thousands of times smaller: what a smoke run trains.

Same classes of transformers, same kinds of layers in the same order, one token per byte, and a ChatML template that
knows `enable_thinking` and images. They learn nothing; they run everything.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tokenizers.pre_tokenizers import ByteLevel

from rl.config.schema import Architecture, MiniatureModelConfig
from rl.model.shape import ModelShape, shape_of
from rl.model.source import check_unset, merged
from rl.protocols import Task

END, START, PAD = "<|im_end|>", "<|im_start|>", "<|endoftext|>"
THINK, END_THINK = "<think>", "</think>"
VISION_START, VISION_END, IMAGE, VIDEO = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
SPECIAL = (PAD, START, END, THINK, END_THINK, VISION_START, VISION_END, IMAGE, VIDEO)
BYTES = sorted(ByteLevel.alphabet())
"""The printable stand-in of each byte, as Qwen's tokenizers write it."""
VOCABULARY = {token: index for index, token in enumerate((*SPECIAL, *BYTES))}
MAX_POSITIONS = 4096

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)

_TEXT: dict[str, Any] = {
    "vocab_size": len(VOCABULARY),
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": VOCABULARY[PAD],
    "eos_token_id": VOCABULARY[END],
    "bos_token_id": None,
    "dtype": "float32",
}
_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}

CONFIGS: dict[Architecture, dict[str, Any]] = {
    Architecture.qwen3: _TEXT
    | {
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "head_dim": 8,
        "rope_parameters": _ROPE,
    },
    Architecture.qwen2: _TEXT
    | {"model_type": "qwen2", "num_hidden_layers": 2, "intermediate_size": 64, "rope_parameters": _ROPE},
    Architecture.qwen3_5_moe: {
        "model_type": "qwen3_5_moe",
        "image_token_id": VOCABULARY[IMAGE],
        "video_token_id": VOCABULARY[VIDEO],
        "vision_start_token_id": VOCABULARY[VISION_START],
        "vision_end_token_id": VOCABULARY[VISION_END],
        "tie_word_embeddings": False,
        "dtype": "float32",
        "text_config": _TEXT
        | {
            "model_type": "qwen3_5_moe_text",
            "num_hidden_layers": 4,
            "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
            "head_dim": 16,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_conv_kernel_dim": 4,
            "rope_parameters": _ROPE
            | {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5},
        },
        "vision_config": {
            "model_type": "qwen3_5_moe_vision",
            "depth": 1,
            "hidden_size": 32,
            "intermediate_size": 32,
            "num_heads": 2,
            "out_hidden_size": 32,
            "patch_size": 16,
            "num_position_embeddings": 64,
            "initializer_range": 0.1,
        },
    },
}
"""config.json of each."""

PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""preprocessor_config.json of those that see."""


class MiniatureModel:
    """Same interface as `HuggingFaceModel`; what it makes is read by the same code as a downloaded model."""

    def __init__(self, config: MiniatureModelConfig) -> None:
        self.check(config)
        self.config = config

    @classmethod
    def check(cls, config: MiniatureModelConfig) -> None:
        usual = {"path": "miniature", "revision": None, "chat_template": None, "num_params": None, "shape": None}
        check_unset(config, usual=usual, why="a miniature, which is made on the spot")

    @classmethod
    def check_present(cls, config: MiniatureModelConfig) -> None:
        """It is made."""

    @classmethod
    def shape(cls, config: MiniatureModelConfig) -> ModelShape:
        return shape_of(merged(CONFIGS[config.architecture], config.hf_overrides))

    def prepare(self, folder: Path, *, seed: int) -> Path:
        """Writes the model into `folder`, or leaves it if it is there.

        Written beside `folder` and renamed, so that it is complete whenever it exists.
        """
        if folder.exists():
            return folder
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, GenerationConfig

        values = merged(CONFIGS[self.config.architecture], self.config.hf_overrides)
        config = AutoConfig.for_model(**values)
        sees = "vision_config" in values
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            auto_class: Any = AutoModelForImageTextToText if sees else AutoModelForCausalLM
            model = auto_class.from_config(config, dtype=torch.float32)
        model.generation_config = GenerationConfig(eos_token_id=VOCABULARY[END], pad_token_id=VOCABULARY[PAD])
        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        model.save_pretrained(temporary)
        tokenizer().save_pretrained(temporary)
        if sees:
            (temporary / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR, indent=2), encoding="utf-8")
        try:
            os.rename(temporary, folder)
        except OSError:
            shutil.rmtree(temporary)
            raise
        return folder

    def warm_start(self, folder: Path, task: Task, *, seed: int) -> None:
        """Nothing: its weights stay random."""


def tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(vocab=VOCABULARY, merges=[]))
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)  # type: ignore[assignment]
    backend.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[token for token in SPECIAL if token not in (END, PAD)],
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made
