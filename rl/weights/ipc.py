"""Buckets between processes on one device, without a way through the driver: CUDA IPC, which HIP has too.

Between processes on CPUs they lie in a file that exists in memory alone and is gone with the trainer's process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from rl.config.schema import ALLOCATOR_VARIABLES
from rl.protocols import Bucket, EngineError, MemoryHandle, SharedBucket
from rl.weights.flat import ALIGNMENT, copy_into, flat_places, specs_of, views

HOST = torch.device("cpu")


def device_key(device: torch.device) -> str:
    """Equal in all processes that can open each other's memory on it, however each of them numbers its devices."""
    if device.type == "cpu":
        return f"the host {socket.gethostname()}"
    return str(torch.cuda.get_device_properties(device).uuid)


@dataclass(frozen=True, slots=True)
class SharedBuffer:
    """Keeps the memory; others may copy it while this object lives."""

    bucket: SharedBucket
    memory: torch.Tensor
    """uint8"""
    file: _MemoryFile | None


class _MemoryFile:
    """Its path is gone when this object is, and with it the file when the last who opened it is done."""

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("rl-weights")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def grown_to(self, size: int) -> torch.Tensor:
        """The whole file, uint8."""
        os.truncate(self._descriptor, size)
        return torch.from_file(self.path, shared=True, size=size, dtype=torch.uint8)

    def __del__(self) -> None:
        os.close(self._descriptor)


class KeptBuckets:
    """Copies of buckets in the host's memory, for processes of this machine to open while this object lives."""

    def __init__(self) -> None:
        self._file = _MemoryFile()
        self._size = 0

    def add(self, bucket: Bucket) -> SharedBucket:
        _, size = flat_places([tensor.nbytes for _, tensor in bucket])
        start = -(-self._size // ALIGNMENT) * ALIGNMENT
        self._size = start + size
        copy_into(self._file.grown_to(self._size)[start:], bucket)
        handle = MemoryHandle(self._file.path, size, start)
        return SharedBucket({device_key(HOST): handle}, specs_of(bucket), sum(tensor.nbytes for _, tensor in bucket))


def share_bucket(bucket: Bucket, device: torch.device) -> SharedBuffer:
    """A copy of the bucket in one buffer on `device`. Returns when the copy is complete."""
    _, size = flat_places([tensor.nbytes for _, tensor in bucket])
    file = None
    if device.type == "cpu":
        file = _MemoryFile()
        memory = file.grown_to(size)
        copy_into(memory, bucket)
        handle = MemoryHandle(file.path, size)
    else:
        with _outside_expandable_segments():
            memory = torch.empty(size, dtype=torch.uint8, device=device)
        copy_into(memory, bucket)
        torch.cuda.current_stream(device).synchronize()
        handle = _gpu_handle(memory)
    shared = SharedBucket({device_key(device): handle}, specs_of(bucket), sum(tensor.nbytes for _, tensor in bucket))
    return SharedBuffer(shared, memory, file)


def open_bucket(bucket: SharedBucket, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors, copied: the sender frees its buffer once this has returned, and a loader may keep what it gets.

    From `device` or, if they are not on it, from the host's memory.
    """
    own = device_key(device)
    if own not in bucket.handles:
        device = HOST
    key = device_key(device)
    if key not in bucket.handles:
        raise EngineError(
            f"a bucket of weights was shared on {', '.join(sorted(bucket.handles))}, and this worker is on {own}: "
            "placement.weight_transport=ipc needs a trainer rank on every device that an engine has. Use "
            "placement.weight_transport=auto."
        )
    try:
        copy = _opened(bucket.handles[key], device).clone()
    except (OSError, RuntimeError) as error:
        raise EngineError(f"a bucket of weights that was shared on {key} could not be opened: {error}") from error
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    return views(copy, bucket.tensors)


def _gpu_handle(memory: torch.Tensor) -> MemoryHandle:
    storage: Any = memory.untyped_storage()
    _, handle, size, offset, counter, counter_offset, event, waits = storage._share_cuda_()
    return MemoryHandle(handle.hex(), size, offset, counter.hex(), counter_offset, event.hex(), waits)


def _opened(handle: MemoryHandle, device: torch.device) -> torch.Tensor:
    """uint8"""
    if device.type == "cpu":
        end = handle.offset + handle.num_bytes
        return torch.from_file(handle.memory, shared=True, size=end, dtype=torch.uint8)[handle.offset :]
    torch.cuda.init()  # a process that has not touched its device yet cannot open a handle
    storage = torch.UntypedStorage._new_shared_cuda(
        torch.cuda.current_device() if device.index is None else device.index,
        bytes.fromhex(handle.memory),
        handle.num_bytes,
        handle.offset,
        bytes.fromhex(handle.counter),
        handle.counter_offset,
        bytes.fromhex(handle.event),
        handle.waits_for_event,
    )
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


@contextmanager
def _outside_expandable_segments() -> Iterator[None]:
    """Memory in expandable segments has no handle; while the setting is off, PyTorch's allocator takes none of them."""
    if not any("expandable_segments:true" in os.environ.get(name, "").lower() for name in ALLOCATOR_VARIABLES):
        yield
        return
    torch.cuda.memory._set_allocator_settings("expandable_segments:False")
    try:
        yield
    finally:
        torch.cuda.memory._set_allocator_settings("expandable_segments:True")
