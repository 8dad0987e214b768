"""The receiving end of remote buckets: one in each worker of an engine, whatever the engine."""

from __future__ import annotations

import json
from dataclasses import asdict

import torch

from rl.protocols import (
    BroadcastBucket,
    EngineError,
    Meeting,
    MemoryHandle,
    RemoteBucket,
    SharedBucket,
    StoredBucket,
    TensorSpec,
)
from rl.weights.collective import WeightGroup, join
from rl.weights.disk import read_bucket
from rl.weights.flat import flat_places, num_bytes, views
from rl.weights.ipc import open_bucket


class WeightInlet:
    def __init__(self, device: torch.device) -> None:
        """`device` is where broadcast buckets arrive, and shared ones lie."""
        self._device = device
        self._group: WeightGroup | None = None

    @property
    def group_id(self) -> str | None:
        """Of the process group for weights that this worker is in."""
        return None if self._group is None else self._group.meeting.group_id

    def join(self, meeting: Meeting, *, rank: int) -> None:
        """Leaves the old group, if there is one. Blocks until the new one is formed. Raises `PartnerLost`."""
        self.leave()
        self._group = join(meeting, rank=rank, device=self._device)

    def leave(self) -> None:
        if self._group is not None:
            self._group.leave()
            self._group = None

    def fetch(self, bucket: RemoteBucket) -> dict[str, torch.Tensor]:
        """Nobody else holds their memory. Raises `EngineError`."""
        if isinstance(bucket, StoredBucket):
            return read_bucket(bucket)
        if isinstance(bucket, SharedBucket):
            return open_bucket(bucket, self._device)
        if self._group is None or bucket.group_id != self.group_id:
            raise EngineError(
                f"a bucket of weights is broadcast to group {bucket.group_id}, and this worker is in "
                f"{self.group_id or 'none'}."
            )
        _, size = flat_places([num_bytes(spec) for spec in bucket.tensors])
        buffer = torch.empty(size, dtype=torch.uint8, device=self._device)
        try:
            self._group.start(buffer)
            self._group.wait()
        except BaseException:
            self._group = None
            raise
        return views(buffer, bucket.tensors)


def to_json(message: Meeting | RemoteBucket) -> str:
    """For the remote calls of engines, which carry no classes."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)})


def meeting_from_json(text: str) -> Meeting:
    fields = json.loads(text)
    assert fields.pop("kind") == Meeting.__name__
    return Meeting(**fields)


def bucket_from_json(text: str) -> RemoteBucket:
    fields = json.loads(text)
    kind = fields.pop("kind")
    if kind == StoredBucket.__name__:
        return StoredBucket(**fields)
    specs = tuple(TensorSpec(spec["name"], spec["dtype"], tuple(spec["shape"])) for spec in fields.pop("tensors"))
    if kind == SharedBucket.__name__:
        handles = {key: MemoryHandle(**handle) for key, handle in fields.pop("handles").items()}
        return SharedBucket(handles, specs, **fields)
    return BroadcastBucket(tensors=specs, **fields)
