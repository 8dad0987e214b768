"""Where the policy comes from: one local folder in Hugging Face layout, read alike by trainer, engine and export."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rl.config.schema import HUB_ID, ConfigError, ModelConfig
from rl.config.shape import ModelShape
from rl.model.positions import POSITIONS_KEY, ROPE_KEYS, check_stretch, max_positions
from rl.model.shape import SIZE_KEYS, params_in_files, read_config_json, shape_of
from rl.protocols import Task

if TYPE_CHECKING:
    from rl.model.light_tokenizer import LightTokenizer

CHAT_TEMPLATES = ("plain",)
"""Values of model.chat_template."""
DOWNLOADED = ("*.json", "*.safetensors", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Files taken from a hub: no code, no pickles."""
OLD_ROPE_KEYS = ("rope_theta", "rope_scaling")
"""Older config.json files hold these at the top level; the config class folds them into `rope_parameters`."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


class HuggingFaceModel:
    """A model of a local folder or a hub."""

    def __init__(self, config: ModelConfig) -> None:
        self.check(config)
        self.config = config

    @classmethod
    def check(cls, config: ModelConfig) -> None:
        """What can be wrong, as far as files tell without loading a model."""
        if config.chat_template is not None and config.chat_template not in CHAT_TEMPLATES:
            raise ConfigError(
                f"model.chat_template={config.chat_template} must be null (the tokenizer's own) or "
                f"{', '.join(CHAT_TEMPLATES)}."
            )
        folder = local_folder(config)
        if folder is None:
            return
        values = read_config_json(folder)
        if config.shape is not None:
            _check_shape(config.shape, shape_of(values), folder)
        check_stretch(values, merged(values, config.hf_overrides))
        _check_weights(folder)
        _check_tokenizer(folder, config)

    @classmethod
    def check_present(cls, config: ModelConfig) -> None:
        """Raises ConfigError where the model is not here and cannot be fetched."""
        if local_folder(config) is None and not _may_download():
            raise ConfigError(
                f"model.path={config.path}: no such folder here, HF_HUB_OFFLINE=1 is set, and the hub's cache does not "
                f"hold it. {_OFFLINE_REMEDY}"
            )

    @classmethod
    def shape(cls, config: ModelConfig) -> ModelShape | None:
        """From config.json with the overrides or, where there is none here, from model.shape; None without either."""
        folder = local_folder(config)
        if folder is not None:
            shape = shape_of(merged(read_config_json(folder), config.hf_overrides))
            whole = config.num_params or (None if shape.num_params else params_in_files(folder))
            return _counted(shape, whole)
        if config.shape is None or _overrides_size(config.hf_overrides):
            return None
        shape = replace(
            config.shape,
            num_params=config.shape.num_params or config.shape.counted_params(),
            max_positions=_overridden_positions(config.shape.max_positions, config.hf_overrides),
        )
        return _counted(shape, config.num_params)

    @classmethod
    def light_tokenizer(cls, config: ModelConfig) -> LightTokenizer | None:
        """For a plan of the data. None: the model is not here, or has no tokenizer.json."""
        folder = local_folder(config)
        if folder is None:
            return None
        from rl.model.light_tokenizer import read_light_tokenizer
        from rl.model.renderer import PLAIN_TEMPLATE

        plain = PLAIN_TEMPLATE if config.chat_template == "plain" else None
        return read_light_tokenizer(folder, plain_template=plain)

    def prepare(self, folder: Path, *, seed: int) -> Path:
        """The model's folder. `folder` is written to only where config.json differs from the original's.

        `seed` is for models that are made; this one is read.
        """
        source = local_folder(self.config) or self.downloaded()
        if self.config.hf_overrides:
            return write_overlay(source, folder, overrides=self.config.hf_overrides)
        return source

    def warm_start(self, folder: Path, task: Task, *, seed: int) -> None:
        """Nothing: this policy starts as it is."""

    def downloaded(self) -> Path:
        """The hub's snapshot of this model, whose folder is named after its revision; fetched where it is not here."""
        import huggingface_hub
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

        name, revision = self.config.path, self.config.revision
        try:
            folder = Path(huggingface_hub.snapshot_download(name, revision=revision, allow_patterns=list(DOWNLOADED)))
        except RepositoryNotFoundError as error:
            raise ConfigError(
                f"model.path={name}: there is no such folder here and no such model on the hub, or it needs a login "
                "(HF_TOKEN). Give a local folder or another hub id."
            ) from error
        except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise ConfigError(f"model.path={name}: the hub did not give it ({error}). {_OFFLINE_REMEDY}") from error
        read_config_json(folder)
        _check_weights(folder)
        _check_tokenizer(folder, self.config)
        return folder


_OFFLINE_REMEDY = "Without a network, give a local folder: model.path=FOLDER."


def check_unset(config: ModelConfig, *, usual: Mapping[str, Any], why: str) -> None:
    """Of a model that is made on the spot: raises ConfigError for a setting that is not as `usual`, and so without use.

    `why` follows the setting in the message.
    """
    for name, value in usual.items():
        if getattr(config, name) != value:
            raise ConfigError(
                f"model.{name}={getattr(config, name)} has no meaning for {why}. Use model=hf for a model of your own."
            )


def given_folder(config: ModelConfig) -> Path | None:
    """The folder that `config.path` names; None where it names none, as a hub id does."""
    path = Path(config.path).expanduser()
    return path.resolve() if path.is_dir() else None


def local_folder(config: ModelConfig) -> Path | None:
    """The folder that `config.path` names; None for a hub id. With HF_HUB_OFFLINE=1 a hub id is its snapshot in the
    hub's cache, and None where there is none."""
    given = given_folder(config)
    if given is not None:
        return given
    if Path(config.path).expanduser().exists() or HUB_ID.fullmatch(config.path) is None:
        raise ConfigError(
            f"model.path={config.path}: there is no such folder. Give a folder in Hugging Face layout, or a hub id "
            "(owner/name)."
        )
    if _may_download():
        return None
    if not _has_cache(config.path):  # asked first: the next import takes a second
        return None
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(config.path, "config.json", revision=config.revision)
    return Path(cached).parent if isinstance(cached, str) else None


def _has_cache(hub_id: str) -> bool:
    from huggingface_hub import constants

    folder = constants.REPO_ID_SEPARATOR.join(["models", *hub_id.split("/")])
    return Path(constants.HF_HUB_CACHE, folder).is_dir()


def _may_download() -> bool:
    from huggingface_hub import constants

    return not constants.HF_HUB_OFFLINE


def _overrides_size(overrides: Mapping[str, Any]) -> bool:
    below = [value for value in overrides.values() if isinstance(value, Mapping)]
    return bool(SIZE_KEYS & overrides.keys()) or any(_overrides_size(value) for value in below)


def _counted(shape: ModelShape, whole: int | None) -> ModelShape:
    """`whole`: parameters of decoder and tower together, where somebody says them; else the shape's own count stays."""
    return shape if whole is None else replace(shape, num_params=whole - shape.vision_params)


def _overridden_positions(written: int | None, overrides: Mapping[str, Any]) -> int | None:
    """Of a model whose config.json is not here, which would say whether its text part is nested."""
    below = overrides.get("text_config")
    text = {**overrides, **(below if isinstance(below, Mapping) else {})}
    return max_positions({POSITIONS_KEY: written} | text)


def _check_shape(written: ModelShape, real: ModelShape, folder: Path) -> None:
    """Raises ConfigError where model.shape is not what config.json says."""
    for item in fields(ModelShape):
        one, other = getattr(written, item.name), getattr(real, item.name)
        if one != other and not (item.name in ("num_params", "max_positions") and one is None):
            raise ConfigError(
                f"model.shape.{item.name}={one}, but {folder}/config.json makes it {other}. Is model.path another "
                "model? Correct model.shape, or set model.shape=null to take every size from config.json."
            )


def merged(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """`config` with `overrides` laid over it, nested mappings key by key."""
    result = dict(config)
    for key, value in overrides.items():
        below = result.get(key)
        result[key] = merged(below, value) if isinstance(below, Mapping) and isinstance(value, Mapping) else value
    return result


def write_overlay(source: Path, folder: Path, *, overrides: Mapping[str, Any]) -> Path:
    """`folder` as a view of `source` with another config.json: every other file is a link to the original.

    Written beside `folder` and renamed, so that it is complete whenever it exists.
    """
    original = read_config_json(source)
    values = merged(original, overrides)
    _check_overrides(original, values, overrides)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    for path in source.iterdir():
        if path.name != "config.json":
            (temporary / path.name).symlink_to(path.resolve())
    (temporary / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(temporary, folder)
    return folder


def _check_overrides(original: Mapping[str, Any], values: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    """Every override is a key of the model's config class, and the class accepts the result."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    model_type = original["model_type"]
    if overrides.get("model_type", model_type) != model_type:
        raise ConfigError(f"model.hf_overrides.model_type={overrides['model_type']}: the model is a {model_type}.")
    rest = {key: value for key, value in values.items() if key != "model_type"}
    try:
        config = AutoConfig.for_model(model_type, **rest)
        default = AutoConfig.for_model(model_type)
    except (StrictDataclassError, TypeError, ValueError) as error:
        raise ConfigError(f"model.hf_overrides={dict(overrides)}: {type(error).__name__}: {error}") from error
    legacy: dict[str, Any] = dict.fromkeys(OLD_ROPE_KEYS) if hasattr(config, "rope_parameters") else {}
    for key in OLD_ROPE_KEYS:
        if key in overrides and "rope_parameters" in original:
            raise ConfigError(
                f"model.hf_overrides.{key}: this model keeps it in rope_parameters. Write "
                f"model.hf_overrides.rope_parameters.{key if key == 'rope_theta' else '...'}=..."
            )
    known = [_with_rope_keys(original), _with_rope_keys(default.to_dict()), default.attribute_map, legacy]
    _refuse_unknown(overrides, known, prefix="model.hf_overrides")


def _with_rope_keys(values: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary settings with the keys of every kind: those of one kind would not let another be chosen."""
    from transformers.modeling_rope_utils import RopeParameters

    found: dict[str, Any] = dict(values)
    for key, value in values.items():
        if isinstance(value, Mapping):
            found[key] = {**dict.fromkeys(RopeParameters.__annotations__), **value} if key in ROPE_KEYS else value
            found[key] = _with_rope_keys(found[key])
    return found


def _refuse_unknown(overrides: Mapping[str, Any], known: list[Mapping[str, Any]], *, prefix: str) -> None:
    names = sorted({name for mapping in known for name in mapping})
    for key, value in overrides.items():
        if key not in names:
            close = difflib.get_close_matches(key, names, n=1)
            hint = f" Did you mean '{close[0]}'?" if close else ""
            raise ConfigError(f"{prefix}.{key}: the model's config has no such key.{hint}")
        below = [mapping[key] for mapping in known if isinstance(mapping.get(key), Mapping) and mapping[key]]
        if isinstance(value, Mapping) and below:
            _refuse_unknown(value, below, prefix=f"{prefix}.{key}")


def _check_weights(folder: Path) -> None:
    if not any(folder.glob("*.safetensors")):
        others = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in folder.glob(pattern))
        has = f" (it has {', '.join(others[:3])})" if others else ""
        raise ConfigError(
            f"model.path={folder}: the folder has no *.safetensors{has}. Other formats are not read: "
            "convert the weights with save_pretrained."
        )
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
        missing = sorted(name for name in names if not (folder / name).is_file())
        if missing:
            raise ConfigError(
                f"model.path={folder}: {len(missing)} of {len(names)} weight files are missing, first {missing[0]}."
            )


def _check_tokenizer(folder: Path, config: ModelConfig) -> None:
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(f"model.path={folder}: the folder has no tokenizer ({', '.join(TOKENIZER_FILES)}).")
    if config.chat_template is not None or (folder / "chat_template.jinja").is_file():
        return
    settings = folder / "tokenizer_config.json"
    if not settings.is_file() or "chat_template" not in json.loads(settings.read_text(encoding="utf-8")):
        raise ConfigError(
            f"model.path={folder}: the tokenizer has no chat template. Use model.chat_template=plain, which joins the "
            "contents of the messages, or add a chat_template.jinja to the folder."
        )
