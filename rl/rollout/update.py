"""The receiving end of a weight update where the model is a plain Hugging Face module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from rl.protocols import Bucket, EngineError, UpdateManifest
from rl.rollout.manifest_check import ManifestCheck, some


class ModelUpdate:
    """Copies the tensors of one manifest into `model`, in place, each exactly once.

    Every parameter and persistent buffer must be in the manifest, under one of its names if it is tied. Raises
    `EngineError` at the first tensor that is not as the manifest or the model says. Tensors are converted to the
    model's dtype and device.
    """

    def __init__(self, model: nn.Module, manifest: UpdateManifest) -> None:
        targets = _targets(model)
        self._check = ManifestCheck(manifest)
        for spec in manifest.tensors:
            if spec.name not in targets:
                raise EngineError(f"tensor {spec.name} of the manifest is not in the engine's model.")
            here = tuple(targets[spec.name].shape)
            if here != spec.shape:
                raise EngineError(f"tensor {spec.name}: {spec.shape} in the manifest, {here} here.")
        covered = {id(targets[spec.name]) for spec in manifest.tensors}
        missing = [name for name, tensor in targets.items() if id(tensor) not in covered]
        if missing:
            raise EngineError(f"the manifest lacks {len(missing)} tensors of the engine's model: {some(missing)}.")
        self._targets = targets

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        self._check.accept(bucket)
        for name, tensor in bucket:
            self._targets[name].copy_(tensor)

    def check_complete(self) -> None:
        self._check.check_complete()


def _targets(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Under every name that a tensor has: tied ones share a tensor. Non-persistent buffers are computed, not sent."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    persistent = model.state_dict(keep_vars=True)
    return parameters | {name: tensor for name, tensor in persistent.items() if name not in parameters}
