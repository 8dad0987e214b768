"""How tests run the command as a person does: in a process of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path


def environment(**changes: str) -> dict[str, str]:
    """Several processes share two cores in CI: one thread each, or they wait for each other."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", **changes}


def rl(*words: str, cwd: Path, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return _python("-m", "rl", *words, cwd=cwd, timeout_s=timeout_s)


def _python(
    *words: str, cwd: Path, timeout_s: float, standard_input: str | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        input=standard_input,
        cwd=cwd,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def with_words(words: Sequence[str], *others: str) -> list[str]:
    """`words` with `others` in place of those of the same keys: the command takes each key once."""
    keys = {other.partition("=")[0] for other in others}
    return [*(word for word in words if word.partition("=")[0] not in keys), *others]


def run_ok(*words: str, cwd: Path, timeout_s: float = 240.0) -> str:
    """Standard output of a command that must succeed."""
    done = rl(*words, cwd=cwd, timeout_s=timeout_s)
    assert done.returncode == 0, f"rl {' '.join(words)}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


_PROGRAM = """
import sys
from contextlib import redirect_stdout
from rl.__main__ import main
for number, line in enumerate(sys.stdin):
    with open(f"{number}.txt", "w") as said, redirect_stdout(said):
        code = main(line.split())
    assert code == 0, (line, code)
"""


def run_together(lines: Sequence[Sequence[str]], *, cwd: Path, timeout_s: float) -> list[str]:
    """What each of these commands says on standard output. They must succeed, and their words hold no space.

    They run one after the other in one process: most of a small run's time is loading torch and transformers.
    """
    done = _python("-c", _PROGRAM, cwd=cwd, timeout_s=timeout_s, standard_input="\n".join(map(" ".join, lines)))
    said = [path.read_text() for number in range(len(lines)) if (path := cwd / f"{number}.txt").exists()]
    assert done.returncode == 0, said[-1][-2000:] + done.stderr[-4000:]
    return said


def cpu_s() -> float:
    """CPU seconds of this process's finished children. What a command takes on an idle machine, on a busy one too."""
    times = os.times()
    return times.children_user + times.children_system


def start(*words: str, cwd: Path) -> subprocess.Popen[str]:
    """In a process group of its own, as a shell does it: Ctrl-C reaches every process of the group."""
    return subprocess.Popen(
        [sys.executable, "-m", "rl", *words],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def press_ctrl_c(process: subprocess.Popen[str]) -> None:
    os.killpg(process.pid, signal.SIGINT)
