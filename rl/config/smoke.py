"""`smoke=cpu`: a published run made so small that a CPU runs it in seconds, with the same placement and algorithm.

What is replaced or made smaller is printed, key by key. Nothing is learned: it shows that the parts fit together.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rl.config.algorithms import DAPOConfig
from rl.config.check import check_run_config
from rl.config.compose import checked_run_config, compose_run_config, left_out_text, parse_overrides
from rl.config.flat import ABSENT, differing, flat
from rl.config.given import given_words
from rl.config.load import load_run_config, to_plain
from rl.config.schema import (
    Architecture,
    ConfigError,
    Dtype,
    EvaluationConfig,
    FSDPConfig,
    LocalRolloutConfig,
    MiniatureModelConfig,
    RunConfig,
    TrainerConfig,
)
from rl.config.tasks import MADE, CheckerConfig, DataConfig, DataSetsConfig, MathematicsConfig
from rl.config.unused import check_unused

WORD = "smoke=cpu"

ARCHITECTURES = {
    "qwen3_8b": Architecture.qwen3,
    "qwen2_5_math_7b": Architecture.qwen2,
    "qwen3_5_35b_a3b": Architecture.qwen3_5_moe,
}
"""Option of the group `model` -> the miniature that stands for it."""

GROUP_SIZE = 2
NEW_TOKENS = 48
"""Of 265 tokens one ends an answer: a sixth of the answers end before."""
PUBLISHES = 2
NOT_SHOWN = "task.data."


def split_smoke(words: list[str]) -> tuple[list[str], bool]:
    """The words without `smoke=cpu`, and whether it was among them. Raises ConfigError for another smoke, or two."""
    found = [word for word in words if word.startswith("smoke=")]
    for word in found:
        if word != WORD:
            raise ConfigError(f"{word}: the only smoke run is {WORD}.")
    if len(found) > 1:
        raise ConfigError(f"{WORD} is there twice. Leave one of the two.")
    return [word for word in words if word != WORD], bool(found)


def run_config(words: list[str]) -> tuple[RunConfig, str]:
    """The checked config of a command line, and what is not as its experiment says, for people: settings that the parts
    chosen instead have no use for, and what `smoke=cpu` replaced. Raises ConfigError.
    """
    plain_words, is_smoke = split_smoke(words)
    config, replaced = smoke_run_config(plain_words) if is_smoke else (checked_run_config(words), "")
    return config, "\n".join(text for text in (left_out_text(plain_words), replaced) if text)


def smoke_run_config(words: list[str]) -> tuple[RunConfig, str]:
    """The small run of the experiment that `words` name, and what was replaced, as text for people.

    Raises ConfigError, also for a word without effect.
    """
    config = compose_run_config(words)
    small = load_run_config(to_plain(_shrunk(config)))
    pairs = differing(flat(to_plain(config)), flat(to_plain(small)))
    overrides = parse_overrides(words)
    for override in overrides:
        key = override.key_or_group.replace("/", ".")
        if override.key_or_group != "experiment" and any(f"{name}.".startswith(f"{key}.") for name in pairs):
            raise ConfigError(f"{override.input_line}: {WORD} sets this itself. Leave out one of the two.")
    check_run_config(small)
    check_unused(small, given_words(overrides))
    return small, _report(config, small, {key: ours for key, (_, ours) in pairs.items()})


def _shrunk(config: RunConfig) -> RunConfig:
    if config.model.name not in ARCHITECTURES or not isinstance(config.task, MathematicsConfig):
        raise ConfigError(
            f"{WORD} makes the published runs small ({', '.join(ARCHITECTURES)}), and model={config.model.name} is "
            "none of theirs. Name one of their experiments; experiment=quickstart is small as it is."
        )
    architecture = ARCHITECTURES[config.model.name]
    updates = config.algorithm.updates_per_step
    algorithm = replace(
        config.algorithm,
        prompts_per_step=max(2, updates),
        prompts_per_mini_batch=None if config.algorithm.prompts_per_mini_batch is None else max(2, updates) // updates,
        group_size=GROUP_SIZE,
    )
    if isinstance(algorithm, DAPOConfig):
        # All answers are wrong: only their length tells them apart, and equal groups would leave nothing to train on.
        algorithm = replace(algorithm, response_limit=NEW_TOKENS, overlong_buffer=NEW_TOKENS)
    defaults = compose_run_config([])  # on a CPU, with the embedded engine and no tracker
    return replace(
        config,
        steps=PUBLISHES * config.placement.publish_every,
        model=MiniatureModelConfig(
            name=f"miniature_{architecture.value}", architecture=architecture, hf_overrides=config.model.hf_overrides
        ),
        algorithm=algorithm,
        backend=replace(
            config.backend,
            trainer=_trainer(config.backend.trainer),
            rollout=LocalRolloutConfig(dtype=Dtype.float32),
        ),
        placement=replace(config.placement, trainer_ranks=1),
        hardware=defaults.hardware,
        task=_task(config.task),
        logger=defaults.logger,
        evaluation=EvaluationConfig(at_start=False),
        checkpoint=defaults.checkpoint,
        plan=defaults.plan,
        published=None,  # nothing that is published is of a run like this
    )


def _trainer(trainer: TrainerConfig) -> FSDPConfig:
    """FSDP2 with what all trainers share, on small micro-batches of full precision."""
    shared = {item.name: getattr(trainer, item.name) for item in fields(TrainerConfig) if item.name != "_target_"}
    return FSDPConfig(**shared | {"compute_dtype": Dtype.float32, "max_tokens_per_micro_batch": 4096})


def _task(task: MathematicsConfig) -> MathematicsConfig:
    data = DataSetsConfig(**{item.name: DataConfig(MADE) for item in fields(DataSetsConfig)})
    samples = min(GROUP_SIZE, task.eval_sampling.samples_per_problem)
    return replace(
        task,
        data=data,
        eval_limit=2,
        sampling=replace(task.sampling, max_new_tokens=NEW_TOKENS),
        eval_sampling=replace(task.eval_sampling, max_new_tokens=NEW_TOKENS, samples_per_problem=samples),
        checker=CheckerConfig(workers=1),
    )


def _report(config: RunConfig, small: RunConfig, changed: dict[str, Any]) -> str:
    parts = {
        "model": (config.model.path, f"random weights, {small.model.name}"),
        "trainer": (_class_name(config.backend.trainer), _class_name(small.backend.trainer)),
        "engine": (_class_name(config.backend.rollout), _class_name(small.backend.rollout)),
        "hardware": (config.hardware.name, small.hardware.name),
    }
    lines = [f"{WORD}: {name} {old} replaced by {new}" for name, (old, new) in parts.items() if old != new]
    lines.append(f"{WORD}: data replaced by a few rows made in the published layout")
    values = {key: value for key, value in changed.items() if value is not None and value is not ABSENT}
    shown = [f"{key}={value}" for key, value in values.items() if not key.startswith(NOT_SHOWN)]
    return "\n".join([*lines, f"{WORD} stands for: {' '.join(shown)}"])


def _class_name(part: Any) -> str:
    return part._target_.rpartition(".")[2]
