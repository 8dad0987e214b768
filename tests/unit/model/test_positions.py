"""What a config.json says about the longest sequence, by hand and beside what transformers makes of the same file."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from rl.config.schema import ConfigError
from rl.model.positions import check_stretch, max_positions

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
ORIGINAL = "original_max_position_embeddings"


@pytest.mark.parametrize(
    ("values", "positions"),
    [
        ({}, 64),
        ({"max_position_embeddings": None}, None),
        ({"rope_scaling": None, "rope_theta": 1e6}, 64),
        ({"rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2]}}, 64),
        # DeepSeek-V3: 40 x 4,096 is what max_position_embeddings says.
        ({"rope_scaling": {"type": "yarn", "factor": 40, ORIGINAL: 4096}, "max_position_embeddings": 163840}, 163840),
        # As Qwen3's card has it: 4 x 32,768, and yet 40,960 is what engines take.
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, ORIGINAL: 32768}, "max_position_embeddings": 40960}, 40960),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 16}}, 32),  # stretched no further
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 64),
        ({"rope_parameters": {"rope_type": "yarn", "factor": None, ORIGINAL: 16}}, 64),  # the factor is 64 / 16
        # Llama 3.1 has 131,072 positions, and 8 x 8,192 is another number.
        ({"rope_scaling": LLAMA3 | {ORIGINAL: 8192}, "max_position_embeddings": 131072}, 131072),
        # Phi-3-mini-128k: 4,096 before it stretches, said outside.
        ({"rope_scaling": LONGROPE, "max_position_embeddings": 131072, ORIGINAL: 4096}, 4096),
        ({"rope_scaling": LONGROPE | {"rope_type": "su"}, ORIGINAL: 16}, 16),
        ({"rope_parameters": LONGROPE | {ORIGINAL: 32}}, 32),
        ({"rope_parameters": LONGROPE | {ORIGINAL: 32}, ORIGINAL: 16}, 16),
        ({"rope_scaling": {"type": "dynamic", "factor": 4.0}}, 64),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 256),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}, "rope_parameters": LONGROPE | {ORIGINAL: 32}}, 256),
        # One kind for each type of layers: the shortest counts.
        (
            {
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default"},
                    "full_attention": {"rope_type": "linear", "factor": 8.0},
                }
            },
            64,
        ),
    ],
)
def test_positions_of_each_kind(values: dict[str, Any], positions: int | None):
    assert max_positions({"max_position_embeddings": 64} | values) == positions


@pytest.mark.parametrize("value", [0, True, 7.5, "many"])
def test_positions_that_are_no_number_of_tokens_are_refused(value: Any):
    with pytest.raises(ConfigError, match=r"max_position_embeddings=.* must be a whole number of tokens"):
        max_positions({"max_position_embeddings": value})


def rotary_of(model_type: str, **values: Any) -> Any:
    """transformers' own module of rotary positions, on a CPU, for 32 numbers of hidden states in 4 heads."""
    from transformers import AutoConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    sizes = {"hidden_size": 32, "num_attention_heads": 4, "max_position_embeddings": 64, "pad_token_id": 0}
    return LlamaRotaryEmbedding(AutoConfig.for_model(model_type, **sizes, **copy.deepcopy(values)))  # it fills them in


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        ({"rope_type": "default"}, False),
        ({"rope_type": "linear", "factor": 4.0}, False),
        ({"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}, False),
        (LLAMA3 | {ORIGINAL: 16}, False),
        ({"rope_type": "dynamic", "factor": 4.0}, True),
        (LONGROPE | {ORIGINAL: 16}, True),
    ],
    ids=lambda value: str(value)[:40],
)
def test_past_that_many_transformers_gives_a_batch_other_frequencies_or_never_does(values: dict, changes: bool):
    """The first position of a batch, as long as is allowed and one token longer."""
    limit = max_positions({"max_position_embeddings": 64, "rope_parameters": values})
    assert limit is not None
    rotary = rotary_of("llama", rope_parameters=values)
    states = torch.zeros(1, 1, 32)
    first, longest, longer = (rotary(states, torch.arange(length)[None])[0][0, 1] for length in (8, limit, limit + 1))
    assert torch.equal(first, longest)
    assert torch.equal(longest, longer) is not changes


@pytest.mark.parametrize(
    ("model_type", "values", "original"),
    [
        ("llama", {"rope_scaling": {"type": "yarn", "factor": 4.0}}, 64),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, ORIGINAL: 16}}, 16),
        ("phi3", {"rope_scaling": LONGROPE, ORIGINAL: 16}, 16),
    ],
)
def test_what_is_stretched_is_what_transformers_stretches(model_type: str, values: dict, original: int):
    """Where no file says it, all of them: then another number of positions is another stretch, and refused alone."""
    assert rotary_of(model_type, **values).config.rope_parameters[ORIGINAL] == original
    before = {"max_position_embeddings": 64} | values
    after = before | {"max_position_embeddings": 128}
    if original == 64:
        for files in [(before, after), ({"text_config": before}, {"text_config": after})]:
            with pytest.raises(
                ConfigError, match=rf"=128: this model stretches its yarn .*rope_scaling\.{ORIGINAL}=64\."
            ):
                check_stretch(*files)
        after["rope_scaling"] = values["rope_scaling"] | {ORIGINAL: 64}
    check_stretch(before, after)
