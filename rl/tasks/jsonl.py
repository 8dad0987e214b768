"""A person's own problems: a file of rows with a prompt and an answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError
from rl.config.tasks import JsonlConfig
from rl.protocols import PromptRenderer
from rl.tasks.base import Problem, ProblemTask, user_message
from rl.tasks.rewards.exact import is_exact
from rl.tasks.rewards.numbers import ends_with_number
from rl.tasks.rows import Row, read_rows, require_columns
from rl.types import Prompt, Reward, Rollout


class Jsonl(ProblemTask):
    """Reward 1 if the finished response is the answer, white space around it aside, or its last number equals it."""

    name = "jsonl"

    def __init__(self, config: JsonlConfig, *, renderer: PromptRenderer, seed: int) -> None:
        super().__init__(
            config,
            renderer=renderer,
            seed=seed,
            training=_problems(config, config.path, key="task.path"),
            held_out=_problems(config, config.eval_path, key="task.eval_path") if config.eval_path else [],
        )
        self.print_sizes()

    @classmethod
    def check(cls, config: JsonlConfig) -> int:
        """Training rows."""
        if config.eval_path:
            _checked_rows(config, config.eval_path, key="task.eval_path")
        return len(_checked_rows(config, config.path, key="task.path"))

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        exact = is_exact(rollout, prompt.answer, strip=True)
        number = ends_with_number(rollout, prompt.answer)
        correct = exact or number
        return Reward(
            value=float(correct), correct=correct, parts={"exact": float(exact), "last_number": float(number)}
        )


def _problems(config: JsonlConfig, path: str, *, key: str) -> list[Problem]:
    return [
        Problem(f"{Path(path).name}:{number}", _messages(row[config.prompt_key]), str(row[config.answer_key]).strip())
        for number, row in enumerate(_checked_rows(config, path, key=key))
    ]


def _messages(prompt: Any) -> tuple[dict[str, Any], ...]:
    return user_message(prompt) if isinstance(prompt, str) else tuple(prompt)


def _checked_rows(config: JsonlConfig, path: str, *, key: str) -> list[Row]:
    rows = read_rows(Path(path).expanduser(), key=key)
    example = {config.prompt_key: "What is 7 + 5?", config.answer_key: "12"}
    require_columns(rows, example, source=f"{key}={path}")
    for number, row in enumerate(rows, 1):
        if not _is_prompt(row[config.prompt_key]):
            raise ConfigError(
                f"{key}={path}, row {number}: '{config.prompt_key}' must be a text or a list of messages with 'role' "
                f"and 'content', and not empty. A row looks like {example}"
            )
        answer = row[config.answer_key]
        if not isinstance(answer, str | int | float) or isinstance(answer, bool) or str(answer).strip() == "":
            raise ConfigError(
                f"{key}={path}, row {number}: '{config.answer_key}' must be a text or a number, and not empty "
                f"(got {answer!r}). A row looks like {example}"
            )
    return rows


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return value.strip() != ""
    return (
        isinstance(value, list)
        and len(value) > 0
        and all(isinstance(m, dict) and isinstance(m.get("role"), str) and m.get("content") for m in value)
    )
