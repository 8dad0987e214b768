"""Batched sampling from a Hugging Face causal LM with a KV cache, one round at a time: prefill to last sample."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import DynamicCache

from rl.model.placeholders import placeholders_of_images
from rl.rollout.sampler import Sampled, stop_reach
from rl.types import FinishReason, FloatArray, IntArray, Sampling

COMPACT_BELOW = 0.75
"""Finished rows leave the batch once the running ones are at most this share of it."""

MAX_SAMPLED_ELEMENTS = 2**24
"""Rows x vocabulary whose probabilities exist at once in double precision: 128 MiB a copy."""


@dataclass(eq=False, slots=True)
class SampleRequest:
    """Some samples of one prompt."""

    prompt_ids: IntArray
    sampling: Sampling
    seeds: list[int]
    """One per sample."""
    position_ids: IntArray | None = None
    """[3, L_p] multimodal rotary positions of `prompt_ids`; None: 0 to L_p - 1."""
    mm_inputs: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """Of the images in `prompt_ids`; empty for text."""
    num_sampled: int = 0
    """Tokens at the end of `prompt_ids` that were sampled before."""
    cancelled: set[int] = field(default_factory=set)
    """Places in `seeds`, added by any thread: those samples end at the next token."""


@dataclass(frozen=True, slots=True)
class FinishedSample:
    request: SampleRequest
    place: int
    """In `request.seeds`."""
    sampled: Sampled


def uniforms(seeds: NDArray[np.uint64], step: int) -> NDArray[np.float64]:
    """Draw number `step` of each stream, in [0, 1): SplitMix64 (Steele et al. 2014), which needs no state."""
    z = seeds + np.uint64((step + 1) * 0x9E3779B97F4A7C15 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def truncated(logprobs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """[rows, V] renormalized over the top_k likeliest tokens, then over the fewest of those that hold top_p.

    `top_k` and `top_p` are [rows, 1]; -1 and 1.0 truncate nothing.
    """
    ordered, order = logprobs.sort(dim=-1, descending=True, stable=True)
    ranks = torch.arange(logprobs.shape[-1], device=logprobs.device)
    keep = (ranks < top_k) | (top_k < 0)
    probs = ordered.double().exp().masked_fill_(~keep, 0.0)
    probs /= probs.sum(-1, keepdim=True)
    before = probs.cumsum(-1) - probs
    # Rounding must not drop the rarest tokens of a row that asks for no truncation.
    keep &= (before < top_p) | (top_p >= 1.0)
    kept = torch.zeros_like(keep).scatter_(-1, order, keep)
    return torch.log_softmax(logprobs.masked_fill(~kept, -torch.inf), dim=-1)


class TokenSampler:
    """Samples the next token of every row, each from its own stream, by inverting its distribution function."""

    def __init__(self, samplings: Sequence[Sampling], seeds: Sequence[int], device: torch.device) -> None:
        self._seeds = np.array(seeds, dtype=np.uint64)
        self._is_greedy = torch.tensor([s.is_greedy for s in samplings], device=device)

        def column(values: list[float] | list[int]) -> torch.Tensor:
            return torch.tensor(values, device=device).unsqueeze(-1)

        # A greedy row is scored, not drawn, at temperature 1 and without truncation.
        self._temperature = column([1.0 if s.is_greedy else s.temperature for s in samplings])
        self._top_k = column([-1 if s.is_greedy else s.top_k for s in samplings])
        self._top_p = column([1.0 if s.is_greedy else s.top_p for s in samplings])
        self._has_greedy = any(s.is_greedy for s in samplings)
        self._truncates = any(not s.is_greedy and (s.top_k > 0 or s.top_p < 1.0) for s in samplings)

    def select(self, rows: torch.Tensor) -> None:
        self._seeds = self._seeds[rows.cpu().numpy()]
        for name in ("_is_greedy", "_temperature", "_top_k", "_top_p"):
            setattr(self, name, getattr(self, name)[rows])

    def sample(self, logits: torch.Tensor, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, V] to (token ids [rows] int64, their log-probs [rows] float32)."""
        draws = torch.from_numpy(uniforms(self._seeds, step)).to(logits.device)
        rows_at_once = max(1, MAX_SAMPLED_ELEMENTS // logits.shape[-1])
        chunks = [
            self._sample_rows(logits[begin : begin + rows_at_once], draws, slice(begin, begin + rows_at_once))
            for begin in range(0, len(logits), rows_at_once)
        ]
        tokens, logprobs = (torch.cat(parts) for parts in zip(*chunks, strict=True))
        return tokens, logprobs

    def _sample_rows(self, logits: torch.Tensor, draws: torch.Tensor, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs = torch.log_softmax(logits.float() / self._temperature[rows], dim=-1)
        if self._truncates:
            logprobs = truncated(logprobs, self._top_k[rows], self._top_p[rows])
        # Double, so that the rarest token of a large vocabulary keeps its share; the first value above the draw is
        # never one of probability 0.
        cdf = logprobs.double().exp_().cumsum(-1)
        target = draws[rows].unsqueeze(-1) * cdf[:, -1:]
        tokens = torch.searchsorted(cdf, target, right=True).squeeze(-1).clamp_(max=logits.shape[-1] - 1)
        if self._has_greedy:
            tokens = torch.where(self._is_greedy[rows], logits.argmax(-1), tokens)
        return tokens, logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@dataclass(slots=True)
class _Rows:
    """The samples of a round, one row each."""

    requests: list[SampleRequest]
    places: list[int]
    token_ids: IntArray
    """[rows, max_new_tokens]"""
    logprobs: FloatArray
    limits: NDArray[np.int64]
    """[rows] max_new_tokens"""
    running: NDArray[np.int64]
    """[rows still in the batch] their row numbers."""
    is_live: NDArray[np.bool_]
    """[rows still in the batch] False once finished or cancelled."""
    has_stops: bool

    def cancelled(self) -> NDArray[np.bool_]:
        """[rows still in the batch] live rows whose sample is to end now."""
        is_cancelled = np.zeros_like(self.is_live)
        for at in self.is_live.nonzero()[0]:
            row = self.running[at]
            is_cancelled[at] = self.places[row] in self.requests[row].cancelled
        return is_cancelled

    def compact(self) -> NDArray[np.int64] | None:
        """Places of the live rows in the batch, which becomes those; None while too few have finished."""
        if self.is_live.sum() > COMPACT_BELOW * len(self.is_live):
            return None
        kept = self.is_live.nonzero()[0]
        self.running, self.is_live = self.running[kept], self.is_live[kept]
        return kept


class Decoder:
    """Left-pads prompts of different lengths. `eos_ids` end an answer."""

    def __init__(self, model: Any, tokenizer: Any, *, eos_ids: Collection[int], device: torch.device) -> None:
        self._model = model
        # transformers 5.2x renames it.
        is_renamed = "cache" in inspect.signature(model.forward).parameters
        self._cache_argument = "cache" if is_renamed else "past_key_values"
        self._tokenizer = tokenizer
        self._eos_ids = np.array(sorted(eos_ids), dtype=np.int32)
        self._device = device
        self._text_config = model.config.get_text_config()

    @torch.inference_mode()
    def run(self, requests: list[SampleRequest], deliver: Callable[[list[FinishedSample]], None]) -> None:
        """Decodes all samples of `requests` together. `deliver` gets each once, when it finishes or is cancelled."""
        rows = _rows_of(requests)
        sampler = TokenSampler(
            [request.sampling for request in rows.requests],
            [request.seeds[place] for request, place in zip(rows.requests, rows.places, strict=True)],
            self._device,
        )
        lengths = torch.tensor([len(request.prompt_ids) for request in requests])
        input_ids, mask = _left_padded(requests, lengths)
        is_padded = bool((lengths != lengths.max()).any())
        cache = DynamicCache(config=self._text_config)
        owner = torch.tensor([at for at, request in enumerate(requests) for _ in request.seeds], device=self._device)
        position_ids = _positions(requests, mask)
        mm_inputs = {name: value.to(self._device) for name, value in _mm_inputs(requests).items()}
        num_sampled = torch.tensor([[request.num_sampled] for request in requests])
        is_prompt = torch.arange(mask.shape[1]) < mask.shape[1] - num_sampled
        with placeholders_of_images(
            self._model, input_ids.to(self._device), is_prompt.to(self._device) if mm_inputs else None
        ) as prompt_ids:
            logits = self._forward(
                prompt_ids,
                mask.to(self._device) if is_padded else None,
                position_ids.to(self._device),
                cache,
                mm_inputs,
            )[owner]
        # The samples of a prompt share its prefill.
        _select(cache, owner)
        positions = position_ids.reshape(-1, *mask.shape).amax((0, 2)).add(1).to(self._device)[owner]
        grown_mask = None
        if is_padded:
            more = torch.ones(len(owner), int(rows.limits.max()), dtype=mask.dtype, device=self._device)
            grown_mask = torch.cat([mask.to(self._device)[owner], more], dim=-1)
        step = 0
        while True:
            tokens, logprobs = sampler.sample(logits, step)
            rows.token_ids[rows.running, step] = tokens.cpu().numpy()
            rows.logprobs[rows.running, step] = logprobs.cpu().numpy()
            step += 1
            self._deliver_finished(rows, step, deliver)
            if not rows.is_live.any():
                return
            if (places := rows.compact()) is not None:
                kept = torch.from_numpy(places).to(self._device)
                _select(cache, kept)
                sampler.select(kept)
                tokens, positions = tokens[kept], positions[kept]
                grown_mask = None if grown_mask is None else grown_mask[kept]
            seen = None if grown_mask is None else grown_mask[:, : mask.shape[1] + step]
            logits = self._forward(tokens.unsqueeze(-1), seen, positions.unsqueeze(-1), cache)
            positions = positions + 1

    def _forward(
        self,
        input_ids: torch.Tensor,
        mask: torch.Tensor | None,
        position_ids: torch.Tensor,
        cache: DynamicCache,
        mm_inputs: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Logits [rows, V] after the last token of each row; `cache` grows by `input_ids`."""
        output = self._model(
            input_ids=input_ids,
            attention_mask=mask,
            position_ids=position_ids,
            use_cache=True,
            logits_to_keep=1,
            **{self._cache_argument: cache},
            **(mm_inputs or {}),
        )
        return output.logits[:, -1]

    def _deliver_finished(self, rows: _Rows, length: int, deliver: Callable[[list[FinishedSample]], None]) -> None:
        """Takes the rows whose answer ends with token number `length` (from 1) out of the live ones."""
        last = rows.token_ids[rows.running, length - 1]
        is_stopped = rows.is_live & np.isin(last, self._eos_ids)
        for at in (rows.is_live & ~is_stopped).nonzero()[0] if rows.has_stops else ():
            is_stopped[at] = self._ends_with_stop(rows, int(rows.running[at]), length)
        is_complete = rows.is_live & (is_stopped | (rows.limits[rows.running] <= length))
        is_finished = is_complete | rows.cancelled()
        rows.is_live &= ~is_finished
        if not is_finished.any():
            return
        finished = rows.running[is_finished]
        token_ids = rows.token_ids[finished, :length].copy()
        logprobs = rows.logprobs[finished, :length].copy()
        texts = [self._text(ids) for ids in token_ids.tolist()]
        reasons = [
            FinishReason.STOP if stopped else FinishReason.LENGTH if complete else FinishReason.ABORT
            for stopped, complete in zip(is_stopped[is_finished], is_complete[is_finished], strict=True)
        ]
        deliver(
            [
                FinishedSample(rows.requests[row], rows.places[row], Sampled(ids, values, text, reason))
                for row, ids, values, text, reason in zip(finished, token_ids, logprobs, texts, reasons, strict=True)
            ]
        )

    def _text(self, token_ids: list[int]) -> str:
        """Without special tokens. A fast tokenizer's core is asked itself: its wrapper looks at every token again."""
        if self._tokenizer.is_fast and not self._tokenizer.clean_up_tokenization_spaces:
            return self._tokenizer.backend_tokenizer.decode(token_ids, skip_special_tokens=True)
        return self._tokenizer.decode(token_ids, skip_special_tokens=True)

    def _ends_with_stop(self, rows: _Rows, row: int, length: int) -> bool:
        """Whether the newest token completes a stop string. Special tokens count as text here."""
        stops = rows.requests[row].sampling.stop
        if not stops:
            return False
        window = stop_reach(stops)
        text = self._tokenizer.decode(rows.token_ids[row, max(0, length - window) : length].tolist())
        return any(stop in text for stop in stops)


def _rows_of(requests: list[SampleRequest]) -> _Rows:
    pairs = [(request, place) for request in requests for place in range(len(request.seeds))]
    limits = np.array([request.sampling.max_new_tokens for request, _ in pairs])
    return _Rows(
        requests=[request for request, _ in pairs],
        places=[place for _, place in pairs],
        token_ids=np.zeros((len(pairs), limits.max()), dtype=np.int32),
        logprobs=np.zeros((len(pairs), limits.max()), dtype=np.float32),
        limits=limits,
        running=np.arange(len(pairs)),
        is_live=np.ones(len(pairs), dtype=np.bool_),
        has_stops=any(request.sampling.stop for request in requests),
    )


def _left_padded(requests: list[SampleRequest], lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(token ids, mask), both [requests, longest prompt]; padding is token 0, masked."""
    width = int(lengths.max())
    mask = torch.arange(width) >= (width - lengths).unsqueeze(-1)
    input_ids = torch.zeros(mask.shape, dtype=torch.int64)
    input_ids[mask] = torch.from_numpy(np.concatenate([request.prompt_ids for request in requests]).astype(np.int64))
    return input_ids, mask.long()


def _positions(requests: list[SampleRequest], mask: torch.Tensor) -> torch.Tensor:
    """[requests, longest prompt], or [3, ...] if any prompt has multimodal positions; 0 on padding."""
    of_text = (mask.cumsum(-1) - 1).clamp_(min=0)
    if all(request.position_ids is None for request in requests):
        return of_text
    positions = of_text.expand(3, *of_text.shape).clone()
    for row, request in enumerate(requests):
        if request.position_ids is not None:
            positions[:, row, mask[row].bool()] = torch.from_numpy(request.position_ids).long()
    return positions


def _mm_inputs(requests: list[SampleRequest]) -> dict[str, torch.Tensor]:
    """Of all images, in the order of their placeholders: row by row."""
    inputs = [dict(request.mm_inputs) for request in requests if request.mm_inputs]
    names = inputs[0].keys() if inputs else ()
    return {name: torch.from_numpy(np.concatenate([of_row[name] for of_row in inputs])) for name in names}


def _select(cache: Any, rows: torch.Tensor) -> None:
    """Keeps these rows, in this order. Unlike `batch_select_indices`, linear attention has this method, too."""
    cache.reorder_cache(rows)
