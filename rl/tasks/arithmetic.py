"""Sums and products of two numbers, with a reward of 0 or 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rl.config.schema import ConfigError
from rl.config.tasks import ArithmeticConfig, Notation
from rl.protocols import PromptRenderer
from rl.tasks.base import Problem, ProblemTask, user_message
from rl.tasks.rewards.exact import is_exact
from rl.tasks.rewards.numbers import ends_with_number
from rl.types import Prompt, Reward, Rollout

OPERATORS = {"+": lambda a, b: a + b, "*": lambda a, b: a * b}
MAX_DIGITS = 3
"""All problems are listed, 10^(2 x digits) of each operator."""


@dataclass(frozen=True, slots=True)
class Expression:
    a: int
    operator: str
    b: int

    @property
    def value(self) -> int:
        return OPERATORS[self.operator](self.a, self.b)

    @property
    def pair(self) -> tuple[int, int]:
        """The unordered pair: the unit that the split never divides."""
        return (min(self.a, self.b), max(self.a, self.b))


@dataclass(frozen=True, slots=True)
class Split:
    """All problems, each in exactly one part."""

    held_out: list[Expression]
    validation: list[Expression]
    warm_start: list[Expression]
    training: list[Expression]


def split_problems(config: ArithmeticConfig) -> Split:
    """Deals the unordered pairs, in an order drawn from `split_seed`, to one part after another.

    A pair brings all its problems: both orders, every operator. One that does not fit in what is left of a part waits
    for the next, so that the parts have exactly the sizes asked for.
    """
    limit = 10**config.digits
    pairs = [(a, b) for a in range(limit) for b in range(a, limit)]
    order = np.random.default_rng(config.split_seed).permutation(len(pairs))
    remaining = [pairs[place] for place in order]
    parts: list[list[Expression]] = []
    for name in ("held_out", "validation", "warm_start"):
        size: int = getattr(config, name)
        part: list[Expression] = []
        later: list[tuple[int, int]] = []
        for pair in remaining:
            problems = _problems_of(pair, config.operators)
            if len(part) + len(problems) <= size:
                part += problems
            else:
                later.append(pair)
        if len(part) < size:
            raise ConfigError(
                f"task.{name}={size}: only {len(part)} problems are left for it, because pairs are never divided. "
                f"There are {len(config.operators) * limit**2} problems in all; lower held_out, validation or "
                "warm_start."
            )
        parts.append(part)
        remaining = later
    training = [problem for pair in remaining for problem in _problems_of(pair, config.operators)]
    return Split(*parts, training=training)


def _problems_of(pair: tuple[int, int], operators: Sequence[str]) -> list[Expression]:
    a, b = pair
    orders = [(a, b)] if a == b else [(a, b), (b, a)]
    return [Expression(x, operator, y) for operator in operators for x, y in orders]


class Arithmetic(ProblemTask):
    name = "arithmetic"

    def __init__(self, config: ArithmeticConfig, *, renderer: PromptRenderer, seed: int) -> None:
        self.check(config)
        self._notation = config.notation
        self._digits = config.digits
        self._answer_width = answer_width(config)
        split = split_problems(config)
        super().__init__(
            config,
            renderer=renderer,
            seed=seed,
            training=[self._problem(expression) for expression in split.training],
            held_out={self.name: [self._problem(expression) for expression in split.held_out]},
        )
        self._demonstrated = self.rendered([self._problem(e) for e in split.warm_start], "warm-start")
        self._validation = self.rendered([self._problem(e) for e in split.validation], "validation")
        self.print_split(split)

    @classmethod
    def check(cls, config: ArithmeticConfig) -> int:
        """Training problems, by arithmetic alone."""
        if not 1 <= config.digits <= MAX_DIGITS:
            raise ConfigError(f"task.digits={config.digits} is out of range: it must be 1 to {MAX_DIGITS}.")
        operators = list(config.operators)
        if not operators or len(set(operators)) < len(operators) or not set(operators) <= set(OPERATORS):
            raise ConfigError(f"task.operators={operators} must name some of {', '.join(OPERATORS)}, each once.")
        for name in ("held_out", "validation", "warm_start"):
            if getattr(config, name) < 0:
                raise ConfigError(f"task.{name}={getattr(config, name)} is out of range: it must be 0 or more.")
        total = len(operators) * 10 ** (2 * config.digits)
        num_training = total - config.held_out - config.validation - config.warm_start
        if num_training < 1:
            raise ConfigError(
                f"task.held_out={config.held_out}, validation={config.validation}, warm_start={config.warm_start} "
                f"leave {num_training} of the {total} problems (operands of {config.digits} digit(s), operators "
                f"{' '.join(operators)}) for training. Lower them."
            )
        if config.notation is Notation.reversed_digits:
            needed = answer_width(config) + 1
            for name in ("sampling", "eval_sampling"):
                if getattr(config, name).max_new_tokens < needed:
                    raise ConfigError(
                        f"task.{name}.max_new_tokens={getattr(config, name).max_new_tokens} is too small: an answer "
                        f"has {needed - 1} digits and an end of text. Use at least {needed}."
                    )
        return num_training

    def _problem(self, expression: Expression) -> Problem:
        a, operator, b = expression.a, expression.operator, expression.b
        if self._notation is Notation.reversed_digits:
            text = f"{a:0{self._digits}d}{operator}{b:0{self._digits}d}="
            answer = f"{expression.value:0{self._answer_width}d}"[::-1]
        else:
            text, answer = f"What is {a} {operator} {b}? Answer with the number only.", str(expression.value)
        return Problem(f"{self.name}:{a}{operator}{b}", user_message(text), answer, source=self.name, text=text)

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        if self._notation is Notation.reversed_digits:
            correct = is_exact(rollout, prompt.answer)
        else:
            correct = ends_with_number(rollout, prompt.answer)
        return Reward(value=float(correct), correct=correct)

    def demonstrations(self) -> list[tuple[Prompt, str]]:
        return [(prompt, prompt.answer) for prompt in self._demonstrated]

    def validation_demonstrations(self) -> list[tuple[Prompt, str]]:
        return [(prompt, prompt.answer) for prompt in self._validation]

    def print_split(self, split: Split) -> None:
        """One line with the size of each part and the unordered pairs that held-out problems share with the others."""
        held_out = {expression.pair for expression in split.held_out}
        shared = [
            sum(expression.pair in held_out for expression in part)
            for part in (split.validation, split.warm_start, split.training)
        ]
        print(
            f"{self.name}: {len(split.held_out):,} held-out problems, {len(split.validation):,} validation, "
            f"{len(split.warm_start):,} warm start, {len(split.training):,} training; overlap with held-out: "
            f"validation {shared[0]}, warm start {shared[1]}, training {shared[2]}",
            flush=True,
        )


def answer_width(config: ArithmeticConfig) -> int:
    """Digits of the largest answer."""
    largest = 10**config.digits - 1
    return max(len(str(OPERATORS[operator](largest, largest))) for operator in config.operators)
