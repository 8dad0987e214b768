"""`score` in processes of its own: it may hang, crash and raise, and nobody else notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from rl.config.schema import ConfigError
from rl.config.tasks import ArithmeticConfig, EvalSamplingConfig, SamplingConfig
from rl.grading import grade
from rl.tasks import scoring
from rl.tasks.arithmetic import Arithmetic
from rl.types import Reward, RewardError, RewardTimeoutError
from tests.made_answers import answer
from tests.made_scores import BrokenOnArrival, HoldsTheLock, Moody, Thorough, Unsendable
from tests.processes import descendants, is_alive, wait_until


def made(renderer: Any, task_class: type[Arithmetic]) -> Arithmetic:
    config = ArithmeticConfig(
        digits=1,
        held_out=20,
        validation=0,
        warm_start=0,
        sampling=SamplingConfig(max_new_tokens=3),
        eval_sampling=EvalSamplingConfig(max_new_tokens=3),
    )
    return task_class(config, renderer=renderer, seed=0)


@pytest.fixture
def moody(renderer: Any) -> Iterator[Arithmetic]:
    task = made(renderer, Moody)
    yield task
    task._scoring.close()


async def graded(task: Arithmetic, *texts: str, limit_s: float = 60.0) -> list[Reward]:
    answers = [answer(text, index=index) for index, text in enumerate(texts)]
    return await grade(task.grade_truly, task.training[0], answers, limit_s=limit_s)


async def test_rewards_come_in_order_from_a_process_that_is_used_again(renderer):
    task = made(renderer, Arithmetic)
    right = task.training[0].answer
    assert [reward.value for reward in await graded(task, right, "x", right)] == [1.0, 0.0, 1.0]
    assert [reward.value for reward in await graded(task, "x")] == [0.0]
    assert (task._scoring._num_children, len(task._scoring._idle)) == (1, 1)
    task._scoring.close()


@pytest.mark.parametrize(("num_answers", "num_tokens"), [(3, 0), (400, 10), (8, 200_000)])
async def test_answers_arrive_whole_however_many_and_long_they_are(renderer, num_answers: int, num_tokens: int):
    """400 are more arrays than one call sends; 8 of 200,000 tokens more bytes than a socket holds."""
    task = made(renderer, Thorough)
    answers = [answer("x" * num_tokens, index=index) for index in range(num_answers)]
    for index, one in enumerate(answers):
        one.token_ids = np.full(num_tokens + 1, index, dtype=np.int32)
        one.loss_mask = np.arange(num_tokens + 1) > 0
        one.rollout_logprobs = np.full(num_tokens + 1, -0.5, dtype=np.float32)
        one.policy_versions = np.full(num_tokens + 1, 7, dtype=np.int32)
    rewards = await grade(task.grade_truly, task.training[0], answers, limit_s=60.0)
    # Of tokens index, of masks num_tokens, of log-probs -0.5, of versions 7, of the text num_tokens.
    expected = [(index - 0.5 + 7) * (num_tokens + 1) + 2 * num_tokens for index in range(num_answers)]
    assert [reward.value for reward in rewards] == expected
    task._scoring.close()


def test_a_child_serves_one_event_loop_after_another(moody):
    pids = [asyncio.run(graded(moody, "fine"))[0].parts["pid"] for _ in range(2)]
    assert pids[0] == pids[1] != os.getpid()


async def test_a_score_that_hangs_is_over_after_its_time_and_its_process_is_gone(moody):
    child = int((await graded(moody, "fine"))[0].parts["pid"])
    began = time.monotonic()
    hanging = asyncio.create_task(graded(moody, "hang", limit_s=3.0))
    await asyncio.sleep(0.1)
    assert len(await graded(moody, "fine")) == 1 and time.monotonic() - began < 2.5  # not held up by it
    with pytest.raises(RewardTimeoutError, match=r"arithmetic:\S+ took over 3 s \(stream.reward_timeout_s\)"):
        await hanging
    wait_until(lambda: not is_alive(child), "the hanging child is gone", timeout_s=10)
    assert moody._scoring._num_children == len(moody._scoring._idle) == 1
    assert RewardTimeoutError.drop_reason == "reward_timeout" != RewardError.drop_reason


async def test_a_score_that_never_lets_go_of_the_interpreter_holds_up_no_event_loop(renderer):
    task = made(renderer, HoldsTheLock)
    began = time.monotonic()
    with pytest.raises(RewardTimeoutError):
        await graded(task, "fine", limit_s=4.0)
    assert 4.0 <= time.monotonic() - began < 10.0
    task._scoring.close()


async def test_more_scores_that_hang_than_there_are_cores_hold_up_nobody(moody):
    await graded(moody, "fine")
    began = time.monotonic()
    hanging = [asyncio.create_task(graded(moody, "hang")) for _ in range(scoring.MAX_EAGER + 4)]
    await asyncio.sleep(0.1)
    assert len(await graded(moody, "fine")) == 1
    assert time.monotonic() - began < 20.0
    for task in hanging:
        task.cancel()
    await asyncio.gather(*hanging, return_exceptions=True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fail", r"failed: ZeroDivisionError\('oops'\) \(made_scores\.py, line \d+\)"),
        ("crash", "its process ended without a word"),
        ("leave", "its process ended without a word"),
    ],
)
async def test_a_score_that_fails_is_an_error_of_the_grader_and_the_next_group_is_graded(moody, text, words):
    with pytest.raises(RewardError, match=words):
        await graded(moody, "fine", text)
    assert [reward.correct for reward in await graded(moody, "fine")] == [True]


async def test_a_process_that_was_killed_from_outside_costs_no_group(moody):
    child = int((await graded(moody, "fine"))[0].parts["pid"])
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not is_alive(child), "the child is gone", timeout_s=10)
    assert len(await graded(moody, "fine")) == 1
    host = moody._scoring._host
    assert host is not None
    os.kill(host._process.pid, signal.SIGKILL)
    assert len(await graded(moody, "fine")) == 1


def test_a_task_that_cannot_be_sent_is_refused_with_the_remedy(renderer):
    with pytest.raises(ConfigError, match=r"cannot be sent there \(.*lambda.*\)\. Keep out .* define `grade_truly`"):
        made(renderer, Unsendable).start_grading()


async def test_a_task_that_does_not_arrive_says_why(renderer):
    task = made(renderer, BrokenOnArrival)
    with pytest.raises(RewardError, match=r"could not load the task: FileNotFoundError\('no word list here'\)"):
        await graded(task, "fine")
    task._scoring.close()


def test_nothing_is_left_running_once_the_processes_are_closed(renderer):
    before = set(descendants(os.getpid()))
    task = made(renderer, Moody)
    task.start_grading()
    pid = int(asyncio.run(graded(task, "fine"))[0].parts["pid"])
    assert pid in descendants(os.getpid())
    task._scoring.close()
    wait_until(lambda: not is_alive(pid), "the child is gone", timeout_s=10)
    assert set(descendants(os.getpid())) <= before
