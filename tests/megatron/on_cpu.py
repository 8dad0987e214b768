"""Megatron-Core on a CPU. The patches are here and nowhere else: the suite itself runs Megatron on GPUs only."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module")
def megatron_on_cpu() -> Iterator[None]:
    """Megatron-Core asks CUDA for the current device (rotary angles) and for its RNG state (recomputation)."""
    from megatron.core.tensor_parallel import random

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(random, "_get_cuda_rng_state", lambda *_, **__: torch.empty(0))
        patch.setattr(random, "_set_cuda_rng_state", lambda *_, **__: None)
        yield
