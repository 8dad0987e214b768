"""The receiving end of a weight update where the model is a plain Hugging Face module."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from rl.protocols import Bucket, EngineError, UpdateManifest


class ModelUpdate:
    """Copies the tensors of one manifest into `model`, in place, each exactly once.

    Every parameter and persistent buffer must be in the manifest, under one of its names if it is tied. Raises
    `EngineError` at the first tensor that is not as the manifest or the model says. Tensors are converted to the
    model's dtype and device.
    """

    def __init__(self, model: nn.Module, manifest: UpdateManifest) -> None:
        targets = _targets(model)
        self._specs = {spec.name: spec for spec in manifest.tensors}
        if len(self._specs) != len(manifest.tensors):
            raise EngineError(f"the manifest of version {manifest.version} names a tensor twice.")
        for name, spec in self._specs.items():
            if name not in targets:
                raise EngineError(f"tensor {name} of the manifest is not in the engine's model.")
            if tuple(targets[name].shape) != spec.shape:
                raise EngineError(f"tensor {name}: {spec.shape} in the manifest, {tuple(targets[name].shape)} here.")
        covered = {id(targets[name]) for name in self._specs}
        missing = [name for name, tensor in targets.items() if id(tensor) not in covered]
        if missing:
            raise EngineError(f"the manifest lacks {len(missing)} tensors of the engine's model: {_some(missing)}.")
        self._targets = targets
        self._pending = dict.fromkeys(self._specs)

    @torch.no_grad()
    def receive(self, bucket: Bucket) -> None:
        for name, tensor in bucket:
            if name not in self._pending:
                fault = "arrived twice" if name in self._specs else "is not in the manifest"
                raise EngineError(f"tensor {name} {fault}.")
            spec = self._specs[name]
            found, expected = (_dtype_name(tensor.dtype), tuple(tensor.shape)), (spec.dtype, spec.shape)
            if found != expected:
                raise EngineError(f"tensor {name} is {found}, the manifest says {expected}.")
            del self._pending[name]
            self._targets[name].copy_(tensor)

    def check_complete(self) -> None:
        if self._pending:
            raise EngineError(f"{len(self._pending)} tensors never arrived: {_some(self._pending)}.")


def _targets(model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Under every name that a tensor has: tied ones share a tensor. Non-persistent buffers are computed, not sent."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    persistent = model.state_dict(keep_vars=True)
    return parameters | {name: tensor for name, tensor in persistent.items() if name not in parameters}


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _some(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(listed[:3]) + (", ..." if len(listed) > 3 else "")
