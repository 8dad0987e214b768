"""Keys that do nothing for the parts that were chosen. Setting one is an error: whoever sets it expects an effect.

`UNUSED` is the whole rule. tests/integration/test_unused_keys.py runs the parts with a config that records what is read
of it, and holds the table against that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rl.config.algorithms import AlgorithmConfig, CorrectionConfig, DAPOConfig, KlPlacement, Outside, WeightLevel
from rl.config.given import Given, short
from rl.config.replicas import engine_has_own_process
from rl.config.schema import (
    ConfigError,
    Mode,
    RunConfig,
    ServerRolloutConfig,
)
from rl.config.tasks import ArithmeticConfig, JsonlConfig, MathematicsConfig, ReasoningGymConfig


@dataclass(frozen=True, slots=True)
class Unused:
    """When some keys do nothing, and what a person can do about it."""

    keys: tuple[str, ...]
    """A key, or a node and all below it."""
    applies: Callable[[RunConfig], bool]
    why: str

    def covers(self, key: str) -> bool:
        return any(key == own or key.startswith(f"{own}.") for own in self.keys)


def _is_eval(config: RunConfig) -> bool:
    return config.mode is Mode.eval


def _is_on_cpu(config: RunConfig) -> bool:
    return config.hardware.device == "cpu"


def _correction(config: RunConfig) -> CorrectionConfig:
    return config.algorithm.correction


def _filters_groups(algorithm: AlgorithmConfig) -> bool:
    return isinstance(algorithm, DAPOConfig) and algorithm.dynamic_sampling


def _has_no_evaluation(config: RunConfig) -> bool:
    task = config.task
    return (isinstance(task, JsonlConfig) and task.eval_path is None) or (
        isinstance(task, MathematicsConfig) and not task.evaluate
    )


def _never_evaluates(config: RunConfig) -> bool:
    evaluation = config.evaluation
    return not (_is_eval(config) or evaluation.every or evaluation.at_start or evaluation.at_end)


UNUSED: tuple[Unused, ...] = (
    Unused(
        (
            *("steps", "checkpoint", "canary", "sentinels", "logger", "algorithm", "plan"),
            *("stream.window", "stream.oversample", "stream.max_failed_fraction"),
            *("backend.trainer.optimizer", "backend.trainer.max_tokens_per_micro_batch"),
            *("evaluation.every", "evaluation.at_start", "evaluation.at_end"),
            *("task.epochs", "task.reward", "task.sampling", "placement.max_staleness", "placement.publish_every"),
            "placement.in_flight",
        ),
        _is_eval,
        "mode=eval trains nothing. Leave it out, or use mode=train.",
    ),
    Unused(
        ("task.epochs",),
        lambda config: config.steps is not None,
        "steps is set and ends the run. Leave it out, or set steps=null.",
    ),
    Unused(
        ("clean",),
        lambda config: config.output_dir is None,
        "a run without output_dir always has a new folder. Leave it out, or set output_dir.",
    ),
    Unused(
        ("canary.prompts", "canary.new_tokens", "canary.max_logprob_difference", "canary.action"),
        lambda config: config.canary.every == 0,
        "canary.every=0 switches the canary off. Leave it out, or set canary.every.",
    ),
    Unused(
        ("stream.oversample",),
        lambda config: not _filters_groups(config.algorithm),
        "this algorithm filters no groups, so a surplus would be sampled for nothing. Leave it out, or use "
        "algorithm=dapo with algorithm.dynamic_sampling=true.",
    ),
    Unused(
        ("algorithm.max_sampled_batches",),
        lambda config: not _filters_groups(config.algorithm),
        "algorithm.dynamic_sampling=false filters no groups. Leave it out, or set algorithm.dynamic_sampling=true.",
    ),
    Unused(
        ("algorithm.overlong_penalty",),
        lambda config: isinstance(config.algorithm, DAPOConfig) and config.algorithm.overlong_tokens == 0,
        "algorithm.overlong_buffer=0 makes no answer overlong. Leave it out, or set algorithm.overlong_buffer.",
    ),
    Unused(
        ("algorithm.kl_estimator", "algorithm.kl_in", "algorithm.kl_gradient"),
        lambda config: config.algorithm.kl_coef == 0,
        "algorithm.kl_coef=0 leaves the KL out. Leave it out, or set algorithm.kl_coef.",
    ),
    Unused(
        ("algorithm.kl_gradient",),
        lambda config: config.algorithm.kl_in is KlPlacement.reward,
        "a KL in the reward has no gradient of its own. Leave it out, or set algorithm.kl_in=loss.",
    ),
    Unused(
        ("algorithm.correction.high", "algorithm.correction.low", "algorithm.correction.outside"),
        lambda config: _correction(config).weights is WeightLevel.none,
        "algorithm.correction.weights=none has no weights to bound. Leave it out, or set "
        "algorithm.correction.weights to token or sequence.",
    ),
    Unused(
        ("algorithm.correction.low",),
        lambda config: _correction(config).outside is Outside.truncate and _correction(config).low == 0,
        "only algorithm.correction.outside=mask has a lower bound. Leave it out, or set that.",
    ),
    Unused(
        ("backend.rollout.memory_fraction",),
        lambda config: isinstance(config.backend.rollout, ServerRolloutConfig) and _is_on_cpu(config),
        "on a CPU backend.rollout.cpu_cache_gib is the size of the cache. Set that.",
    ),
    Unused(
        ("backend.rollout.cpu_cache_gib",),
        lambda config: not _is_on_cpu(config),
        "on a GPU backend.rollout.memory_fraction is the size of the cache. Set that.",
    ),
    Unused(
        ("hardware.gpus_per_node",),
        _is_on_cpu,
        "hardware.device=cpu has no GPUs. Choose hardware with GPUs, or leave it out.",
    ),
    Unused(
        ("ray.address", "hardware.nodes"),
        lambda config: config.placement.trainer_ranks == 1 and not engine_has_own_process(config),
        "a trainer of one rank and one colocated engine live in this process, and no other machine has a part. Leave "
        "it out, or use placement=fully_async, placement.trainer_ranks or backend.rollout.replicas above 1.",
    ),
    Unused(
        ("evaluation.every", "evaluation.at_start", "evaluation.at_end", "task.eval_limit", "task.eval_sampling"),
        _has_no_evaluation,
        "the task has no evaluation set. Give it one (task.eval_path or task.evaluate), or leave it out.",
    ),
    Unused(
        ("task.checker",),
        lambda config: isinstance(config.task, ArithmeticConfig | ReasoningGymConfig),
        "this task judges answers without the checker of mathematical equality. Leave it out.",
    ),
    Unused(
        ("task.eval_limit", "task.eval_sampling"),
        _never_evaluates,
        "this run never evaluates. Set evaluation.every, at_start or at_end, or leave it out.",
    ),
)
"""Of a key that several rows cover, one that applies is enough."""


def check_unused(config: RunConfig, given: Iterable[Given]) -> None:
    """Raises ConfigError for the first given key that does nothing."""
    for one in given:
        why = reason(config, one.key)
        if why is not None:
            raise ConfigError(f"{one.key} would do nothing: {why} ({short(one.where)})")


def reason(config: RunConfig, key: str) -> str | None:
    """Why `key` does nothing in this run; None if it does something."""
    for row in UNUSED:
        if row.covers(key) and row.applies(config):
            return row.why
    return _data_reason(config, key)


def _data_reason(config: RunConfig, key: str) -> str | None:
    """Of a published data set that the task does not take."""
    if not isinstance(config.task, MathematicsConfig) or not key.startswith("task.data."):
        return None
    name = key.split(".")[2]
    used = [*config.task.train, *config.task.evaluate]
    if name in used:
        return None
    return f"{name} is not among task.train and task.evaluate ({', '.join(used)}). Add it there, or leave it out."
