"""A bucket in one buffer: of a broadcast, or for another process to open by one handle."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rl.protocols import Bucket, TensorSpec

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


def flattened(bucket: Bucket, *, device: torch.device, is_shared: bool = True) -> tuple[torch.Tensor, list[int]]:
    """The tensors' bytes, copied into one uint8 buffer, and where each begins.

    On a CPU the buffer is shared memory if `is_shared`; on a GPU the copies may still be under way.
    """
    _, size = flat_places([tensor.nbytes for _, tensor in bucket])
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    if device.type == "cpu" and is_shared:
        buffer.share_memory_()
    return buffer, copy_into(buffer, bucket)


def copy_into(buffer: torch.Tensor, bucket: Bucket) -> list[int]:
    """Where in the uint8 buffer each tensor begins. On a GPU the copies may still be under way."""
    places, _ = flat_places([tensor.nbytes for _, tensor in bucket])
    for (_, tensor), start in zip(bucket, places, strict=True):
        buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return places


def specs_of(bucket: Bucket) -> tuple[TensorSpec, ...]:
    return tuple(
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in bucket
    )


def num_bytes(spec: TensorSpec) -> int:
    size = getattr(torch, spec.dtype).itemsize
    for length in spec.shape:
        size *= length
    return size


def views(buffer: torch.Tensor, specs: Sequence[TensorSpec]) -> dict[str, torch.Tensor]:
    """The tensors of a buffer that `flattened` filled, without copies."""
    sizes = [num_bytes(spec) for spec in specs]
    places, _ = flat_places(sizes)
    return {
        spec.name: buffer[start : start + size].view(getattr(torch, spec.dtype)).view(spec.shape)
        for spec, start, size in zip(specs, places, sizes, strict=True)
    }
