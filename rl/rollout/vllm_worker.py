"""What runs inside vLLM's worker process: receives weights and answers which version it holds.

vLLM mixes `WeightReceiver` into its worker class (`worker_extension_cls`); the methods are called by collective RPC.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from rl.protocols import TensorSpec, UpdateManifest
from rl.rollout.manifest_check import ManifestCheck, some
from rl.rollout.processes import end_with_parent

if TYPE_CHECKING:
    import torch

    from rl.weights.inlet import WeightInlet


class _OpenUpdate:
    """What of a manifest is still missing, and which parameters of vLLM's model were written."""

    def __init__(self, version: int, tensors: list[tuple[str, str, list[int]]]) -> None:
        specs = tuple(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in tensors)
        self.check = ManifestCheck(UpdateManifest(version, specs))
        self.loaded: set[str] = set()


class WeightReceiver:
    """Mixed into `vllm.v1.worker.gpu_worker.Worker` or its CPU relative, whose attributes it uses."""

    model_runner: Any
    vllm_config: Any
    device: torch.device
    rank: int

    rl_version = -1
    rl_update: _OpenUpdate | None = None
    rl_inlet: WeightInlet | None = None

    def rl_attach(self) -> int:
        """Ties this process to its parent: if that is killed, no engine is left holding the device. Returns the pid."""
        end_with_parent()
        return os.getpid()

    def rl_policy_version(self) -> int:
        return self.rl_version

    def rl_weight_digests(self) -> dict[str, str]:
        """Of every parameter, in the model's order.

        On CPU vLLM keeps a linear layer's weight in a packed form alone, which cannot be read: there it is the digest
        of what the layer makes of a fixed input.
        """
        import torch

        from rl.weights.digest import tensor_digest

        digests: dict[str, str] = {}
        with torch.inference_mode():
            for prefix, layer in self.model_runner.get_model().named_modules():
                for name, parameter in layer.named_parameters(recurse=False):
                    key = f"{prefix}.{name}" if prefix else name
                    packed = name == "weight" and getattr(layer, "cpu_linear", None)
                    digests[key] = tensor_digest(self._rl_response(layer, packed) if packed else parameter)
        return digests

    def _rl_response(self, layer: Any, multiply: Any) -> torch.Tensor:
        import torch

        row = torch.randn(1, layer.input_size_per_partition, generator=torch.Generator().manual_seed(0))
        return multiply(row.to(self.vllm_config.model_config.dtype), layer.weight, None)

    def rl_free_memory(self) -> tuple[int, int]:
        """Free and total bytes of this worker's device, as the device counts them."""
        import torch

        return torch.cuda.mem_get_info()

    def rl_begin_update(self, version: int, tensors: list[tuple[str, str, list[int]]]) -> None:
        """Puts the layers into checkpoint layout, one by one as their tensors arrive.

        Writing straight into the parameters fails on CPU, where linear layers hold repacked weights.
        """
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self.rl_update is not None:
            self.rl_abort_update()
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(self.model_runner.get_model())
        self.rl_update = _OpenUpdate(version, tensors)

    def rl_weight_group(self) -> str | None:
        return self._rl_inlet().group_id

    def rl_join_group(self, meeting: str, first_rank: int) -> None:
        from rl.weights.inlet import meeting_from_json

        self._rl_inlet().join(meeting_from_json(meeting), rank=first_rank + self.rank)

    def rl_fetch(self, bucket: str) -> None:
        """One bucket, from wherever it is."""
        from rl.weights.inlet import bucket_from_json

        self._rl_load(self._rl_inlet().fetch(bucket_from_json(bucket)))

    def _rl_inlet(self) -> WeightInlet:
        from rl.weights.inlet import WeightInlet

        if self.rl_inlet is None:
            self.rl_inlet = WeightInlet(self.device)
        return self.rl_inlet

    def _rl_load(self, tensors: dict[str, torch.Tensor]) -> None:
        from vllm.config import set_current_vllm_config

        update = self._rl_open_update()
        update.check.accept(list(tensors.items()))
        with set_current_vllm_config(self.vllm_config):
            loaded = self.model_runner.get_model().load_weights(iter(tensors.items()))
        update.loaded |= set(loaded or ())

    def rl_finish_update(self, version: int) -> None:
        """Checks that the manifest arrived and that vLLM's loader took all of it, then takes the new version."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        update = self._rl_open_update()
        update.check.check_complete()
        model = self.model_runner.get_model()
        partial = _partly_loaded_layers(model)
        if partial:
            raise ValueError(f"vLLM's loader filled {len(partial)} layers only in part: {some(partial)}")
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(model, self.vllm_config.model_config)
            _repack_tied_heads(model)
        self.rl_update = None
        missing = {name for name, _ in model.named_parameters()} - update.loaded
        if missing:
            raise ValueError(f"vLLM's loader left {len(missing)} parameters as they were: {some(missing)}")
        self.model_runner.reset_encoder_cache()
        self.model_runner.reset_mm_cache()
        self.rl_version = version

    def rl_abort_update(self) -> None:
        """Back to a model that another update can start from; its weights are a mixture, so the engine is unfit."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.rl_update is None:
            return
        self.rl_update = None
        with set_current_vllm_config(self.vllm_config):
            finalize_layerwise_reload(self.model_runner.get_model(), self.vllm_config.model_config)

    def _rl_open_update(self) -> _OpenUpdate:
        if self.rl_update is None:
            raise ValueError("no weight update is open")
        return self.rl_update


def _repack_tied_heads(model: torch.nn.Module) -> None:
    """A tied output head receives no tensor of its own, so vLLM does not process it again after a reload.

    It shares the embedding's parameter, but on CPU it multiplies with a repacked copy, which would stay that of the
    weights before the first update. Elsewhere processing does nothing.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    embeddings: list[Any] = [layer for layer in model.modules() if isinstance(layer, VocabParallelEmbedding)]
    for head in embeddings:
        if isinstance(head, ParallelLMHead) and any(
            layer.weight is head.weight for layer in embeddings if layer is not head
        ):
            head.quant_method.process_weights_after_loading(head)


def _partly_loaded_layers(model: torch.nn.Module) -> list[str]:
    """Layers of which some elements arrived and some did not, for example a fused projection without its keys.

    Embeddings are padded to a multiple of 64 rows and so never full; buffers are not part of a checkpoint.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    partial = []
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        if isinstance(layer, VocabParallelEmbedding) or not info.can_load() or not info.load_numel:
            continue
        num_buffer_elements = sum(buffer.numel() for buffer in layer.buffers(recurse=False))
        if info.load_numel < (info.load_numel_total or 0) - num_buffer_elements:
            partial.append(name)
    return partial
