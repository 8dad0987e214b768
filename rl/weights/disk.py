"""A bucket as a file that both sides see: for where no process group can be, and no other way is fast enough."""

from __future__ import annotations

import contextlib
import os
import uuid
from pathlib import Path

import safetensors
import safetensors.torch
import torch
import xxhash

from rl.protocols import Bucket, EngineError, StoredBucket
from rl.weights.packed import safetensors_bytes

SUFFIX = ".safetensors"


def write_bucket(bucket: Bucket, folder: Path) -> StoredBucket:
    """A file under its final name is complete. Raises `EngineError` where it cannot be written."""
    payload = safetensors_bytes(bucket)
    path = folder / f"bucket-{uuid.uuid4().hex}{SUFFIX}"
    part = path.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_bytes(payload)
        os.replace(part, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            part.unlink()
        raise EngineError(f"a bucket of weights could not be written to {folder}: {error}") from error
    return StoredBucket(str(path), _digest(payload), sum(tensor.nbytes for _, tensor in bucket))


def read_bucket(bucket: StoredBucket) -> dict[str, torch.Tensor]:
    """On the CPU. Raises `EngineError` unless the file is there and holds what was written."""
    try:
        payload = Path(bucket.path).read_bytes()
    except OSError as error:
        raise EngineError(
            f"a bucket of weights could not be read: {error}. The run's folder, where the trainer writes it, must be "
            "one that the engine's machine sees, too."
        ) from error
    if (digest := _digest(payload)) != bucket.digest:
        raise EngineError(
            f"{bucket.path} is not what the trainer wrote: its digest is {digest}, the trainer's {bucket.digest}."
        )
    return safetensors.torch.load(payload)


def remove_stale(folder: Path) -> None:
    """What a run that was killed has left there. Only while no bucket is on its way."""
    for path in folder.glob("bucket-*"):
        path.unlink(missing_ok=True)


def _digest(payload: bytes) -> str:
    return xxhash.xxh3_128_hexdigest(payload)
