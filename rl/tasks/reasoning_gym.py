"""Problems from the generators of reasoning-gym (arXiv:2505.24760), scored by each generator's own scorer."""

from __future__ import annotations

import ast
import dataclasses
import difflib
import importlib.util
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

from rl.config.schema import ConfigError
from rl.config.tasks import ReasoningGymConfig
from rl.protocols import PromptRenderer
from rl.tasks.base import Problem, ProblemTask, user_message
from rl.types import Prompt, Reward, RewardError, Rollout

INSTRUCTION = "Give the final answer alone between <answer> and </answer>."

Entry = dict[str, Any]
"""What a generator makes: question, answer and metadata."""

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_EVALUATES = {"eval", "exec", "compile", "parse_expr", "parse_latex", "sympify"}
"""Functions, sympy's among them, that run their text as code."""
_OWN_SETTINGS = ("size", "seed")


class ReasoningGym(ProblemTask):
    """The reward is the generator's score, in [0, 1], of what stands between the last answer tags; 0 without any.

    Training and held-out problems differ by seed; one that both seeds make is held out.
    """

    name = "reasoning_gym"
    config_class = ReasoningGymConfig
    votes = True

    def __init__(self, config: ReasoningGymConfig, *, renderer: PromptRenderer, seed: int) -> None:
        self.check(config)
        self.config: ReasoningGymConfig = config
        self.name = config.generator
        held_out, self._scorer = _generated(config, size=config.eval_size, seed=config.eval_seed)
        training, _ = _generated(config, size=config.train_size, seed=config.train_seed)
        questions = {entry["question"] for entry in held_out}
        kept = [entry for entry in training if entry["question"] not in questions]
        if len(kept) < len(training):
            print(
                f"{self.name}: {len(training) - len(kept):,} of {len(training):,} generated training problems are "
                "left out because they are held out",
                flush=True,
            )
        if not kept:
            raise ConfigError(
                f"task.generator={config.generator}: every training problem is also held out. Make the problems more "
                "various (task.params), or lower task.eval_size."
            )
        self._entries: dict[str, Entry] = {}
        super().__init__(
            config,
            renderer=renderer,
            seed=seed,
            training=self._problems(kept, f"train-{config.train_seed}"),
            held_out={self.name: self._problems(held_out, f"test-{config.eval_seed}")},
        )
        self.print_sizes()

    @classmethod
    def check(cls, config: ReasoningGymConfig) -> None:
        """How many training problems there are is known once they are generated."""
        if importlib.util.find_spec("reasoning_gym") is None:
            raise ConfigError(
                "task=reasoning_gym needs the package 'reasoning_gym', which is not installed. Run: pip install -e "
                "'.[reasoning-gym]' in the project's folder"
            )
        for key, least in (("train_size", 1), ("eval_size", 0)):
            if getattr(config, key) < least:
                raise ConfigError(f"task.{key}={getattr(config, key)} is out of range: it must be at least {least}.")
        if config.train_seed == config.eval_seed:
            raise ConfigError(f"task.train_seed and task.eval_seed are both {config.eval_seed}: they must differ.")
        _settings(config, size=1, seed=config.train_seed)

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        found = _ANSWER.findall(rollout.text)
        if not found:
            return Reward(0.0, correct=False)
        answer = found[-1].strip()
        try:
            value = float(self._scorer(answer, self._entries[prompt.prompt_id]))
        except Exception as error:
            raise RewardError(f"the scorer of {self.name} failed on {answer[:100]!r}: {error!r}") from error
        return Reward(value, correct=value >= 1.0, answer=answer)

    def __getstate__(self) -> dict[str, Any]:
        """Generators hold what cannot be pickled; the scorer is made anew where it is needed."""
        return {name: value for name, value in super().__getstate__().items() if name != "_scorer"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _, self._scorer = _generated(self.config, size=0, seed=self.config.eval_seed)

    def _problems(self, entries: list[Entry], part: str) -> list[Problem]:
        problems = []
        for number, entry in enumerate(entries):
            prompt_id, question = f"{self.name}/{part}:{number}", entry["question"]
            self._entries[prompt_id] = entry
            messages = user_message(f"{question}\n{INSTRUCTION}")
            problems.append(Problem(prompt_id, messages, str(entry["answer"]), source=self.name, text=question))
        return problems


def _generated(config: ReasoningGymConfig, *, size: int, seed: int) -> tuple[list[Entry], Callable[..., float]]:
    dataset_class, settings = _settings(config, size=max(size, 1), seed=seed)
    dataset = dataset_class(config=settings)
    return [dataset[index] for index in range(size)], dataset.score_answer


def _settings(config: ReasoningGymConfig, *, size: int, seed: int) -> tuple[type, Any]:
    """(the generator's class, its settings). Raises ConfigError where name or settings are wrong, or it is unsafe."""
    from reasoning_gym.factory import DATASETS

    name = config.generator
    if name not in DATASETS:
        close = difflib.get_close_matches(name, DATASETS, n=3)
        raise ConfigError(
            f"task.generator={name} is none of the {len(DATASETS)} generators. Near: {', '.join(close) or 'nothing'}."
        )
    if name == "composite":
        raise ConfigError("task.generator=composite is refused: it hides which generators score. Name one of those.")
    dataset_class, settings_class = DATASETS[name]
    unsafe = evaluating_call(dataset_class)
    if unsafe is not None:
        raise ConfigError(
            f"task.generator={name} is refused: its scorer runs what a model wrote as code ({unsafe}). Choose another."
        )
    keys = [field.name for field in dataclasses.fields(settings_class) if field.name not in _OWN_SETTINGS]
    for key in config.params:
        if key not in keys:
            raise ConfigError(f"task.params.{key}: {name} has no such setting. It has {', '.join(keys)}.")
    try:
        settings = settings_class(**config.params, size=size, seed=seed)
        settings.validate()
    except (AssertionError, TypeError, ValueError) as error:
        raise ConfigError(f"task.params={config.params}: {name} refuses them: {error}") from error
    return dataset_class, settings


def evaluating_call(dataset_class: type) -> str | None:
    """Where the scorer of a generator, or a function of the package that it calls, evaluates text; None: nowhere."""
    waiting: list[Any] = [dataset_class.score_answer]  # type: ignore[attr-defined]
    seen: set[Any] = set()
    while waiting:
        function = inspect.unwrap(waiting.pop())
        if function in seen:
            continue
        seen.add(function)
        for name in _called(function):
            own = getattr(dataset_class, name, None) or function.__globals__.get(name)
            if inspect.isfunction(own) and own.__module__.startswith("reasoning_gym"):
                waiting.append(own)
            elif name in _EVALUATES:
                return f"{function.__qualname__} calls {name}"
    return None


def _called(function: Any) -> Iterator[str]:
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name):
                yield node.func.id
            elif isinstance(node.func, ast.Attribute) and not _is_regex(node.func):
                yield node.func.attr


def _is_regex(node: ast.Attribute) -> bool:
    """`re.compile` compiles no code."""
    return isinstance(node.value, ast.Name) and node.value.id == "re"
