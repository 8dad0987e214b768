"""The policy as a module whose own forward returns log-probs, so that FSDP's root hooks surround the output head."""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from rl.config.schema import ConfigError, Packing
from rl.model.placeholders import placeholders_of_images
from rl.trainer.attention import PACKED, equal_length_runs
from rl.trainer.logprobs import token_logprobs
from rl.types import BoolArray, MicroBatch

Model = TypeVar("Model", bound=nn.Module)

_LOGIT_TRANSFORMS = {"final_logit_softcapping": None, "logits_scaling": 1.0, "logit_scale": 1.0}
"""Config keys of models that change logits after the head, and the value that means no change."""

_PACKABLE_LAYERS = {"full_attention", "sliding_attention"}
_UNPACKABLE_LAYERS = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "moe"}
"""transformers' `layer_types` that carry a state along the sequence (and `moe`, in models that have such layers too).
They know no sequence bounds, so a sequence must be alone in its micro-batch."""


def load_model(
    model_folder: Path, *, dtype: torch.dtype | str = "auto", packing: Packing = Packing.tokens
) -> PreTrainedModel:
    """The model of a Hugging Face folder on the CPU, with packed attention and without dropout.

    ConfigError for a model whose log-probs would be wrong under `packing`.
    """
    config = AutoConfig.from_pretrained(model_folder)
    text_config = config.get_text_config()
    for key, neutral in _LOGIT_TRANSFORMS.items():
        value = getattr(text_config, key, neutral)
        if value not in (None, neutral):
            raise ConfigError(
                f"model: {key}={value} in {model_folder}/config.json. The trainer computes logits as the output head "
                f"gives them, so a model that changes them afterwards is not supported. Use another model."
            )
    _check_layers(text_config, model_folder, packing)
    if hasattr(config, "vision_config"):
        attention: Any = {"text_config": PACKED, "vision_config": "sdpa"}
        auto_class: Any = AutoModelForImageTextToText
    else:
        attention, auto_class = PACKED, AutoModelForCausalLM
    model: PreTrainedModel = auto_class.from_pretrained(model_folder, dtype=dtype, attn_implementation=attention)
    if packing is Packing.tokens and model._is_stateful:  # also without `layer_types`, such as RecurrentGemma
        raise _unpackable(f"{type(model).__name__} carries a state along the sequence", model_folder)
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        raise ConfigError(
            f"model: the model of {model_folder} has attention sinks, which the trainer's attention does not "
            "implement. Use another model."
        )
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _check_layers(text_config: PreTrainedConfig, model_folder: Path, packing: Packing) -> None:
    # The attention of Gemma 2 takes this; asked here, it costs no loading and no rollouts.
    softcap = getattr(text_config, "attn_logit_softcapping", None)
    if softcap is not None:
        raise ConfigError(
            f"model: attn_logit_softcapping={softcap} in {model_folder}/config.json, which the trainer's attention "
            "does not implement. Use another model."
        )
    kinds = set(getattr(text_config, "layer_types", None) or ())
    if unknown := sorted(kinds - _PACKABLE_LAYERS - _UNPACKABLE_LAYERS):
        raise ConfigError(
            f"model: layer_types of {model_folder}/config.json holds {', '.join(unknown)}, which the trainer's "
            "attention does not implement. Use another model."
        )
    if packing is Packing.tokens and (stateful := sorted(kinds - _PACKABLE_LAYERS)):
        raise _unpackable(f"layer_types holds {', '.join(stateful)}", model_folder)


def _unpackable(why: str, model_folder: Path) -> ConfigError:
    return ConfigError(
        f"backend.trainer.packing={Packing.tokens.value} with the model of {model_folder}: {why}, which would run on "
        "from one packed sequence into the next. Use backend.trainer.packing=one_sequence."
    )


def positions_to_score(score_mask: BoolArray) -> torch.Tensor:
    """[S] int64, where the mask is True.

    With an empty mask one token is scored all the same: every rank then runs the same collectives, and a loss over no
    token has an all-zero gradient instead of none.
    """
    positions = torch.from_numpy(score_mask.nonzero()[0])
    return positions if len(positions) else torch.ones(1, dtype=torch.int64)


class ScoringModel(nn.Module, ABC, Generic[Model]):
    """A model whose forward pass gives log-probs. Subclasses say how it computes hidden states and logits."""

    model: Model

    def __init__(self, model: Model, *, logprob_chunk_tokens: int, entropy_gradient: bool = False):
        super().__init__()
        self.model = model
        self.logprob_chunk_tokens = logprob_chunk_tokens
        self.entropy_gradient = entropy_gradient

    def forward(self, micro: MicroBatch, score_mask: BoolArray) -> tuple[torch.Tensor, torch.Tensor]:
        """(log-probs [T], entropies [T]) on the tokens of `score_mask`, zero elsewhere."""
        device = next(self.parameters()).device
        position_ids = micro.places() if micro.position_ids is None else micro.position_ids
        token_ids, position_ids = (torch.from_numpy(ids).to(device).long() for ids in (micro.token_ids, position_ids))
        return token_logprobs(
            self.head,
            self.hidden_states(micro, token_ids, position_ids),
            token_ids,
            torch.from_numpy(micro.on_tokens(micro.temperatures)).to(device),
            positions_to_score(score_mask).to(device),
            chunk_tokens=self.logprob_chunk_tokens,
            entropy_gradient=self.entropy_gradient,
        )

    @abstractmethod
    def hidden_states(self, micro: MicroBatch, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        """[T, H]; `token_ids` [T] and `position_ids` ([T] or [3, T]) are those of `micro`, on the model's device."""

    @abstractmethod
    def head(self, states: torch.Tensor) -> torch.Tensor:
        """[S, H] -> [S, V]"""


class Policy(ScoringModel[PreTrainedModel]):
    """Over a Hugging Face model."""

    def hidden_states(self, micro: MicroBatch, token_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        runs = equal_length_runs(micro.cu_seqlens)
        bounds = {}
        if micro.num_sequences > 1:  # a sequence alone is an ordinary batch, to layers that know nothing of packing too
            cu_seqlens = torch.from_numpy(micro.cu_seqlens).to(token_ids.device)
            max_length = max(length for _, length in runs)
            bounds = {"cu_seq_lens_q": cu_seqlens, "cu_seq_lens_k": cu_seqlens}
            bounds |= {"max_length_q": max_length, "max_length_k": max_length}
        mm_inputs = {name: torch.from_numpy(value).to(token_ids.device) for name, value in micro.mm_inputs.items()}
        is_prompt = torch.from_numpy(micro.is_prompt()).to(token_ids.device) if mm_inputs else None
        with placeholders_of_images(self.model, token_ids.unsqueeze(0), is_prompt) as input_ids:
            return self.model.base_model(
                input_ids=input_ids,
                position_ids=position_ids.unsqueeze(-2),  # [1, T]; [3, 1, T] for multimodal rotary positions
                attention_mask=None,
                use_cache=False,
                sequence_runs=runs,
                **bounds,
                **mm_inputs,
            ).last_hidden_state.squeeze(0)

    def head(self, states: torch.Tensor) -> torch.Tensor:
        head = self.model.get_output_embeddings()
        assert head is not None
        return head(states)
