"""The part of a task that nobody asks for in a test of training alone."""

from __future__ import annotations

from rl.types import EvalSet, Prompt


class TrainingOnly:
    """Has no evaluation sets and no demonstrations. A subclass says what is asked and how it is graded."""

    def eval_sets(self) -> list[EvalSet]:
        return []

    def demonstrations(self) -> list[tuple[Prompt, str]]:
        return []

    validation_demonstrations = demonstrations

    def fingerprint(self) -> str:
        return type(self).__name__
