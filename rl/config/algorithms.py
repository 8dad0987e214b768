"""Settings of the algorithms: one class each, so that a setting of another algorithm is an error."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from omegaconf import MISSING


class OldLogprobs(Enum):
    """Where the log-probs in the denominator of the policy ratio come from."""

    trainer = "trainer"
    """A pass of the trainer before the first update of a step."""
    rollout = "rollout"
    """The engine's own, as sampled: no extra pass, and staleness is part of the ratio (bypass mode)."""


class KlEstimator(Enum):
    """Of KL(policy, reference), from one sampled token (http://joschu.net/blog/kl-approx.html). x = policy - reference
    log-prob."""

    k1 = "k1"
    """x"""
    k2 = "k2"
    """x^2 / 2"""
    k3 = "k3"
    """exp(-x) - 1 + x"""


class KlGradient(Enum):
    """What a KL term of the loss pulls with; its value is that of the estimator either way."""

    estimator = "estimator"
    """The derivative of the estimator itself: for k1 zero on average, for k3 that of KL(reference, policy)."""
    unbiased = "unbiased"
    """The derivative of k2, which on samples of the policy is that of KL(policy, reference) on average."""


class KlPlacement(Enum):
    """Where the KL to the initial policy counts."""

    loss = "loss"
    reward = "reward"
    """Subtracted from the reward before advantages, from the log-probs sampled with; no gradient of its own."""


class Aggregation(Enum):
    """How losses of tokens become one number. Every count is of the whole update: all ranks and micro-batches."""

    token_mean = "token_mean"
    """Sum over tokens / number of tokens (verl's reading of DAPO)."""
    prompt_mean_token_mean = "prompt_mean_token_mean"
    """Token mean of each group, then the mean over groups (DAPO's equation 8 as printed)."""
    seq_mean_token_mean = "seq_mean_token_mean"
    """Token mean of each answer, then the mean over answers (GRPO's paper)."""
    seq_mean_token_sum = "seq_mean_token_sum"
    """Token sum of each answer, then the mean over answers (REINFORCE over whole answers)."""
    seq_mean_token_sum_norm = "seq_mean_token_sum_norm"
    """The same divided by the constant `horizon` (Dr. GRPO)."""


class AdvantageScale(Enum):
    """What GRPO divides reward minus group mean by."""

    group = "group"
    """Sample standard deviation (n - 1) of the group's rewards, plus 1e-6."""
    batch = "batch"
    """That of all rewards of the step, plus 1e-6."""
    none = "none"


class WeightLevel(Enum):
    """What one importance weight is of. r is the trainer's policy over the engine's, token by token."""

    none = "none"
    """Every token counts 1; answers may still be rejected by their geometric mean."""
    token = "token"
    """Each token's own r."""
    sequence = "sequence"
    """The product of r over an answer, on each of its tokens."""


class Outside(Enum):
    """What becomes of a weight outside its bounds."""

    truncate = "truncate"
    """It becomes the upper bound (truncated importance sampling)."""
    mask = "mask"
    """It becomes 0 (masked importance sampling; with tokens and two bounds, IcePop)."""


@dataclass
class CorrectionConfig:
    """Importance weights for what the engine samples with but the trainer would not: other kernels, other dtypes, older
    weights. A token of weight 0 stays in every denominator, so that rejecting much makes a small update."""

    weights: WeightLevel = WeightLevel.none
    outside: Outside = Outside.truncate
    low: float = 0.0
    """Lower bound of a weight; only with outside=mask."""
    high: float = 2.0
    """Upper bound of a weight."""
    geometric_low: float | None = None
    """Answers whose geometric mean of r is below get weight 0. None: no such bound."""
    geometric_high: float | None = None
    """Likewise above."""

    @property
    def is_active(self) -> bool:
        """Whether any weight can differ from 1."""
        has_bounds = self.geometric_low is not None or self.geometric_high is not None
        return has_bounds or self.weights is not WeightLevel.none


@dataclass
class AlgorithmConfig:
    _target_: str = MISSING
    prompts_per_step: int = MISSING
    """P: prompts whose groups make one rollout batch."""
    group_size: int = MISSING
    """G: answers sampled per prompt."""
    prompts_per_mini_batch: int | None = None
    """Prompts per optimizer update; divides prompts_per_step. None: all of them, one update a step."""
    old_logprobs: OldLogprobs = OldLogprobs.trainer
    kl_coef: float = 0.0
    """Weight of the KL to the frozen initial policy. 0: no reference policy is kept."""
    kl_estimator: KlEstimator = KlEstimator.k3
    kl_in: KlPlacement = KlPlacement.loss
    kl_gradient: KlGradient = KlGradient.estimator
    """Of a KL in the loss."""
    entropy_coef: float = 0.0
    """Weight of the mean entropy of the policy, at the sampling temperature, subtracted from the loss."""
    correction: CorrectionConfig = field(default_factory=CorrectionConfig)

    @property
    def updates_per_step(self) -> int:
        return self.prompts_per_step // (self.prompts_per_mini_batch or self.prompts_per_step)


@dataclass
class TokenLossConfig(AlgorithmConfig):
    aggregation: Aggregation = Aggregation.token_mean
    horizon: int | None = None
    """Tokens that seq_mean_token_sum_norm divides by, and no other aggregation."""


@dataclass
class ClippedConfig(TokenLossConfig):
    clip_low: float = 0.2
    """Lower clip: ratio >= 1 - clip_low."""
    clip_high: float = 0.2
    """Upper clip: ratio <= 1 + clip_high."""
    dual_clip: float | None = None
    """Where the advantage is negative the ratio counts as this at most (arXiv:1912.09729); above 1. None: no bound."""


@dataclass
class GRPOConfig(ClippedConfig):
    """Group relative policy optimization (arXiv:2402.03300) with the token-mean loss of DAPO (arXiv:2503.14476)."""

    _target_: str = "rl.algorithms.grpo.GRPO"
    advantage_scale: AdvantageScale = AdvantageScale.group


@dataclass
class DrGRPOConfig(ClippedConfig):
    """GRPO without two biases (arXiv:2503.20783): no division by the group's deviation nor by the answer's length."""

    _target_: str = "rl.algorithms.dr_grpo.DrGRPO"
    aggregation: Aggregation = Aggregation.seq_mean_token_sum_norm


@dataclass
class DAPOConfig(ClippedConfig):
    """Decoupled clip and dynamic sampling policy optimization (arXiv:2503.14476)."""

    _target_: str = "rl.algorithms.dapo.DAPO"
    clip_high: float = 0.28
    dynamic_sampling: bool = True
    """Groups whose answers are all right or all wrong are replaced by others."""
    max_sampled_batches: int = 10
    """The run stops where so many times prompts_per_step groups in a row did not give one batch to train on."""
    response_limit: int = MISSING
    """Tokens at which answers are cut: task.sampling.max_new_tokens."""
    overlong_buffer: int | None = None
    """The last so many tokens before response_limit cost reward, linearly more. 0: none do. None: a fifth of
    response_limit (the paper: 4,096 of 20,480)."""
    overlong_penalty: float = 1.0
    """Reward lost by an answer of response_limit tokens."""

    @property
    def overlong_tokens(self) -> int:
        return self.response_limit // 5 if self.overlong_buffer is None else self.overlong_buffer


@dataclass
class RLOOConfig(TokenLossConfig):
    """REINFORCE with a leave-one-out baseline (arXiv:2402.14740)."""

    _target_: str = "rl.algorithms.rloo.RLOO"
    aggregation: Aggregation = Aggregation.seq_mean_token_sum
    kl_estimator: KlEstimator = KlEstimator.k1
    kl_in: KlPlacement = KlPlacement.reward


@dataclass
class ReinforcePPConfig(ClippedConfig):
    """REINFORCE++ (arXiv:2501.03262): no baseline but the mean of the batch, over which advantages are normalized."""

    _target_: str = "rl.algorithms.reinforce_pp.ReinforcePP"
    gamma: float = 1.0
    """Discount of a reward per later token that the policy sampled."""
    kl_estimator: KlEstimator = KlEstimator.k1
    kl_in: KlPlacement = KlPlacement.reward


@dataclass
class ReinforcePPBaselineConfig(ClippedConfig):
    """REINFORCE++ with the group's mean as baseline (arXiv:2501.03262)."""

    _target_: str = "rl.algorithms.reinforce_pp.ReinforcePPBaseline"
    kl_estimator: KlEstimator = KlEstimator.k2


@dataclass
class GSPOConfig(AlgorithmConfig):
    """Group sequence policy optimization (arXiv:2507.18071): one ratio for a whole answer."""

    _target_: str = "rl.algorithms.gspo.GSPO"
    clip_low: float = 3e-4
    """Lower clip of the geometric mean of the token ratios; the paper's scale."""
    clip_high: float = 4e-4
    """Upper clip, likewise."""


@dataclass
class CISPOConfig(TokenLossConfig):
    """Clipped importance weights instead of clipped updates (MiniMax-M1, arXiv:2506.13585)."""

    _target_: str = "rl.algorithms.cispo.CISPO"
    old_logprobs: OldLogprobs = OldLogprobs.rollout
    weight_low: float = 0.0
    """1 - eps_low of the paper, which sets no lower bound."""
    weight_high: float = 5.0
    """1 + eps_high."""
