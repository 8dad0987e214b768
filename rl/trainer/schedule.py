"""The learning rate as a function of the update's number."""

from __future__ import annotations

import math

from rl.config.schema import OptimizerConfig, Schedule


def lr_at(update: int, total_updates: int, config: OptimizerConfig) -> float:
    """Rate of update `update` (from 0) of `total_updates`.

    Warm-up ends with the full rate at update `lr_warmup_updates` - 1; decay starts there and ends at 0 with the last
    update of the run.
    """
    if update < config.lr_warmup_updates:
        return config.lr * (update + 1) / config.lr_warmup_updates
    peak = max(config.lr_warmup_updates - 1, 0)
    progress = min((update - peak) / max(total_updates - 1 - peak, 1), 1.0)
    match config.schedule:
        case Schedule.constant:
            return config.lr
        case Schedule.linear:
            return config.lr * (1.0 - progress)
        case Schedule.cosine:
            return config.lr * 0.5 * (1.0 + math.cos(math.pi * progress))
