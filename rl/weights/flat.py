"""A bucket in one buffer, which another process can open by one handle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.protocols import Bucket

ALIGNMENT = 16
"""Bytes; of no less than any element."""


def flat_places(sizes: Sequence[int]) -> tuple[list[int], int]:
    """Where tensors of so many bytes begin in one buffer, each aligned, and the buffer's size."""
    places, end = [], 0
    for size in sizes:
        start = -(-end // ALIGNMENT) * ALIGNMENT
        places.append(start)
        end = start + size
    return places, end


def flattened(bucket: Bucket, *, device: torch.device) -> tuple[torch.Tensor, list[int]]:
    """The tensors' bytes, copied into one uint8 buffer, and where each begins.

    On a CPU the buffer is shared memory; on a GPU the copies may still be under way.
    """
    places, size = flat_places([tensor.nbytes for _, tensor in bucket])
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu":
        buffer.share_memory_()
    for (_, tensor), start in zip(bucket, places, strict=True):
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return buffer, places
