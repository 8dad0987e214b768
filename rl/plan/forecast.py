"""What a run is expected to take, whether it fits, and which one setting would help most."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from rl.config.check import check_devices, not_there_yet
from rl.config.schema import ConfigError, LocalRolloutConfig, RunConfig, ServerRolloutConfig
from rl.plan.memory import Cache, Phase, cache_of, phases, trainer_gib
from rl.plan.sizes import RunSizes, Sharing, sizes_of
from rl.plan.time import StepTimes, predict

MEASURED_AS = {"train": "train", "publish": "publish", "wake": "wake", "generate": "wait_for_batch"}
"""Phase of the plan -> that of a run, `memory/gpu_<phase>_gib`."""
TIGHT = 0.1
"""Of a GPU's memory. A smaller margin is called tight: activations are estimated, and allocators leave holes."""


@dataclass(frozen=True, slots=True)
class Knob:
    """One override and what it brings."""

    words: str
    saved_gib: float
    """Of the fullest phase."""
    fits: bool


@dataclass(frozen=True, slots=True)
class Forecast:
    sizes: RunSizes
    phases: list[Phase]
    cache: Cache
    times: StepTimes | None
    """None: the hardware's peak rates are not known."""

    @property
    def fullest(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.gib)

    @property
    def margin_gib(self) -> float:
        return self.sizes.device.memory_gib - self.fullest.gib

    @property
    def problem(self) -> str | None:
        """Why it does not fit; None: it does."""
        if self.cache.sequences < 1:
            tokens = self.sizes.step.max_sequence
            if self.cache.gib <= 0:
                lacking = -self.cache.gib
                return f"the engine's share of a GPU lacks {lacking:.1f} GiB for its weights, without keys and values"
            return f"the engine's cache of {self.cache.gib:.1f} GiB does not hold one answer of {tokens:,} tokens"
        if self.margin_gib < 0:
            return (
                f"{self.fullest.name} takes {self.fullest.gib:.1f} of {self.sizes.device.memory_gib:g} GiB, most of it "
                f"{self.fullest.largest.what} ({self.fullest.largest.gib:.1f})"
            )
        return None


def forecast(config: RunConfig) -> Forecast | None:
    """None where the model's sizes are not known."""
    sizes = sizes_of(config)
    return None if sizes is None else Forecast(sizes, phases(sizes), cache_of(sizes), predict(sizes))


def best_knob(config: RunConfig, now: Forecast) -> Knob | None:
    """The override that makes room where there is least; one after which the run fits goes before. None: none helps."""
    name, found = now.fullest.name, []
    for words, changed in _neighbors(config):
        other = forecast(changed)
        assert other is not None
        at = next((phase for phase in other.phases if phase.name == name), other.fullest)
        saved = now.fullest.gib - at.gib
        fits = other.problem is None
        if saved > 0.05 or (fits and now.problem is not None):
            found.append(Knob(words, saved, fits))
    return max(found, key=lambda knob: (knob.fits, knob.saved_gib), default=None)


def _neighbors(config: RunConfig) -> list[tuple[str, RunConfig]]:
    """Configs one setting away, of those settings that change how a run is done and not what it learns."""
    trainer, rollout = config.backend.trainer, config.backend.rollout
    longest = config.task.max_prompt_tokens + config.task.sampling.max_new_tokens
    candidates: list[tuple[str, Any]] = [
        ("backend.trainer.max_tokens_per_micro_batch", max(longest, trainer.max_tokens_per_micro_batch // 2)),
        ("backend.trainer.logprob_chunk_tokens", max(256, trainer.logprob_chunk_tokens // 4)),
        ("placement.trainer_ranks", config.placement.trainer_ranks * 2),
    ]
    if not trainer.recompute:
        candidates.append(("backend.trainer.recompute", True))
    for key in ("tensor_parallel", "expert_parallel"):
        if hasattr(trainer, key):
            candidates.append((f"backend.trainer.{key}", getattr(trainer, key) * 2))
    if isinstance(rollout, ServerRolloutConfig):
        fraction = rollout.memory_fraction
        candidates += [("backend.rollout.memory_fraction", round(fraction + by, 2)) for by in (-0.2, -0.1, 0.1, 0.2)]
        candidates.append(("backend.rollout.tensor_parallel", rollout.tensor_parallel * 2))
    if isinstance(rollout, LocalRolloutConfig):
        candidates.append(("backend.rollout.max_num_seqs", max(1, rollout.max_num_seqs // 4)))
    return [(f"{key}={_word(value)}", changed) for key, value in candidates if (changed := _with(config, key, value))]


def _with(config: RunConfig, key: str, value: Any) -> RunConfig | None:
    """`config` with another value; None where that is no change, or devices or trainer do not allow it."""
    *path, name = key.split(".")
    nodes: list[Any] = [config]
    for part in path:
        nodes.append(getattr(nodes[-1], part))
    if getattr(nodes[-1], name) == value or (name == "memory_fraction" and not 0 < value < 1):
        return None
    changed: Any = value
    for node, part in zip(reversed(nodes), reversed([*path, name]), strict=True):
        changed = replace(node, **{part: changed})
    try:
        check_devices(changed)
    except ConfigError:
        return None
    return None if set(not_there_yet(changed)) - set(not_there_yet(config)) else changed


def _word(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def planned_metrics(config: RunConfig) -> dict[str, float]:
    """What a run logs of its plan, each under the name of the measured value with `plan/` in front."""
    found = forecast(config)
    if found is None:
        return {}
    planned: dict[str, float] = {}
    if not found.sizes.device.is_cpu:
        planned["plan/memory/gpu_peak_gib"] = trainer_gib(found.sizes)
        takes_turns = found.sizes.sharing is Sharing.turns  # else the trainer's allocator keeps what it took to train
        for phase in found.phases:
            if takes_turns or phase.name == "train":
                planned[f"plan/memory/gpu_{MEASURED_AS[phase.name]}_gib"] = phase.gib
    elif (
        config.placement.trainer_ranks == 1 and found.sizes.sharing is Sharing.turns
    ):  # else it is of several processes
        planned["plan/memory/rss_gib"] = found.fullest.gib
    if found.times is not None:
        planned["plan/time/step_s"] = found.times.step
        planned["plan/time/train_s"] = found.times.train
        planned["plan/time/publish_s"] = found.times.publish * config.placement.publish_every
        if found.sizes.sharing is Sharing.turns:
            planned["plan/time/wait_for_batch_s"] = found.times.generate
    return planned
