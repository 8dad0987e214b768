"""Draws and truncation of the local engine, with numbers worked by hand."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rl.rollout.decoding import TokenSampler, truncated, uniforms
from rl.types import Sampling

CPU = torch.device("cpu")


def test_draws_are_those_of_the_published_splitmix64():
    """First outputs for seed 1234567 of the reference implementation in C (Vigna 2015)."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    seeds = np.array([1234567], dtype=np.uint64)
    drawn = [float(uniforms(seeds, step)[0]) for step in range(4)]
    assert drawn == [(value >> 11) / 2**53 for value in published]


def test_a_draw_depends_on_its_own_seed_and_step_alone():
    together = uniforms(np.array([1, 2, 2**63 - 1], dtype=np.uint64), 7)
    alone = [uniforms(np.array([seed], dtype=np.uint64), 7)[0] for seed in (1, 2, 2**63 - 1)]
    assert together.tolist() == alone
    assert len(set(together)) == 3


def test_draws_of_neighboring_seeds_and_steps_are_uniform_and_uncorrelated():
    draws = np.stack([uniforms(np.arange(2000, dtype=np.uint64), step) for step in range(50)])
    assert 0 <= draws.min() < draws.max() < 1
    # Standard errors are 0.0009 (mean), 0.0003 (variance) and 0.0032 (correlation).
    assert draws.mean() == pytest.approx(0.5, abs=0.004)
    assert draws.var() == pytest.approx(1 / 12, abs=0.0015)
    for a, b in [(draws[:-1], draws[1:]), (draws[:, :-1], draws[:, 1:])]:
        assert abs(np.corrcoef(a.ravel(), b.ravel())[0, 1]) < 0.015


def kept(probs: list[float], *, top_k: int = -1, top_p: float = 1.0) -> list[float]:
    row = torch.tensor([probs]).log()
    return truncated(row, torch.tensor([[top_k]]), torch.tensor([[top_p]])).exp()[0].tolist()


def test_top_k_and_top_p_keep_the_likeliest_tokens_and_renormalize():
    probs = [0.1, 0.5, 0.15, 0.25]
    assert kept(probs, top_k=2) == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert kept(probs, top_p=0.7) == pytest.approx([0, 2 / 3, 0, 1 / 3])
    assert kept(probs, top_p=0.76) == pytest.approx([0, 5 / 9, 1.5 / 9, 2.5 / 9])
    assert kept(probs, top_p=1e-6) == pytest.approx([0, 1, 0, 0])
    # top_k first: of the renormalized 2/3 and 1/3 the first alone holds 0.6, of the raw 0.5 and 0.25 it does not.
    assert kept(probs, top_k=2, top_p=0.6) == pytest.approx([0, 1, 0, 0])
    assert kept(probs) == pytest.approx(probs)


def test_rows_of_one_batch_keep_their_own_settings():
    logits = torch.tensor([[0.0, 2.0, 1.0]]).repeat(4, 1)
    samplings = [
        Sampling(0.0, 1, 0),
        Sampling(0.5, 1, 0),
        Sampling(1.0, 1, 0, top_k=1),
        Sampling(0.0, 1, 0, top_k=1, top_p=0.1),
    ]
    sampler = TokenSampler(samplings, [5, 6, 7, 8], CPU)
    tokens, logprobs = sampler.sample(logits, 0)
    raw, sharp = torch.log_softmax(logits[0], -1), torch.log_softmax(logits[0] / 0.5, -1)
    assert tokens[[0, 2, 3]].tolist() == [1, 1, 1]
    # Greedy rows carry the model's own log-prob, untouched by truncation.
    assert logprobs.tolist() == pytest.approx([raw[1].item(), sharp[tokens[1]].item(), 0.0, raw[1].item()])
    sampler.select(torch.tensor([3, 1]))
    again, _ = sampler.sample(logits[:2], 0)
    assert again.tolist() == [1, tokens[1].item()]


def test_a_token_of_probability_zero_is_never_drawn():
    logits = torch.full((3000, 5), -torch.inf)
    logits[:, [1, 3]] = 0.0
    tokens, logprobs = TokenSampler([Sampling(1.0, 1, 0)] * 3000, list(range(3000)), CPU).sample(logits, 0)
    assert set(tokens.tolist()) == {1, 3}
    assert logprobs.tolist() == pytest.approx([np.log(0.5)] * 3000)


def test_rows_drawn_in_parts_are_the_rows_drawn_at_once(monkeypatch: pytest.MonkeyPatch):
    logits = torch.randn(50, 11, generator=torch.Generator().manual_seed(0))
    sampler = TokenSampler([Sampling(1.0, 1, 0)] * 50, list(range(50)), CPU)
    whole = sampler.sample(logits, 2)
    monkeypatch.setattr("rl.rollout.decoding.MAX_SAMPLED_ELEMENTS", 33)
    parts = sampler.sample(logits, 2)
    assert torch.equal(whole[0], parts[0])
    assert torch.equal(whole[1], parts[1])
