"""Settings of a sweep. They belong to no run: `rl -m sweep.KEY=VALUE ...` takes them off the command line."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any


class Launcher(Enum):
    """What starts the points of a sweep."""

    local = "local"
    """Child processes on this machine."""
    slurm = "slurm"
    """One Slurm job for each point, by submitit."""
    submitit_local = "submitit_local"
    """As slurm, but as processes of this machine that nothing ends with the sweep: to try submitit's parameters."""


@dataclass
class SweepConfig:
    jobs: int | None = None
    """Points that run at the same time. None: on a CPU one, on GPUs as many as have GPUs of their own."""
    metric: str | None = None
    """Key of metrics.jsonl by whose last value settings are compared; higher is better. None: the first accuracy that
    was evaluated, or reward/mean."""
    launcher: Launcher = Launcher.local
    slurm: dict[str, Any] = field(default_factory=dict)
    """With launcher=slurm: submitit's parameters, for example slurm_partition, timeout_min, gpus_per_node."""
