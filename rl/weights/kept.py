"""Weights of one version that stay as they are while the trainer goes on: a copy in the host's memory."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

from rl.protocols import Bucket, SharedBucket, Trainer, UpdateManifest, WeightSource


class KeptWeights(WeightSource):
    """What rank 0 keeps until the next are kept. To publish them asks nothing of the trainer."""

    def __init__(self, manifest: UpdateManifest, buckets: Sequence[SharedBucket]) -> None:
        self._manifest = manifest
        self._buckets = buckets
        self._posted: SharedBucket | None = None

    @classmethod
    async def of(cls, trainer: Trainer, version: int) -> KeptWeights:
        """The trainer's as they are now, to be `version`. What was kept before is gone."""
        await trainer.outlet("forget")
        buckets = [bucket async for bucket in trainer.post_buckets("keep")]
        assert all(isinstance(bucket, SharedBucket) for bucket in buckets)
        return cls(await trainer.manifest(version), buckets)  # type: ignore[arg-type]

    @property
    def num_bytes(self) -> int:
        return sum(bucket.num_bytes for bucket in self._buckets)

    async def manifest(self, version: int) -> UpdateManifest:
        assert version == self._manifest.version
        return self._manifest

    async def buckets(self) -> AsyncIterator[Bucket]:
        for bucket in self._buckets:
            yield _opened(bucket)

    async def outlet(self, method: str, *arguments: Any) -> None:
        """They lie where they are; nothing has to be finished or dropped."""

    async def post_buckets(self, method: str, *arguments: Any) -> AsyncIterator[SharedBucket]:
        for bucket in self._buckets:
            self._posted = bucket
            yield bucket

    async def copy_posted(self) -> Any:
        """Packed, in this process."""
        from rl.weights.packed import pack

        assert self._posted is not None
        return pack(_opened(self._posted))


def _opened(bucket: SharedBucket) -> Bucket:
    from rl.weights.ipc import HOST, open_bucket

    return list(open_bucket(bucket, HOST).items())
