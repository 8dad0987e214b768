from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rl.config.schema import ConfigError, ModelConfig
from rl.config.shape import ModelShape
from rl.model.source import HuggingFaceModel, merged
from tests.tiny_models import write_tiny_qwen3


def model_of(path: Path | str, **values: Any) -> HuggingFaceModel:
    return HuggingFaceModel(ModelConfig(name="hf", path=str(path), **values))


def test_a_local_folder_is_used_as_it_is(tiny_qwen3, tmp_path):
    assert model_of(tiny_qwen3).prepare(tmp_path / "model", seed=0) == tiny_qwen3
    assert not (tmp_path / "model").exists()


def test_overrides_reach_the_config_and_leave_the_original_alone(tiny_qwen3, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    before = (tiny_qwen3 / "config.json").read_text()
    overrides = {"max_position_embeddings": 77, "rope_parameters": {"rope_theta": 5000.0}}
    folder = model_of(tiny_qwen3, hf_overrides=overrides).prepare(tmp_path / "run" / "model", seed=0)
    config = AutoConfig.from_pretrained(folder)
    assert (config.max_position_embeddings, config.rope_parameters["rope_theta"]) == (77, 5000.0)
    assert config.rope_parameters["rope_type"] == "default"  # nested keys are merged, not replaced
    assert (tiny_qwen3 / "config.json").read_text() == before
    assert AutoModelForCausalLM.from_pretrained(folder).config.max_position_embeddings == 77
    assert len(AutoTokenizer.from_pretrained(folder)) == len(AutoTokenizer.from_pretrained(tiny_qwen3))
    assert [path.name for path in folder.parent.iterdir()] == ["model"]


def test_rotary_positions_of_another_kind_can_be_chosen(tiny_qwen3, tmp_path):
    """`factor` and the like are no keys of the plain kind that the model's file has."""
    from transformers import AutoConfig

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    overrides = {"max_position_embeddings": 2048, "rope_parameters": yarn}
    model = ModelConfig(name="hf", path=str(tiny_qwen3), hf_overrides=overrides)
    shape = HuggingFaceModel.shape(model)
    assert shape is not None and shape.max_positions == 2048
    folder = HuggingFaceModel(model).prepare(tmp_path / "m", seed=0)
    settings = AutoConfig.from_pretrained(folder).rope_parameters
    assert {key: settings[key] for key in yarn} == yarn and settings["rope_theta"] == 10_000.0
    del yarn["original_max_position_embeddings"]
    with pytest.raises(ConfigError, match=r"rope_parameters\.original_max_position_embeddings=512"):
        HuggingFaceModel.check(model)


def test_an_overlay_is_written_anew_with_other_overrides(tiny_qwen3, tmp_path):
    for value in (77, 99):
        folder = model_of(tiny_qwen3, hf_overrides={"max_position_embeddings": value}).prepare(tmp_path / "m", seed=0)
        assert json.loads((folder / "config.json").read_text())["max_position_embeddings"] == value


def test_an_older_rope_key_takes_effect_or_is_refused(tiny_qwen3, tmp_path):
    """Silently overruled by `rope_parameters`, it would be an override without effect."""
    from transformers import AutoConfig

    model = model_of(tiny_qwen3, hf_overrides={"rope_theta": 1234.0})
    with pytest.raises(ConfigError, match=r"Write model\.hf_overrides\.rope_parameters\.rope_theta="):
        model.prepare(tmp_path / "m", seed=0)
    old = Path(shutil.copytree(tiny_qwen3, tmp_path / "old"))
    config = json.loads((old / "config.json").read_text())
    del config["rope_parameters"]
    (old / "config.json").write_text(json.dumps(config | {"rope_theta": 10_000.0}))
    folder = model_of(old, hf_overrides={"rope_theta": 1234.0}).prepare(tmp_path / "m", seed=0)
    assert AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"] == 1234.0


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"max_position_embedding": 7}, r"hf_overrides\.max_position_embedding: .*mean 'max_position_embeddings'"),
        ({"rope_parameters": {"rope_thetta": 1.0}}, r"rope_parameters\.rope_thetta: .*mean 'rope_theta'"),
        ({"model_type": "llama"}, r"hf_overrides\.model_type=llama: the model is a qwen3"),
        ({"hidden_size": "wide"}, r"model\.hf_overrides=.*hidden_size"),
    ],
)
def test_a_wrong_override_is_refused(tiny_qwen3, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        model_of(tiny_qwen3, hf_overrides=overrides).prepare(tmp_path / "m", seed=0)
    assert not (tmp_path / "m").exists()


def test_merging_goes_key_by_key():
    assert merged({"a": 1, "b": {"c": 2, "d": 3}}, {"b": {"c": 4}, "e": {"f": 5}}) == {
        "a": 1,
        "b": {"c": 4, "d": 3},
        "e": {"f": 5},
    }


def test_a_hub_id_without_a_network_names_the_remedy(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=r"HF_HUB_OFFLINE=1 is set.*cache does not hold it.*model\.path=FOLDER"):
        HuggingFaceModel.check_present(ModelConfig(name="hf", path="nobody/no-such-model-anywhere"))


def test_a_plan_needs_no_download_where_the_shape_is_written_down(monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    sizes = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10)
    config = ModelConfig(name="hf", path="nobody/no-such-model-anywhere", shape=sizes)
    HuggingFaceModel.check(config)
    # A layer: 8 x (16 + 8) attention, 3 x 8 x 16 feed-forward, 16 norms = 592; 2 x 10 x 8 + 8 outside.
    assert HuggingFaceModel.shape(config) == replace(sizes, num_params=2 * 592 + 168)
    config.hf_overrides = {"max_position_embeddings": 7}
    assert HuggingFaceModel.shape(config) is not None
    config.hf_overrides = {"text_config": {"hidden_size": 16}}  # then nobody knows the sizes
    assert HuggingFaceModel.shape(config) is None


@pytest.mark.parametrize(
    ("overrides", "positions"),
    [
        ({}, 4096),
        ({"max_position_embeddings": 7}, 7),
        ({"text_config": {"max_position_embeddings": 9}}, 9),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, 8192),
    ],
)
def test_overridden_positions_win_over_those_written_down(overrides, positions, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    sizes = ModelShape(layers=2, hidden=8, heads=2, kv_heads=1, head_dim=4, ffn=16, vocab=10, max_positions=4096)
    config = ModelConfig(name="hf", path="nobody/no-such-model-anywhere", shape=sizes, hf_overrides=overrides)
    shape = HuggingFaceModel.shape(config)
    assert shape is not None and shape.max_positions == positions


def test_a_written_shape_that_is_not_the_model_s_is_refused(tiny_qwen3):
    shape = HuggingFaceModel.shape(ModelConfig(name="hf", path=str(tiny_qwen3)))
    assert shape is not None
    HuggingFaceModel.check(ModelConfig(name="hf", path=str(tiny_qwen3), shape=replace(shape, num_params=None)))
    HuggingFaceModel.check(ModelConfig(name="hf", path=str(tiny_qwen3), shape=replace(shape, max_positions=None)))
    for name in ("kv_heads", "max_positions"):
        wrong = replace(shape, **{name: getattr(shape, name) + 1})
        with pytest.raises(ConfigError, match=rf"model\.shape\.{name}=\d+, but .*config\.json makes it \d+"):
            HuggingFaceModel.check(ModelConfig(name="hf", path=str(tiny_qwen3), shape=wrong))


@pytest.mark.parametrize(
    ("remove", "write", "message"),
    [
        ("config.json", None, "the folder has no config.json"),
        ("model.safetensors", None, r"the folder has no \*\.safetensors"),
        ("model.safetensors", ("pytorch_model.bin", ""), r"it has pytorch_model\.bin.*save_pretrained"),
        ("tokenizer.json", None, "the folder has no tokenizer"),
        ("chat_template.jinja", None, r"no chat template\. Use model\.chat_template=plain"),
        (None, ("config.json", "{"), "config.json is not valid JSON"),
        (None, ("config.json", "{}"), "config.json has no model_type"),
        (
            None,
            ("model.safetensors.index.json", json.dumps({"weight_map": {"a": "model-1.safetensors"}})),
            r"1 of 1 weight files are missing, first model-1\.safetensors",
        ),
    ],
)
def test_an_incomplete_folder_is_refused_before_a_model_loads(tmp_path, tiny_qwen3, remove, write, message):
    folder = Path(shutil.copytree(tiny_qwen3, tmp_path / "model"))
    if remove is not None:
        (folder / remove).unlink()
    if write is not None:
        (folder / write[0]).write_text(write[1])
    with pytest.raises(ConfigError, match=message):
        model_of(folder)


def test_a_path_that_is_neither_folder_nor_hub_id_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"there is no such folder"):
        model_of(tmp_path / "missing")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"there is no such folder"):
        model_of(tmp_path / "file")


def test_an_unknown_chat_template_is_refused(tiny_qwen3):
    with pytest.raises(ConfigError, match=r"model\.chat_template=chatml must be null .* or plain"):
        model_of(tiny_qwen3, chat_template="chatml")


def test_the_shape_follows_the_overrides(tmp_path):
    folder = write_tiny_qwen3(tmp_path / "model")
    shape = HuggingFaceModel.shape(ModelConfig(name="hf", path=str(folder), hf_overrides={"num_hidden_layers": 5}))
    assert shape is not None and (shape.layers, shape.hidden, shape.heads, shape.kv_heads) == (5, 32, 4, 2)
