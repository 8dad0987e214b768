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
    """What a policy is trained on."""

    task = "task"
    shuffled = "shuffled"
    """A control: the true rewards of each group, dealt out at random among its members. Evaluation stays true."""


class Scoring(Enum):
    """Which of the two scores of an answer is the reward. Both accuracies are logged."""

    published = "published"
    """The exact rule of the published run, so that a curve can be compared with its."""
    equivalence = "equivalence"
    """1 where the final answer equals the right one, however it is written, else 0."""


class AnswerRule(Enum):
    """When an answer is right."""

    equivalence = "equivalence"
    """The response is the answer, white space around it aside, or its final answer equals it mathematically."""
    exact = "exact"
    """The finished response is the answer, white space around it aside."""
    last_number = "last_number"
    """The last number of the response equals the answer."""
    gsm8k = "gsm8k"
    """The text after the last `#### ` of the last 300 characters, as in the published GSM8K runs."""
    math = "math"
    """The last box, compared as text after Hendrycks' normalization, as in the published MATH runs."""
    dapo = "dapo"
    """The last `Answer:` line of the last 300 characters, as in the published DAPO runs; scores 1 or -1."""


@dataclass
class SamplingConfig:
    temperature: float = 1.0
    """Above 0 in training."""
    top_p: float = 1.0
    """Only the most probable tokens that together have this probability are drawn; 1 in training."""
    top_k: int = -1
    """Only so many of the most probable tokens are drawn; -1: all, as in training."""
    max_new_tokens: int = MISSING
    """Longest answer; it is cut there."""
    stop: list[str] = field(default_factory=list)
    """Texts after which an answer ends, besides the model's own end of text."""


@dataclass
class EvalSamplingConfig(SamplingConfig):
    temperature: float = 0.0
    """0: greedy."""
    samples_per_problem: int = 1
    """Answers to each problem; above 1, pass@k and maj@k are computed, too."""


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
    """Longest prompt, after the template; `overlong` says what happens to a longer one."""
    overlong: Overlong = Overlong.error
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    """Explicit arguments of the chat template, for example {enable_thinking: false}."""
    epochs: int = 1
    """Passes over the training prompts; ignored where `steps` is set."""
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    """Of training rollouts."""
    eval_sampling: EvalSamplingConfig = field(default_factory=EvalSamplingConfig)
    train_limit: int | None = None
    """Training rows used, the first ones; None: all."""
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


MADE = "made"
"""A value of `DataConfig.path`."""


@dataclass
class DataConfig:
    """Where a published data set is read from."""

    path: str = MISSING
    """Hub id, a local folder in the published layout, or `made`: a few rows made by code, for smoke runs."""
    revision: str | None = None
    """Of the hub. None: whatever it serves; scripts/fetch_assets.py prints what that was."""


@dataclass
class DataSetsConfig:
    """The data sets that `task.train` and `task.evaluate` may name."""

    gsm8k: DataConfig = field(default_factory=lambda: DataConfig("openai/gsm8k"))
    math: DataConfig = field(default_factory=lambda: DataConfig("DigitalLearningGmbH/MATH-lighteval"))
    math_500: DataConfig = field(default_factory=lambda: DataConfig("HuggingFaceH4/MATH-500"))
    dapo_math: DataConfig = field(default_factory=lambda: DataConfig("BytedTsinghua-SIA/DAPO-Math-17k"))
    dapo_aime_2024: DataConfig = field(default_factory=lambda: DataConfig("BytedTsinghua-SIA/AIME-2024"))
    aime_2024: DataConfig = field(default_factory=lambda: DataConfig("HuggingFaceH4/aime_2024"))
    aime_2025: DataConfig = field(default_factory=lambda: DataConfig("math-ai/aime25"))
    amc23: DataConfig = field(default_factory=lambda: DataConfig("math-ai/amc23"))
    geometry3k: DataConfig = field(default_factory=lambda: DataConfig("hiyouga/geometry3k"))


@dataclass
class MathematicsConfig(TaskConfig):
    """Mathematical problems with a final answer, from published data sets."""

    _target_: str = "rl.tasks.mathematics.Mathematics"
    train: list[str] = MISSING
    """Names in `data` whose training rows are trained on, one after the other; empty: the task is for mode=eval."""
    evaluate: list[str] = MISSING
    """Names in `data` whose held-out problems are evaluated, each a set of its own."""
    scoring: Scoring = Scoring.published
    deduplicate: bool = False
    """Train on each distinct problem once an epoch. A deviation where the published run trained on repeated rows."""
    data: DataSetsConfig = field(default_factory=DataSetsConfig)


@dataclass
class ReasoningGymConfig(TaskConfig):
    """Problems that a generator of the package reasoning-gym makes."""

    _target_: str = "rl.tasks.reasoning_gym.ReasoningGym"
    generator: str = MISSING
    """For example `chain_sum`; an unknown one is refused with the nearest names."""
    params: dict[str, Any] = field(default_factory=dict)
    """Settings of the generator, but for size and seed."""
    train_size: int = 10_000
    """Training problems."""
    train_seed: int = 1
    """Of the generator, for training problems."""
    eval_size: int = 200
    """Held-out problems. One that is also among the training problems is taken out of those."""
    eval_seed: int = 2
    """Of the generator, for held-out problems."""


@dataclass
class JsonlConfig(TaskConfig):
    """A person's own problems: one JSON object a line."""

    _target_: str = "rl.tasks.jsonl.Jsonl"
    path: str = MISSING
    """File of training rows."""
    eval_path: str | None = None
    """File of held-out rows; None: no evaluation."""
    prompt_key: str = "prompt"
    """Column of the problem."""
    answer_key: str = "answer"
    """Column of the right answer."""
    source_key: str | None = None
    """Column that says where a row comes from: held-out rows are evaluated apart by it. None: all together."""
    rule: AnswerRule = AnswerRule.equivalence
