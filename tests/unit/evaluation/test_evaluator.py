from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import numpy as np
import pytest

from rl.evaluation.evaluator import TaskEvaluator
from rl.loggers.names import find
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


def evaluate(
    engine: ScriptedEngine, *sets: EvalSet, at_once: int = 100, limit_s: float = 300.0, **options: Any
) -> list[EvalResult]:
    evaluator = TaskEvaluator(
        Sets(*sets),  # type: ignore[arg-type]
        max_concurrent_samples=at_once,
        reward_timeout_s=limit_s,
        **{"stall_timeout_s": 300.0, **options},
    )
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


def test_a_grader_that_hangs_is_no_wrong_answer_and_one_that_hangs_on_everything_is_an_error():
    async def grader(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        if prompt.prompt_id in ("set:0", "set:1"):
            await asyncio.Event().wait()
        return await answers_are_right_from_sample_one(prompt, rollouts)

    (result,) = evaluate(ScriptedEngine(), eval_set(10, samples=4, grader=grader), limit_s=0.2)
    assert (result.value, result.num_problems, result.num_errors) == (0.75, 8, 8)
    with pytest.raises(RewardError, match=r"the grader failed on all 2 problems; .*took over 0\.2 s.*reward_timeout_s"):
        evaluate(ScriptedEngine(), eval_set(2, grader=grader), limit_s=0.2)


def test_an_engine_that_stops_answering_ends_the_evaluation_and_one_that_is_slow_does_not():
    class Slow(ScriptedEngine):
        def __init__(self, *, num_answered: int) -> None:
            super().__init__()
            self.num_answered = num_answered

        async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling):
            await asyncio.sleep(0.15 * (group_id + 1) if group_id < self.num_answered else 3600)
            async for rollout in super().generate(prompt, group_id=group_id, n=n, sampling=sampling):
                yield rollout

    # Four problems, one each 0.15 s: 0.6 s in all, and never 0.4 s without one.
    (result,) = evaluate(Slow(num_answered=4), eval_set(4), stall_timeout_s=0.4)
    assert result.num_problems == 4
    with pytest.raises(
        EngineError, match=r"evaluation set: no problem was done for 0 s \(stream\.stall_timeout_s\); 3 of 4 are"
    ):
        evaluate(Slow(num_answered=3), eval_set(4), stall_timeout_s=0.4)


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
        "answer": None,
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


def test_sampled_sets_have_pass_and_majority_and_accuracies_by_other_rules():
    async def grader(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        """Sample 3 is right and says 5, as nobody else; samples 0 to 2 say 4. By the other rule all are right."""
        return [
            Reward(0.0, correct=r.index == 3, parts={"other": 1.0}, answer="5" if r.index == 3 else "4")
            for r in rollouts
        ]

    warm = Sampling(temperature=0.6, max_new_tokens=9, seed=5)
    prompts = eval_set(5).prompts
    results = evaluate(ScriptedEngine(), EvalSet("set", prompts, 4, warm, grader, accuracies=("other",), votes=True))
    values = {result.key: result.value for result in results}
    assert values == {
        "eval/set/avg@4": 0.25,
        "eval/set/other/avg@4": 1.0,
        "eval/set/pass@2": pytest.approx(0.5),
        "eval/set/pass@4": 1.0,
        "eval/set/maj@4": 0.0,
    }
    assert all(find(key) is not None and find(f"{key}/stderr") is not None for key in values)


class Workers:
    """An engine of `num` workers that take `batch` problems at a time, each sample after a while of its own."""

    def __init__(self, num: int, batch: int) -> None:
        self._slots = asyncio.Semaphore(num * batch)
        self._answers = ScriptedEngine()

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        async with self._slots:
            async for rollout in self._answers.generate(prompt, group_id=group_id, n=n, sampling=sampling):
                yield rollout


@pytest.mark.parametrize("workers", range(1, 5))
@pytest.mark.parametrize("batch", range(1, 12))
def test_ten_rows_of_which_seven_are_right_are_0_7_for_any_batch_and_number_of_workers(batch: int, workers: int):
    graded: Counter[str] = Counter()

    async def grader(prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        graded[prompt.prompt_id] += 1
        return [Reward(0.0, correct=int(prompt.prompt_id.split(":")[1]) < 7) for _ in rollouts]

    engine: Any = Workers(workers, batch)
    (result,) = evaluate(engine, eval_set(10, samples=1, grader=grader), at_once=workers * batch)
    assert (result.num_problems, result.value) == (10, 0.7)
    assert graded == {f"set:{i}": 1 for i in range(10)}


def test_progress_counts_every_problem(capsys):
    evaluate(ScriptedEngine(), eval_set(10), shows_progress=True)  # no terminal, and quicker than the first line
    assert capsys.readouterr().out == ""
