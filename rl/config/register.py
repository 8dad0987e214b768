"""Schemas and experiments into Hydra's ConfigStore."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rl.config import algorithms, schema, tasks
from rl.config.build import target_class
from rl.config.schema import ConfigError, RunConfig

GROUPS: dict[str, tuple[type, ...]] = {
    "model": (schema.ModelConfig, schema.TinyModelConfig, schema.MiniatureModelConfig),
    "algorithm": (
        algorithms.GRPOConfig,
        algorithms.DrGRPOConfig,
        algorithms.RLOOConfig,
        algorithms.ReinforcePPConfig,
        algorithms.ReinforcePPBaselineConfig,
        algorithms.DAPOConfig,
        algorithms.GSPOConfig,
        algorithms.CISPOConfig,
    ),
    "backend/trainer": (schema.FSDPConfig, schema.MegatronConfig),
    "backend/rollout": (schema.LocalRolloutConfig, schema.VLLMRolloutConfig, schema.SGLangRolloutConfig),
    "placement": (schema.ColocatedConfig, schema.FullyAsyncConfig),
    "hardware": (schema.HardwareConfig,),
    "task": (tasks.ArithmeticConfig, tasks.MathematicsConfig, tasks.ReasoningGymConfig, tasks.JsonlConfig),
    "logger": (schema.JsonlLoggerConfig, schema.WandbLoggerConfig),
}
"""Config group -> schemas of its options. Everything a person can choose by name is here or in conf/."""

SCHEMA_NAMES = {
    schema.ModelConfig: "hf",
    schema.TinyModelConfig: "tiny",
    schema.MiniatureModelConfig: "miniature",
    algorithms.GRPOConfig: "grpo",
    algorithms.DrGRPOConfig: "dr_grpo",
    algorithms.RLOOConfig: "rloo",
    algorithms.ReinforcePPConfig: "reinforce_pp",
    algorithms.ReinforcePPBaselineConfig: "reinforce_pp_baseline",
    algorithms.DAPOConfig: "dapo",
    algorithms.GSPOConfig: "gspo",
    algorithms.CISPOConfig: "cispo",
    schema.FSDPConfig: "fsdp",
    schema.MegatronConfig: "megatron",
    schema.LocalRolloutConfig: "local",
    schema.VLLMRolloutConfig: "vllm",
    schema.SGLangRolloutConfig: "sglang",
    schema.ColocatedConfig: "colocated",
    schema.FullyAsyncConfig: "fully_async",
    schema.HardwareConfig: "hardware",
    tasks.ArithmeticConfig: "arithmetic",
    tasks.MathematicsConfig: "mathematics",
    tasks.ReasoningGymConfig: "reasoning_gym",
    tasks.JsonlConfig: "jsonl",
    schema.JsonlLoggerConfig: "jsonl",
    schema.WandbLoggerConfig: "wandb",
}

_user_schemas: dict[str, type] = {}


def register_schema(group: str, name: str, config_class: type) -> None:
    """Adds a schema of one's own, so that a YAML option may start with `defaults: [schema_<name>, _self_]`."""
    from hydra.core.config_store import ConfigStore

    ConfigStore.instance().store(group=group, name=f"schema_{name}", node=config_class)
    _user_schemas[config_class._target_] = config_class  # type: ignore[attr-defined]


def knows(group: str, setting: str) -> bool:
    """Whether any option of the group has a setting of that name."""
    return any(setting == item.name for each in (*GROUPS[group], *_user_schemas.values()) for item in fields(each))


def schema_of_target(target: str) -> type | None:
    """The config class whose `_target_` default is `target`; of another class, the one that its `config_class` names.

    Raises ConfigError if that class cannot be imported.
    """
    for classes in GROUPS.values():
        for config_class in classes:
            if getattr(config_class, "_target_", None) == target:
                return config_class
    return _user_schemas.get(target) or getattr(target_class(target), "config_class", None)


def option_of(part: Mapping[str, Any]) -> str:
    """How people call a part of a saved config: its name where it has one, else its schema's, else its class."""
    config_class = schema_of_target(part["_target_"])
    return part.get("name") or (SCHEMA_NAMES.get(config_class) if config_class else None) or _class_name(part)


def _class_name(part: Mapping[str, Any]) -> str:
    return part["_target_"].rpartition(".")[2]


def package_folder(name: str) -> Path:
    """`conf` or `experiments`: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[1]
    in_wheel = package / f"_{name}"
    return in_wheel if in_wheel.is_dir() else package.parent / name


def experiment_files() -> dict[str, Path]:
    return {path.stem: path for path in sorted(package_folder("experiments").glob("*.yaml"))}


PARENT = "/experiment/"
"""Before the name of an experiment, in the defaults of one that builds on it."""
_stored: dict[str, tuple[Path, int, int]] = {}
"""Experiments in Hydra's store -> their file, its time and size. To read all takes longer than to compose one."""


class _Options(dict[str, Any]):
    """One group in Hydra's store, where a schema is made when an option's file first asks for it.

    A run needs a few of them, and to make all takes half as long as to compose it.
    """

    def __init__(self, group: str, nodes: dict[str, Any]) -> None:
        super().__init__(nodes)
        self._group = group

    def __getitem__(self, name: str) -> Any:
        node = super().__getitem__(name)
        if isinstance(node, type):
            from hydra.core.config_store import ConfigNode

            node = self[name] = ConfigNode(name, OmegaConf.structured(node), self._group, package=None, provider=None)
        return node


def register_all(experiments: Collection[str] | None = None) -> None:
    """Idempotent. A broken experiment file raises ConfigError naming the file.

    `experiments`: which are read; None: all, half a second with what they say of their sources.
    """
    from hydra.core.config_store import ConfigStore

    store = ConfigStore.instance()
    if "schema_run.yaml" not in store.repo:
        store.store(name="schema_run", node=RunConfig)
        for group, classes in GROUPS.items():
            *parents, last = group.split("/")
            options = store.repo
            for name in parents:
                options = options.setdefault(name, {})
            schemas = {f"schema_{SCHEMA_NAMES[config_class]}.yaml": config_class for config_class in classes}
            options[last] = _Options(group, schemas | options.get(last, {}))
    files = experiment_files()
    wanted = list(files if experiments is None else experiments)
    while wanted:
        name = wanted.pop()
        if name in files:
            wanted += _parents(_stored_experiment(name, files[name]))


def _stored_experiment(name: str, path: Path) -> Any:
    """The experiment's own settings, in Hydra's store; read where the file is new or has changed."""
    facts = path.stat()
    key = (path, facts.st_mtime_ns, facts.st_size)
    if _stored.get(name) == key:
        return experiment_node(name)
    try:
        node = OmegaConf.load(path)
    except (OSError, ValueError, SyntaxError) as error:
        raise ConfigError(f"experiment file {path} cannot be read: {error}") from error
    except Exception as error:
        if type(error).__module__.split(".")[0] != "yaml":
            raise
        raise ConfigError(f"experiment file {path} is not valid YAML: {error}") from error
    if not isinstance(node, DictConfig) or "experiment" in node:
        raise ConfigError(
            f"experiment file {path} must be a mapping of settings, and not set `experiment`: its name is the file's."
        )
    node.experiment = name  # so that the composed config says what it started from, for --cfg job too
    _store(name, node)
    _stored[name] = key
    return node


def experiment_node(name: str) -> Any:
    """What a registered experiment's file holds."""
    from hydra.core.config_store import ConfigStore

    return ConfigStore.instance().load(f"experiment/{name}.yaml").node


@contextmanager
def lacking(name: str | None, keys: Collection[str]) -> Iterator[None]:
    """Meanwhile the registered experiment `name`, and those that it builds on, do not set `keys` (dotted)."""
    whole = {each: experiment_node(each) for each in (_lineage(name) if name is not None and keys else ())}
    for each, node in whole.items():
        rest = node.copy()
        for key in keys:
            parent, _, last = key.rpartition(".")
            OmegaConf.select(rest, parent, default={}).pop(last, None)
        _store(each, rest)
    try:
        yield
    finally:
        for each, node in whole.items():
            _store(each, node)


def _lineage(name: str) -> list[str]:
    """The experiment, and all that it builds on."""
    return [name, *(each for parent in _parents(experiment_node(name)) for each in _lineage(parent))]


def _store(name: str, node: Any) -> None:
    from hydra.core.config_store import ConfigStore

    provider = str(experiment_files()[name])
    ConfigStore.instance().store(group="experiment", name=name, node=node, package="_global_", provider=provider)


def _parents(node: Any) -> list[str]:
    """Experiments that this one builds on. What else stands in `defaults`, and is none, Hydra refuses."""
    entries = node.get("defaults")
    if not OmegaConf.is_list(entries):
        return []
    return [entry.removeprefix(PARENT) for entry in entries if isinstance(entry, str) and entry.startswith(PARENT)]


def option_names(group: str) -> list[str]:
    """Options of a config group, without the schemas."""
    if group == "experiment":
        return list(experiment_files())
    return sorted(path.stem for path in (package_folder("conf") / group).glob("*.yaml"))


def known_keys(config_class: type, prefix: str = "") -> list[str]:
    """Dotted keys of a config class, nested classes included where a default says which."""
    keys = []
    for item in fields(config_class):
        if item.name == "_target_":
            continue
        keys.append(prefix + item.name)
        default: Any = item.default_factory() if callable(item.default_factory) else item.default
        if is_dataclass(default) and not isinstance(default, type):
            keys += known_keys(type(default), f"{prefix}{item.name}.")
    return keys
