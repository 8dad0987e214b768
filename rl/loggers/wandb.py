"""Weights & Biases: the rows of metrics.jsonl under the same keys, with `step` as their axis.

W&B runs in a child process that reads one request a line on standard input and answers each with one line. A hanging
upload, its exit hooks and its threads then end with that child and never hold the run. If the run is killed, the child
sees the end of its input and marks the W&B run as failed.
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
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rl.config.schema import ConfigError, WandbLoggerConfig
from rl.loggers.names import METRICS, Reduction
from rl.loggers.tracker import BackgroundTracker, log

if TYPE_CHECKING:
    import wandb

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
        run_config: Mapping[str, Any],
        name: str,
        group: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        """`run_config`: resolved, plain (JSON) and free of secrets; it is uploaded."""
        super().__init__("W&B")
        if config.mode not in ("online", "offline"):
            raise ConfigError(f"logger.mode={config.mode}: must be online or offline.")
        self._mode = os.environ.get("WANDB_MODE") or config.mode
        self._init = {
            "project": config.project,
            "entity": config.entity,
            "dir": str(run_folder),
            "config": dict(run_config),
            "name": name,
            "group": group,
            "tags": list(tags),
        }
        self._run_folder = run_folder
        self._child: subprocess.Popen[str] | None = None

    def open(self) -> None:
        if self._child is not None:
            _kill(self._child)
        # A session of its own: Ctrl-C in the terminal is for the run, which then tells W&B.
        self._child = subprocess.Popen(
            [sys.executable, "-m", "rl.loggers.wandb"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        answer = self._ask({"init": {**self._init, "mode": self._mode, "id": self._run_id()}})
        if answer["mode"] != self._mode:
            log.warning("W&B has no valid API key: recording offline. Set WANDB_API_KEY or run 'wandb login'.")
        self.location = answer["location"]

    def send(self, metrics: Mapping[str, float | None], *, step: int) -> None:
        self._ask({"row": {"step": step, **{key: value for key, value in metrics.items() if value is not None}}})

    def finish(self, *, failed: bool) -> None:
        self._ask({"finish": 1 if failed else 0})

    def close(self, *, failed: bool) -> None:
        super().close(failed=failed)
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

    def _run_id(self) -> str:
        path = self._run_folder / "wandb_run_id"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        return path.read_text().strip()


def _kill(child: subprocess.Popen[str]) -> None:
    """Ends the child and W&B's own service below it. No-op if both are gone."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def serve(requests: TextIO, answers: TextIO) -> None:
    """The child: answers requests until one of them is `finish` or the input ends."""
    run: wandb.Run | None = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "init" in request:
                run, mode = _start_run(**request["init"])
                location = run.url or f"{run.settings.sync_dir} (upload with 'wandb sync')"
                answer = {"mode": mode, "location": location}
            elif "row" in request and run is not None:
                # W&B's own step is left to count commits: it drops rows whose explicit step is not above the last one.
                run.log(request["row"])
            elif "finish" in request and run is not None:
                run.finish(exit_code=request["finish"])
        except Exception as error:  # noqa: BLE001 - whatever W&B raises is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "finish" in request:
            return
    if run is not None:
        run.finish(exit_code=1)


def _start_run(*, mode: str, **arguments: Any) -> tuple[wandb.Run, str]:
    """The run, and its mode: offline where W&B has no valid API key.

    No code, git diff, command line or console output is recorded: they may hold secrets or a model's raw text.
    """
    import wandb
    from wandb.errors import UsageError

    settings = wandb.Settings(
        silent=True,  # and so never asks for a key on the terminal
        console="off",
        disable_code=True,
        disable_git=True,
        x_disable_meta=True,
        init_timeout=60,
    )
    if "finish_timeout" in wandb.Settings.model_fields:  # W&B 0.26 has no such limit
        settings.finish_timeout = FINISH_LIMIT_S
    wandb.setup(wandb.Settings(silent=True))
    resume = "allow" if mode == "online" else None
    try:
        run = wandb.init(mode=mode, resume=resume, settings=settings, **arguments)  # type: ignore[arg-type]
    except UsageError:
        if mode != "online":
            raise
        mode = "offline"
        run = wandb.init(mode=mode, settings=settings, **arguments)
    run.define_metric("step")
    for metric in METRICS:
        key = metric.key.partition("<")[0] + "*" if metric.is_pattern else metric.key
        summary = "max" if metric.reduction is Reduction.MAX else "last"
        run.define_metric(key, step_metric="step", summary=summary)
    return run, mode


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what W&B prints is no answer
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
