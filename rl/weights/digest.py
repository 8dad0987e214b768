"""Fingerprints of weights, computed where they lie."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator

import torch

_COLUMNS = 2**12
"""Words of a row. Rows and columns have weights of their own, so that few weights are made: 13 times as fast on a CPU
as one for each word."""
_ROWS = 2**6
"""Whose products exist at once: 2 MiB, which stays in a CPU's cache."""
_JOINED_BYTES = 2**24
"""Up to which tensors are joined before they are digested together: a call takes as long as 10,000 elements."""
_STRIDE = 2 * 0x2C28FA16A64ABF97
"""Even, so that every weight is odd; a large one, so that neighbours differ in all bits."""


def tensor_digest(tensor: torch.Tensor) -> str:
    """16 hex digits of the bytes of `tensor`; equal for equal values on any device.

    A sum modulo 2^64 weighted by row and column (odd weights, so that any single changed element changes it). It finds
    weights that are stale, torn or swapped; it is no defence against an adversary.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    width = next(size for size in (8, 4, 2, 1) if flat.numel() % size == 0)
    words = flat.view({8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[width])
    num_rows, num_left = divmod(len(words), _COLUMNS)
    of_columns = _weights(_COLUMNS if num_rows else num_left, tensor.device)
    of_rows = _weights(num_rows + 1, tensor.device)
    rows = words[: num_rows * _COLUMNS].view(num_rows, _COLUMNS)
    sums = [(part.to(torch.int64) * of_columns).sum(1) for part in rows.split(_ROWS)] if num_rows else []
    sums.append((words[num_rows * _COLUMNS :].to(torch.int64) * of_columns[:num_left]).sum(0, keepdim=True))
    return f"{int((torch.cat(sums) * of_rows).sum()) % 2**64:016x}"


def _weights(count: int, device: torch.device) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int64, device=device).mul_(_STRIDE).add_(1)


def tensors_digest(tensors: Iterable[torch.Tensor]) -> str:
    """Of all of them, in their order."""
    return join_digests(tensor_digest(joined) for joined in _joined(tensors))


def _joined(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Their bytes, neighbours together up to a size; a larger tensor alone and not copied."""
    waiting: list[torch.Tensor] = []
    size = 0
    for tensor in tensors:
        flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
        if waiting and size + flat.numel() > _JOINED_BYTES:
            yield torch.cat(waiting)
            waiting, size = [], 0
        if flat.numel() > _JOINED_BYTES:
            yield flat
            continue
        waiting.append(flat)
        size += flat.numel()
    if waiting:
        yield torch.cat(waiting)


def join_digests(digests: Iterable[str]) -> str:
    """One of many, in their order."""
    return hashlib.blake2b("".join(digests).encode(), digest_size=8).hexdigest()
