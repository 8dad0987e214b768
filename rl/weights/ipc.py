"""Tensors between two processes on one GPU, without a way through the host: CUDA IPC, which HIP has too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rl.protocols import Bucket

_ALIGNMENT = 16
"""Bytes; no dtype needs more."""

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
    layout: Layout = []
    size = 0
    for name, tensor in bucket:
        layout.append((name, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), size))
        size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
    device = bucket[0][1].device
    buffer = torch.empty(size, dtype=torch.uint8, device=device)
    for (_, tensor), (_, _, _, first) in zip(bucket, layout, strict=True):
        buffer[first : first + tensor.nbytes].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
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
