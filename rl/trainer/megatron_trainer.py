"""The trainer on Megatron-Core's GPTModel, for dense Qwen3 models. One rank; needs a GPU.

Megatron's own DistributedDataParallel and distributed optimizer run on GPUs only and are not used yet: with one rank
and tensor parallel 1 there is nothing to shard, so torch's AdamW steps fp32 masters, as Megatron's mixed-precision
optimizer does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from rl.config.schema import ConfigError, MegatronConfig
from rl.trainer.attention import equal_length_runs, packed_attention
from rl.trainer.policy import ScoringModel, load_model
from rl.trainer.rank import PolicyRank
from rl.types import MicroBatch
from rl.weights.megatron_names import AttentionShape, Correspondence, dense_qwen3, to_hugging_face, to_megatron


class MegatronTrainer(PolicyRank["MegatronPolicy"]):
    """One data-parallel rank. `masters` are fp32; with another compute dtype `policy` holds a copy in that dtype."""

    def __init__(self, config: MegatronConfig, **arguments: Any):
        """`arguments` are `PolicyRank`'s."""
        assert config.tensor_parallel == config.expert_parallel == arguments["num_ranks"] == 1, (
            "more is not there yet; rl.config.check refuses it"
        )
        super().__init__(config, **arguments)
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
        hf_model = load_model(self.model_folder, packing=self.config.packing)
        check_model(hf_model.config, self.model_folder)
        self._hf_config = hf_model.config
        self._table: list[Correspondence] = dense_qwen3(
            self._hf_config.num_hidden_layers, is_tied=self._hf_config.tie_word_embeddings
        )
        self._attention = AttentionShape(
            self._hf_config.num_attention_heads, self._hf_config.num_key_value_heads, self._hf_config.head_dim
        )
        self._hf_shapes = {name: tuple(parameter.shape) for name, parameter in hf_model.named_parameters()}
        weights = hf_model.state_dict()
        master_policy = self._loaded_policy(weights, torch.float32, recompute=config.recompute)
        self.masters = master_policy.model
        if self.compute_dtype == torch.float32:
            self.policy = master_policy
        else:
            self.policy = self._loaded_policy(weights, self.compute_dtype, recompute=config.recompute)
            self._accumulate_in_masters()
            self._refresh_compute_copy()
        self.reference = None
        if self.algorithm.uses_reference:
            self.reference = self._loaded_policy(weights, self.compute_dtype, recompute=False)
            self.reference.requires_grad_(False)
        self._make_optimizer()

    def _loaded_policy(
        self, weights: dict[str, torch.Tensor], dtype: torch.dtype, *, recompute: bool
    ) -> MegatronPolicy:
        model = gpt_model(self._hf_config, dtype=dtype, device=self.device, recompute=recompute)
        targets = dict(model.named_parameters())
        assert targets.keys() == {entry.megatron for entry in self._table}, "the table of names does not fit GPTModel"
        with torch.no_grad():
            for entry in self._table:
                targets[entry.megatron].copy_(to_megatron(entry, weights, self._attention))
        return MegatronPolicy(
            model,
            logprob_chunk_tokens=self.config.logprob_chunk_tokens,
            entropy_gradient=self.algorithm.uses_entropy_gradient,
        ).train()

    def _accumulate_in_masters(self) -> None:
        """Adds each micro-batch's gradient to the master's in fp32 and frees it, as Megatron's main_grad does."""
        for master, parameter in zip(self.masters.parameters(), self.policy.model.parameters(), strict=True):

            def add(parameter: torch.Tensor, master: nn.Parameter = master) -> None:
                assert parameter.grad is not None
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(add)

    @torch.no_grad()
    def _refresh_compute_copy(self) -> None:
        if self.policy.model is not self.masters:
            for master, parameter in zip(self.masters.parameters(), self.policy.model.parameters(), strict=True):
                parameter.copy_(master)

    def _update(self, lr: float) -> float:
        norm = super()._update(lr)
        self._refresh_compute_copy()
        return norm

    def load(self, folder: Path) -> None:
        super().load(folder)
        self._refresh_compute_copy()

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return self._hf_shapes

    def _full_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        masters = dict(self.masters.named_parameters())
        for entry in self._table:
            weight = masters[entry.megatron].to(self.compute_dtype)
            for name, part in to_hugging_face(entry, weight, self._attention):
                yield name, part.clone(memory_format=torch.contiguous_format)

    def _hugging_face_model(self) -> PreTrainedModel:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.model_folder))


def check_model(config: Any, model_folder: Path) -> None:
    """Raises ConfigError unless the model is a dense Qwen3 with plain rotary positions and full attention."""
    rotary = config.rope_parameters if config.model_type == "qwen3" else {}
    facts: list[tuple[str, Any, Any]] = [("model_type", config.model_type, "qwen3")]
    if config.model_type == "qwen3":
        facts += [
            ("rope_parameters.rope_type", rotary.get("rope_type", "default"), "default"),
            ("attention_bias", config.attention_bias, False),
            ("layer_types", sorted(set(config.layer_types)), ["full_attention"]),
            ("hidden_act", config.hidden_act, "silu"),
        ]
    for key, value, wanted in facts:
        if value != wanted:
            raise ConfigError(
                f"model: {key}={value} in {model_folder}/config.json. The Megatron trainer has {key}={wanted} only so "
                "far. Use backend/trainer=fsdp."
            )


def gpt_model(hf_config: Any, *, dtype: torch.dtype, device: torch.device, recompute: bool) -> GPTModel:
    """Megatron's model of a dense Qwen3 on `device`, with weights that are still to be loaded."""
    config = TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        ffn_hidden_size=hf_config.intermediate_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=hf_config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        qk_layernorm=True,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        perform_initialization=False,
        use_cpu_initialization=device.type == "cpu",
        # Kernels of Transformer Engine and Apex, or compiled ones that only a GPU has.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        gradient_accumulation_fusion=False,
        recompute_granularity="full" if recompute else None,
        recompute_method="uniform" if recompute else None,
        recompute_num_layers=1 if recompute else None,
    )
    layer: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    layer.submodules.self_attention.submodules.core_attention = PackedCoreAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer,
        vocab_size=hf_config.vocab_size,
        max_sequence_length=hf_config.max_position_embeddings,
        position_embedding_type="rope",
        rotary_base=hf_config.rope_parameters["rope_theta"],
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        parallel_output=False,
    )
    return model.to(device=device, dtype=dtype)


@dataclass
class PackedRuns(PackedSeqParams):
    """Sequence bounds for `PackedCoreAttention`. `qkv_format` stays None: Megatron's rotary code for packed sequences
    loops over them, and angles gathered by position need no bounds."""

    runs: list[tuple[int, int]] = field(default_factory=list)
    """See `equal_length_runs`."""


class PackedCoreAttention(nn.Module):
    """Our packed attention in the place of Megatron's, which without Transformer Engine has no packed form."""

    def __init__(self, config: TransformerConfig, *, softmax_scale: float | None = None, **_: Any):
        super().__init__()
        self.scaling = softmax_scale
        self.is_causal = True

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        *,
        packed_seq_params: PackedRuns,
        **_: Any,
    ) -> torch.Tensor:
        """query [T, 1, heads, D], key and value [T, 1, kv_heads, D] -> [T, 1, heads D]."""
        assert packed_seq_params.cu_seqlens_q is not None and packed_seq_params.max_seqlen_q is not None
        query, key, value = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        output = packed_attention(
            self,
            query,
            key,
            value,
            attention_mask,
            cu_seq_lens_q=packed_seq_params.cu_seqlens_q,
            max_length_q=packed_seq_params.max_seqlen_q,
            sequence_runs=packed_seq_params.runs,
            scaling=self.scaling,
        )[0]
        return output.transpose(0, 1).flatten(2)


class MegatronPolicy(ScoringModel[GPTModel]):
    """Over a GPTModel."""

    def hidden_states(self, micro: MicroBatch, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        cu_seqlens = torch.from_numpy(micro.cu_seqlens).to(token_ids.device)
        runs = equal_length_runs(micro.cu_seqlens)
        max_length = max(length for _, length in runs)
        rotary: Any = self.model.rotary_pos_emb
        angles = rotary.get_emb(max_length).index_select(0, position_ids)
        return self.model.decoder(
            hidden_states=self.model.embedding(input_ids=token_ids.unsqueeze(0), position_ids=None),
            attention_mask=None,
            rotary_pos_emb=angles,
            packed_seq_params=PackedRuns(
                cu_seqlens_q=cu_seqlens,
                cu_seqlens_kv=cu_seqlens,
                max_seqlen_q=max_length,
                max_seqlen_kv=max_length,
                runs=runs,
            ),
        ).squeeze(1)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        tied = self.model.share_embeddings_and_output_weights
        weight = self.model.shared_embedding_or_output_weight() if tied else None
        logits, _ = self.model.output_layer(states.unsqueeze(1), weight=weight)
        return logits.squeeze(1)
