"""The process that W&B runs in: `python -m rl.loggers.wandb_process`, started by `rl/loggers/wandb.py`."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import fields
from typing import TYPE_CHECKING, Any, TextIO

from rl.loggers.names import METRICS, axis_of
from rl.loggers.samples import Sample

if TYPE_CHECKING:
    import wandb

SAMPLES_KEY = "samples"


class Session:
    """A W&B run and the number of its next commit."""

    def __init__(self, init: dict[str, Any], *, first_commit: int, axes: dict[str, str], finish_limit_s: float) -> None:
        self.run, self.mode = _start_run(finish_limit_s=finish_limit_s, **init)
        for key, axis in (_axes() | axes).items():
            self.run.define_metric(key, step_metric=axis)
        known = self.run.summary
        self.last_step: int | None = known.get("step")
        # W&B drops a row whose explicit step is not above the last one, and a run that is recorded offline in two
        # parts would count from 0 in both.
        self._commit = max(first_commit, known.get("_step", -1) + 1)

    @property
    def location(self) -> str:
        return self.run.url or f"{self.run.settings.sync_dir} (upload with 'wandb sync')"

    def log(self, row: dict[str, Any], samples: list[dict[str, Any]]) -> None:
        self.run.log(row | ({SAMPLES_KEY: _table(samples)} if samples else {}), step=self._commit, commit=True)
        self._commit += 1


def _axes() -> dict[str, str]:
    """W&B's name of every metric, with `*` for what follows -> the key it is drawn against."""
    keys = {metric.key.partition("<")[0] + "*" if metric.is_pattern else metric.key for metric in METRICS}
    return {key: axis_of(key) for key in sorted(keys)} | {SAMPLES_KEY: "step"}


def _table(samples: list[dict[str, Any]]) -> wandb.Table:
    import wandb

    columns: list[Any] = [field.name for field in fields(Sample)]
    rows: list[Any] = [[_cell(sample[column]) for column in columns] for sample in samples]
    return wandb.Table(columns=columns, data=rows, allow_mixed_types=True)


def _cell(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, dict) else value


def serve(requests: TextIO, answers: TextIO) -> None:
    """Answers requests until one of them is `finish` or the input ends."""
    session: Session | None = None
    for line in requests:
        request = json.loads(line)
        answer: dict[str, Any] = {}
        try:
            if "init" in request:
                session = Session(**request)
                answer = {"mode": session.mode, "location": session.location, "last_step": session.last_step}
            elif session is not None:
                if "row" in request:
                    session.log(request["row"], request["samples"])
                if request.get("summary"):
                    session.run.summary.update(request["summary"])
                if "finish" in request:
                    session.run.finish(exit_code=request["finish"])
        except Exception as error:  # noqa: BLE001 - whatever W&B raises is the answer
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()
        if "finish" in request:
            return
    if session is not None:
        session.run.finish(exit_code=1)


def _start_run(*, mode: str, finish_limit_s: float, **arguments: Any) -> tuple[wandb.Run, str]:
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
        settings.finish_timeout = finish_limit_s
    wandb.setup(wandb.Settings(silent=True))
    try:
        return wandb.init(mode=mode, settings=settings, **arguments), mode  # type: ignore[arg-type]
    except UsageError:
        if mode != "online":
            raise
        return wandb.init(mode="offline", settings=settings, **arguments), "offline"


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what W&B prints is no answer
    serve(sys.stdin, answers)


if __name__ == "__main__":
    main()
