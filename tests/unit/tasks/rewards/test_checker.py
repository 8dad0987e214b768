"""Worker processes: the same score everywhere, a price for hanging and no more, errors apart from wrong answers."""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from rl.config.tasks import CheckerConfig, Scoring
from rl.tasks.rewards import checker as checker_module
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.grading import grade_rollouts
from rl.tasks.rewards.verdict import Case, Reason, Verdict
from rl.types import FinishReason, RewardError
from tests.made_answers import answer
from tests.unit.tasks.rewards.conftest import TIMEOUT_S

THIRD = Case(r"\boxed{\frac{1}{3}}", r"\frac{1}{3}")
RADICAL = Case(r"\boxed{\sqrt{12}}", r"2\sqrt{3}")
WRONG = Case(r"\boxed{\frac{1}{3}}", "0.33")
HANGING = Case(r"\boxed{9^{9^{9}}}", "7")
"""A number of 370 million digits: sympy computes it in one call of C code, which holds the interpreter's lock."""
SCORES = [1.0, 1.0, 0.0]

ELSEWHERE = """
import json
from rl.config.tasks import CheckerConfig
from rl.tasks.rewards.checker import Checker
from rl.tasks.rewards.verdict import Case
def scores():
    checker = Checker(CheckerConfig(workers=1))
    cases = [Case(r"\\boxed{\\frac{1}{3}}", r"\\frac{1}{3}"), Case(r"\\boxed{\\sqrt{12}}", r"2\\sqrt{3}"),
             Case(r"\\boxed{\\frac{1}{3}}", "0.33")]
    found = [verdict.score for verdict in checker.check(cases)]
    checker.close()
    return found
"""


def children_of(checker: Checker) -> list[psutil.Process]:
    assert checker._workers is not None
    return psutil.Process(checker._workers._process.pid).children()


def test_threads_and_the_event_loop_get_the_scores_of_the_main_thread(checker: Checker):
    cases = [THIRD, RADICAL, WRONG]
    assert [verdict.score for verdict in checker.check(cases)] == SCORES
    assert [verdict.score for verdict in asyncio.run(checker.grade(cases))] == SCORES
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.extend(verdict.score for verdict in checker.check(cases)))
    thread.start()
    thread.join()
    assert found == SCORES


def run(tmp_path: Path, code: str) -> str:
    """Standard output of a script in a process of its own."""
    script = tmp_path / "script.py"
    script.write_text(f"{ELSEWHERE}\n{code}")
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.slow
def test_a_subprocess_gets_the_same_scores(tmp_path: Path):
    assert json.loads(run(tmp_path, "print(json.dumps(scores()))")) == SCORES


RAY = """
import ray
from rl.placement.ray_runtime import ensure_ray, shutdown_ray
ensure_ray()

@ray.remote
class Actor:
    def scores(self):
        return scores()

print(json.dumps(ray.get(Actor.remote().scores.remote())))
shutdown_ray()
"""


@pytest.mark.slow
def test_a_ray_actor_gets_the_same_scores(tmp_path: Path):
    assert json.loads(run(tmp_path, RAY).splitlines()[-1]) == SCORES


def test_a_hanging_answer_costs_its_limit_and_the_others_are_scored(checker: Checker):
    before = {child.pid for child in children_of(checker)}
    started = time.monotonic()
    verdicts = checker.check([HANGING, *[THIRD] * 7])
    assert time.monotonic() - started < 2 * TIMEOUT_S + 1.0
    assert verdicts[0] == Verdict(0.0, False, None, Reason.TIMEOUT, f"more than {TIMEOUT_S:g} s")
    assert [verdict.reason for verdict in verdicts[1:]] == [Reason.OK] * 7
    after = {child.pid for child in children_of(checker)}
    assert len(after) == len(before) == 2
    assert len(after - before) == 1, "only the worker that hung was replaced"


def test_answers_that_hang_at_the_same_time_share_the_workers(checker: Checker):
    """Four on two workers: two limits, one after the other."""
    started = time.monotonic()
    verdicts = checker.check([HANGING] * 4)
    seconds = time.monotonic() - started
    assert [verdict.reason for verdict in verdicts] == [Reason.TIMEOUT] * 4
    assert 2 * TIMEOUT_S <= seconds < 2 * TIMEOUT_S + 1.5


def test_a_timeout_has_the_lowest_score_of_its_rule(checker: Checker, monkeypatch: pytest.MonkeyPatch):
    def never(*_: object) -> Verdict:
        raise checker_module._OverLimitError("more than 1 s")

    monkeypatch.setattr(checker_module._Workers, "judge", never)
    scores = {rule: checker.check([Case("x", "1", rule)])[0].score for rule in ("equivalence", "math", "dapo")}
    assert scores == {"equivalence": 0.0, "math": 0.0, "dapo": -1.0}


def test_n_cases_give_n_verdicts_in_order(checker: Checker):
    cases = [Case(f"\\boxed{{{number}}}", "7") for number in range(50)]
    cases[20], cases[30] = Case("7", "7", rule="nonsense"), Case("", "7")
    verdicts = checker.check(cases)
    assert [number for number, verdict in enumerate(verdicts) if verdict.correct] == [7]
    assert [verdict.extracted for verdict in verdicts[:20]] == [str(number) for number in range(20)]
    assert (verdicts[20].reason, verdicts[30].reason) == (Reason.ERROR, Reason.NO_ANSWER)
    assert checker.check([]) == []


@pytest.mark.slow
def test_a_worker_killed_from_outside_costs_no_verdict(checker: Checker):
    for victim in (lambda: children_of(checker)[0].pid, lambda: psutil.Process(children_of(checker)[0].pid).ppid()):
        os.kill(victim(), signal.SIGKILL)
        assert [verdict.score for verdict in checker.check([THIRD, RADICAL, WRONG] * 4)] == SCORES * 4


def test_workers_killed_while_they_start_cost_no_verdict():
    checker = Checker(CheckerConfig(workers=1))
    others = {child.pid for child in psutil.Process().children()}

    def kill_the_first() -> None:
        while not (new := [child for child in psutil.Process().children() if child.pid not in others]):
            time.sleep(0.01)
        new[0].kill()

    killer = threading.Thread(target=kill_the_first, daemon=True)
    killer.start()
    verdicts = checker.check([THIRD, RADICAL, WRONG])
    killer.join(timeout=10)
    assert not killer.is_alive()
    assert [verdict.score for verdict in verdicts] == SCORES, verdicts
    checker.close()


def test_verdicts_are_counted_by_reason(checker: Checker):
    before = checker.counts.copy()
    checker.check([THIRD, WRONG, HANGING, Case("", "7"), Case("7", "7", rule="nonsense")])
    assert checker.counts - before == dict.fromkeys(Reason, 1)


@pytest.mark.slow
def test_a_closed_checker_leaves_no_process_and_starts_again():
    checker = Checker(CheckerConfig(workers=1))
    assert checker.check([THIRD])[0].correct
    processes = [psutil.Process(checker._workers._process.pid), *children_of(checker)] if checker._workers else []
    checker.close()
    _, alive = psutil.wait_procs(processes, timeout=5)
    assert len(processes) == 2
    assert alive == []
    assert pickle.loads(pickle.dumps(checker)).config == checker.config


@pytest.mark.slow
def test_a_checker_whose_owner_is_killed_leaves_no_process():
    code = (
        f"{ELSEWHERE}\nimport os, time\nchecker = Checker(CheckerConfig(workers=2, timeout_s=2.0))\n"
        "checker.check([Case('1', '1')])\nprint(checker._workers._process.pid, flush=True)\n"
        "checker.check([Case(r'\\boxed{9^{9^{9}}}', '7')])\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    workers = psutil.Process(int(owner.stdout.readline()))
    processes = [workers, *workers.children()]
    owner.kill()
    owner.wait()
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert len(processes) == 3
    assert alive == []


def test_a_checker_that_cannot_start_is_an_error_and_no_wrong_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "sympy.py").write_text("raise ImportError('broken on purpose')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    checker = Checker(CheckerConfig(workers=1))
    rollouts = [answer(r"\boxed{7}", index=index) for index in range(2)]
    with pytest.raises(RewardError, match=r"the checker failed on 4 of 4 answers: .*did not start.*broken on purpose"):
        asyncio.run(grade_rollouts(checker, "7", rollouts, rule="math", scoring=Scoring.published))
    assert checker.counts == {Reason.ERROR: 4}
    checker.close()


def test_rewards_carry_both_accuracies(checker: Checker):
    texts = ["Answer: 34", r"\boxed{34.0}", "Answer: 35"]
    rollouts = [answer(text, index=index) for index, text in enumerate(texts)]

    def graded(scoring: Scoring) -> list[tuple[float, bool, float, float]]:
        rewards = asyncio.run(grade_rollouts(checker, "34", rollouts, rule="dapo", scoring=scoring))
        return [(r.value, r.correct, r.parts["published"], r.parts["equivalence"]) for r in rewards]

    assert graded(Scoring.published) == [(1.0, True, 1.0, 1.0), (-1.0, False, 0.0, 1.0), (-1.0, False, 0.0, 0.0)]
    assert graded(Scoring.equivalence) == [(1.0, True, 1.0, 1.0), (1.0, True, 0.0, 1.0), (0.0, False, 0.0, 0.0)]


def test_an_answer_cut_at_the_length_limit_counts_only_in_a_box_or_a_whole_line(checker: Checker):
    texts = ["The answer is 12", "The answer is 12\nbecause", r"\boxed{12} because", r"\boxed{12"]
    rollouts = [answer(text, finish=FinishReason.LENGTH) for text in texts]
    rewards = asyncio.run(grade_rollouts(checker, "12", rollouts, rule="math", scoring=Scoring.equivalence))
    assert [reward.correct for reward in rewards] == [False, True, True, False]


@pytest.mark.slow
def test_the_memory_of_one_answer_is_limited():
    """The worker as it is, with a judge that wants 8 GiB."""
    code = (
        "import sys, rl.tasks.rewards.judge as j\nj.judge = lambda case: bytearray(2**33)\n"
        "from rl.tasks.rewards import worker\nworker.main()"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", code, "20", "1024", str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        channel = checker_module._Channel(ours)
        assert channel.receive(timeout_s=120) == {"ready": True}
        channel.send({"response": "7", "answer": "7"})
        assert channel.receive(timeout_s=30) == {"died": checker_module.OUT_OF_MEMORY}
        process.kill()
        process.wait()
