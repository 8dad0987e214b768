"""How tests drive a rollout engine: publish a transformers model to it, sample, and compare log-probs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import numpy as np

from rl.protocols import Bucket, RemoteBucket, RolloutEngine, TensorSpec, UpdateManifest
from rl.types import Prompt, Rollout, Sampling
from rl.weights.outlet import WeightOutlet
from rl.weights.packed import pack


def weights_of(model: Any) -> list[tuple[str, Any]]:
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


def manifest_of(weights: list[tuple[str, Any]], version: int) -> UpdateManifest:
    specs = (
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)) for name, tensor in weights
    )
    return UpdateManifest(version, tuple(specs))


async def publish(engine: RolloutEngine, model: Any, version: int, *, per_bucket: int = 5) -> None:
    weights = weights_of(model)
    update = await engine.open_update(manifest_of(weights, version))
    for start in range(0, len(weights), per_bucket):
        await update.send(weights[start : start + per_bucket])
    await update.commit(version)


class Source:
    """Tensors that a test holds, as a trainer of one rank sends them: what `publish_weights` needs of a trainer.

    `sent` are those of the manifest unless they are to differ.
    """

    def __init__(
        self,
        weights: list[tuple[str, Any]],
        *,
        outlet: WeightOutlet,
        sent: list[tuple[str, Any]] | None = None,
        per_bucket: int = 5,
    ) -> None:
        self._weights = weights
        self._sent = weights if sent is None else sent
        self._outlet = outlet
        self._per_bucket = per_bucket
        self._posted: Bucket = []

    async def manifest(self, version: int) -> UpdateManifest:
        return manifest_of(self._weights, version)

    async def buckets(self) -> AsyncIterator[Bucket]:
        for start in range(0, len(self._sent), self._per_bucket):
            yield self._sent[start : start + self._per_bucket]

    async def outlet(self, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(getattr(self._outlet, method), *arguments)

    async def post_buckets(self, method: str, *arguments: Any) -> AsyncIterator[RemoteBucket]:
        async for bucket in self.buckets():
            self._posted = bucket
            yield await self.outlet(method, bucket, *arguments)

    async def copy_posted(self) -> Any:
        import ray

        return ray.put(pack(self._posted))


async def sample_group(
    engine: RolloutEngine, prompt: Prompt, *, n: int, group_id: int, sampling: Sampling
) -> list[Rollout]:
    """In order of their index."""
    rollouts = [r async for r in engine.generate(prompt, group_id=group_id, n=n, sampling=sampling)]
    return sorted(rollouts, key=lambda rollout: rollout.index)


def logprobs_of(model: Any, rollout: Rollout, temperature: float) -> np.ndarray:
    """[L], the model's own, 0 where nothing was sampled."""
    import torch

    ids = torch.tensor(rollout.token_ids[None].astype(np.int64), device=model.device)
    with torch.no_grad():
        table = torch.log_softmax(model(ids).logits[0, :-1].float() / temperature, -1)
    values = table.gather(1, ids[0, 1:, None])[:, 0].cpu().numpy()
    return np.where(rollout.loss_mask, np.concatenate([[0.0], values]), 0.0)


class EngineSession:
    """A started engine and the event loop that it belongs to, over several tests."""

    def __init__(self, engine: RolloutEngine) -> None:
        self.engine: Any = engine
        self.runner = asyncio.Runner()
        self.run(engine.start())

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(limited())

    def close(self) -> None:
        self.run(self.engine.close())
        self.run(self.engine.close())
        self.runner.close()
