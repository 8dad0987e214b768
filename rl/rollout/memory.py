"""Device memory, as every engine counts it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rl.protocols import EngineError

MIN_FREED_FRACTION = 0.1
"""Of an engine's memory budget. A sleep that frees less has freed nothing that a trainer could use."""


def check_freed(name: str, workers: Iterable[tuple[int, int, int]], *, memory_fraction: float, remedy: str) -> None:
    """Raises `EngineError` if a sleep freed too little. `workers`: bytes free before and after, and in all, of each.

    As the device counts them: on some ROCm versions sleep returns and the memory stays taken.
    """
    for rank, (before, after, total) in enumerate(workers):
        freed, needed = after - before, MIN_FREED_FRACTION * memory_fraction * total
        if freed < needed:
            raise EngineError(
                f"{name}'s worker {rank} went to sleep but freed {freed / 2**30:.1f} GiB of its device (at least "
                f"{needed / 2**30:.1f} expected), so the trainer would run out of memory. {remedy}"
            )


def cache_bytes_per_token(text_config: Any, *, bytes_per_element: int) -> int:
    """Keys and values of one token in all layers, of a Hugging Face text config."""
    heads = getattr(text_config, "num_key_value_heads", None) or text_config.num_attention_heads
    head_dim = getattr(text_config, "head_dim", None) or text_config.hidden_size // text_config.num_attention_heads
    return 2 * text_config.num_hidden_layers * heads * head_dim * bytes_per_element
