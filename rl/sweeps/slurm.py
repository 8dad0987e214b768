"""Points as Slurm jobs, by submitit: `pip install -e '.[slurm]'`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rl import exit_codes
from rl.config.schema import ConfigError
from rl.config.sweep import Launcher, SweepConfig
from rl.sweeps import ledger
from rl.sweeps.ledger import Entry, State

ENDED = (
    "CANCELLED",
    "FAILED",
    "TIMEOUT",
    "OUT_OF_MEMORY",
    "NODE_FAIL",
    "PREEMPTED",
    "BOOT_FAIL",
    "COMPLETED",
    "FINISHED",
)
"""Words that Slurm's or submitit's name of a job's state begins with, once it runs no more."""


def submit(folder: Path, missing: Sequence[Entry], settings: SweepConfig) -> int:
    """Submits one job for each point and returns at once; `rl sweep show` says how far they are."""
    submitit = _submitit()
    cluster = "local" if settings.launcher is Launcher.submitit_local else "slurm"
    try:
        executor = submitit.AutoExecutor(folder=folder / "slurm", cluster=cluster)
        executor.update_parameters(**settings.slurm)
    except (NameError, TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"sweep.slurm: {error}") from error
    for entry in missing:
        command = [sys.executable, "-m", "rl.sweeps.child", "0", str(entry.folder), *entry.words]
        record = replace(entry.record, state=State.submitted, why="", exit_code=None)
        # Written first: the job writes the next state itself, and may start before `submit` returns.
        ledger.write_record(entry.folder, record)
        job = executor.submit(submitit.helpers.CommandFunction(command))
        if ledger.read_record(entry.folder).state is State.submitted:
            ledger.write_record(entry.folder, replace(record, job_id=job.job_id))
        print(f"[{entry.folder.name}] {entry.label}: job {job.job_id}", flush=True)
    print(f"{len(missing)} job(s) submitted. How far they are: rl sweep show {folder}")
    return exit_codes.DONE


def forget_dead_jobs(folder: Path, settings: SweepConfig) -> None:
    """Points whose job ended without a word, cancelled or killed with its machine, are interrupted ones."""
    submitit = _submitit()
    kind = submitit.LocalJob if settings.launcher is Launcher.submitit_local else submitit.SlurmJob
    for entry in ledger.read_ledger(folder):
        record = entry.record
        if record.state not in (State.submitted, State.running) or record.job_id is None:
            continue
        if str(kind(folder / "slurm", record.job_id).state).startswith(ENDED):
            ledger.write_record(entry.folder, replace(record, state=State.interrupted))


def _submitit() -> Any:
    try:
        import submitit
    except ModuleNotFoundError as error:
        raise ConfigError(
            "sweep.launcher=slurm needs the package 'submitit', which is not installed. Run: pip install -e '.[slurm]' "
            "in the project's folder."
        ) from error
    return submitit
