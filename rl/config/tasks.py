"""Settings of tasks: data, prompts, reward, sampling and evaluation. Standard library and omegaconf only."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING


class Overlong(Enum):
    """What happens to a prompt of more than `task.max_prompt_tokens`. Each is counted and printed."""

    error = "error"
    drop = "drop"
    truncate_left = "truncate_left"


class Notation(Enum):
    """How the arithmetic task writes problem and answer."""

    reversed_digits = "reversed_digits"
    """`12+34=` answered by exactly `640`: zero-padded, least significant digit first, then end of text."""
    question = "question"
    """`What is 7 + 5? Answer with the number only.`; the last number of the answer counts."""


class TrainReward(Enum):
    task = "task"
    shuffled = "shuffled"
    """A control: the true rewards of each group, dealt out at random among its members. Evaluation stays true."""


class Scoring(Enum):
    """Which of the two scores of an answer is the reward. Both accuracies are logged."""

    published = "published"
    """The exact rule of the published run, so that a curve can be compared with its."""
    equivalence = "equivalence"
    """1 where the final answer equals the right one, however it is written, else 0."""


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_new_tokens: int = MISSING
    stop: list[str] = field(default_factory=list)


@dataclass
class EvalSamplingConfig(SamplingConfig):
    temperature: float = 0.0
    """0: greedy."""
    samples_per_problem: int = 1


@dataclass
class CheckerConfig:
    """The processes that judge answers. What is right depends on none of this, only what a slow answer costs."""

    workers: int | None = None
    """Processes. None: one for each core that this process may use, at most 8."""
    timeout_s: float = 3.0
    """Wall time for one answer; then its process is killed and the answer scores 0 with reason `timeout`."""
    memory_mib: int = 1024
    """Address space of one process, sympy included, likewise."""


@dataclass
class TaskConfig:
    """Data, reward and evaluation sets; they belong together."""

    _target_: str = MISSING
    reward: TrainReward = TrainReward.task
    max_prompt_tokens: int = 1024
    overlong: Overlong = Overlong.error
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Explicit arguments of the chat template, for example {enable_thinking: false}."""
    epochs: int = 1
    """Passes over the training prompts; ignored where `steps` is set."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Of training rollouts."""
    eval_sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    eval_limit: int | None = None
    """Problems evaluated of each set, the first ones; None: all."""
    checker: CheckerConfig = field(default_factory=CheckerConfig)


@dataclass
class ArithmeticConfig(TaskConfig):
    """Sums and products of two numbers, split by unordered pair into held out, validation, warm start and training."""

    _target_: str = "rl.tasks.arithmetic.Arithmetic"
    digits: int = 2
    """Of each operand, 0 to 10^digits - 1."""
    operators: list[str] = field(default_factory=lambda: ["+"])
    """Of `+` and `*`."""
    notation: Notation = Notation.reversed_digits
    split_seed: int = 20261201
    """Of the split, independent of the run's seed."""
    held_out: int = 1000
    """Problems that are only evaluated; a op b and b op a always fall on the same side."""
    validation: int = 300
    """Problems that only decide when a warm start stops."""
    warm_start: int = 2000
    """Problems whose answers are demonstrated in a warm start; the rest is trained on."""


@dataclass
class GSM8KConfig(TaskConfig):
    _target_: str = "rl.tasks.gsm8k.GSM8K"
    path: str = "openai/gsm8k"
    """Hub id, or a local folder with train.jsonl and test.jsonl in the published layout."""
    revision: str | None = None


@dataclass
class JsonlConfig(TaskConfig):
    """A person's own problems: one JSON object a line."""

    _target_: str = "rl.tasks.jsonl.Jsonl"
    path: str = MISSING
    """File of training rows."""
    eval_path: str | None = None
    """File of held-out rows; None: no evaluation."""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
