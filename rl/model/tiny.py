"""A small Qwen3 with one token per character, made from the run's seed and saved like any other model."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.config.schema import ConfigError, TinyModelConfig
from rl.config.shape import ModelShape
from rl.model.shape import shape_of
from rl.model.source import check_unset
from rl.model.warm_start import is_warm_started, warm_start
from rl.protocols import Task

if TYPE_CHECKING:
    from rl.model.light_tokenizer import LightTokenizer

END, UNKNOWN = "<end>", "<unknown>"
CHARACTERS = "0123456789+-*= ?."
MAX_POSITIONS = 512
VERBATIM_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


class TinyModel:
    """Same interface as `HuggingFaceModel`; what it makes is read by the same code as a downloaded model."""

    def __init__(self, config: TinyModelConfig) -> None:
        self.check(config)
        self.config = config

    @classmethod
    def check(cls, config: TinyModelConfig) -> None:
        for name in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn"):
            if getattr(config, name) < 1:
                raise ConfigError(f"model.{name}={getattr(config, name)} is out of range: it must be at least 1.")
        if config.heads % config.kv_heads:
            raise ConfigError(f"model.heads={config.heads} must be a multiple of model.kv_heads={config.kv_heads}.")
        if config.head_dim % 2:
            raise ConfigError(f"model.head_dim={config.head_dim} must be even: rotary positions turn pairs.")
        usual = {"path": "tiny", "revision": None, "hf_overrides": {}, "chat_template": None}
        usual |= {"num_params": None, "shape": None}
        check_unset(config, usual=usual, why="model=tiny, which is made from its sizes")
        warm = config.warm_start
        if warm is None:
            return
        if not 0 < warm.target_accuracy <= 1:
            raise ConfigError(f"model.warm_start.target_accuracy={warm.target_accuracy} must be above 0 and at most 1.")
        for name in ("max_steps", "check_every", "batch_size", "lr"):
            if getattr(warm, name) <= 0:
                raise ConfigError(f"model.warm_start.{name}={getattr(warm, name)} must be above 0.")
        if warm.lr_warmup_steps < 0:
            raise ConfigError(f"model.warm_start.lr_warmup_steps={warm.lr_warmup_steps} must be 0 or more.")

    @classmethod
    def check_present(cls, config: TinyModelConfig) -> None:
        """It is made."""

    @classmethod
    def shape(cls, config: TinyModelConfig) -> ModelShape:
        return shape_of(_config_values(config))

    @classmethod
    def light_tokenizer(cls, config: TinyModelConfig) -> LightTokenizer:
        from rl.model.light_tokenizer import LightTokenizer

        return LightTokenizer(
            _backend(), VERBATIM_TEMPLATE, special_tokens={"eos_token": END, "unk_token": UNKNOWN}, is_plain=False
        )

    def prepare(self, folder: Path, *, seed: int) -> Path:
        """Writes the model into `folder`, or leaves it if it is there: a resumed run keeps its warm start.

        Written beside `folder` and renamed, so that it is complete whenever it exists.
        """
        if folder.exists():
            return folder
        import torch
        from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

        folder.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        values = _config_values(self.config)
        end = values["eos_token_id"]
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = Qwen3ForCausalLM(Qwen3Config(**{k: v for k, v in values.items() if k != "model_type"}))
        model.generation_config = GenerationConfig(eos_token_id=end, pad_token_id=end)
        model.save_pretrained(temporary)
        _tokenizer().save_pretrained(temporary)
        try:
            os.rename(temporary, folder)
        except OSError:
            shutil.rmtree(temporary)
            raise
        return folder

    def warm_start(self, folder: Path, task: Task, *, seed: int) -> None:
        """Supervised steps on the task's demonstrations; nothing if none are asked for or they are already done."""
        if self.config.warm_start is None or is_warm_started(folder):
            return
        if not task.demonstrations() or not task.validation_demonstrations():
            raise ConfigError(
                "model.warm_start needs demonstrations and validation problems, and the task has none. Use "
                "task=arithmetic with task.warm_start and task.validation above 0, or model.warm_start=null."
            )
        warm_start(
            folder,
            demonstrations=task.demonstrations(),
            validation=task.validation_demonstrations(),
            config=self.config.warm_start,
            seed=seed,
        )


def _config_values(config: TinyModelConfig) -> dict[str, Any]:
    """config.json. The end of text also pads: nothing else in the vocabulary is invisible in decoded text."""
    vocabulary = _vocabulary()
    return {
        "model_type": "qwen3",
        "vocab_size": len(vocabulary),
        "hidden_size": config.hidden,
        "intermediate_size": config.ffn,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": MAX_POSITIONS,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        "tie_word_embeddings": True,
        "initializer_range": 0.02,
        "pad_token_id": vocabulary[END],
        "eos_token_id": vocabulary[END],
        "bos_token_id": None,
        "dtype": "float32",
    }


def _vocabulary() -> dict[str, int]:
    return {token: index for index, token in enumerate([END, UNKNOWN, *CHARACTERS])}


def _backend() -> Any:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    backend = Tokenizer(models.WordLevel(_vocabulary(), unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    return backend


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_backend(),
        eos_token=END,
        pad_token=END,
        unk_token=UNKNOWN,
        model_max_length=MAX_POSITIONS,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = VERBATIM_TEMPLATE
    return tokenizer
