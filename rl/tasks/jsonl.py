"""A person's own problems: a file of rows with a prompt and an answer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError
from rl.config.tasks import AnswerRule, JsonlConfig, Scoring
from rl.protocols import PromptRenderer
from rl.tasks.base import Problem, ProblemTask, user_message
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.exact import is_exact
from rl.tasks.rewards.grading import grade_rollouts
from rl.tasks.rewards.numbers import ends_with_number
from rl.tasks.rows import Row, as_example, read_rows, require_columns
from rl.types import Prompt, Reward, Rollout


class RowsTask(ProblemTask):
    """The rows of a file as problems. A task of one's own subclasses this and defines `score`."""

    name = "rows"
    config_class = JsonlConfig

    def __init__(self, config: JsonlConfig, *, renderer: PromptRenderer, seed: int) -> None:
        self.config: JsonlConfig = config
        held_out: dict[str, list[Problem]] = {}
        if config.eval_path:
            for problem in _problems(config, config.eval_path, key="task.eval_path"):
                held_out.setdefault(problem.source or self.name, []).append(problem)
        super().__init__(
            config,
            renderer=renderer,
            seed=seed,
            training=list(_problems(config, config.path, key="task.path")),
            held_out=held_out,
        )
        self.print_sizes()

    @classmethod
    def check(cls, config: JsonlConfig) -> int:
        """Training rows."""
        if config.eval_path:
            for _ in _checked_rows(config, config.eval_path, key="task.eval_path"):
                pass
        num_rows = sum(1 for _ in _checked_rows(config, config.path, key="task.path"))
        return num_rows if config.train_limit is None else min(num_rows, config.train_limit)


class Jsonl(RowsTask):
    """Reward 1 (or the score of a published rule) where the answer is right by `task.rule`, no code needed."""

    name = "jsonl"
    votes = True

    def __init__(self, config: JsonlConfig, *, renderer: PromptRenderer, seed: int) -> None:
        self._checker = Checker(config.checker)
        super().__init__(config, renderer=renderer, seed=seed)

    async def grade_truly(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        rule = self.config.rule
        if rule is AnswerRule.exact:
            return [_plain_reward(rollout, is_exact(rollout, prompt.answer, strip=True)) for rollout in rollouts]
        if rule is AnswerRule.last_number:
            return [_plain_reward(rollout, ends_with_number(rollout, prompt.answer)) for rollout in rollouts]
        rewards = await grade_rollouts(
            self._checker, prompt.answer, rollouts, rule=rule.value, scoring=Scoring.published
        )
        if rule is not AnswerRule.equivalence:
            return rewards
        return [
            _plain_reward(rollout, True) if is_exact(rollout, prompt.answer, strip=True) else reward
            for rollout, reward in zip(rollouts, rewards, strict=True)
        ]


def _plain_reward(rollout: Rollout, correct: bool) -> Reward:
    return Reward(value=float(correct), correct=correct, answer=rollout.text.strip())


def _problems(config: JsonlConfig, path: str, *, key: str) -> Iterator[Problem]:
    for number, row in enumerate(_checked_rows(config, path, key=key)):
        messages = _messages(row[config.prompt_key])
        yield Problem(
            f"{Path(path).name}:{number}",
            messages,
            str(row[config.answer_key]).strip(),
            source="" if config.source_key is None else _metric_word(str(row[config.source_key])),
            text="\n".join(str(message["content"]) for message in messages if message["role"] == "user"),
        )


def _metric_word(source: str) -> str:
    """`openai/gsm8k` as a word of a metric's key."""
    return re.sub(r"[^\w.+=@-]", "_", source, flags=re.ASCII)


def _messages(prompt: Any) -> tuple[dict[str, Any], ...]:
    return user_message(prompt) if isinstance(prompt, str) else tuple(prompt)


def _checked_rows(config: JsonlConfig, path: str, *, key: str) -> Iterator[Row]:
    example = {config.prompt_key: "What is 7 + 5?", config.answer_key: "12"}
    if config.source_key is not None:
        example[config.source_key] = "sums"
    shown = f"A row looks like {as_example(example)}"
    for number, row in enumerate(read_rows(Path(path).expanduser(), key=key), 1):
        require_columns(row, number, example, source=f"{key}={path}")
        if not _is_prompt(row[config.prompt_key]):
            raise ConfigError(
                f"{key}={path}, row {number}: '{config.prompt_key}' must be a text or a list of messages with 'role' "
                f"and 'content', and not empty. {shown}"
            )
        answer = row[config.answer_key]
        if not isinstance(answer, str | int | float) or isinstance(answer, bool) or str(answer).strip() == "":
            raise ConfigError(
                f"{key}={path}, row {number}: '{config.answer_key}' must be a text or a number, and not empty "
                f"(got {answer!r}). {shown}"
            )
        yield row


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() != ""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") for m in value)
    )
