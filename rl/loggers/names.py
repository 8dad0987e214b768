"""Every metric key of a run: unit, meaning, healthy range, and how one step's many values become one.

A part `<name>` of a key stands for one word: the name of a reward part, a benchmark, a phase. The run's logger refuses
a key that is not here. In metrics.jsonl a value that does not exist (a mean over nothing, say) is null.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache


class Reduction(StrEnum):
    """How the values of one step (over rollouts, tokens, updates or ranks) become the one that is logged."""

    MEAN = "mean"
    MAX = "max"
    SUM = "sum"
    LAST = "last"
    RATE = "rate"
    """Something counted over the step's wall time, `time/step_s`: of several steps, all of it over all of theirs."""


@dataclass(frozen=True, slots=True)
class Metric:
    key: str
    unit: str
    """Empty: a plain number."""
    meaning: str
    healthy: tuple[float, float] | None = None
    """Lowest and highest value, both included, of a run that is well; None: no general statement."""
    reduction: Reduction = Reduction.MEAN

    @property
    def is_pattern(self) -> bool:
        return "<" in self.key

    def matches(self, key: str) -> bool:
        return _regex(self.key).fullmatch(key) is not None


_ALLOWED = r"[A-Za-z0-9_@.+=-]+"
_FREE_PREFIXES = ("reward/part/", "rollout/dropped/")

AXES = {"step": "steps", "prompts_trained": "prompts trained on", "tokens_trained": "response tokens trained on"}
"""Keys that curves can be drawn against -> what they count. Curves of runs whose steps hold different data, such as a
colocated and an asynchronous one, are compared against prompts."""
_OF_MACHINES = (
    "time/",
    "memory/",
    "throughput/",
    "plan/",
    "publish/",
    "engine/",
    "canary/",
    "sentinel/",
    "policy_version",
    *AXES,
)

# The first match counts, so a narrower pattern stands before a wider one.
METRICS: tuple[Metric, ...] = (
    Metric("reward/mean", "", "raw reward, before shaping, over the rollouts that were trained on"),
    Metric("reward/std", "", "standard deviation of the raw reward over all rollouts of the batch"),
    Metric("reward/shaped_mean", "", "reward that advantages come from: with an overlong penalty, before any KL"),
    Metric(
        "reward/kl_ref", "nats", "k1 estimate of KL(policy that sampled, reference) over loss tokens, with kl_in=reward"
    ),
    Metric("reward/correct", "fraction", "rollouts with the right outcome, free of shaping", (0.0, 1.0)),
    Metric("reward/part/<name>", "", "one named part of the reward"),
    Metric(
        "reward/uniform_group_fraction",
        "fraction",
        "groups whose rewards are all equal, so that they teach nothing",
        (0.0, 0.95),
    ),
    Metric("rollout/response_tokens_mean", "tokens", "response length over the rollouts that were trained on"),
    Metric("rollout/response_tokens_max", "tokens", "longest response", reduction=Reduction.MAX),
    Metric("rollout/truncated_fraction", "fraction", "responses cut at the length limit", (0.0, 0.5)),
    Metric("rollout/duplicate_fraction", "fraction", "responses that repeat another one of their group to the token"),
    Metric(
        "rollout/mixed_version_fraction",
        "fraction",
        "responses of tokens from more than one version: a publish came while they were sampled",
        (0.0, 1.0),
    ),
    Metric(
        "rollout/version_spread_max",
        "versions",
        "newest minus oldest version of a response's tokens, of the widest response",
        reduction=Reduction.MAX,
    ),
    Metric("rollout/restarted_fraction", "fraction", "responses that a publish made start anew", (0.0, 1.0)),
    Metric(
        "rollout/discarded_tokens",
        "tokens",
        "what the batch's restarted responses had before and lost",
        reduction=Reduction.SUM,
    ),
    Metric(
        "rollout/nonfinite_logprobs",
        "tokens",
        "loss tokens whose log-prob the engine did not give as a number; they are not trained on",
        (0.0, 0.0),
        Reduction.SUM,
    ),
    Metric(
        "rollout/tokens_per_s",
        "tokens/s",
        "response tokens of the batch over the wall time of the step",
        reduction=Reduction.RATE,
    ),
    Metric(
        "throughput/prompts_per_s",
        "prompts/s",
        "prompts trained on over the wall time of the step",
        reduction=Reduction.RATE,
    ),
    Metric(
        "throughput/tokens_per_s_per_gpu",
        "tokens/s/GPU",
        "tokens of prompts and answers over the wall time of the step and all GPUs of trainer and engines",
        reduction=Reduction.RATE,
    ),
    Metric(
        "throughput/tokens_per_s_per_training_gpu",
        "tokens/s/GPU",
        "the same over the GPUs of the trainer alone",
        reduction=Reduction.RATE,
    ),
    Metric(
        "throughput/mfu",
        "fraction",
        "model FLOPs of the updates, 3 x forward, over the trainer's peak bf16 rate in their time; null where "
        "hardware.bf16_tflops is not known",
        healthy=(0.0, 1.0),
    ),
    Metric("rollout/groups_started", "groups", "groups admitted since the run began", reduction=Reduction.LAST),
    Metric("rollout/groups_trained", "groups", "groups trained on since the run began", reduction=Reduction.LAST),
    Metric(
        "rollout/groups_in_flight",
        "groups",
        "groups started and neither trained on nor dropped: groups_started - groups_trained - all of dropped/",
        reduction=Reduction.LAST,
    ),
    Metric(
        "rollout/surplus_groups",
        "groups",
        "groups that stream.oversample started beyond the step's batch, to start anew on the next weights",
        reduction=Reduction.SUM,
    ),
    Metric(
        "rollout/retried_groups",
        "groups",
        "groups asked for again because the engine, which lives, failed on a request of theirs, in this step",
        (0.0, 0.0),
        reduction=Reduction.SUM,
    ),
    Metric(
        "rollout/dropped/<reason>",
        "groups",
        "groups dropped for this reason since the run began",
        reduction=Reduction.LAST,
    ),
    Metric("train/loss", "", "loss of the update, over the updates of the step"),
    Metric("train/grad_norm", "", "global gradient norm before clipping, over the updates of the step", (0.0, 100.0)),
    Metric("train/lr", "", "learning rate of the step's last update", reduction=Reduction.LAST),
    Metric(
        "train/entropy",
        "nats",
        "entropy of the policy over loss tokens, at the sampling temperature",
        (1e-3, math.inf),
    ),
    Metric("train/ratio_clipped_low_fraction", "fraction", "loss tokens clipped at 1 - clip_low", (0.0, 0.5)),
    Metric("train/ratio_clipped_high_fraction", "fraction", "loss tokens clipped at 1 + clip_high", (0.0, 0.5)),
    Metric("train/ratio_clipped_dual_fraction", "fraction", "loss tokens held at dual_clip", (0.0, 0.1)),
    Metric("train/sequence_clipped_low_fraction", "fraction", "answers clipped at 1 - clip_low, of GSPO", (0.0, 0.5)),
    Metric("train/sequence_clipped_high_fraction", "fraction", "answers clipped at 1 + clip_high, of GSPO", (0.0, 0.5)),
    Metric(
        "train/weight_clipped_low_fraction", "fraction", "loss tokens of a ratio below CISPO's weight_low", (0.0, 0.5)
    ),
    Metric("train/weight_clipped_high_fraction", "fraction", "loss tokens of a ratio above weight_high", (0.0, 0.5)),
    Metric("train/ratio_max", "", "largest policy ratio of a loss token", reduction=Reduction.MAX),
    Metric("correction/weight_mean", "", "importance weight after bounds, over loss tokens", (0.5, 2.0)),
    Metric("correction/weight_max", "", "the largest of them", reduction=Reduction.MAX),
    Metric("correction/outside_fraction", "fraction", "loss tokens whose raw weight is outside its bounds", (0.0, 0.2)),
    Metric("correction/outside_sequence_fraction", "fraction", "answers with such a token", (0.0, 1.0)),
    Metric("correction/rejected_sequence_fraction", "fraction", "answers outside the geometric bounds", (0.0, 0.5)),
    Metric("train/approx_kl", "nats", "k3 estimate of KL(old policy, policy) over loss tokens", (-1e-6, 1.0)),
    Metric("train/kl_ref", "nats", "estimate of the KL to the reference policy over loss tokens"),
    Metric(
        "train/kl_bounded_fraction",
        "fraction",
        "loss tokens whose log-ratio to the reference is past +-20, where k3 is bounded",
        (0.0, 0.0),
    ),
    Metric(
        "train/old_logprob_difference_max",
        "nats",
        "largest difference between the pass for old log-probs and the training pass on equal weights; null: no pass",
        reduction=Reduction.MAX,
    ),
    Metric(
        "sentinel/padding_leak",
        "nats",
        "change of a log-prob when its neighbors in the pack change, found at the first step; null: masked values leak",
        reduction=Reduction.MAX,
    ),
    Metric("sentinel/trips", "sentinels", "values past their limit, see `sentinels`", (0.0, 0.0)),
    Metric(
        "train/nonfinite_logprobs",
        "tokens",
        "loss tokens whose old or reference log-prob is not finite, which are not trained on, or whose own is not, so "
        "that the update is skipped",
        (0.0, 0.0),
        Reduction.SUM,
    ),
    Metric(
        "train/skipped_updates",
        "updates",
        "updates left out for a gradient that is not finite",
        (0.0, 0.0),
        Reduction.SUM,
    ),
    Metric(
        "mismatch/kl_k3", "nats", "k3 estimate of KL(engine, trainer) of equal weights, over loss tokens", (-1e-6, 0.01)
    ),
    Metric(
        "mismatch/logprob_diff_max",
        "nats",
        "largest |trainer - engine| log-prob of a loss token",
        reduction=Reduction.MAX,
    ),
    Metric(
        "offpolicy/kl_k3", "nats", "k3 estimate of KL(policy that sampled, policy before the step) over loss tokens"
    ),
    Metric(
        "offpolicy/effective_sample_fraction",
        "fraction",
        "(sum of ratios)^2 / (tokens x sum of squared ratios), of the policy before the step over the one that sampled",
        (0.5, 1.0),
    ),
    Metric(
        "canary/logprob_difference_mean",
        "nats",
        "|trainer - engine| log-prob of the tokens of the canary's prompts, on the weights published last",
    ),
    Metric("canary/logprob_difference_max", "nats", "the same, of the token with the largest", reduction=Reduction.MAX),
    Metric("canary/kl_k3", "nats", "k3 estimate of KL(engine, trainer) over the same tokens", (-1e-6, 0.01)),
    Metric(
        "canary/trips", "", "1 if the mean difference was past canary.max_logprob_difference", (0.0, 0.0), Reduction.SUM
    ),
    Metric(
        "canary/differing_parameters",
        "parameters",
        "after a trip: engine parameters that publishing the same weights again changed",
        reduction=Reduction.LAST,
    ),
    Metric(
        "canary/skipped_rollouts",
        "rollouts",
        "answers that came too late, failed, or are not of the version to compare",
        (0.0, 0.0),
        Reduction.SUM,
    ),
    Metric("staleness/mean", "versions", "trainer version minus the rollout's oldest version, over rollouts"),
    Metric("staleness/max", "versions", "the same, of the stalest rollout", reduction=Reduction.MAX),
    Metric("staleness/count_<versions>", "rollouts", "rollouts of the batch by staleness", reduction=Reduction.SUM),
    Metric("policy_version", "", "version of the trainer's weights after the step", reduction=Reduction.LAST),
    Metric(
        "engine/policy_version", "", "version that the engine itself reports after the step", reduction=Reduction.LAST
    ),
    Metric(
        "engine/redispatched_groups",
        "groups",
        "groups that another engine had to sample again because theirs died, since the run began or was resumed",
        (0.0, 0.0),
        Reduction.LAST,
    ),
    Metric(
        "engine/replica_restarts",
        "restarts",
        "engines that died and were started again, since the run began or was resumed",
        (0.0, 0.0),
        Reduction.LAST,
    ),
    Metric("prompts_trained", "prompts", "prompts trained on since the run began", reduction=Reduction.LAST),
    Metric("tokens_trained", "tokens", "response tokens trained on since the run began", reduction=Reduction.LAST),
    Metric(
        "time/overlap_fraction", "fraction", "share of the step in which trainer and engine were both busy", (0.0, 1.0)
    ),
    Metric("time/engine_busy_fraction", "fraction", "share of the step in which the engine had requests", (0.0, 1.0)),
    Metric("time/<phase>_s", "s", "wall time of a phase; `step` is the whole step", reduction=Reduction.SUM),
    Metric("publish/bytes", "bytes", "weights sent to the engine", reduction=Reduction.SUM),
    Metric(
        "publish/pause_s",
        "s",
        "part of the publish in which the trainer waits until the engine's requests have finished or stopped",
        reduction=Reduction.SUM,
    ),
    Metric("memory/rss_gib", "GiB", "resident memory of the driver process", reduction=Reduction.MAX),
    Metric(
        "memory/gpu_peak_gib",
        "GiB",
        "peak memory that the allocator of a trainer rank held in the step, of all ranks the largest",
        reduction=Reduction.MAX,
    ),
    Metric(
        "memory/gpu_<phase>_gib",
        "GiB",
        "most memory in use on the fullest GPU of the trainer in a phase, by all processes; in a part of `train`, as "
        "`forward_backward`: that the allocator of a rank held",
        reduction=Reduction.MAX,
    ),
    Metric(
        "memory/<phase>_gib",
        "GiB",
        "most memory of the driver process that was resident in a phase",
        reduction=Reduction.MAX,
    ),
    Metric("plan/time/<phase>_s", "s", "what the plan predicts of `time/<phase>_s`; a publish counts whole"),
    Metric("plan/memory/<what>_gib", "GiB", "what the plan predicts of `memory/<what>_gib`", reduction=Reduction.MAX),
    Metric("published/<claim>", "", "constant: what the experiment's source claims; for trackers and reports only"),
    Metric("eval/<benchmark>/truncated_fraction", "fraction", "answers cut at the length limit", (0.0, 0.5)),
    Metric("eval/<benchmark>/errors", "answers", "answers whose grader failed", (0.0, 0.0), Reduction.SUM),
    Metric("eval/<benchmark>/<metric>/stderr", "fraction", "standard error of the metric, clustered by problem"),
    Metric("eval/<benchmark>/<rule>/<metric>/stderr", "fraction", "likewise, of an accuracy by another rule"),
    Metric("eval/<benchmark>/pass@<k>", "fraction", "problems solved by one of k samples, unbiased", (0.0, 1.0)),
    Metric("eval/<benchmark>/maj@<k>", "fraction", "problems whose most frequent answer of k is right", (0.0, 1.0)),
    Metric(
        "eval/<benchmark>/<rule>/<metric>",
        "fraction",
        "accuracy by a rule by its name, `published` or `equivalence`, whichever is the reward",
        (0.0, 1.0),
    ),
    Metric("eval/<benchmark>/<metric>", "fraction", "accuracy on held-out problems, for example `greedy`", (0.0, 1.0)),
)


@lru_cache
def _regex(key: str) -> re.Pattern[str]:
    parts = re.split(r"<\w+>", key)
    return re.compile(_ALLOWED.join(re.escape(part) for part in parts))


@lru_cache(maxsize=4096)
def find(key: str) -> Metric | None:
    """The entry for a key; None if it is not listed."""
    return next((metric for metric in METRICS if metric.matches(key)), None)


def unlisted(keys: Iterable[str]) -> list[str]:
    """The keys that the table does not hold."""
    return [key for key in keys if find(key) is None]


def axis_of(key: str) -> str:
    """What a metric is drawn against unless a person chooses: prompts for what the policy does, steps for the rest."""
    return "step" if key.startswith(_OF_MACHINES) or key == "rollout/tokens_per_s" else "prompts_trained"


def is_score(key: str) -> bool:
    """Whether larger is better beyond doubt: rewards and held-out accuracies."""
    if key in ("reward/mean", "reward/correct"):
        return True
    leaf = key.rpartition("/")[2]
    return key.startswith("eval/") and leaf not in ("stderr", "truncated_fraction", "errors")


def clean_key(key: str) -> str:
    """Replaces characters that a tracker may refuse, for example those of a user's reward part or benchmark, by `_`."""
    for prefix in _FREE_PREFIXES:
        if key.startswith(prefix):
            key = prefix + key.removeprefix(prefix).replace("/", "_")
    return re.sub(r"[^A-Za-z0-9_@.+=/-]", "_", key)


def is_healthy(key: str, value: float) -> bool:
    """False only for a value outside the range that the table states."""
    metric = find(key)
    if metric is None or metric.healthy is None:
        return True
    low, high = metric.healthy
    return low <= value <= high
