"""Kills random processes of a run at random moments, continues it, and looks whether anything was lost.

    python -m scripts.chaos --kills 20 --seed 0 --folder FOLDER [OVERRIDE ...]

The run is the quickstart with two trainer ranks and two engines, fully asynchronous, and small steps. A victim is the
driver, a trainer rank, an engine, or another process of the run, as a reward's worker. In the end the run must have
finished, with every step in its log once, accounts that add up, and no process left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rl.loggers.jsonl import read_metrics

PROMPTS_PER_STEP = 16
END_LIMIT_S = 30.0
"""In which a run with a dead rank must end."""
WORDS = (
    "experiment=quickstart",
    "placement=fully_async",
    "placement.trainer_ranks=2",
    "backend.rollout.replicas=2",
    f"algorithm.prompts_per_step={PROMPTS_PER_STEP}",
    "algorithm.prompts_per_mini_batch=8",
    "evaluation.every=0",
    "checkpoint.every=2",
    "task.eval_limit=20",
)
ROLES = {"ray::_RankHost": "trainer rank", "ray::_EngineHost": "engine"}


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    began: int
    """Clock ticks after boot: a number is used again, a number and a beginning are not."""
    parent: int
    command: str

    @property
    def is_alive(self) -> bool:
        now = look_up(self.pid)
        return now is not None and now.began == self.began


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


@dataclass
class Chaos:
    """One run and what was done to it."""

    folder: Path
    steps: int
    rng: random.Random
    words: list[str]
    events: list[str] = field(default_factory=list)
    seen: set[Process] = field(default_factory=set)

    def survive(self, kills: int) -> None:
        """Raises AssertionError where something is lost."""
        process = self._start(self.words)
        killed = 0
        while killed < kills:
            self._wait_for_a_moment(process)
            if process.poll() is None:
                role = self._kill_one(process)
                killed += role is not None
                if role == "engine":
                    continue  # the other one goes on with its groups
                self._expect_end(process, role)
            if process.returncode == 0:
                break  # finished before its next kill
            process = self._start([f"resume={self.folder}"])
        self._finish(process)
        self._check()

    def _start(self, words: Sequence[str]) -> subprocess.Popen[bytes]:
        output = (self.folder.parent / f"{self.folder.name}.log").open("ab")
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with output:
            return subprocess.Popen([sys.executable, "-m", "rl", *words], stdout=output, stderr=output, env=environment)

    def _wait_for_a_moment(self, process: subprocess.Popen[bytes]) -> None:
        """One in four anywhere, as the run starts, say; the others after a step."""
        if self.rng.random() < 0.25:
            deadline = time.monotonic() + self.rng.uniform(1.0, 20.0)
            while time.monotonic() < deadline and process.poll() is None:
                time.sleep(0.05)
        else:
            after = self._last_step() + 1
            while self._last_step() < after and process.poll() is None:
                time.sleep(0.05)
            time.sleep(self.rng.uniform(0.0, 1.0))

    def _last_step(self) -> int:
        rows = read_metrics(self.folder / "metrics.jsonl")
        return rows[-1]["step"] if rows else -1

    def _kill_one(self, process: subprocess.Popen[bytes]) -> str | None:
        children = family(process.pid)
        self.seen.update(children)
        victims = [("driver", process.pid)]
        for child in children:
            role = next((role for prefix, role in ROLES.items() if child.command.startswith(prefix)), None)
            is_own = role is None and "rl." in child.command and "ray" not in child.command
            if role is not None or is_own:
                victims.append((role or "helper", child.pid))
        role, pid = self.rng.choice(victims)
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            return None
        self.events.append(f"{role} {pid} killed after step {self._last_step()}")
        print(self.events[-1], flush=True)
        return role

    def _expect_end(self, process: subprocess.Popen[bytes], role: str | None) -> None:
        try:
            process.wait(END_LIMIT_S + 15.0)  # closing the parts of a run may take a while more
        except subprocess.TimeoutExpired:
            assert role in (None, "helper"), f"the run did not end after its {role} was killed"

    def _finish(self, process: subprocess.Popen[bytes]) -> None:
        for _ in range(3):  # an engine killed last may have been the second of two
            if process.wait() == 0:
                return
            process = self._start([f"resume={self.folder}"])
        raise AssertionError(f"the run does not finish; see {self.folder}.log")

    def _check(self) -> None:
        rows = read_metrics(self.folder / "metrics.jsonl")
        assert [row["step"] for row in rows] == list(range(self.steps + 1)), "a step is missing, or there twice"
        (state,) = self.folder.glob(f"checkpoints/step-{self.steps:06d}/state.json")
        stream = json.loads(state.read_text())["stream"]
        in_flight, dropped = stream["in_flight"], sum(stream["dropped"].values())
        assert stream["trained"] == self.steps * PROMPTS_PER_STEP == rows[-1]["prompts_trained"]
        assert stream["trained"] + dropped + len(in_flight) == stream["next_index"], stream
        assert len(set(in_flight)) == len(in_flight), "a group is in flight twice"
        deadline = time.monotonic() + 20.0
        while (left := [one for one in self.seen if one.is_alive]) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert not left, f"left behind: {left}"


def chaos(folder: Path, *, kills: int, seed: int, words: Sequence[str] = ()) -> Chaos:
    """A run in `folder` that was killed up to `kills` times, and finished."""
    steps = 6 + 3 * kills
    run = Chaos(folder, steps, random.Random(seed), [*WORDS, f"steps={steps}", f"output_dir={folder}", *words])
    run.survive(kills)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, required=True, help="of the run, to be made")
    parser.add_argument("words", nargs="*", help="more overrides")
    arguments = parser.parse_args()
    run = chaos(arguments.folder.resolve(), kills=arguments.kills, seed=arguments.seed, words=arguments.words)
    print(f"{len(run.events)} kills, {run.steps} steps, nothing lost and nothing left")


if __name__ == "__main__":
    main()
