"""Mathematical problems with a final answer: GSM8K, MATH, DAPO-Math-17k, AIME, AMC, alone or mixed."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from rl.config.schema import ConfigError
from rl.config.tasks import DataConfig, DataSetsConfig, MathematicsConfig
from rl.protocols import PromptRenderer
from rl.tasks.base import Problem, ProblemTask
from rl.tasks.published import DATA_SETS, DataSet, read_problems
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.grading import grade_rollouts
from rl.tasks.rows import is_hub_id
from rl.types import Prompt, Reward, Rollout


class Mathematics(ProblemTask):
    """Scored by the published rule of each data set and by mathematical equality; `task.scoring` says which counts."""

    name = "mathematics"
    config_class = MathematicsConfig
    accuracies = ("published", "equivalence")
    votes = True

    def __init__(self, config: MathematicsConfig, *, renderer: PromptRenderer, seed: int) -> None:
        self.name = "+".join(config.train) or "+".join(config.evaluate)
        self.config: MathematicsConfig = config
        self._checker = Checker(config.checker)
        super().__init__(
            config,
            renderer=renderer,
            seed=seed,
            training=training_problems(config),
            held_out={
                data_set.name: read_problems(data_set, data, split) for data_set, data, split in _held_out(config)
            },
        )
        self.print_sizes()

    @classmethod
    def check(cls, config: MathematicsConfig) -> int | None:
        """Training rows; None where some are on a hub. Local rows are read and checked."""
        used = [*_training(config), *_held_out(config)]
        if not used:
            raise ConfigError(f"task.train and task.evaluate are both empty. Name some of {', '.join(DATA_SETS)}.")
        for data_set, data, split in used:
            if not is_hub_id(data.path):
                read_problems(data_set, data, split)
        if any(is_hub_id(data.path) for _, data, _ in _training(config)):
            return None
        return len(training_problems(config)[: config.train_limit])

    @classmethod
    def hub_data(cls, config: MathematicsConfig) -> dict[str, DataConfig]:
        used = (*_training(config), *_held_out(config))
        return {data_set.name: data for data_set, data, _ in used if is_hub_id(data.path)}

    @classmethod
    def trains_on_images(cls, config: MathematicsConfig) -> bool:
        return any(data_set.has_images for data_set, _, _ in _training(config))

    @classmethod
    def expected_rows(cls, config: MathematicsConfig) -> int | None:
        usual = DataSetsConfig()
        rows = [
            data_set.train_rows if data.path == getattr(usual, data_set.name).path else None
            for data_set, data, _ in _training(config)
        ]
        known = [count for count in rows if count is not None]
        return sum(known) if known and len(known) == len(rows) and config.train_limit is None else None

    async def grade_truly(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        return await grade_rollouts(
            self._checker,
            prompt.answer,
            rollouts,
            rule=DATA_SETS[prompt.task].rule,
            scoring=self.config.scoring,
        )


def training_problems(config: MathematicsConfig) -> list[Problem]:
    problems = [
        problem for data_set, data, split in _training(config) for problem in read_problems(data_set, data, split)
    ]
    return list(dict.fromkeys(problems)) if config.deduplicate else problems


Used = tuple[DataSet, DataConfig, str]


def _training(config: MathematicsConfig) -> Iterator[Used]:
    for data_set in _named(config.train, "task.train"):
        if data_set.train_split is None:
            raise ConfigError(f"task.train={list(config.train)}: {data_set.name} has held-out problems only.")
        yield data_set, getattr(config.data, data_set.name), data_set.train_split


def _held_out(config: MathematicsConfig) -> Iterator[Used]:
    for data_set in _named(config.evaluate, "task.evaluate"):
        if data_set.test_split is None:
            raise ConfigError(f"task.evaluate={list(config.evaluate)}: {data_set.name} has training rows only.")
        yield data_set, getattr(config.data, data_set.name), data_set.test_split


def _named(names: Sequence[str], key: str) -> Iterator[DataSet]:
    for name in names:
        if name not in DATA_SETS or names.count(name) > 1:
            close = difflib.get_close_matches(name, DATA_SETS, n=1)
            hint = f" Did you mean '{close[0]}'?" if close and close[0] != name else ""
            raise ConfigError(
                f"{key}={list(names)}: '{name}' must be one of {', '.join(DATA_SETS)}, and stand there once.{hint}"
            )
        yield DATA_SETS[name]
