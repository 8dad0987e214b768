"""Tensors between two processes on one GPU, without a way through the host: CUDA IPC, which HIP has too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rl.protocols import Bucket
from rl.weights.flat import flattened

Layout = list[tuple[str, str, list[int], int]]
"""(name, dtype, shape, first byte) of each tensor in a buffer."""


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """A bucket copied into one buffer, to be opened by another process while this object lives."""

    buffer: torch.Tensor
    layout: Layout
    handle: list[Any]
    """What `open_bucket` needs, as plain numbers and bytes: nothing here is ever unpickled."""


def share_bucket(bucket: Bucket) -> SharedBucket:
    """One handle for all tensors, which must be on one GPU. Returns when the copy is complete."""
    device = bucket[0][1].device
    buffer, places = flattened(bucket, device=device)
    layout: Layout = [
        (name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), first)
        for (name, tensor), first in zip(bucket, places, strict=True)
    ]
    torch.cuda.current_stream(device).synchronize()
    storage: Any = buffer.untyped_storage()
    return SharedBucket(buffer, layout, list(storage._share_cuda_()))


def open_bucket(layout: Layout, handle: list[Any]) -> dict[str, torch.Tensor]:
    """The tensors, copied: the sender frees its buffer once this has returned, and a loader may keep what it gets."""
    torch.cuda.init()  # a process that has not touched its device yet cannot open a handle
    storage = torch.UntypedStorage._new_shared_cuda(*handle)
    buffer = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
    tensors = {}
    for name, dtype_name, shape, first in layout:
        dtype = getattr(torch, dtype_name)
        num_bytes = dtype.itemsize
        for length in shape:
            num_bytes *= length
        tensors[name] = buffer[first : first + num_bytes].clone().view(dtype).reshape(shape)
    torch.cuda.current_stream(storage.device).synchronize()
    return tensors
