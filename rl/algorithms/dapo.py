"""Decoupled clip and dynamic sampling policy optimization (DAPO, arXiv:2503.14476)."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from rl.algorithms.advantages import Rewards, group_scaled
from rl.algorithms.grpo import ClippedPolicyGradient
from rl.config.algorithms import DAPOConfig
from rl.config.schema import ConfigError
from rl.types import Rollout, RolloutGroup


class NothingToLearn(RuntimeError):
    """Dynamic sampling finds too few groups that teach something."""


class DAPO(ClippedPolicyGradient[DAPOConfig]):
    """Equation 8 of the paper: GRPO's advantages, a wider upper clip, a token mean, no KL, shaping of overlong answers
    and dynamic sampling. The token mean is over the whole update, as in verl's code; the equation as printed is
    `aggregation=prompt_mean_token_mean`.
    """

    def __init__(self, config: DAPOConfig):
        super().__init__(config)
        self._judged: deque[float] = deque(maxlen=config.max_sampled_batches * config.prompts_per_step)
        """Share of right answers of the latest groups."""

    @classmethod
    def check(cls, config: DAPOConfig) -> None:
        super().check(config)
        if not 0 <= config.overlong_tokens <= config.response_limit:
            raise ConfigError(
                f"algorithm.overlong_buffer={config.overlong_tokens} must be between 0 and algorithm.response_limit="
                f"{config.response_limit}: it is the last part of an answer. Lower it, or use 0 for no shaping."
            )

    def shape_reward(self, rollout: Rollout) -> float:
        """Equation 13: nothing is lost up to response_limit - buffer tokens, overlong_penalty at response_limit."""
        buffer = self.config.overlong_tokens
        if buffer == 0:
            return rollout.reward
        excess = rollout.num_response_tokens - (self.config.response_limit - buffer)
        return rollout.reward - self.config.overlong_penalty * min(max(excess, 0) / buffer, 1.0)

    def keep(self, group: RolloutGroup) -> bool:
        """Equation 11: some answer is right and some is wrong, whatever shaping makes of their rewards."""
        if not self.config.dynamic_sampling:
            return True
        right = [rollout.reward_parts["correct"] for rollout in group.rollouts]
        self._judged.append(sum(right) / len(right))
        self._raise_if_exhausted()
        return 0 < sum(right) < len(right)

    def advantages(self, rewards: Sequence[Rewards]) -> list[Rewards]:
        return [group_scaled(of_group) for of_group in rewards]

    def _raise_if_exhausted(self) -> None:
        """The paper samples on without an end; verl's code stops at 10 batches, too."""
        judged, wanted = self._judged, self.config.prompts_per_step
        kept = sum(0 < share < 1 for share in judged)
        if len(judged) < (judged.maxlen or 0) or kept >= wanted:
            return
        counts = {
            "all wrong": sum(share == 0 for share in judged),
            "up to a half right": sum(0 < share <= 0.5 for share in judged),
            "more than a half": sum(0.5 < share < 1 for share in judged),
            "all right": sum(share == 1 for share in judged),
        }
        table = "\n".join(f"  {name:<20} {count:>6}" for name, count in counts.items())
        raise NothingToLearn(
            f"dynamic sampling kept {kept} of the last {len(judged)} groups, and a batch needs {wanted} "
            f"(algorithm.max_sampled_batches={self.config.max_sampled_batches} times algorithm.prompts_per_step). "
            f"Groups by share of right answers:\n{table}\nUse easier or harder prompts, a larger "
            "algorithm.group_size, or algorithm.dynamic_sampling=false."
        )
