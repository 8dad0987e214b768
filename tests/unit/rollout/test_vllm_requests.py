"""What leaves the vLLM adapter and what comes back; none of this needs vLLM."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import pytest

from rl.protocols import EngineError
from rl.rollout.vllm_requests import (
    collapse_placeholders,
    finish_reason,
    sampled_logprobs,
    sampling_kwargs,
)
from rl.types import FinishReason, Sampling

SAMPLING = Sampling(temperature=0.7, max_new_tokens=9, seed=5, top_p=0.8, top_k=3, stop=("</a>", "\n"))


@dataclass
class Flat:
    start_indices: list[int]
    end_indices: list[int]
    token_ids: list[int]
    logprobs: list[float]


def test_every_field_of_sampling_reaches_the_request():
    kwargs = sampling_kwargs(SAMPLING, seed=77)
    assert kwargs["temperature"] == 0.7
    assert kwargs["max_tokens"] == 9
    assert kwargs["seed"] == 77
    assert kwargs["top_p"] == 0.8
    assert kwargs["top_k"] == 3
    assert kwargs["stop"] == ["</a>", "\n"]


@pytest.mark.parametrize("name", [field.name for field in fields(Sampling) if field.name != "seed"])
def test_changing_any_field_of_sampling_changes_the_request(name: str):
    other = {"temperature": 0.0, "max_new_tokens": 1, "top_p": 1.0, "top_k": -1, "stop": ()}[name]
    changed = replace(SAMPLING, **{name: other})
    assert sampling_kwargs(changed, seed=1) != sampling_kwargs(SAMPLING, seed=1)


def test_text_is_decoded_while_sampling_only_to_find_a_stop_string():
    assert sampling_kwargs(SAMPLING, seed=1)["detokenize"]
    without = sampling_kwargs(replace(SAMPLING, stop=()), seed=1)
    assert not without["detokenize"]
    assert without["stop"] is None


@pytest.mark.parametrize("temperature", [0.001, 2.5])
def test_a_temperature_that_vllm_would_change_is_refused(temperature: float):
    with pytest.raises(EngineError, match=str(temperature)):
        sampling_kwargs(replace(SAMPLING, temperature=temperature), seed=1)


def test_finish_reasons_map_by_name_and_others_are_failures():
    assert [finish_reason(name) for name in ("stop", "length", "abort")] == list(FinishReason)
    for unknown in ("error", "repetition", None):
        with pytest.raises(EngineError, match="finish reason"):
            finish_reason(unknown)


def test_logprob_is_the_sampled_tokens_wherever_it_stands():
    flat = Flat([0, 2], [2, 3], [5, 9, 4], [-0.1, -3.0, -0.5])
    np.testing.assert_array_equal(sampled_logprobs([9, 4], flat), np.array([-3.0, -0.5], dtype=np.float32))


def test_a_missing_logprob_is_an_error_and_never_a_neighbors():
    flat = Flat([0, 1], [1, 2], [5, 9], [-0.1, -3.0])
    with pytest.raises(EngineError, match="token 9 at position 0"):
        sampled_logprobs([9, 9], flat)
    with pytest.raises(EngineError, match="3 tokens but 2 log-probs"):
        sampled_logprobs([5, 9, 9], flat)


def test_each_image_is_sent_as_one_placeholder():
    token_ids = np.array([1, 7, 7, 7, 2, 7, 3], dtype=np.int32)
    assert collapse_placeholders(token_ids, 7, num_images=2) == [1, 7, 2, 7, 3]
    with pytest.raises(EngineError, match="1 images but 2 runs"):
        collapse_placeholders(token_ids, 7, num_images=1)
