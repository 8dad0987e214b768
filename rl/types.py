"""The values that travel through one training step. Arrays are numpy, so that they cross processes without torch.

Legend: P groups per step, G rollouts per group, L tokens of one rollout (prompt and response, ragged), T packed tokens
of one micro-batch, n sequences packed in it. Log-probabilities are in nats.

Alignment rule, stated once: `x[i]` describes token i itself given the tokens before it; position 0 holds 0.0. Only
`rl/trainer/logprobs.py` shifts.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]
FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]
Number = TypeVar("Number", bound=np.generic)


class FinishReason(StrEnum):
    """Why an engine stopped sampling. Only `LENGTH` means truncated, whatever the last token is."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How an engine samples. `temperature` 0 means greedy; `top_k` -1 and `top_p` 1.0 mean no truncation."""

    temperature: float
    max_new_tokens: int
    seed: int
    """Root of this stream of samples; sample i of group g draws from `sample_seed(seed, g, i)`."""
    top_p: float = 1.0
    top_k: int = -1
    stop: tuple[str, ...] = ()
    """Stop strings; the one that matched stays in the response."""

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0


def sample_seed(seed: int, group_id: int, index: int) -> int:
    """Seed of one sample, from its identity alone: a re-dispatched request on any replica asks for the same sample."""
    digest = hashlib.blake2b(f"{seed}/{group_id}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1  # engines take signed 64-bit seeds


@dataclass(frozen=True, slots=True)
class Prompt:
    """One problem, rendered once: engine, trainer and evaluator all use these token ids."""

    prompt_id: str
    """`<source>:<row>`, stable over runs."""
    messages: tuple[dict[str, Any], ...]
    token_ids: IntArray
    """[L_p], chat template applied, image placeholders expanded as the model's processor expands them."""
    answer: str
    task: str
    """Data set or evaluation set that the problem is of."""
    images: tuple[bytes, ...] = ()
    """Each a file as the data set holds it (PNG, JPEG), in the order of their placeholders. Empty for text."""
    mm_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """What the model's processor makes of `images` (pixel_values, image_grid_thw); empty for text. It may be made only
    where it is read: pixels are some 100 times as large as their file."""
    position_ids: IntArray | None = None
    """[3, L_p] multimodal rotary positions of `token_ids`; a response goes on after the largest. None: 0 to L_p - 1."""


@dataclass(frozen=True, slots=True)
class RenderedWithImages:
    """What rendering adds to a prompt with images; see the fields of `Prompt`."""

    token_ids: IntArray
    position_ids: IntArray
    mm_inputs: Mapping[str, NDArray[Any]]


@dataclass(slots=True)
class Rollout:
    """One sampled answer. Mutable only until it is graded."""

    group_id: int
    index: int
    """0..G-1, the sample's place in its group."""
    token_ids: IntArray
    """[L], prompt then response."""
    loss_mask: BoolArray
    """[L], True exactly on tokens that the policy sampled."""
    rollout_logprobs: FloatArray
    """[L], at the temperature sampled with; 0 where `loss_mask` is False."""
    temperature: float
    policy_versions: IntArray
    """[L], of the weights that sampled each token; -1 on tokens that no policy sampled."""
    finish_reason: FinishReason
    text: str = ""
    """Decoded response, special tokens kept out."""
    num_discarded_tokens: int = 0
    """Sampled for this answer and thrown away, because a pause made it start anew."""
    reward: float = 0.0
    """Raw, before shaping."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    shaped_reward: float = 0.0
    advantage: float = 0.0
    """Of the whole answer; the mean of `token_advantages` where those differ."""
    token_advantages: FloatArray | None = None
    """[L], where tokens of the answer differ in it; None: `advantage` on every loss token."""
    ref_logprobs: FloatArray | None = None
    """[L] of the reference policy, where a KL is subtracted from the reward; 0 where `loss_mask` is False."""

    def __post_init__(self) -> None:
        arrays = (self.token_ids, self.loss_mask, self.rollout_logprobs, self.policy_versions)
        lengths = [len(array) for array in arrays]
        assert len(set(lengths)) == 1, f"the per-token arrays differ in length: {lengths}"

    @property
    def min_policy_version(self) -> int:
        oldest = int(self.policy_versions.astype(np.uint32).min())  # where -1 is the largest
        assert oldest <= self.max_policy_version, "no policy sampled a token of it"
        return oldest

    @property
    def max_policy_version(self) -> int:
        """Above the smallest only if new weights arrived while this rollout was in flight."""
        return int(self.policy_versions.max())

    @property
    def num_response_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))  # five times as fast as a sum

    @property
    def is_truncated(self) -> bool:
        return self.finish_reason is FinishReason.LENGTH


@dataclass(frozen=True, slots=True)
class Reward:
    """A grade. `value` is the raw score; `parts` names what it is made of; `correct` is the outcome free of shaping."""

    value: float
    correct: bool
    parts: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    """The final answer that the grader read: equal texts are votes for one answer. None: it read none, or none is
    asked for."""


class RewardError(Exception):
    """The grader itself failed. Never the same as a wrong answer: the group is dropped and counted."""

    drop_reason = "reward_error"
    """What the group is counted under."""


class RewardTimeoutError(RewardError):
    """The grader did not answer in time."""

    drop_reason = "reward_timeout"


@dataclass(slots=True)
class RolloutGroup:
    """The G rollouts of one prompt."""

    group_id: int
    """Position of the prompt in the run's endless order of prompts; equal ids mean equal prompts in every placement."""
    prompt: Prompt
    rollouts: list[Rollout]

    @property
    def rewards(self) -> NDArray[np.float64]:
        """[G], raw."""
        return np.array([rollout.reward for rollout in self.rollouts], dtype=np.float64)

    @property
    def is_uniform(self) -> bool:
        """True if every raw reward is the same, so that group-relative advantages vanish."""
        return all(rollout.reward == self.rollouts[0].reward for rollout in self.rollouts)

    @property
    def min_policy_version(self) -> int:
        return min(rollout.min_policy_version for rollout in self.rollouts)


@dataclass(slots=True)
class MicroBatch:
    """Sequences packed back to back for one forward and backward pass of one rank.

    What a rank can make itself (positions of text, values of a sequence on each of its tokens) does not travel.
    """

    token_ids: IntArray
    """[T]"""
    cu_seqlens: IntArray
    """[n+1], cumulative lengths starting at 0: sequence j is cu_seqlens[j]:cu_seqlens[j+1]."""
    prompt_lengths: IntArray
    """[n], tokens; an image placeholder after them, which the policy sampled itself, stands for no image."""
    loss_mask: BoolArray
    """[T]"""
    advantages: FloatArray
    """[T], the rollout's advantage on each of its loss tokens, 0 elsewhere."""
    rollout_logprobs: FloatArray
    """[T]"""
    temperatures: FloatArray
    """[n], what each sequence was sampled at."""
    staleness: IntArray
    """[n], trainer version minus the rollout's min_policy_version, in published versions."""
    group_loss_tokens: IntArray
    """[n], loss tokens of the sequence's whole group in this update."""
    old_logprobs: FloatArray | None = None
    """[T], filled by the trainer before the first update; None until then, or where they are not used."""
    ref_logprobs: FloatArray | None = None
    """[T], filled by the trainer; None without a reference policy."""
    position_ids: IntArray | None = None
    """[3, T], multimodal rotary positions; None: each sequence counts from 0."""
    mm_inputs: dict[str, NDArray[Any]] = field(default_factory=dict)

    @property
    def num_sequences(self) -> int:
        return len(self.cu_seqlens) - 1

    def places(self) -> IntArray:
        """[T], each token's in its own sequence, from 0."""
        return np.arange(len(self.token_ids), dtype=np.int32) - self.on_tokens(self.cu_seqlens[:-1])

    def is_prompt(self) -> BoolArray:
        """[T]"""
        return self.places() < self.on_tokens(self.prompt_lengths)

    def on_tokens(self, values: NDArray[Number]) -> NDArray[Number]:
        """[n], of sequences -> [T], of their tokens."""
        return np.repeat(values, np.diff(self.cu_seqlens))

    @property
    def num_loss_sequences(self) -> int:
        """With at least one loss token."""
        return int(np.logical_or.reduceat(self.loss_mask, self.cu_seqlens[:-1]).sum())


@dataclass(frozen=True, slots=True)
class LossCounts:
    """Denominators of one update: over all ranks and micro-batches, sequences that are not run included."""

    tokens: int
    """Loss tokens."""
    sequences: int
    """Sequences with at least one loss token."""
    groups: int
    """Groups with at least one loss token."""


@dataclass(slots=True)
class TrainBatch:
    """One rollout batch, split for the trainer."""

    mini_batches: list[list[list[MicroBatch]]]
    """[update][dp_rank][micro]; in an update every rank has equally many, filled up by all-masked ones."""
    loss_counts: list[LossCounts]
    """[update]"""
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class StepStats:
    """What one trainer step did."""

    num_updates: int
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    first_loss: float = math.nan
    """Of the first update, before any weight of the step changed, over all ranks."""


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """Memory of one device that is in use, by all processes, from a time on."""

    time: float
    """`time.time()`"""
    gib: float


@dataclass(frozen=True, slots=True)
class PublishStats:
    """What one weight publish cost."""

    version: int
    num_bytes: int
    seconds: float
    """Of the update, from its begin to its end."""
    pause_s: float = 0.0
    """Before that: until the engine's running requests had finished or stopped. 0 on an engine that was idle."""


@dataclass(frozen=True, slots=True)
class EvalResult:
    benchmark: str
    metric: str
    """For example `greedy`, `avg@32`, `pass@8`, `maj@32`, or `published/greedy` by another rule."""
    value: float
    """In [0, 1]."""
    stderr: float
    """Standard error, clustered by problem."""
    num_problems: int
    samples_per_problem: int
    sampling: Sampling
    policy_version: int
    truncated_fraction: float
    num_errors: int = 0
    """Answers whose grader failed; they are left out of `value`."""

    @property
    def key(self) -> str:
        return f"eval/{self.benchmark}/{self.metric}"


Grader = Callable[[Prompt, list[Rollout]], Awaitable[list[Reward]]]
"""Grades the rollouts of one prompt, in order: n in, n out. Raises `RewardError` if the grader itself fails."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """Held-out problems with their own sampling. `grader` is the task's own code, free of any training-only twist."""

    name: str
    prompts: list[Prompt]
    samples_per_problem: int
    sampling: Sampling
    grader: Grader
    accuracies: tuple[str, ...] = ()
    """Reward parts of 0 or 1 that judge by other rules than `Reward.correct`; each is an accuracy of its own."""
    votes: bool = False
    """The grader fills `Reward.answer`, so that a majority vote has a meaning."""
