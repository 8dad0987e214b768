"""Requests to SGLang and its answers, without SGLang."""

from __future__ import annotations

import pickle
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rl.config.schema import SGLangRolloutConfig
from rl.protocols import EngineError
from rl.rollout.decoding import uniforms as uniforms_of_the_local_engine
from rl.rollout.memory import cache_bytes_per_token
from rl.rollout.sampler import Part
from rl.rollout.sglang_engine import SGLangSampler, pack_bucket
from rl.rollout.sglang_requests import (
    context_limit,
    finish_reason,
    logprobs_of,
    request_of,
    rid_of,
    sampled,
    sampling_params,
)
from rl.rollout.sglang_worker import draw_with_seed, uniforms
from rl.types import FinishReason, Prompt, Sampling
from rl.weights.flat import flat_places

SAMPLING = Sampling(temperature=0.7, max_new_tokens=3, seed=9, top_p=0.9, top_k=5, stop=("\n", "END"))
PROMPT = Prompt("test:0", (), np.array([7, 8], dtype=np.int32), "", "test")


def part(**changes: Any) -> Part:
    values: dict[str, Any] = {"request_id": "1", "prompt": PROMPT, "prefix": np.zeros(0, np.int32), "seed": 2**62}
    return Part(**(values | {"sampling": SAMPLING} | changes))


def output(ids: list[int], reason: dict[str, Any], logprobs: list[Any] | None = None) -> dict[str, Any]:
    entries = [(-0.5 * i, token_id, None) for i, token_id in enumerate(ids)] if logprobs is None else logprobs
    return {"output_ids": ids, "meta_info": {"finish_reason": reason, "output_token_logprobs": entries}}


def answer(of: dict[str, Any], *, was_aborted: bool = False) -> Any:
    request = request_of(part(), is_seeded=True)
    return sampled(of, request, was_aborted=was_aborted, end_ids={1}, decode=lambda ids: "".join(map(chr, ids)))


# What leaves.


def test_a_request_carries_prompt_and_prefix_and_what_the_sampling_says():
    request = request_of(part(prefix=np.array([9], dtype=np.int32)), is_seeded=True)
    assert request.token_ids == [7, 8, 9]
    assert request.sampling == {
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "max_new_tokens": 3,
        "stop": ["\n", "END"],
        "no_stop_trim": True,
        "ignore_eos": False,
        "skip_special_tokens": True,
        "sampling_seed": 2**62,
    }


def test_a_backend_without_seeds_is_sent_none_and_promises_none(tmp_path: Any):
    assert "sampling_seed" not in request_of(part(), is_seeded=False).sampling
    for backend, is_seeded in ((None, True), ("pytorch", True), ("flashinfer", False)):
        config = SGLangRolloutConfig(sampling_backend=backend)
        assert SGLangSampler(config, model_folder=tmp_path, device="cpu").capabilities.seeded is is_seeded


def test_no_request_id_begins_another_because_sglang_aborts_by_beginnings():
    rids = [rid_of(str(number)) for number in (1, 10, 11, 101)]
    assert not any(a != b and b.startswith(a) for a in rids for b in rids)


def test_a_temperature_that_sglang_would_take_for_greedy_is_refused():
    assert sampling_params(replace(SAMPLING, temperature=0.0), seed=None)["temperature"] == 0.0
    assert sampling_params(replace(SAMPLING, temperature=1e-6), seed=None)["temperature"] == 1e-6
    with pytest.raises(EngineError, match="not at 1e-07"):
        sampling_params(replace(SAMPLING, temperature=1e-7), seed=None)


def test_no_stop_strings_are_none_and_not_an_empty_list():
    assert sampling_params(replace(SAMPLING, stop=()), seed=None)["stop"] is None


# What comes back.


def test_an_answer_becomes_its_tokens_log_probs_and_text():
    result = answer(output([72, 105], {"type": "stop", "matched": 105}))
    assert result.token_ids.tolist() == [72, 105]
    assert (result.token_ids.dtype, result.logprobs.dtype) == (np.int32, np.float32)
    np.testing.assert_array_equal(result.logprobs, np.float32([0.0, -0.5]))
    assert (result.text, result.finish_reason) == ("Hi", FinishReason.STOP)


def test_an_abort_that_was_asked_for_keeps_the_tokens_and_one_that_was_not_is_an_error():
    aborted = output([72], {"type": "abort", "message": "Aborted"})
    result = answer(aborted, was_aborted=True)
    assert (result.token_ids.tolist(), result.finish_reason) == ([72], FinishReason.ABORT)
    with pytest.raises(EngineError, match="'abort': Aborted"):
        answer(aborted)


def test_an_abort_before_the_first_token_needs_no_log_probs():
    unstarted = {"output_ids": [], "meta_info": {"finish_reason": {"type": "abort"}}}
    result = answer(unstarted, was_aborted=True)
    assert (len(result.token_ids), len(result.logprobs), result.text) == (0, 0, "")


def test_a_response_that_sglang_cut_short_is_an_error():
    assert answer(output([1, 2, 3], {"type": "length", "length": 3})).finish_reason is FinishReason.LENGTH
    with pytest.raises(EngineError, match="at 2 tokens as if they were the 3"):
        answer(output([1, 2], {"type": "length", "length": 2}))


@pytest.mark.parametrize("reason", [None, {}, {"type": None}, {"type": "error", "message": "no memory"}])
def test_any_other_end_is_an_error(reason: Any):
    with pytest.raises(EngineError, match="no memory" if reason and reason["type"] else "log says why"):
        finish_reason(reason, was_aborted=True)


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([(-0.1, 5, None)], "2 tokens but 1 log-probs"),
        ([], "2 tokens but 0 log-probs"),
        ([(-0.1, 5, None), (-0.2, 7, None)], "of token 7 for token 6 at position 1"),
        ([(-0.1, 5, None), (None, 6, None)], "log-prob None for token 6"),
        ([(-0.1, 5, None), (float("nan"), 6, None)], "log-prob nan for token 6"),
        ([(float("-inf"), 5, None), (-0.2, 6, None)], "log-prob -inf for token 5 at position 0"),
    ],
)
def test_every_token_needs_a_finite_log_prob_of_its_own(entries: list[Any], message: str):
    assert logprobs_of([5, 6], [(-0.1, 5, None), (-0.2, 6, "b")]) == [-0.1, -0.2]
    with pytest.raises(EngineError, match=message):
        logprobs_of([5, 6], entries)


# Sizes.


def test_the_context_is_the_models_or_what_the_cache_holds_beside_a_spare_page():
    assert context_limit(model_length=512, cache_tokens=65536, page_size=1) == 512
    assert context_limit(model_length=512, cache_tokens=512, page_size=1) == 504
    assert context_limit(model_length=4096, cache_tokens=4096, page_size=128) == 3840


def test_the_cache_holds_keys_and_values_of_every_layer():
    config = SimpleNamespace(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
    assert cache_bytes_per_token(config, bytes_per_element=2) == 2 * 3 * 2 * 8 * 2
    config.head_dim = 32
    assert cache_bytes_per_token(config, bytes_per_element=4) == 2 * 3 * 2 * 32 * 4


# Weights.


def test_tensors_in_one_buffer_begin_at_multiples_of_16():
    assert flat_places([4, 16, 17, 1]) == ([0, 16, 32, 64], 65)


def test_a_packed_bucket_is_what_sglang_unpacks():
    """As SGLang does it: a slice of bytes, seen as the dtype, in the shape."""
    bucket = [
        ("a", torch.arange(6, dtype=torch.float32).reshape(2, 3).T),
        ("b", torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16)),
        ("c", torch.tensor(7.0)),
    ]
    payloads, flat = pack_bucket(bucket, num_readers=2)
    assert flat.is_shared()
    for payload in payloads:
        content = pickle.loads(payload)
        for meta, (name, tensor) in zip(content["metadata"], bucket, strict=True):
            part_of = content["flattened_tensor"][meta.start_idx : meta.end_idx]
            assert (meta.name, meta.numel) == (name, tensor.nbytes)
            assert torch.equal(part_of.view(meta.dtype).reshape(meta.shape), tensor)


# Draws.


def test_draws_are_those_of_the_local_engine():
    seeds = np.array([0, 1, 2**63 - 1, 123456789], dtype=np.uint64)
    for step in (0, 1, 1000):
        positions = torch.full((4,), step)
        found = uniforms(torch.from_numpy(seeds.astype(np.int64)), positions).numpy()
        np.testing.assert_array_equal(found, uniforms_of_the_local_engine(seeds, step))


def test_a_draw_inverts_the_distribution_and_never_takes_what_is_impossible():
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75]])
    seeds = torch.arange(4000)
    drawn = draw_with_seed(probs.log().expand(4000, 4), seeds, torch.zeros(4000, dtype=torch.long)).squeeze(-1)
    expected = torch.where(uniforms(seeds, torch.zeros(4000, dtype=torch.long)) < 0.25, 1, 3)
    assert torch.equal(drawn, expected)
    assert 900 < int((drawn == 1).sum()) < 1100


def test_a_large_batch_is_drawn_in_pieces_with_equal_results(monkeypatch: pytest.MonkeyPatch):
    logprobs = torch.log_softmax(torch.randn(7, 11, generator=torch.Generator().manual_seed(0)), -1)
    seeds, positions = torch.arange(7), torch.arange(7) * 3
    whole = draw_with_seed(logprobs, seeds, positions)
    monkeypatch.setattr("rl.rollout.sglang_worker.MAX_DRAWN_ELEMENTS", 23)
    assert torch.equal(draw_with_seed(logprobs, seeds, positions), whole)
