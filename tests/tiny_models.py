"""Small random models in Hugging Face layout, made without a network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

CHARACTERS = "0123456789+= abcdefghijklmnopqrstuvwxyz?.\n"
PAD, EOS = "<pad>", "<eos>"


def write_char_tokenizer(folder: Path, characters: str = CHARACTERS) -> Any:
    """A tokenizer with one token per character; id 0 is padding, id 1 the end of text."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, *characters])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token=PAD))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), behavior="isolated")  # type: ignore[assignment]
    backend.decoder = decoders.Fuse()  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=EOS, pad_token=PAD)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_tiny_qwen3(folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random Qwen3 of two layers with `write_char_tokenizer`'s tokenizer. `overrides` go to Qwen3Config."""
    import torch
    from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = write_char_tokenizer(folder)
    values: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "initializer_range": 0.2,
        "pad_token_id": tokenizer.pad_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "bos_token_id": None,
        "dtype": torch.float32,
    } | overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(Qwen3Config(**values))
    model.generation_config = GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, max_new_tokens=16
    )
    model.save_pretrained(folder)
    return folder


def write_tiny(model_type: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """A random causal model of transformers' `model_type`, two layers, no tokenizer. `overrides` go to its config."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values: dict[str, Any] = {
        "vocab_size": 2 + len(CHARACTERS),
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
    } | overrides
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder
