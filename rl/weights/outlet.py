"""The sending end of remote buckets: beside a rank's tensors, in this process or in an actor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rl.protocols import BroadcastBucket, Bucket, Meeting, SharedBucket, StoredBucket
from rl.weights.collective import WeightGroup, join_as_host, open_meeting
from rl.weights.disk import write_bucket
from rl.weights.flat import flattened, specs_of
from rl.weights.ipc import KeptBuckets, SharedBuffer, share_bucket

OF_EVERY_RANK = frozenset({"share", "finish", "drop"})
"""Methods that every rank's outlet does; the others are rank 0's alone."""


class WeightOutlet:
    """One bucket is on its way at a time: the one before is waited for and freed as the next is posted.

    So no more of the model than two buckets lies beside it, of which the trainer's own size is the bound.
    """

    def __init__(self, *, device: torch.device, host: str) -> None:
        """`host` is the address that the engines reach this process by."""
        self._device = device
        self._host = host
        self._group: WeightGroup | None = None
        self._meeting: tuple[Any, Meeting] | None = None
        """Of a group that is being formed, with its store."""
        self._buffer: torch.Tensor | None = None
        self._file: Path | None = None
        self._shared: SharedBuffer | None = None
        self._kept: KeptBuckets | None = None

    def group(self) -> Meeting | None:
        """That its group was formed at."""
        return None if self._group is None else self._group.meeting

    def meet(self, num_workers: int, timeout_s: float) -> Meeting:
        """Opens the meeting of a new group; the old one is left."""
        self.drop()
        self._meeting = open_meeting(host=self._host, num_workers=num_workers, device=self._device, timeout_s=timeout_s)
        return self._meeting[1]

    def join(self) -> None:
        """Blocks until all workers have come. Raises `PartnerLost`."""
        assert self._meeting is not None, "no meeting is open"
        (store, meeting), self._meeting = self._meeting, None
        self._group = join_as_host(store, meeting, device=self._device)

    def broadcast(self, bucket: Bucket) -> BroadcastBucket:
        """Begins to send it to all members of the group; returns at once."""
        assert self._group is not None, "no group has been formed"
        self.finish()
        self._buffer = self._laid_out(bucket)
        self._group.start(self._buffer)
        return BroadcastBucket(
            self._group.meeting.group_id, specs_of(bucket), sum(tensor.nbytes for _, tensor in bucket)
        )

    def _laid_out(self, bucket: Bucket) -> torch.Tensor:
        """A tensor that is a bucket of its own is not copied: it may be a large part of the model."""
        if len(bucket) == 1:
            ((_, tensor),) = bucket
            if tensor.is_contiguous() and tensor.device == self._device:
                return tensor.detach().reshape(-1).view(torch.uint8)
        return flattened(bucket, device=self._device, is_shared=False)[0]

    def store(self, bucket: Bucket, folder: str) -> StoredBucket:
        """Writes it to a file of `folder`."""
        self.finish()
        stored = write_bucket(bucket, Path(folder))
        self._file = Path(stored.path)
        return stored

    def share(self, bucket: Bucket) -> SharedBucket:
        """Lays it out for the processes that use this rank's device, too."""
        self.finish()
        self._shared = share_bucket(bucket, self._device)
        return self._shared.bucket

    def forget(self) -> None:
        """What was kept of the weights before."""
        self._kept = None

    def keep(self, bucket: Bucket) -> SharedBucket:
        """Copies it to the host, where it stays until `forget`, whatever becomes of the weights."""
        if self._kept is None:
            self._kept = KeptBuckets()
        return self._kept.add(bucket)

    def finish(self) -> None:
        """Until the bucket that was posted last has gone. Raises `PartnerLost`."""
        if self._buffer is not None and self._group is not None:
            try:
                self._group.wait()
            except BaseException:
                self._group = None
                raise
        self._free()

    def drop(self) -> None:
        """After an error, at any time: nothing is on its way any more, and the group is left."""
        if self._group is not None:
            self._group.leave()
        self._group = self._meeting = None
        self._free()

    def _free(self) -> None:
        self._buffer = self._shared = None
        if self._file is not None:
            self._file.unlink(missing_ok=True)
            self._file = None
