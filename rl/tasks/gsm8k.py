"""Grade-school word problems (GSM8K, arXiv:2110.14168), prompted and scored as verl does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError
from rl.config.tasks import GSM8KConfig
from rl.protocols import PromptRenderer
from rl.tasks.base import Problem, ProblemTask, user_message
from rl.tasks.rewards.numbers import ends_with_number
from rl.tasks.rows import Row, is_hub_id, read_rows, require_columns, split_files, split_rows
from rl.types import Prompt, Reward, Rollout

INSTRUCTION = "Think it through step by step, and end with the final answer after ####."
EXAMPLE = {"question": "Tom has 3 apples and buys 4. How many has he?", "answer": "3 + 4 = 7\n#### 7"}

SCORED_CHARACTERS = 300
"""The strict score looks at the end of a response only, as verl's does."""

_GOLD = re.compile(r"####\s*(-?[0-9.,]+)\s*$")
_STRICT = re.compile(r"#### (-?[0-9.,]+)")


class GSM8K(ProblemTask):
    """Reward 1 where the strict score is 1. `last_number` is the lenient accuracy, logged beside it."""

    name = "gsm8k"

    def __init__(self, config: GSM8KConfig, *, renderer: PromptRenderer, seed: int) -> None:
        super().__init__(
            config,
            renderer=renderer,
            seed=seed,
            training=_problems(config, "train"),
            held_out=_problems(config, "test"),
        )
        self.print_sizes()

    @classmethod
    def check(cls, config: GSM8KConfig) -> int | None:
        """Training rows of a local folder; None for a hub id."""
        if is_hub_id(config.path):
            return None
        counts = []
        for split in ("train", "test"):
            count = 0
            for file in split_files(config.path, split, key="task.path"):
                rows = read_rows(file, key="task.path")
                _check_rows(rows, file)
                count += len(rows)
            counts.append(count)
        return counts[0]

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        strict = strict_answer(rollout.text) == prompt.answer
        parts = {"strict": float(strict), "last_number": float(ends_with_number(rollout, prompt.answer))}
        return Reward(value=float(strict), correct=strict, parts=parts)


def strict_answer(text: str) -> str | None:
    """What follows the last `#### ` of the last 300 characters, without commas; None if no number does.

    The comparison is of strings: `80000.` and `80000.00` are not `80000`, and `$80000` is no match.
    """
    found = _STRICT.findall(text[-SCORED_CHARACTERS:])
    return found[-1].replace(",", "") if found else None


def _problems(config: GSM8KConfig, split: str) -> list[Problem]:
    rows = split_rows(config.path, split, key="task.path", config_name="main", revision=config.revision)
    _check_rows(rows, f"{config.path} ({split})")
    return [
        Problem(f"gsm8k/{split}:{number}", user_message(f"{row['question']} {INSTRUCTION}"), _gold(row))
        for number, row in enumerate(rows)
    ]


def _check_rows(rows: list[Row], source: Path | str) -> None:
    require_columns(rows, EXAMPLE, source=f"task.path: {source}")
    for number, row in enumerate(rows, 1):
        if (
            not isinstance(row["question"], str)
            or not isinstance(row["answer"], str)
            or not _GOLD.search(row["answer"])
        ):
            raise ConfigError(
                f"task.path: {source}, row {number}: 'question' must be a text and 'answer' a text that ends with "
                f"'#### <number>' (got {_short(row['answer'])}). A row looks like {EXAMPLE}"
            )


def _gold(row: Row) -> str:
    match = _GOLD.search(row["answer"])
    assert match is not None, "rows are checked before"
    return match[1].replace(",", "")


def _short(value: Any) -> str:
    return repr(value)[-60:]
