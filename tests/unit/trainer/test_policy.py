from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from rl.config.schema import ConfigError, Packing
from rl.trainer.attention import equal_length_runs, packed_attention
from rl.trainer.logprobs import token_logprobs
from rl.trainer.policy import Policy, load_model
from rl.types import MicroBatch, RolloutGroup
from tests.made_groups import made_batch, packed
from tests.tiny_models import write_tiny, write_tiny_qwen3


def micro_batch(groups: list[RolloutGroup]) -> MicroBatch:
    (micro,) = micro_batches(groups, Packing.tokens)
    return micro


def micro_batches(groups: list[RolloutGroup], packing: Packing) -> list[MicroBatch]:
    return packed(groups, packing=packing).mini_batches[0][0]


def policy_of(folder: Path, chunk_tokens: int = 10_000) -> Policy:
    return Policy(load_model(folder), logprob_chunk_tokens=chunk_tokens)


def plain_logprobs(folder: Path, micro: MicroBatch) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies of one sequence at a time, by the plain model and log_softmax."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    logprobs, entropies = np.zeros(len(micro.token_ids)), np.zeros(len(micro.token_ids))
    for (start, end), temperature in zip(itertools.pairwise(micro.cu_seqlens), micro.temperatures, strict=True):
        ids = torch.from_numpy(micro.token_ids[start:end]).long()
        with torch.no_grad():
            logits = model(input_ids=ids.unsqueeze(0)).logits[0].double()
        for i in range(1, len(ids)):
            if micro.loss_mask[start + i]:
                distribution = (logits[i - 1] / float(temperature)).log_softmax(-1)
                logprobs[start + i] = distribution[ids[i]]
                entropies[start + i] = -(distribution.exp() * distribution).sum()
    return logprobs, entropies


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
@pytest.mark.parametrize("overrides", [{}, {"tie_word_embeddings": False}, {"num_key_value_heads": 4}])
def test_packed_logprobs_equal_those_of_the_plain_model(tmp_path, temperature, overrides):
    folder = write_tiny_qwen3(tmp_path / "model", **overrides)
    micro = micro_batch(made_batch(3, 4, temperature=temperature))
    logprobs, entropy = policy_of(folder)(micro, micro.loss_mask)
    expected_logprobs, expected_entropy = plain_logprobs(folder, micro)
    np.testing.assert_allclose(logprobs.detach(), expected_logprobs, atol=1e-5)
    np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)
    assert not logprobs[~torch.from_numpy(micro.loss_mask)].any()


def test_sliding_window_layers_equal_those_of_the_plain_model(tmp_path):
    folder = write_tiny_qwen3(
        tmp_path / "model",
        use_sliding_window=True,
        sliding_window=4,
        max_window_layers=1,
        layer_types=["full_attention", "sliding_attention"],
    )
    micro = micro_batch(made_batch(2, 4, response_tokens=[9, 1, 5, 5]))
    logprobs, _ = policy_of(folder)(micro, micro.loss_mask)
    np.testing.assert_allclose(logprobs.detach(), plain_logprobs(folder, micro)[0], atol=1e-5)


def test_a_neighbor_in_the_pack_changes_nothing(tiny_qwen3):
    groups = made_batch(2, 2, response_tokens=[5, 3])
    policy = policy_of(tiny_qwen3)
    together = micro_batch(groups)
    logprobs, _ = policy(together, together.loss_mask)
    changed = replace(together, token_ids=together.token_ids.copy())
    first = slice(0, int(together.cu_seqlens[1]))
    changed.token_ids[first] = (changed.token_ids[first] + 1) % 40
    changed_logprobs, _ = policy(changed, changed.loss_mask)
    assert not torch.equal(logprobs[first], changed_logprobs[first])
    assert torch.equal(logprobs[first.stop :], changed_logprobs[first.stop :])


def test_tokens_after_the_last_scored_one_change_nothing(tiny_qwen3):
    """Causality, and what a masked tail may hold."""
    micro = micro_batch(made_batch(1, 1, response_tokens=[6]))
    micro.loss_mask[-2:] = False
    poisoned = replace(micro, token_ids=micro.token_ids.copy())
    poisoned.token_ids[-2:] = 0
    policy = policy_of(tiny_qwen3)
    clean, poison = (policy(m, m.loss_mask)[0] for m in (micro, poisoned))
    assert torch.equal(clean, poison)


@pytest.mark.parametrize("chunk_tokens", [1, 7])
def test_chunks_change_neither_values_nor_gradients(tiny_qwen3, chunk_tokens):
    micro = micro_batch(made_batch(2, 4))
    results = []
    for size in (chunk_tokens, 10_000):
        policy = policy_of(tiny_qwen3, size)
        logprobs, entropy = policy(micro, micro.loss_mask)
        (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
        results.append((logprobs.detach(), entropy, {n: p.grad for n, p in policy.named_parameters()}))
    (logprobs, entropy, gradients), (all_logprobs, all_entropy, all_gradients) = results
    torch.testing.assert_close(logprobs, all_logprobs, atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(entropy, all_entropy, atol=1e-6, rtol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, all_gradients[name], atol=1e-5, rtol=1e-4, msg=name)


class LargestTensor(TorchFunctionMode):
    """Notes the largest result of any torch call, and of its backward pass through the head."""

    def __init__(self):
        super().__init__()
        self.numel = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_logits_of_all_positions_never_exist():
    """Neither as a result in forward or recomputation, nor among the tensors saved for the backward pass."""
    num_tokens, hidden_size, vocab_size, chunk_tokens = 64, 8, 500, 4
    head = torch.nn.Linear(hidden_size, vocab_size, bias=False)
    hidden = torch.randn(num_tokens, hidden_size, requires_grad=True)
    saved: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.numel())
        return tensor

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        logprobs, _ = token_logprobs(
            head,
            hidden,
            torch.randint(vocab_size, (num_tokens,)),
            torch.ones(num_tokens),
            torch.arange(1, num_tokens),
            chunk_tokens=chunk_tokens,
        )
        logprobs.sum().backward()
    assert largest.numel <= vocab_size * hidden_size  # the head's own gradient; a chunk's logits are smaller
    assert sum(saved) < num_tokens * vocab_size / 2


def test_an_empty_mask_scores_one_token_and_reaches_every_parameter(tiny_qwen3):
    policy = policy_of(tiny_qwen3)
    micro = micro_batch(made_batch(1, 2))
    logprobs, _ = policy(micro, np.zeros_like(micro.loss_mask))
    assert logprobs.isfinite().all()
    logprobs[torch.zeros(len(logprobs), dtype=torch.bool)].sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in policy.parameters())


def test_equal_lengths_in_a_row_are_one_run():
    assert equal_length_runs(np.array([0, 3, 6, 8, 9, 10], dtype=np.int32)) == [(2, 3), (1, 2), (2, 1)]


def test_no_mask_of_all_pairs_is_built(tiny_qwen3):
    micro = micro_batch(made_batch(16, 8))
    num_tokens = len(micro.token_ids)
    with LargestTensor() as largest, torch.no_grad():
        policy_of(tiny_qwen3)(micro, micro.loss_mask)
    assert largest.numel < num_tokens * num_tokens / 4


def test_dropout_is_off_in_training_mode(tmp_path):
    folder = write_tiny_qwen3(tmp_path / "model", attention_dropout=0.5)
    policy = policy_of(folder).train()
    micro = micro_batch(made_batch(1, 2))
    assert torch.equal(policy(micro, micro.loss_mask)[0], policy(micro, micro.loss_mask)[0])


def test_a_model_that_changes_its_logits_after_the_head_is_refused(tmp_path):
    folder = write_tiny_qwen3(tmp_path / "model", final_logit_softcapping=30.0)
    with pytest.raises(ConfigError, match="final_logit_softcapping=30"):
        load_model(folder)


HYBRID = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
"""One layer of Gated DeltaNet (arXiv:2412.06464), whose state runs along the sequence, and one of attention."""
HYBRIDS = {
    "qwen3_next": HYBRID
    | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16},
    "qwen3_5_text": HYBRID,
}


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_a_recurrent_layer_is_refused_in_packs_and_right_alone(tmp_path, model_type):
    folder = write_tiny(model_type, tmp_path / "model", **HYBRIDS[model_type])
    with pytest.raises(ConfigError, match=r"linear_attention.*backend\.trainer\.packing=one_sequence"):
        load_model(folder, packing=Packing.tokens)
    policy = Policy(load_model(folder, packing=Packing.one_sequence), logprob_chunk_tokens=10_000)
    micros = micro_batches(made_batch(2, 3), Packing.one_sequence)
    assert len(micros) == 6
    for micro in micros:
        logprobs, _ = policy(micro, micro.loss_mask)
        np.testing.assert_allclose(logprobs.detach(), plain_logprobs(folder, micro)[0], atol=1e-5)


def test_a_recurrent_model_that_may_not_list_its_layers_is_refused_in_packs(tmp_path):
    folder = write_tiny("recurrent_gemma", tmp_path / "model", lru_width=32)
    with pytest.raises(ConfigError, match=r"backend\.trainer\.packing=one_sequence"):
        load_model(folder, packing=Packing.tokens)


def test_chunked_attention_is_refused_in_every_packing(tmp_path):
    folder = write_tiny_qwen3(tmp_path / "model", layer_types=["chunked_attention", "full_attention"])
    for packing in Packing:
        with pytest.raises(ConfigError, match="chunked_attention"):
            load_model(folder, packing=packing)


@pytest.mark.parametrize(
    ("model_type", "overrides", "message"),
    [
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}, "attention sinks"),
        ("gemma2", {"final_logit_softcapping": None, "attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
    ],
)
def test_a_model_whose_attention_does_more_is_refused(tmp_path, model_type, overrides, message):
    folder = write_tiny(model_type, tmp_path / "model", **overrides)
    with pytest.raises(ConfigError, match=message):
        load_model(folder)


@pytest.mark.parametrize("keyword", [{"s_aux": torch.zeros(2)}, {"softcap": 50.0}, {"is_causal": False}, {"new": True}])
def test_attention_refuses_keywords_that_it_would_drop(keyword):
    query = torch.randn(1, 2, 3, 8)
    known = {"cu_seq_lens_q": torch.tensor([0, 3], dtype=torch.int32), "max_length_q": 3, "sequence_runs": [(1, 3)]}
    packed_attention(torch.nn.Identity(), query, query, query, None, **known, dropout=0.1, softcap=None, is_causal=True)
    with pytest.raises(ConfigError, match=next(iter(keyword))):
        packed_attention(torch.nn.Identity(), query, query, query, None, **known, **keyword)


def test_sliding_windows_of_gemma_3_equal_those_of_the_plain_model(tmp_path):
    layer_types = ["sliding_attention", "full_attention"]
    folder = write_tiny("gemma3_text", tmp_path / "model", sliding_window=4, layer_types=layer_types)
    micro = micro_batch(made_batch(2, 4, response_tokens=[9, 1, 5, 5]))
    logprobs, _ = policy_of(folder)(micro, micro.loss_mask)
    np.testing.assert_allclose(logprobs.detach(), plain_logprobs(folder, micro)[0], atol=1e-5)
