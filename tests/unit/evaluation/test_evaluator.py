from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from rl.evaluation.evaluator import TaskEvaluator
from rl.protocols import EngineError
from rl.types import EvalResult, EvalSet, FinishReason, Prompt, Reward, RewardError, Rollout, Sampling

GREEDY = Sampling(temperature=0.0, max_new_tokens=4, seed=11)


class ScriptedEngine:
    """Answers problem i with its sample number, out of order; notes what was asked and how much at once."""

    def __init__(self, *, version: Callable[[int], int] = lambda _: 3, fail_on: int | None = None) -> None:
        self.asked: Counter[tuple[str, int, int]] = Counter()
        self.samplings: set[Sampling] = set()
        self.most_at_once = self.running = self.cancelled = 0
        self._version, self._fail_on = version, fail_on

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self.asked[prompt.prompt_id, group_id, n] += 1
        self.samplings.add(sampling)
        self.running += n
        self.most_at_once = max(self.most_at_once, self.running)
        try:
            await asyncio.sleep(0.0005 * (group_id % 3))
            if group_id == self._fail_on:
                raise EngineError("the engine died")
            for index in reversed(range(n)):
                yield self._rollout(group_id, index)
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled += 1
            raise
        finally:
            self.running -= n

    def _rollout(self, group_id: int, index: int) -> Rollout:
        is_cut = group_id == 0
        return Rollout(
            group_id=group_id,
            index=index,
            token_ids=np.array([1, 2], dtype=np.int32),
            loss_mask=np.array([False, True]),
            rollout_logprobs=np.array([0.0, -1.0], dtype=np.float32),
            temperature=0.0,
            policy_versions=np.array([-1, self._version(group_id)], dtype=np.int32),
            finish_reason=FinishReason.LENGTH if is_cut else FinishReason.STOP,
            text=str(index),
        )


async def answers_are_right_from_sample_one(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
    """Problem 0 is never solved; elsewhere sample 0 is wrong. The training reward is something else on purpose."""
    return [
        Reward(value=0.25, correct=prompt.prompt_id != "set:0" and rollout.text != "0", parts={"form": 1.0})
        for rollout in rollouts
    ]


class Sets:
    def __init__(self, *sets: EvalSet) -> None:
        self._sets = list(sets)

    def eval_sets(self) -> list[EvalSet]:
        return self._sets


def eval_set(num: int = 10, *, samples: int = 4, name: str = "set", grader: Any = None, sampling=GREEDY) -> EvalSet:
    prompts = [Prompt(f"{name}:{i}", (), np.array([1], dtype=np.int32), answer="1", task=name) for i in range(num)]
    return EvalSet(name, prompts, samples, sampling, grader or answers_are_right_from_sample_one)


def evaluate(engine: ScriptedEngine, *sets: EvalSet, at_once: int = 100, **options: Any) -> list[EvalResult]:
    evaluator = TaskEvaluator(Sets(*sets), max_concurrent_samples=at_once, **options)  # type: ignore[arg-type]
    return asyncio.run(evaluator.evaluate(engine, step=7))  # type: ignore[arg-type]


def test_every_problem_is_asked_exactly_once_with_the_sampling_of_its_set():
    engine = ScriptedEngine()
    warm = Sampling(temperature=0.6, max_new_tokens=9, seed=5)
    evaluate(engine, eval_set(10, samples=4), eval_set(3, samples=2, name="other", sampling=warm))
    expected = {(f"set:{i}", i, 4): 1 for i in range(10)} | {(f"other:{i}", i, 2): 1 for i in range(3)}
    assert engine.asked == expected
    assert engine.samplings == {GREEDY, warm}


def test_the_result_by_hand():
    (result,) = evaluate(ScriptedEngine(), eval_set(10, samples=4))
    # Problem 0 scores 0, nine problems 3/4: mean 0.675; variance (0.675^2 + 9 * 0.075^2) / 9, error sqrt(var / 10).
    assert result.value == pytest.approx(0.675) and result.stderr == pytest.approx(0.075)
    assert (result.num_problems, result.samples_per_problem, result.num_errors) == (10, 4, 0)
    assert (result.policy_version, result.truncated_fraction) == (3, 0.1)
    assert (result.key, result.sampling) == ("eval/set/greedy", GREEDY)


def test_a_grader_that_fails_is_no_wrong_answer():
    async def grader(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        if prompt.prompt_id in ("set:0", "set:1"):
            raise RewardError("no verdict")
        return await answers_are_right_from_sample_one(prompt, rollouts)

    (result,) = evaluate(ScriptedEngine(), eval_set(10, samples=4, grader=grader))
    assert result.value == 0.75  # of the eight that were graded
    assert (result.num_problems, result.num_errors) == (8, 8)


def test_a_grader_that_fails_on_everything_is_an_error():
    async def grader(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        raise RewardError("no verdict")

    with pytest.raises(RewardError, match=r"evaluation set: the grader failed on all 10 problems; no verdict"):
        evaluate(ScriptedEngine(), eval_set(10, grader=grader))


def test_an_engine_that_fails_ends_the_evaluation_and_leaves_nothing_running():
    engine = ScriptedEngine(fail_on=4)
    with pytest.raises(EngineError, match="the engine died"):
        evaluate(engine, eval_set(200, samples=1), at_once=5)
    assert engine.running == 0
    assert len(engine.asked) < 200


@pytest.mark.parametrize(("at_once", "most"), [(1, 4), (8, 8), (11, 8), (1000, 40)])
def test_no_more_samples_are_asked_for_at_once_than_allowed_but_one_problem_always(at_once, most):
    engine = ScriptedEngine()
    evaluate(engine, eval_set(10, samples=4), at_once=at_once)
    assert engine.most_at_once == most


def test_a_mix_of_policy_versions_is_refused():
    with pytest.raises(AssertionError, match=r"mixes policy versions \[3, 4\]"):
        evaluate(ScriptedEngine(version=lambda group_id: 3 + group_id % 2), eval_set(10))


def test_the_answers_are_written_one_a_line_and_replaced_whole(tmp_path):
    async def grader(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        if prompt.prompt_id == "set:1":
            raise RewardError("no verdict")
        return await answers_are_right_from_sample_one(prompt, rollouts)

    path = tmp_path / "answers.jsonl"
    path.write_text("of an earlier evaluation\n")
    evaluate(ScriptedEngine(), eval_set(3, samples=2, grader=grader), answers_file=path)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(row["prompt_id"], row["index"]) for row in rows] == [(f"set:{i}", j) for i in range(3) for j in range(2)]
    assert [row["correct"] for row in rows] == [False, False, None, None, False, True]
    assert rows[5] == {
        "benchmark": "set",
        "step": 7,
        "prompt_id": "set:2",
        "index": 1,
        "messages": [],
        "response": "1",
        "expected": "1",
        "correct": True,
        "reward": 0.25,
        "parts": {"form": 1.0},
        "finish_reason": "stop",
        "num_tokens": 1,
        "policy_version": 3,
        "error": "",
    }
    assert (rows[2]["reward"], rows[2]["error"]) == (None, "no verdict")
    assert [file.name for file in tmp_path.iterdir()] == ["answers.jsonl"]


def test_the_accuracy_is_that_of_correct_and_not_of_the_training_reward():
    async def shaped(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        return [Reward(value=-1.0, correct=True) for _ in rollouts]

    (result,) = evaluate(ScriptedEngine(), eval_set(5, grader=shaped))
    assert result.value == 1.0


def test_a_task_without_evaluation_sets_has_no_results():
    assert evaluate(ScriptedEngine()) == []
