"""Whether a weight update is what its manifest announced: each tensor once, as it says, and all of them."""

from __future__ import annotations

from collections.abc import Iterable

from rl.protocols import Bucket, EngineError, TensorSpec, UpdateManifest
from rl.weights.flat import specs_of

NAMES_SHOWN = 5


class ManifestCheck:
    """Ticks off the tensors of one update as they arrive."""

    def __init__(self, manifest: UpdateManifest) -> None:
        self._known = {spec.name: (spec.dtype, tuple(spec.shape)) for spec in manifest.tensors}
        if len(self._known) != len(manifest.tensors):
            raise EngineError(f"the manifest of version {manifest.version} names a tensor twice.")
        self._pending = dict(self._known)

    def accept(self, bucket: Bucket) -> None:
        """Raises `EngineError` at the first tensor that is not as the manifest says, or came before."""
        self.accept_specs(specs_of(bucket))

    def accept_specs(self, specs: Iterable[TensorSpec]) -> None:
        """Likewise, of tensors that are elsewhere."""
        for spec in specs:
            if spec.name not in self._pending:
                fault = "arrived twice" if spec.name in self._known else "is not in the manifest"
                raise EngineError(f"tensor {spec.name} {fault}.")
            expected = self._pending.pop(spec.name)
            found = (spec.dtype, tuple(spec.shape))
            if found != expected:
                raise EngineError(f"tensor {spec.name} is {found}, the manifest says {expected}.")

    def check_complete(self) -> None:
        if self._pending:
            raise EngineError(f"{len(self._pending)} tensors never arrived: {some(self._pending)}.")


def some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:NAMES_SHOWN]) + (", ..." if len(listed) > NAMES_SHOWN else "")
