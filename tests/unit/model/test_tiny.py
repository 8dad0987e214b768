from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from rl.config.schema import ConfigError, TinyModelConfig, WarmStartConfig
from rl.model.tiny import CHARACTERS, TinyModel


def config_of(**values: Any) -> TinyModelConfig:
    return TinyModelConfig(**({"name": "tiny", "layers": 1, "hidden": 16, "ffn": 16} | values))


def digest(folder: Path) -> str:
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


def test_the_folder_is_one_that_any_tool_loads(tiny_folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model: Any = AutoModelForCausalLM.from_pretrained(tiny_folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_folder)
    assert type(model).__name__ == "Qwen3ForCausalLM" and str(model.dtype) == "torch.float32"
    assert model.config.vocab_size == len(tokenizer) == 19
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == model.config.eos_token_id


def test_the_tokenizer_has_one_token_per_character_and_gives_every_text_back(tiny_folder):
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(tiny_folder)
    text = CHARACTERS + " 12 + 34 = 640."
    token_ids = tokenizer(text).input_ids
    assert len(token_ids) == len(text) and tokenizer.unk_token_id not in token_ids
    assert tokenizer.decode(token_ids) == text
    assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer("x").input_ids == [tokenizer.unk_token_id]


def test_equal_seeds_give_equal_bytes_and_others_other_weights(tmp_path):
    """P167; the order: tests/unit/tasks/test_order.py, both in a run: tests/integration/test_divergence.py."""
    import torch

    folders = []
    for number, seed in enumerate([3, 3, 4]):
        torch.manual_seed(number)  # what else the process drew must not matter
        folders.append(TinyModel(config_of()).prepare(tmp_path / str(number), seed=seed))
    first, second, other = (digest(folder) for folder in folders)
    assert first == second != other


def test_a_folder_that_is_there_is_left_alone(tmp_path):
    folder = TinyModel(config_of()).prepare(tmp_path / "model", seed=0)
    before = digest(folder)
    assert digest(TinyModel(config_of()).prepare(tmp_path / "model", seed=1)) == before
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layers": 0}, r"model\.layers=0 is out of range"),
        ({"heads": 3, "kv_heads": 2}, r"model\.heads=3 must be a multiple of model\.kv_heads=2"),
        ({"head_dim": 5}, r"model\.head_dim=5 must be even"),
        ({"path": "elsewhere"}, r"model\.path=elsewhere has no meaning for model=tiny"),
        ({"hf_overrides": {"vocab_size": 3}}, r"model\.hf_overrides=.* Use model=hf"),
        ({"warm_start": WarmStartConfig(target_accuracy=0.0)}, r"model\.warm_start\.target_accuracy=0\.0"),
        ({"warm_start": WarmStartConfig(target_accuracy=1.1)}, r"model\.warm_start\.target_accuracy=1\.1"),
        ({"warm_start": WarmStartConfig(max_steps=0)}, r"model\.warm_start\.max_steps=0 must be above 0"),
        ({"warm_start": WarmStartConfig(check_every=0)}, r"model\.warm_start\.check_every=0 must be above 0"),
        ({"warm_start": WarmStartConfig(lr=0.0)}, r"model\.warm_start\.lr=0\.0 must be above 0"),
        ({"warm_start": WarmStartConfig(lr_warmup_steps=-1)}, r"lr_warmup_steps=-1 must be 0 or more"),
    ],
)
def test_settings_that_cannot_work_are_refused(values, message):
    with pytest.raises(ConfigError, match=message):
        TinyModel.check(config_of(**values))
