"""The embedded engine: an unsharded copy of the model, filled by weight updates alone, sampled in batches.

The caller's event loop owns all state but the model; one working thread owns that. Requests are decoded in rounds:
those that wait when a round ends make the next one, in the order of their calls, as many as `max_num_seqs` and the
memory for keys and values allow. The calls of one turn of the event loop are therefore one batch, always the same.
"""

from __future__ import annotations

import asyncio
import functools
import os
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from rl.config.schema import LocalRolloutConfig
from rl.protocols import Bucket, EngineCapabilities, EngineError, UpdateManifest
from rl.rollout.decoding import Decoder, FinishedSample, SampleRequest
from rl.rollout.lifecycle import Lifecycle, Phase
from rl.rollout.update import ModelUpdate
from rl.types import Prompt, Rollout, Sampling, sample_seed

T = TypeVar("T")

CACHE_FRACTION = 0.25
"""Of the memory that the device has in all, for the keys and values of a round. Not of what is free: a batch must not
depend on what else runs."""


@dataclass(eq=False, slots=True)
class _Ticket:
    """One call of `generate`, written by the event loop alone."""

    prompt: Prompt
    group_id: int
    n: int
    sampling: Sampling
    results: asyncio.Queue[Rollout | EngineError] = field(default_factory=asyncio.Queue)
    version: int = -1
    started: float = 0.0
    num_dispatched: int = 0
    num_delivered: int = 0
    requests: list[SampleRequest] = field(default_factory=list)


class LocalEngine:
    """`protocols.RolloutEngine` over any Hugging Face causal LM, on a CPU or one GPU. Built for one event loop.

    `rollout_logprobs` are those of the distribution that was sampled from: at the temperature, and renormalized over
    what top_k and top_p leave. Greedy samples (temperature 0) carry the model's own, at temperature 1.
    """

    def __init__(self, config: LocalRolloutConfig, *, model_folder: Path | str, device: str) -> None:
        self.capabilities = EngineCapabilities(seeded=True, frees_memory_asleep=device != "cpu", in_flight_update=False)
        self._config = config
        self._model_folder = Path(model_folder)
        self._device = torch.device(device)
        self._lifecycle = Lifecycle("local")
        self._version = -1
        self._active: set[_Ticket] = set()
        self._waiting: list[_Ticket] = []
        self._queued: list[_Ticket] = []
        self._is_decoding = False
        self._is_dispatch_due = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-engine")

    async def start(self) -> None:
        self._lifecycle.check("start")
        self._loop = asyncio.get_running_loop()
        await self._call(self._build)
        self._lifecycle.phase = Phase.AWAKE

    def _build(self) -> None:
        config = AutoConfig.from_pretrained(self._model_folder)
        text_config = config.get_text_config()
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self._model_folder)
        self._model: Any = empty_model(config, dtype=getattr(torch, self._config.dtype.value), device=self._device)
        eos_ids = end_tokens(self._model_folder, config, self._tokenizer)
        self._decoder = Decoder(self._model, self._tokenizer, eos_ids=eos_ids, device=self._device)
        self._vocab_size: int = text_config.vocab_size
        self._max_length: int | None = getattr(text_config, "max_position_embeddings", None)
        self._max_cached_tokens = int(CACHE_FRACTION * _total_memory(self._device) / _cache_bytes(self._model))

    # Requests, on the event loop.

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self._lifecycle.check("generate")
        self._check_prompt(prompt, sampling)
        ticket = _Ticket(prompt, group_id, n, sampling)
        if self._lifecycle.is_updating:
            self._queued.append(ticket)
        else:
            self._submit(ticket)
        try:
            for _ in range(n):
                result = await ticket.results.get()
                if isinstance(result, EngineError):
                    raise result
                yield result
        finally:
            self._discard(ticket)

    def _check_prompt(self, prompt: Prompt, sampling: Sampling) -> None:
        if prompt.images or prompt.mm_inputs:
            raise EngineError(f"prompt {prompt.prompt_id} has images, and the local engine samples from text alone.")
        ids = prompt.token_ids
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= self._vocab_size:
            raise EngineError(
                f"prompt {prompt.prompt_id} has {len(ids)} tokens; it needs one at least, each below the vocabulary's "
                f"{self._vocab_size}."
            )
        if sampling.temperature < 0 or sampling.max_new_tokens < 1:
            raise EngineError(f"the local engine cannot sample with {sampling}.")
        if self._max_length is not None and len(ids) + sampling.max_new_tokens > self._max_length:
            raise EngineError(
                f"{len(ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} do not fit the model's context "
                f"of {self._max_length} tokens."
            )

    def _submit(self, ticket: _Ticket) -> None:
        ticket.version = self._version
        ticket.started = time.monotonic()
        self._active.add(ticket)
        self._waiting.append(ticket)
        self._idle.clear()
        self._dispatch_soon()

    def _dispatch_soon(self) -> None:
        """After all that is ready to run in this turn of the loop, so that calls made together are one batch."""
        if not self._is_dispatch_due and not self._is_decoding:
            self._is_dispatch_due = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_dispatch_due = False
        if self._is_decoding or self._lifecycle.phase is Phase.CLOSED:
            return
        parts = self._next_round()
        if not parts:
            return
        self._is_decoding = True
        tickets = {id(request): (ticket, first) for ticket, first, request in parts}
        requests = [request for _, _, request in parts]

        def deliver(samples: list[FinishedSample]) -> None:
            results = [(*tickets[id(sample.request)], sample) for sample in samples]
            self._loop.call_soon_threadsafe(self._deliver, results)

        running = self._loop.run_in_executor(self._thread, self._decoder.run, requests, deliver)
        running.add_done_callback(functools.partial(self._end_round, [ticket for ticket, _, _ in parts]))

    def _next_round(self) -> list[tuple[_Ticket, int, SampleRequest]]:
        """(ticket, index of its first sample, samples): first come, first served."""
        parts: list[tuple[_Ticket, int, SampleRequest]] = []
        num_rows = longest = 0
        while self._waiting and num_rows < self._config.max_num_seqs:
            ticket = self._waiting[0]
            longest = max(longest, len(ticket.prompt.token_ids) + ticket.sampling.max_new_tokens)
            affordable = min(self._config.max_num_seqs, max(1, self._max_cached_tokens // longest))
            num = min(ticket.n - ticket.num_dispatched, affordable - num_rows)
            if num <= 0:
                break
            first = ticket.num_dispatched
            seeds = [sample_seed(ticket.sampling.seed, ticket.group_id, first + at) for at in range(num)]
            request = SampleRequest(ticket.prompt.token_ids, ticket.sampling, seeds)
            ticket.requests.append(request)
            ticket.num_dispatched += num
            parts.append((ticket, first, request))
            num_rows += num
            if ticket.num_dispatched == ticket.n:
                self._waiting.pop(0)
        return parts

    def _deliver(self, results: list[tuple[_Ticket, int, FinishedSample]]) -> None:
        now = time.monotonic()
        for ticket, first, sample in results:
            ticket.results.put_nowait(_rollout(ticket, first + sample.place, sample, now))
            ticket.num_delivered += 1
            if ticket.num_delivered == ticket.n:
                self._active.discard(ticket)

    def _end_round(self, tickets: list[_Ticket], running: asyncio.Future[None]) -> None:
        self._is_decoding = False
        error = None if running.cancelled() else running.exception()
        if error is not None:
            for ticket in tickets:
                self._fail(ticket, error)
        if self._waiting:
            self._dispatch_soon()
        self._update_idle()

    def _fail(self, ticket: _Ticket, cause: BaseException) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        self._active.discard(ticket)
        error = EngineError(f"the local engine failed while it sampled: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        ticket.results.put_nowait(error)

    def _discard(self, ticket: _Ticket) -> None:
        """Ends a call of `generate`, whose caller may have left before all its samples came."""
        for request in ticket.requests:
            request.is_cancelled = True
        for tickets in (self._queued, self._waiting):
            if ticket in tickets:
                tickets.remove(ticket)
        self._active.discard(ticket)
        self._update_idle()

    def _update_idle(self) -> None:
        """Idle: nothing waits, and the working thread holds no round, not even one whose callers have left."""
        if not self._active and not self._is_decoding:
            self._idle.set()

    # Weights.

    async def policy_version(self) -> int:
        self._check_running()
        return self._version

    async def open_update(self, manifest: UpdateManifest) -> _UpdateSession:
        """Waits until the running requests have finished; new ones queue until the update ends."""
        self._lifecycle.check("open_update")
        self._lifecycle.is_updating = True
        try:
            await self._idle.wait()
            self._check_running()
        except BaseException:
            self._end_update(self._lifecycle.unfit_reason)
            raise
        try:
            update = await self._call(lambda: ModelUpdate(self._model, manifest))
        except BaseException:
            self._end_update("a weight update failed as it began")
            raise
        return _UpdateSession(self, update)

    def _end_update(self, unfit_reason: str | None) -> None:
        """Lets queued requests go, on complete weights (None), or refuses them."""
        self._lifecycle.is_updating = False
        self._lifecycle.unfit_reason = unfit_reason
        queued, self._queued = self._queued, []
        for ticket in queued:
            if unfit_reason is not None:
                ticket.results.put_nowait(self._lifecycle.unfit())
            else:
                self._submit(ticket)

    # Memory.

    async def sleep(self) -> None:
        self._lifecycle.check("sleep")
        if self._active:
            raise EngineError(f"sleep while {len(self._active)} calls of generate are running.")
        await self._idle.wait()  # the round that delivered the last sample may not have ended yet
        await self._move(torch.device("cpu"))
        self._lifecycle.phase = Phase.ASLEEP

    async def wake_weights(self) -> None:
        self._lifecycle.check("wake_weights")
        await self._move(self._device)
        self._lifecycle.phase = Phase.WEIGHTS_AWAKE

    async def wake(self) -> None:
        self._lifecycle.check("wake")
        await self._move(self._device)
        self._lifecycle.phase = Phase.AWAKE

    async def _move(self, device: torch.device) -> None:
        """The weights survive sleep in the host's memory. There is no cache to free: it lives as long as a round."""
        if not self.capabilities.frees_memory_asleep:
            return
        await self._call(lambda: self._model.to(device))
        if device.type == "cpu":
            torch.cuda.empty_cache()

    # Life.

    async def close(self) -> None:
        """Ends the round that runs, fails whatever waits, and frees the model. May be called twice."""
        if self._lifecycle.phase is Phase.CLOSED:
            return
        was_started = self._lifecycle.phase is not Phase.NEW
        self._lifecycle.phase = Phase.CLOSED
        waiting = [*self._active, *self._queued]
        self._active.clear()
        self._waiting.clear()
        self._queued.clear()
        for ticket in waiting:
            for request in ticket.requests:
                request.is_cancelled = True
            ticket.results.put_nowait(EngineError("the local engine was closed."))
        if not self._is_decoding:
            self._idle.set()
        if was_started:
            await self._call(self._free)
        self._thread.shutdown(wait=False)

    def _free(self) -> None:
        del self._model, self._decoder
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _check_running(self) -> None:
        if self._lifecycle.phase in {Phase.NEW, Phase.CLOSED}:
            raise EngineError(f"the local engine is {self._lifecycle.phase.value}.")

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` in the working thread."""
        return await self._loop.run_in_executor(self._thread, function)


class _UpdateSession:
    """Whatever goes wrong in it, a cancellation included, leaves the engine unfit."""

    def __init__(self, engine: LocalEngine, update: ModelUpdate) -> None:
        self._engine = engine
        self._update = update
        self._is_open = True

    async def send(self, bucket: Bucket) -> None:
        await self._guarded(lambda: self._update.receive(bucket))

    async def commit(self, version: int) -> None:
        await self._guarded(lambda: self._update.check_complete(version))
        self._is_open = False
        self._engine._version = version
        self._engine._end_update(None)

    async def abort(self) -> None:
        if self._is_open:
            self._is_open = False
            self._engine._end_update("its last weight update did not complete")

    async def _guarded(self, function: Callable[[], None]) -> None:
        if not self._is_open:
            raise EngineError("this weight update has ended.")
        try:
            self._engine._check_running()
            await self._engine._call(function)
        except BaseException:
            await self.abort()
            raise


def empty_model(config: Any, *, dtype: torch.dtype, device: torch.device) -> Any:
    """The model of a config in evaluation mode, with weights that mean nothing. Draws from no one's random numbers."""
    auto_class = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
    cuda_devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda_devices), device:
        # transformers chooses the attention: SDPA for models that may use it, eager for those that may not (Gemma 2).
        model = auto_class.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def end_tokens(folder: Path, config: Any, tokenizer: Any) -> set[int]:
    """Ids that end an answer: those of generation_config.json (or config.json) and the tokenizer's own."""
    has_file = (folder / "generation_config.json").is_file()
    generation = GenerationConfig.from_pretrained(folder) if has_file else config.get_text_config()
    ids = generation.eos_token_id
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return {*([] if ids is None else [ids] if isinstance(ids, int) else ids), *own}


def _rollout(ticket: _Ticket, index: int, sample: FinishedSample, now: float) -> Rollout:
    prompt_ids = ticket.prompt.token_ids
    length = len(prompt_ids) + len(sample.token_ids)
    loss_mask = np.zeros(length, dtype=np.bool_)
    loss_mask[len(prompt_ids) :] = True
    logprobs = np.zeros(length, dtype=np.float32)
    logprobs[len(prompt_ids) :] = sample.logprobs
    return Rollout(
        group_id=ticket.group_id,
        index=index,
        token_ids=np.concatenate([prompt_ids, sample.token_ids]),
        loss_mask=loss_mask,
        rollout_logprobs=logprobs,
        temperature=ticket.sampling.temperature,
        min_policy_version=ticket.version,
        max_policy_version=ticket.version,
        finish_reason=sample.finish_reason,
        text=sample.text,
        generation_s=now - ticket.started,
    )


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cache_bytes(model: Any) -> int:
    """Keys and values of one token in all layers."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * model.dtype.itemsize
