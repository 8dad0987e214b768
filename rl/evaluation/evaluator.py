"""Held-out accuracy, measured through the engine and the graders that training uses."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl.evaluation.metrics import accuracy, majority, mean_and_error, metric_name, pass_at_k, powers_of_two
from rl.grading import grade, sample
from rl.progress import ProgressLine
from rl.protocols import EngineError, RolloutEngine, Task
from rl.types import EvalResult, EvalSet, Prompt, Reward, RewardError, Rollout


@dataclass(frozen=True, slots=True)
class GradedProblem:
    prompt: Prompt
    rollouts: list[Rollout]
    rewards: list[Reward] | None
    """None: the grader failed."""
    error: str = ""


class TaskEvaluator:
    """Evaluates every problem of the task's evaluation sets exactly once, each set with its own sampling.

    `max_concurrent_samples` bounds the samples asked for at once: enough to fill the engine, not so many that a large
    benchmark floods it. A grader that takes longer than `reward_timeout_s` for a problem has failed on it; an engine
    that has no problem's answers ready for `stall_timeout_s` has failed altogether. With `answers_file` the answers of
    the latest evaluation are written there, one a line. With `shows_progress` a line counts the problems of each set.
    """

    def __init__(
        self,
        task: Task,
        *,
        max_concurrent_samples: int,
        reward_timeout_s: float,
        stall_timeout_s: float,
        answers_file: Path | None = None,
        shows_progress: bool = False,
    ) -> None:
        assert max_concurrent_samples > 0
        self._shows_progress = shows_progress
        self._eval_sets = task.eval_sets()
        self._max_concurrent_samples = max_concurrent_samples
        self._reward_timeout_s = reward_timeout_s
        self._stall_timeout_s = stall_timeout_s
        self._answers_file = answers_file

    async def evaluate(self, engine: RolloutEngine, *, step: int) -> list[EvalResult]:
        """The metrics of each evaluation set. An error of the engine ends the evaluation and is never a wrong answer.

        Raises RewardError if the grader failed on every problem of a set.
        """
        graded = [await self._graded(engine, eval_set) for eval_set in self._eval_sets]
        if self._answers_file is not None:
            self._write_answers(self._answers_file, graded, step=step)
        return [
            result
            for eval_set, problems in zip(self._eval_sets, graded, strict=True)
            for result in summary(eval_set, problems)
        ]

    async def _graded(self, engine: RolloutEngine, eval_set: EvalSet) -> list[GradedProblem]:
        slots = asyncio.Semaphore(max(1, self._max_concurrent_samples // eval_set.samples_per_problem))
        num = len(eval_set.prompts)
        jobs = [asyncio.create_task(self._problem(engine, slots, eval_set, index)) for index in range(num)]
        with ProgressLine(f"evaluating {eval_set.name}", num) if self._shows_progress else nullcontext() as line:
            if line is not None:
                for job in jobs:
                    job.add_done_callback(lambda _: line.advance())
            try:
                return await self._unless_stalled(eval_set.name, jobs)
            finally:
                for job in jobs:
                    job.cancel()
                await asyncio.gather(*jobs, return_exceptions=True)

    async def _unless_stalled(self, name: str, jobs: list[asyncio.Task[GradedProblem]]) -> list[GradedProblem]:
        """The results of all, in order. Raises the first error, and EngineError when none is done for too long."""
        clock = asyncio.get_running_loop().time
        all_done, last_s = asyncio.gather(*jobs), clock()

        def note(_: asyncio.Task[GradedProblem]) -> None:
            nonlocal last_s
            last_s = clock()

        for job in jobs:
            job.add_done_callback(note)
        while not all_done.done():
            left_s = last_s + self._stall_timeout_s - clock()
            if left_s <= 0:
                raise EngineError(
                    f"evaluation {name}: no problem was done for {self._stall_timeout_s:.0f} s "
                    f"(stream.stall_timeout_s); {sum(job.done() for job in jobs)} of {len(jobs)} are. The engine does "
                    "not answer, or its answers take longer than that."
                )
            await asyncio.wait({all_done}, timeout=left_s)
        return all_done.result()

    async def _problem(
        self, engine: RolloutEngine, slots: asyncio.Semaphore, eval_set: EvalSet, index: int
    ) -> GradedProblem:
        prompt, num_samples = eval_set.prompts[index], eval_set.samples_per_problem
        async with slots:
            rollouts = await sample(engine, prompt, group_id=index, n=num_samples, sampling=eval_set.sampling)
        try:
            rewards = await grade(eval_set.grader, prompt, rollouts, limit_s=self._reward_timeout_s)
        except RewardError as error:
            return GradedProblem(prompt, rollouts, None, error=str(error))
        return GradedProblem(prompt, rollouts, rewards)

    def _write_answers(self, path: Path, graded: list[list[GradedProblem]], *, step: int) -> None:
        temporary = path.with_name(f".{path.name}")
        with temporary.open("w", encoding="utf-8") as file:
            for eval_set, problems in zip(self._eval_sets, graded, strict=True):
                for problem in problems:
                    for row in answer_rows(problem):
                        file.write(json.dumps({"benchmark": eval_set.name, "step": step} | row) + "\n")
        os.replace(temporary, path)


def summary(eval_set: EvalSet, problems: list[GradedProblem]) -> list[EvalResult]:
    """The metrics of one set, its accuracy by `Reward.correct` first.

    Over the problems that were graded; those whose grader failed are counted apart.
    """
    name = eval_set.name
    graded = [problem.rewards for problem in problems if problem.rewards is not None]
    if not graded:
        raise RewardError(f"evaluation {name}: the grader failed on all {len(problems)} problems; {problems[0].error}")
    rollouts = [rollout for problem in problems for rollout in problem.rollouts]
    versions = {version for r in rollouts for version in (r.min_policy_version, r.max_policy_version)}
    assert len(versions) == 1, f"evaluation {name} mixes policy versions {sorted(versions)}"
    (version,) = versions
    truncated = float(np.mean([rollout.is_truncated for rollout in rollouts]))
    num_errors = sum(len(problem.rollouts) for problem in problems if problem.rewards is None)

    def result(metric: str, values: list[float]) -> EvalResult:
        value, stderr = mean_and_error(values)
        return EvalResult(
            benchmark=name,
            metric=metric,
            value=value,
            stderr=stderr,
            num_problems=len(graded),
            samples_per_problem=eval_set.samples_per_problem,
            sampling=eval_set.sampling,
            policy_version=version,
            truncated_fraction=truncated,
            num_errors=num_errors,
        )

    return [result(metric, values) for metric, values in metric_values(eval_set, graded)]


def metric_values(eval_set: EvalSet, graded: list[list[Reward]]) -> Iterator[tuple[str, list[float]]]:
    """(metric, its number for each problem), `graded` being [problem][sample]."""
    num_samples = eval_set.samples_per_problem
    headline = metric_name(is_greedy=eval_set.sampling.is_greedy, samples_per_problem=num_samples)
    correct = [[reward.correct for reward in rewards] for rewards in graded]
    yield headline, [accuracy(samples) for samples in correct]
    for rule in eval_set.accuracies:
        yield (
            f"{rule}/{headline}",
            [accuracy([reward.parts[rule] == 1.0 for reward in rewards]) for rewards in graded],
        )
    if eval_set.sampling.is_greedy:
        return  # equal samples: another one adds nothing
    for k in powers_of_two(num_samples):
        yield f"pass@{k}", [pass_at_k(samples, k) for samples in correct]
    if eval_set.votes and num_samples > 1:
        answers = [[reward.answer for reward in rewards] for rewards in graded]
        yield f"maj@{num_samples}", [majority(c, a) for c, a in zip(correct, answers, strict=True)]


def answer_rows(problem: GradedProblem) -> list[dict[str, Any]]:
    """One row per answer. `reward` and `correct` are null where the grader failed, and `error` says how."""
    rewards: list[Reward | None] = [*problem.rewards] if problem.rewards else [None] * len(problem.rollouts)
    return [
        {
            "prompt_id": problem.prompt.prompt_id,
            "index": rollout.index,
            "messages": problem.prompt.messages,
            "response": rollout.text,
            "expected": problem.prompt.answer,
            "correct": None if reward is None else reward.correct,
            "reward": None if reward is None else reward.value,
            "parts": {} if reward is None else reward.parts,
            "answer": None if reward is None else reward.answer,
            "finish_reason": str(rollout.finish_reason),
            "num_tokens": rollout.num_response_tokens,
            "policy_version": rollout.max_policy_version,
            "error": problem.error,
        }
        for rollout, reward in zip(problem.rollouts, rewards, strict=True)
    ]
