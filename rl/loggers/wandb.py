"""Weights & Biases: the rows of metrics.jsonl under the same keys, with `step` as their axis."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import wandb
from wandb.errors import UsageError

from rl.config.schema import ConfigError, WandbLoggerConfig
from rl.loggers.names import METRICS, Reduction
from rl.loggers.tracker import BackgroundTracker, log

FINISH_LIMIT_S = 8.0
"""Of an upload at the end, below the time that `close` waits. What is left is in the run folder, for `wandb sync`."""


class WandbLogger(BackgroundTracker):
    """One W&B run per run folder: a resumed run continues it under the id in `wandb_run_id`.

    The environment variable WANDB_MODE wins over `config.mode`. Without credentials the run is recorded offline.
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
        """`run_config`: resolved, plain and free of secrets; it is uploaded."""
        super().__init__("W&B")
        if config.mode not in ("online", "offline"):
            raise ConfigError(f"logger.mode={config.mode}: must be online or offline.")
        self._config = config
        self._run_folder = run_folder
        self._run_config = dict(run_config)
        self._name = name
        self._group = group
        self._tags = list(tags)
        self._run: wandb.Run | None = None

    def open(self) -> None:
        wandb.setup(wandb.Settings(silent=True))  # a silent W&B never asks for a key on the terminal
        mode = os.environ.get("WANDB_MODE") or self._config.mode
        try:
            self._run = self._init(mode)
        except UsageError:
            if mode != "online":
                raise
            log.warning("W&B has no valid API key: recording offline. Set WANDB_API_KEY or run 'wandb login'.")
            self._run = self._init("offline")
        self.location = self._run.url or f"{self._run.settings.sync_dir} (upload with 'wandb sync')"
        self._run.define_metric("step")
        for metric in METRICS:
            key = metric.key.partition("<")[0] + "*" if metric.is_pattern else metric.key
            summary = "max" if metric.reduction is Reduction.MAX else "last"
            self._run.define_metric(key, step_metric="step", summary=summary)

    def send(self, metrics: Mapping[str, float | None], *, step: int) -> None:
        # W&B's own step is left to count commits: it drops rows whose explicit step is not above the last one.
        assert self._run is not None
        self._run.log({"step": step, **{key: value for key, value in metrics.items() if value is not None}})

    def finish(self, *, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=1 if failed else 0)

    def _init(self, mode: str) -> wandb.Run:
        """No code, git diff, command line or console output is sent: they may hold secrets or a model's raw text."""
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            x_disable_meta=True,
            init_timeout=60,
        )
        if "finish_timeout" in wandb.Settings.model_fields:  # W&B 0.26 has no such limit
            settings.finish_timeout = FINISH_LIMIT_S
        return wandb.init(
            project=self._config.project,
            entity=self._config.entity,
            mode=mode,  # type: ignore[arg-type]: W&B itself checks a value from the environment
            id=self._run_id(),
            resume="allow" if mode == "online" else None,
            dir=self._run_folder,
            config=self._run_config,
            name=self._name,
            group=self._group,
            tags=self._tags,
            settings=settings,
        )

    def _run_id(self) -> str:
        path = self._run_folder / "wandb_run_id"
        if not path.exists():
            path.write_text(secrets.token_hex(4))
        return path.read_text().strip()
