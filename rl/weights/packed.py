"""A bucket as bytes in the host's memory."""

from __future__ import annotations

from typing import Any

import safetensors.torch
import torch

from rl.protocols import Bucket

PackedBucket = list[tuple[str, str, tuple[int, ...], Any]]
"""(name, dtype, shape, bytes as numpy), which Ray moves through shared memory."""


def pack(bucket: Bucket) -> PackedBucket:
    """numpy knows no bfloat16, so the bytes travel."""
    packed = []
    for name, tensor in bucket:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        packed.append(
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.view(torch.uint8).numpy())
        )
    return packed


def unpack(packed: PackedBucket) -> Bucket:
    """Copies: what Ray hands out is shared and read only, and an engine may keep or change what it is given."""
    return [
        (name, torch.from_numpy(array.copy()).view(getattr(torch, dtype)).reshape(shape))
        for name, dtype, shape, array in packed
    ]


def safetensors_bytes(bucket: Bucket) -> bytes:
    """What `safetensors.torch.load` reads; its dictionary is in no particular order."""
    tensors: dict[str, torch.Tensor] = {}
    storages: set[int] = set()
    for name, tensor in bucket:
        whole = tensor.detach().cpu().contiguous()
        if whole.untyped_storage().data_ptr() in storages:
            whole = whole.clone()  # safetensors refuses tensors that overlap, such as tied ones
        storages.add(whole.untyped_storage().data_ptr())
        tensors[name] = whole
    return safetensors.torch.save(tensors)
