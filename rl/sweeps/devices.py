"""What a point runs on: GPUs of its own, or a place on the CPU."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from rl.config.schema import ConfigError, RunConfig

OTHER_VARIABLES = ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")


def visible_gpus(root: Path = Path("/")) -> list[str]:
    """Names of the GPUs that this process may use: those of CUDA_VISIBLE_DEVICES, or all that the kernel shows."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    nvidia = [path for path in root.glob("dev/nvidia[0-9]*") if path.name.removeprefix("nvidia").isdigit()]
    amd = [path for path in root.glob("sys/class/kfd/kfd/topology/nodes/*/gpu_id") if path.read_text().strip() != "0"]
    return [str(index) for index in range(len(nvidia) or len(amd))]


@dataclass(slots=True)
class Slots:
    """Who has what. `gpus` is None for a sweep on the CPU."""

    jobs: int
    gpus: list[str] | None
    _taken: list[str] = field(default_factory=list)
    _running: int = 0

    def take(self, config: RunConfig) -> list[str] | None:
        """GPUs of a point, empty on a CPU; None while there are not enough, or as many points run as may."""
        if self._running >= self.jobs:
            return None
        free = [name for name in self.gpus or [] if name not in self._taken]
        needed = config.num_gpus_used if self.gpus is not None else 0
        if len(free) < needed:
            return None
        self._running += 1
        self._taken += free[:needed]
        return free[:needed]

    def environment(self, gpus: list[str]) -> dict[str, str]:
        """Of a point that has these GPUs; on a CPU several points share its cores, and threads that wait for each other
        are far slower than fewer."""
        if gpus:
            return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        if self.jobs == 1 or "OMP_NUM_THREADS" in os.environ:
            return {}
        return {"OMP_NUM_THREADS": str(max(len(os.sched_getaffinity(0)) // self.jobs, 1))}

    def give_back(self, gpus: list[str]) -> None:
        self._running -= 1
        self._taken = [name for name in self._taken if name not in gpus]


def slots_for(configs: list[RunConfig], jobs: int | None) -> Slots:
    """Raises ConfigError if a point needs more GPUs than there are, or more are asked for than can have their own."""
    if all(config.hardware.device == "cpu" for config in configs):
        return Slots(jobs or 1, None)
    other = next((name for name in OTHER_VARIABLES if name in os.environ), None)
    if other is not None:
        raise ConfigError(f"{other} is set; a sweep gives out GPUs by CUDA_VISIBLE_DEVICES, also on ROCm. Use that.")
    gpus = visible_gpus()
    needed = max(config.num_gpus_used for config in configs)
    if needed > len(gpus) and all(config.hardware.nodes == 1 for config in configs):
        raise ConfigError(f"a point of this sweep needs {needed} GPU(s), and this machine shows {len(gpus)}.")
    if any(config.hardware.nodes > 1 for config in configs):
        if jobs not in (None, 1):
            raise ConfigError(f"sweep.jobs={jobs} with hardware.nodes above 1: such points run one after the other.")
        return Slots(1, None)
    if jobs is not None and jobs * min(max(config.num_gpus_used, 1) for config in configs) > len(gpus):
        raise ConfigError(
            f"sweep.jobs={jobs}: points of {needed} GPU(s) each, and there are {len(gpus)}. No two points share a GPU. "
            f"Use sweep.jobs={max(len(gpus) // needed, 1)} or less, or leave it out."
        )
    return Slots(jobs or len(gpus), gpus)
