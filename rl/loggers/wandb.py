"""Weights & Biases: the rows of metrics.jsonl under the same keys, against the axes of `rl/loggers/names.py`.

Each row is one commit, with its samples as a table and the published claims as constants beside it. The claims are in
every row of their window, so that a panel of a metric can show one as a line.

W&B runs in a child process (`rl/loggers/wandb_process.py`) that reads one request a line on standard input and answers
each with one line. A hanging upload, its exit hooks and its threads then end with that child and never hold the run. If
the run is killed, the child sees the end of its input and marks the W&B run as failed.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rl.config.schema import ConfigError, WandbLoggerConfig
from rl.loggers.facts import RunFacts
from rl.loggers.jsonl import num_logged, read_metrics
from rl.loggers.names import axis_of, is_score
from rl.loggers.samples import Sample
from rl.loggers.tracker import BackgroundTracker, log

RUN_ID_FILE = "wandb_run_id"
FINISH_LIMIT_S = 8.0
"""Of an upload at the end, below the time that `close` waits. What is left is in the run folder, for `wandb sync`."""


class WandbError(RuntimeError):
    """W&B, or the process that it runs in, failed."""


class WandbLogger(BackgroundTracker):
    """One W&B run per run folder: a resumed run continues it under the id in `wandb_run_id`.

    The environment variable WANDB_MODE wins over `config.mode`. Without an API key the run is recorded offline.
    """

    def __init__(
        self,
        config: WandbLoggerConfig,
        *,
        run_folder: Path,
        facts: RunFacts,
        first_commit: int | None = None,
        finish_limit_s: float = FINISH_LIMIT_S,
    ) -> None:
        """`first_commit`: W&B's own `_step` of the first row, which may not be one that it has already.

        None: as many as the run ever logged, for a run that is going on.
        """
        super().__init__("W&B")
        if config.mode not in ("online", "offline"):
            raise ConfigError(f"logger.mode={config.mode}: must be online or offline.")
        self.last_step: int | None = None
        """Of the rows that W&B has of this run; None: none, or it was not asked because this is offline."""
        self._mode = os.environ.get("WANDB_MODE") or config.mode
        self._run_folder = run_folder
        self._published = facts.published
        self._init = {
            "project": config.project,
            "entity": config.entity,
            "dir": str(run_folder),
            "config": dict(facts.config),
            "name": facts.name,
            "group": facts.group,
            "tags": list(facts.tags),
        }
        self._settings = {
            "first_commit": num_logged(run_folder) if first_commit is None else first_commit,
            "axes": {line.key: axis_of(line.metric) for line in self._published},
            "finish_limit_s": finish_limit_s,
        }
        self._best: dict[str, float] = {}
        self._child: subprocess.Popen[str] | None = None

    def open(self) -> None:
        if self._child is not None:
            _kill(self._child)
        # A session of its own: Ctrl-C in the terminal is for the run, which then tells W&B.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "rl.loggers.wandb_process"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        run_id, is_known = self._run_id()
        resume = "allow" if is_known or self._mode == "online" else None
        answer = self._ask(
            {"init": {**self._init, "mode": self._mode, "id": run_id, "resume": resume}, **self._settings}
        )
        if answer["mode"] != self._mode:
            log.warning("W&B has no valid API key: recording offline. Set WANDB_API_KEY or run 'wandb login'.")
        self.location = answer["location"]
        self.last_step = answer["last_step"]
        self._best = best_scores(read_metrics(self._run_folder / "metrics.jsonl"))
        self._ask({"summary": self._best})

    def send(self, metrics: Mapping[str, float | None], *, step: int, samples: Sequence[Sample] = ()) -> None:
        row: dict[str, Any] = {"step": step, **{key: value for key, value in metrics.items() if value is not None}}
        row |= {line.key: line.value for line in self._published if line.holds_at(step)}
        best = best_scores([row])
        better = {key: value for key, value in best.items() if value > self._best.get(key, float("-inf"))}
        self._best |= better
        self._ask({"row": row, "samples": [asdict(sample) for sample in samples], "summary": better})

    def finish(self, *, failed: bool) -> None:
        self._ask({"finish": 1 if failed else 0})

    def close(self, *, failed: bool) -> None:
        super().close(failed=failed)
        self.kill()

    def kill(self) -> None:
        """Ends W&B's process with whatever it has not uploaded."""
        if self._child is not None:
            _kill(self._child)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._child is not None
        assert self._child.stdin is not None
        assert self._child.stdout is not None
        self._child.stdin.write(json.dumps(request) + "\n")
        self._child.stdin.flush()
        line = self._child.stdout.readline()
        if not line:
            raise WandbError("its process ended")
        answer = json.loads(line)
        if "error" in answer:
            raise WandbError(answer["error"])
        return answer

    def _run_id(self) -> tuple[str, bool]:
        """The id, and whether the run had it before."""
        path = self._run_folder / RUN_ID_FILE
        is_known = path.exists()
        if not is_known:
            path.write_text(secrets.token_hex(4))
        return path.read_text().strip(), is_known


def best_scores(rows: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """`best/<key>` -> the largest value of each score among `rows`."""
    best: dict[str, float] = {}
    for row in rows:
        for key, value in row.items():
            if value is not None and is_score(key):
                best[f"best/{key}"] = max(value, best.get(f"best/{key}", value))
    return best


def _kill(child: subprocess.Popen[str]) -> None:
    """Ends the child and W&B's own service below it. No-op if both are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()
