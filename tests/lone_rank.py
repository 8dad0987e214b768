"""A trainer rank by itself, in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rl.config.algorithms import AlgorithmConfig
from rl.config.build import build
from rl.config.schema import TrainerConfig


def lone_rank(
    config: TrainerConfig, folder: Path, algorithm: AlgorithmConfig, *, total_updates: int, device: str = "cpu"
) -> Any:
    """The rank that `config` names, of the model in `folder`."""
    return build(
        config,
        model_folder=folder,
        algorithm=algorithm,
        device=device,
        rank=0,
        num_ranks=1,
        store=None,
        seed=0,
        total_updates=total_updates,
    )
