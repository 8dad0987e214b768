"""What the tasks over a fixed list of problems share: rendering, order, grading, evaluation set, fingerprint."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rl.config.schema import ConfigError
from rl.config.tasks import SamplingConfig, TaskConfig, TrainReward
from rl.protocols import PromptRenderer
from rl.tasks.controls import shuffled
from rl.tasks.order import named_seed, row_at
from rl.types import EvalSet, Grader, Prompt, Reward, RewardError, Rollout, Sampling


@dataclass(frozen=True, slots=True)
class Problem:
    """One row before it is rendered."""

    prompt_id: str
    messages: tuple[dict[str, Any], ...]
    answer: str


def user_message(text: str) -> tuple[dict[str, Any], ...]:
    return ({"role": "user", "content": text},)


def sampling_of(config: SamplingConfig, *, seed: int) -> Sampling:
    """`config` as the engines take it, drawing from the stream `seed`."""
    return Sampling(
        temperature=config.temperature,
        max_new_tokens=config.max_new_tokens,
        seed=seed,
        top_p=config.top_p,
        top_k=config.top_k,
        stop=tuple(config.stop),
    )


class ProblemTask(ABC):
    """A task over problems known in advance. Subclasses bring the problems and `score` one answer."""

    name: str
    """Of the task and of its evaluation set."""

    def __init__(
        self,
        config: TaskConfig,
        *,
        renderer: PromptRenderer,
        seed: int,
        training: Sequence[Problem],
        held_out: Sequence[Problem],
    ) -> None:
        self.config = config
        self._renderer = renderer
        self._seed = seed
        self.training = self.rendered(training, "training")
        if not self.training:
            raise ConfigError(
                f"task {self.name}: no training prompt is left. All {len(training)} are longer than "
                f"task.max_prompt_tokens={config.max_prompt_tokens}; raise it."
            )
        self.num_prompts = len(self.training)
        self.held_out = self.rendered(held_out[: config.eval_limit], "held-out")
        self._grade_training: Grader = self.grade_truly
        if config.reward is TrainReward.shuffled:
            self._grade_training = shuffled(self.grade_truly, seed=seed)

    @abstractmethod
    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        """The grade of one answer. Pure and fast: it runs in the event loop."""

    def rendered(self, problems: Sequence[Problem], kind: str) -> list[Prompt]:
        """Prompts of these problems, in order. Over-long ones are treated as configured, and that is printed."""
        prompts, before = [], (self._renderer.num_dropped, self._renderer.num_truncated)
        for problem in problems:
            token_ids = self._renderer.render(problem.messages, name=problem.prompt_id)
            if token_ids is None:
                continue
            prompts.append(
                Prompt(
                    prompt_id=problem.prompt_id,
                    messages=problem.messages,
                    token_ids=token_ids,
                    answer=problem.answer,
                    task=self.name,
                )
            )
        num_dropped = self._renderer.num_dropped - before[0]
        num_truncated = self._renderer.num_truncated - before[1]
        if num_dropped or num_truncated:
            print(
                f"{self.name}: of {len(problems)} {kind} prompts {num_dropped} dropped and {num_truncated} truncated, "
                f"longer than task.max_prompt_tokens={self.config.max_prompt_tokens}",
                flush=True,
            )
        return prompts

    def prompt(self, seed: int, index: int) -> Prompt:
        return self.training[row_at(seed, index, num_rows=self.num_prompts)]

    async def grade(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        return await self._grade_training(prompt, rollouts)

    async def grade_truly(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        """The grader of evaluation, free of any training-only control."""
        try:
            return [self.score(prompt, rollout) for rollout in rollouts]
        except (ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise RewardError(f"the grader of {prompt.prompt_id} failed: {error!r}") from error

    def eval_sets(self) -> list[EvalSet]:
        if not self.held_out:
            return []
        config = self.config.eval_sampling
        return [
            EvalSet(
                name=self.name,
                prompts=self.held_out,
                samples_per_problem=config.samples_per_problem,
                sampling=sampling_of(config, seed=named_seed(self._seed, f"evaluation of {self.name}")),
                grader=self.grade_truly,
            )
        ]

    def demonstrations(self) -> list[tuple[Prompt, str]]:
        return []

    def validation_demonstrations(self) -> list[tuple[Prompt, str]]:
        return []

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.name.encode(), digest_size=16)
        for prompt in self.training:
            for part in (prompt.prompt_id.encode(), prompt.token_ids.tobytes(), prompt.answer.encode()):
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.hexdigest()

    def print_sizes(self) -> None:
        """One line: how many prompts, and how many held-out ones are also trained on."""
        trained = {prompt.token_ids.tobytes() for prompt in self.training}
        overlap = sum(prompt.token_ids.tobytes() in trained for prompt in self.held_out)
        print(
            f"{self.name}: {self.num_prompts:,} training and {len(self.held_out):,} held-out prompts; "
            f"held-out prompts also trained on: {overlap}",
            flush=True,
        )
