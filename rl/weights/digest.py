"""Fingerprints of weights, computed where they lie."""

from __future__ import annotations

import torch

_CHUNK = 2**22
"""Elements whose 64-bit copy exists at once: 32 MiB."""

_STRIDE = 2 * 0x2C28FA16A64ABF97
"""Even, so that every weight is odd; a large one, so that neighbours differ in all bits."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """16 hex digits of the bytes of `tensor`; equal for equal values on any device.

    A position-weighted sum modulo 2^64 (odd weights, so that any single changed element changes it). It finds weights
    that are stale, torn or swapped; it is no defence against an adversary.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = next(size for size in (8, 4, 2, 1) if flat.numel() % size == 0)
    words = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, len(words), _CHUNK):
        chunk = words[start : start + _CHUNK].to(torch.int64)
        weights = torch.arange(start, start + len(chunk), dtype=torch.int64, device=tensor.device)
        total += (chunk * (weights * _STRIDE + 1)).sum()
    return f"{int(total) % 2**64:016x}"
