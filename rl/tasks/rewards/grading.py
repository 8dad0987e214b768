"""From verdicts to rewards: the published score and mathematical equality of the same answers, side by side."""

from __future__ import annotations

from collections.abc import Sequence

from rl.config.tasks import Scoring
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.verdict import Case, Reason, Verdict
from rl.types import Reward, RewardError, Rollout

NOTHING = Verdict(0.0, correct=False, extracted=None, reason=Reason.NO_ANSWER)


async def grade_rollouts(
    checker: Checker, answer: str, rollouts: Sequence[Rollout], *, rule: str, scoring: Scoring
) -> list[Reward]:
    """Rewards of the rollouts of one prompt, in order, by the published `rule` or by equivalence.

    Both accuracies are among the parts, and `Reward.answer` is what the rule that counts took for the answer. Raises
    RewardError if the checker failed on any of them: the group is dropped and counted, and
    `stream.max_failed_fraction` of such groups stop the run. Nothing equals an empty answer, which one row of MATH has.
    """
    names = list(dict.fromkeys((rule, "equivalence") if answer.strip() else (rule,)))
    cases = [
        Case(rollout.text, answer, rule=name, is_truncated=rollout.is_truncated)
        for name in names
        for rollout in rollouts
    ]
    verdicts = await checker.grade(cases)
    failed = [verdict for verdict in verdicts if verdict.reason is Reason.ERROR]
    if failed:
        raise RewardError(f"the checker failed on {len(failed)} of {len(verdicts)} answers: {failed[0].detail}")
    published = verdicts[: len(rollouts)]
    equal = verdicts[-len(rollouts) :] if "equivalence" in names else [NOTHING] * len(rollouts)
    return [_reward(one, other, scoring) for one, other in zip(published, equal, strict=True)]


def _reward(published: Verdict, equal: Verdict, scoring: Scoring) -> Reward:
    counted = published if scoring is Scoring.published else equal
    is_over = Reason.TIMEOUT in (published.reason, equal.reason)
    parts = {
        "published": float(published.correct),
        "equivalence": float(equal.correct),
        "no_answer": float(counted.reason is Reason.NO_ANSWER),
        "timeout": float(is_over),
        **published.parts,
    }
    return Reward(value=counted.score, correct=counted.correct, parts=parts, answer=counted.extracted)
