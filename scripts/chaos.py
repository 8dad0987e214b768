"""Kills random processes of a run at random moments, continues it, and looks whether anything was lost.

    python -m scripts.chaos --kills 20 --seed 0 [--folder FOLDER] [OVERRIDE ...]

The run is the quickstart with two trainer ranks and two engines, fully asynchronous, with small steps, and with the
checker of final answers in place of its own reward. Each round of four kills has every role once, in random order:
driver, trainer rank, engine, and reward worker, a process in which the checker judges. The run must survive the last
two, of engines one at a time and once it has trained. After every end of the run the last checkpoint must account for
every prompt by its position, and no process may be left; in the end the run must have finished, with every step in its
log once, and every row must add up.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl.assemble import prepare_policy
from rl.config.compose import compose_run_config
from rl.loggers.jsonl import Row, read_metrics
from rl.tasks.base import ProblemTask
from rl.types import Prompt

PROMPTS_PER_STEP = 16
END_LIMIT_S = 30.0
"""In which a run with a dead rank must end, and with it all that it has started."""
AGENT_LIMIT_S = 120.0
"""Of Ray's agents: they see at once that their Ray is dead, and then try for a minute to reach it."""
ROLE_LIMIT_S = 120.0
"""In which a run that has started must have a process of every role."""
STEPS_PER_KILL, STEPS_BEFORE = 5, 10
POLL_S = 0.25
SURVIVED = ("engine", "reward worker")
"""Of two engines the other one goes on with the groups of the dead one, and the checker starts its workers anew."""
ROLES = ("driver", "trainer rank", *SURVIVED)
MARKS = {"ray::_RankHost": "trainer rank", "ray::_EngineHost": "engine", " rl.tasks.": "reward worker"}
"""What the command line of a role's processes has."""
AGENT = re.compile(r"ray::(Dashboard|RuntimeEnv)Agent|\S+ -u \S*/agent[/.]")
"""How the command line of one of Ray's agents begins: before and after it has given itself a name."""
WORDS = (
    "experiment=quickstart",
    "placement=fully_async",
    "placement.trainer_ranks=2",
    "backend.rollout.replicas=2",
    f"algorithm.prompts_per_step={PROMPTS_PER_STEP}",
    "algorithm.prompts_per_mini_batch=8",
    "evaluation.every=0",
    "checkpoint.every=2",
    "task=jsonl",
    "task.rule=equivalence",
    "task.max_prompt_tokens=16",
    "task.sampling.max_new_tokens=4",
    "task.eval_sampling.max_new_tokens=4",
    "task.eval_limit=20",
    "model=hf",
)


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    began: int
    """Clock ticks after boot: a number is used again, a number and a beginning are not."""
    parent: int = field(compare=False)
    command: str = field(compare=False)

    @property
    def is_alive(self) -> bool:
        now = look_up(self.pid)
        return now is not None and now.began == self.began

    @property
    def role(self) -> str | None:
        """None: Ray's own, or a helper of Python's."""
        return next((role for mark, role in MARKS.items() if mark in self.command), None)


def look_up(pid: int) -> Process | None:
    """None: it is gone, or a zombie."""
    try:
        state, *fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return None
    return None if state == "Z" else Process(pid, int(fields[18]), int(fields[0]), command)


def family(pid: int) -> list[Process]:
    """What descends from `pid`, itself not included."""
    numbers = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    processes = [process for number in numbers if (process := look_up(number)) is not None]
    found: list[Process] = []
    wave = {pid}
    while wave:
        children = [process for process in processes if process.parent in wave]
        found += children
        wave = {process.pid for process in children}
    return found


def wait_for_end(processes: Iterable[Process], *, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while (left := [one for one in processes if one.is_alive]) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    assert not left, f"left behind after {limit_s:g} s: {left}"


@dataclass
class Chaos:
    """One run and what was done to it."""

    folder: Path
    steps: int
    rng: random.Random
    words: list[str]
    events: list[str] = field(default_factory=list)
    """Of each kill: role, process, and last step before it."""
    killed: list[str] = field(default_factory=list)
    """Roles, in the order of their kills."""
    drivers: list[subprocess.Popen[bytes]] = field(default_factory=list)
    """Of all lives."""
    seen: set[Process] = field(default_factory=set)
    """Of the life that goes on: what descends from its driver, or did."""
    agents: set[Process] = field(default_factory=set)
    """Ray's, of all lives that have ended."""
    may_end: bool = False
    """Whether something was killed in this life without which a run need not go on."""
    engines_killed: int = 0
    """In this life. The second one may have been the only one that was left."""
    step_before: int = -1
    """The last one in the log as this life began."""

    def survive(self, kills: int) -> None:
        """Raises AssertionError where something is lost; the run is ended then, and its folder stays."""
        try:
            self._kill_and_continue(kills)
        finally:
            for process in self.drivers:
                process.kill()
        self._check_rows()

    def _kill_and_continue(self, kills: int) -> None:
        process = self._start(self.words)
        while len(self.killed) < kills:
            self._wait_for_a_moment(process)
            role = self._kill_one(process) if process.poll() is None else None
            if role in ("driver", "trainer rank"):
                self._wait(process, lambda: False, limit_s=END_LIMIT_S)
                assert process.poll() is not None, f"the run did not end within {END_LIMIT_S:g} s of its {role}'s death"
            if process.poll() is not None:
                assert process.returncode != 0, f"the run finished before kill {len(self.killed) + 1} of {kills}"
                process = self._continue(process)
        self._finish(process)

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        self.seen, self.may_end, self.engines_killed, self.step_before = set(), False, 0, self._last_step()
        command = [sys.executable, "-m", "rl", *words]
        with self.log.open("ab") as output:
            self.drivers.append(subprocess.Popen(command, stdout=output, stderr=output, env=environment))
        return self.drivers[-1]

    @property
    def log(self) -> Path:
        """What the run says."""
        return self.folder.parent / f"{self.folder.name}.log"

    def _continue(self, ended: subprocess.Popen[bytes]) -> subprocess.Popen[bytes]:
        """At once, beside what is left of the life that has ended: that must go by itself."""
        assert self.may_end, f"the run ended (exit code {ended.returncode}) by {self.events[-1:]}; see {self.log}"
        left = self.seen
        self._check_accounts()
        has_begun = (self.folder / "run.yaml").exists()  # killed before that, it has left nothing to continue
        process = self._start([f"resume={self.folder}"] if has_begun else self.words)
        self._check_gone(left)
        return process

    def _wait(self, process: subprocess.Popen[bytes], is_so: Callable[[], bool], *, limit_s: float) -> None:
        """Until it is so, the run has ended, or the time is over."""
        deadline = time.monotonic() + limit_s
        while process.poll() is None and time.monotonic() < deadline and not is_so():
            self.seen.update(family(process.pid))
            time.sleep(POLL_S)

    def _wait_for_a_moment(self, process: subprocess.Popen[bytes]) -> None:
        """One in four anywhere, as the run starts, say; the others after a step."""
        if self.rng.random() >= 0.25:
            after = self._last_step() + 1
            self._wait(process, lambda: self._last_step() >= after, limit_s=float("inf"))
        self._wait(process, lambda: False, limit_s=self.rng.uniform(0.0, 2.0))

    def _last_step(self) -> int:
        rows = read_metrics(self.folder / "metrics.jsonl")
        return rows[-1]["step"] if rows else -1

    def _kill_one(self, process: subprocess.Popen[bytes]) -> str | None:
        """Its role: that, or one of those, that had its turn least often. None: it, or the run, has ended first."""
        num_kills = {role: self.killed.count(role) for role in ROLES}
        role = self.rng.choice([one for one in ROLES if num_kills[one] == min(num_kills.values())])
        victims: list[int] = []

        def has_victims() -> bool:
            victims[:] = [one.pid for one in family(process.pid) if one.role == role]
            victims.extend([process.pid] if role == "driver" else [])
            return bool(victims)

        self._wait(process, has_victims, limit_s=ROLE_LIMIT_S)
        assert victims or process.poll() is not None, f"the run has no {role} within {ROLE_LIMIT_S:g} s"
        if not victims:
            return None
        pid = self.rng.choice(victims)
        self.seen.update(family(process.pid))
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        self.engines_killed += role == "engine"
        self.may_end |= self._need_not_go_on_without(role)
        self.killed.append(role)
        self.events.append(f"{role} {pid} killed after step {self._last_step()}")
        print(self.events[-1], flush=True)
        return role

    def _need_not_go_on_without(self, role: str) -> bool:
        if role == "engine":  # one that dies as it starts ends the start
            return self.engines_killed > 1 or self._last_step() <= self.step_before
        return role != "reward worker"

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(3):  # an engine killed last may have been the second of two
            self._wait(process, lambda: False, limit_s=float("inf"))
            if process.returncode == 0:
                self._check_accounts()
                self._check_gone(self.seen)
                wait_for_end(self.agents, limit_s=AGENT_LIMIT_S)
                return
            process = self._continue(process)
        raise AssertionError(f"the run does not finish; see {self.log}")

    def _check_accounts(self) -> None:
        """Of the last checkpoint: every prompt that was started is trained on, dropped, or still to come, and once."""
        states = sorted(self.folder.glob("checkpoints/step-*/state.json"))
        if not states:
            return  # killed before the first
        step = int(states[-1].parent.name.removeprefix("step-"))
        stream = json.loads(states[-1].read_text())["stream"]
        settled = [*range(stream["settled_below"]), *stream["settled_beyond"]]
        assert stream["trained"] == step * PROMPTS_PER_STEP, stream
        assert stream["trained"] + sum(stream["dropped"].values()) == len(settled), stream
        assert sorted(settled + stream["in_flight"]) == list(range(stream["next_index"])), stream

    def _check_gone(self, life: set[Process]) -> None:
        """But for Ray's agents, which are for the end."""
        agents = {one for one in life if AGENT.match(one.command)}
        self.agents |= agents
        wait_for_end(life - agents, limit_s=END_LIMIT_S)

    def _check_rows(self) -> None:
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(self.steps + 1)), "a step is missing, or there twice"
        aside = [row for path in self.folder.glob("metrics.set_aside.*.jsonl") for row in read_metrics(path)]
        for row in [*rows, *aside]:
            assert row["step"] == 0 or num_unaccounted(row) == 0, row
        assert rows[-1]["prompts_trained"] == self.steps * PROMPTS_PER_STEP
        assert (self.folder / f"checkpoints/step-{self.steps:06d}/state.json").exists(), "no checkpoint of the end"


def num_unaccounted(row: Row) -> float:
    """Groups that a row of metrics.jsonl has as started, and neither as trained on nor dropped nor in flight."""
    dropped = sum(count for key, count in row.items() if key.startswith("rollout/dropped/"))
    done = row["rollout/groups_trained"] + dropped
    return row["rollout/groups_started"] - done - row["rollout/groups_in_flight"]


def quickstart_as_rows(folder: Path) -> list[str]:
    """Overrides of a run that goes on from the quickstart's warm-started model, with its problems in two files."""
    policy = prepare_policy(compose_run_config(["experiment=quickstart"]), folder)
    assert isinstance(policy.task, ProblemTask)
    (held_out,) = policy.task.held_out.values()
    for name, prompts in (("train", policy.task.training), ("test", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(map(_row, prompts)))
    paths = [f"task.path={folder / 'train.jsonl'}", f"task.eval_path={folder / 'test.jsonl'}"]
    return [f"model.path={policy.folder}", *paths]


def _row(prompt: Prompt) -> str:
    return json.dumps({"prompt": prompt.messages, "answer": prompt.answer}) + "\n"


def chaos(folder: Path, *, kills: int, seed: int, words: Sequence[str] = ()) -> Chaos:
    """A run in `folder` that was killed `kills` times, and finished. Its problems lie beside it."""
    made = quickstart_as_rows(folder.parent / f"{folder.name}_problems")
    steps = STEPS_BEFORE + STEPS_PER_KILL * kills
    run = Chaos(folder, steps, random.Random(seed), [*WORDS, *made, f"steps={steps}", f"output_dir={folder}", *words])
    run.survive(kills)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="of the run, to be made; by default a new temporary one")
    parser.add_argument("words", nargs="*", help="more overrides")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-")) / "run"
    print(f"the run is in {folder}", flush=True)
    run = chaos(folder.resolve(), kills=arguments.kills, seed=arguments.seed, words=arguments.words)
    counts = ", ".join(f"{role} {run.killed.count(role)}" for role in ROLES)
    print(f"{len(run.events)} kills ({counts}), {run.steps} steps, nothing lost and nothing left")


if __name__ == "__main__":
    main()
