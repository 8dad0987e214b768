"""What the tasks over problems known in advance share: rendering, order, grading, evaluation sets, fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rl.config.schema import ConfigError
from rl.config.tasks import DataConfig, SamplingConfig, TaskConfig, TrainReward
from rl.progress import ProgressLine
from rl.protocols import PromptRenderer
from rl.tasks.controls import shuffled
from rl.tasks.leaks import find_leaks, leak_words
from rl.tasks.order import named_seed, row_at
from rl.tasks.scoring import ScoringProcesses
from rl.types import EvalSet, Grader, IntArray, Prompt, Reward, Rollout, Sampling

CHUNK = 1000
"""Prompts rendered between two updates of the progress line."""


@dataclass(frozen=True, slots=True, eq=False)
class Problem:
    """One problem before it is rendered. Rows that repeat a problem are the same object, rendered once."""

    prompt_id: str
    """`<source>:<row>`, of the first row with it."""
    messages: tuple[dict[str, Any], ...]
    answer: str
    source: str
    """Data set, or evaluation set, that it is of."""
    text: str
    """The problem without instructions: what is compared to find problems both trained on and held out."""
    images: tuple[bytes, ...] = ()
    """See `Prompt.images`; the messages then hold lists of parts."""


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


class ProblemTask:
    """A task over problems known in advance. A subclass brings the problems and `score`, or `grade_truly`."""

    name: str = "problems"
    """Of the task, in what is printed and in errors."""
    config_class: type[TaskConfig]
    """Of `_target_`s that are no option of the suite; a task that subclasses another's has the other's."""
    accuracies: tuple[str, ...] = ()
    """Reward parts that are accuracies by another rule, see `EvalSet.accuracies`."""
    votes = False
    """See `EvalSet.votes`."""

    def __init__(
        self,
        config: TaskConfig,
        *,
        renderer: PromptRenderer,
        seed: int,
        training: Sequence[Problem],
        held_out: Mapping[str, Sequence[Problem]],
    ) -> None:
        """`held_out`: evaluation set -> problems. Empty `training`: the task can be evaluated, not trained on."""
        self.config = config
        self._renderer = renderer
        self._seed = seed
        training = training[: config.train_limit]
        held_out = {name: problems[: config.eval_limit] for name, problems in held_out.items()}
        self.training = self.rendered(training, "training")
        if training and not self.training:
            raise ConfigError(
                f"task {self.name}: no training prompt is left. All {len(training)} are longer than "
                f"task.max_prompt_tokens={config.max_prompt_tokens}; raise it."
            )
        self.num_prompts = len(self.training)
        self.held_out = {
            name: prompts
            for name, problems in held_out.items()
            if (prompts := self.rendered(_distinct(problems), f"{name} (held-out)"))
        }
        self._scoring = ScoringProcesses(self)
        self.leaks = find_leaks(
            _distinct(training), (one for problems in held_out.values() for one in _distinct(problems))
        )
        self._grade_training: Grader = self.grade_truly
        if config.reward is TrainReward.shuffled:
            self._grade_training = shuffled(self.grade_truly, seed=seed)

    @classmethod
    def hub_data(cls, config: Any) -> dict[str, DataConfig]:
        """The published data sets that are read from a hub, by name, for those who fetch them in advance."""
        return {}

    @classmethod
    def trains_on_images(cls, config: Any) -> bool:
        """Whether problems that are trained on have images."""
        return False

    @classmethod
    def expected_rows(cls, config: Any) -> int | None:
        """Training rows as published, for a plan of data that `check` cannot count. None: not known."""
        return None

    def score(self, prompt: Prompt, rollout: Rollout) -> Reward:
        """The grade of one answer, of `prompt` and `rollout` alone. Whatever it raises is an error of the grader.

        It runs in another process, in a copy of the task without prompts (`training`, `held_out`) and renderer, so that
        one that hangs or crashes takes nothing with it but its group, `stream.reward_timeout_s` after its answers came.
        """
        raise NotImplementedError(f"{type(self).__name__} defines neither `score` nor `grade_truly`")

    def rendered(self, problems: Sequence[Problem], kind: str) -> list[Prompt]:
        """Prompts of these problems, in order. Over-long ones are treated as configured, and that is printed."""
        distinct = _distinct(problems)
        before = (self._renderer.num_dropped, self._renderer.num_truncated)
        prompts: dict[int, Prompt | None] = {}
        with ProgressLine(f"{self.name}: {kind} prompts", len(distinct)) as progress:
            for first in range(0, len(distinct), CHUNK):
                chunk = distinct[first : first + CHUNK]
                texts = [problem for problem in chunk if not problem.images]
                if texts:
                    rendered = self._renderer.render(
                        [problem.messages for problem in texts], names=[problem.prompt_id for problem in texts]
                    )
                    for problem, token_ids in zip(texts, rendered, strict=True):
                        prompts[id(problem)] = None if token_ids is None else _prompt(problem, token_ids)
                    progress.advance(len(texts))
                for problem in (problem for problem in chunk if problem.images):
                    prompts[id(problem)] = self._rendered_with_images(problem)
                    progress.advance()
        num_dropped = self._renderer.num_dropped - before[0]
        num_truncated = self._renderer.num_truncated - before[1]
        if num_dropped or num_truncated:
            print(
                f"{self.name}: of {len(distinct):,} {kind} prompts {num_dropped:,} dropped and {num_truncated:,} "
                f"truncated, longer than task.max_prompt_tokens={self.config.max_prompt_tokens}",
                flush=True,
            )
        in_order = (prompts[id(problem)] for problem in problems)
        return [prompt for prompt in in_order if prompt is not None]

    def _rendered_with_images(self, problem: Problem) -> Prompt | None:
        made = self._renderer.render_with_images(problem.messages, problem.images, name=problem.prompt_id)
        if made is None:
            return None
        return replace(
            _prompt(problem, made.token_ids),
            images=problem.images,
            mm_inputs=made.mm_inputs,
            position_ids=made.position_ids,
        )

    def prompt(self, seed: int, index: int) -> Prompt:
        return self.training[row_at(seed, index, num_rows=self.num_prompts)]

    async def grade(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        return await self._grade_training(prompt, rollouts)

    async def grade_truly(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        """The grader of evaluation, free of any training-only control.

        One that overrides it runs in the event loop: what takes long there must be awaited.
        """
        return await self._scoring.score(prompt, rollouts)

    def start_grading(self) -> None:
        """Starts the process that `score` runs in, which the first grade would do otherwise, without waiting for it.

        Raises ConfigError if the task cannot be sent there. Does nothing for a task that grades otherwise.
        """
        if type(self).grade_truly is ProblemTask.grade_truly:
            self._scoring.start()

    def __getstate__(self) -> dict[str, Any]:
        """What `score` may use."""
        left_out = {"training", "held_out", "leaks", "_renderer", "_grade_training", "_scoring"}
        return {name: value for name, value in self.__dict__.items() if name not in left_out}

    def eval_sets(self) -> list[EvalSet]:
        config = self.config.eval_sampling
        return [
            EvalSet(
                name=name,
                prompts=prompts,
                samples_per_problem=config.samples_per_problem,
                sampling=sampling_of(config, seed=named_seed(self._seed, f"evaluation of {name}")),
                grader=self.grade_truly,
                accuracies=self.accuracies,
                votes=self.votes,
            )
            for name, prompts in self.held_out.items()
        ]

    def demonstrations(self) -> list[tuple[Prompt, str]]:
        return []

    def validation_demonstrations(self) -> list[tuple[Prompt, str]]:
        return []

    def fingerprint(self) -> str:
        digest = hashlib.blake2b(self.name.encode(), digest_size=16)
        for prompt in self.training:
            parts = (prompt.prompt_id.encode(), prompt.token_ids.tobytes(), prompt.answer.encode(), *prompt.images)
            for part in parts:
                digest.update(len(part).to_bytes(8, "little"))
                digest.update(part)
        return digest.hexdigest()

    def print_sizes(self) -> None:
        """One line: how many prompts, and which held-out problems are also trained on."""
        num_distinct = len({id(prompt) for prompt in self.training})
        repeated = "" if num_distinct == self.num_prompts else f" ({num_distinct:,} distinct)"
        sets = ", ".join(f"{name} {len(prompts):,}" for name, prompts in self.held_out.items()) or "none"
        print(
            f"{self.name}: {self.num_prompts:,} training prompts{repeated}; held-out problems: {sets}; "
            f"{leak_words(self.leaks)}",
            flush=True,
        )


def _distinct(problems: Sequence[Problem]) -> list[Problem]:
    """Each once, in the order of first appearance."""
    return list({id(problem): problem for problem in problems}.values())


def _prompt(problem: Problem, token_ids: IntArray) -> Prompt:
    return Prompt(
        prompt_id=problem.prompt_id,
        messages=problem.messages,
        token_ids=token_ids,
        answer=problem.answer,
        task=problem.source,
    )
