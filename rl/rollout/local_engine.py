"""The embedded engine: an unsharded copy of the model, filled by weight updates alone, sampled in batches.

The caller's event loop owns all state but the model; one working thread owns that. Requests are decoded in rounds:
those that wait when a round ends make the next one, in the order of their calls, as many as `max_num_seqs` and the
memory for keys and values allow. The calls of one turn of the event loop are therefore one batch, always the same.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, GenerationConfig

from rl.config.schema import LocalRolloutConfig
from rl.model.positions import max_positions_of
from rl.protocols import Bucket, EngineCapabilities, EngineError, Meeting, RemoteBucket, UpdateManifest
from rl.rollout.decoding import Decoder, FinishedSample, SampleRequest
from rl.rollout.engine import Engine
from rl.rollout.memory import cache_bytes_per_token
from rl.rollout.sampler import NOTHING_SAMPLED, Outcome, Part
from rl.rollout.update import ModelUpdate
from rl.types import Prompt, Sampling
from rl.weights.digest import tensor_digest
from rl.weights.inlet import WeightInlet

T = TypeVar("T")

CACHE_FRACTION = 0.25
"""Of the memory that the device has in all, for the keys and values of a round. Not of what is free: a batch must not
depend on what else runs."""


class LocalEngine(Engine):
    """Samples from any Hugging Face causal LM, on a CPU or one GPU.

    `rollout_logprobs` are those of the distribution that was sampled from: at the temperature, and renormalized over
    what top_k and top_p leave. Greedy samples (temperature 0) carry the model's own, at temperature 1.
    """

    def __init__(self, config: LocalRolloutConfig, *, model_folder: Path | str, device: str) -> None:
        super().__init__(LocalSampler(config, model_folder=model_folder, device=device))


class LocalSampler:
    """Implements `rl.rollout.sampler.Sampler`."""

    name = "local"
    capabilities = EngineCapabilities(seeded=True, loses_weights_asleep=False, renormalizes=True, takes_images=True)

    def __init__(self, config: LocalRolloutConfig, *, model_folder: Path | str, device: str) -> None:
        self._config = config
        self._model_folder = Path(model_folder)
        self._device = torch.device(device)
        self._is_started = False
        self._is_closed = False
        self._waiting: list[Part] = []
        self._decoding: dict[Part, tuple[SampleRequest, int]] = {}
        """The parts of the round that runs, each with its place in it."""
        self._is_round_running = False
        self._is_dispatch_due = False
        self._version = -1
        self._update: ModelUpdate | None = None
        self._inlet = WeightInlet(self._device)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="local-engine")

    async def start(self, *, deliver: Callable[[Sequence[Outcome]], None], die: Callable[[str], None]) -> None:
        del die  # it lives and dies with this process
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        await self._call(self._build)
        self._is_started = True

    def _build(self) -> None:
        config = AutoConfig.from_pretrained(self._model_folder)
        text_config = config.get_text_config()
        self._model_takes_images = hasattr(config, "vision_config")
        self._tokenizer: Any = AutoTokenizer.from_pretrained(self._model_folder)
        self._model: Any = empty_model(config, dtype=getattr(torch, self._config.dtype.value), device=self._device)
        eos_ids = end_tokens(self._model_folder, config, self._tokenizer)
        self._decoder = Decoder(self._model, self._tokenizer, eos_ids=eos_ids, device=self._device)
        self._vocab_size: int = text_config.vocab_size
        self._max_length = max_positions_of(text_config)
        token_bytes = cache_bytes_per_token(text_config, bytes_per_element=self._model.dtype.itemsize)
        self._max_cached_tokens = int(CACHE_FRACTION * _total_memory(self._device) / token_bytes)

    # Requests, on the event loop.

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        if prompt.images and not self._model_takes_images:
            raise EngineError(
                f"prompt {prompt.prompt_id} has images, and the model of {self._model_folder} takes none."
            )
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

    def submit(self, parts: Sequence[Part]) -> None:
        self._waiting += parts
        self._dispatch_soon()

    def abort(self, parts: Sequence[Part]) -> None:
        waiting = set(self._waiting)
        unstarted = [part for part in parts if part in waiting]
        for part in parts:
            if part in self._decoding:
                request, place = self._decoding[part]
                request.cancelled.add(place)
        if unstarted:
            aborted = set(unstarted)
            self._waiting = [part for part in self._waiting if part not in aborted]
            self._loop.call_soon(self._deliver, [(part, NOTHING_SAMPLED) for part in unstarted])

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=not keep_special)

    def _dispatch_soon(self) -> None:
        """After all that is ready to run in this turn of the loop, so that calls made together are one batch."""
        if not self._is_dispatch_due and not self._is_round_running:
            self._is_dispatch_due = True
            self._loop.call_soon(self._dispatch)

    def _dispatch(self) -> None:
        self._is_dispatch_due = False
        if self._is_round_running or self._is_closed or not self._waiting:
            return
        requests = self._next_round()
        self._is_round_running = True
        parts = {place: part for part, place in self._decoding.items()}

        def deliver(samples: list[FinishedSample]) -> None:
            self._loop.call_soon_threadsafe(
                self._deliver_finished, [(parts[sample.request, sample.place], sample) for sample in samples]
            )

        running = self._loop.run_in_executor(self._thread, self._decoder.run, requests, deliver)
        running.add_done_callback(self._end_round)

    def _next_round(self) -> list[SampleRequest]:
        """First come, first served. Neighbours that start from the same tokens in the same way share their prefill."""
        requests: list[SampleRequest] = []
        last: Part | None = None
        longest = 0
        while self._waiting and len(self._decoding) < self._config.max_num_seqs:
            part = self._waiting[0]
            longest = max(longest, len(part.token_ids) + part.sampling.max_new_tokens)
            if self._decoding and (len(self._decoding) + 1) * longest > self._max_cached_tokens:
                break
            if last is None or not _starts_alike(last, part):
                requests.append(_request(part))
            request = requests[-1]
            self._decoding[part] = (request, len(request.seeds))
            request.seeds.append(part.seed)
            last = self._waiting.pop(0)
        return requests

    def _deliver_finished(self, results: list[tuple[Part, FinishedSample]]) -> None:
        for part, _ in results:
            del self._decoding[part]
        self._deliver([(part, sample.sampled) for part, sample in results])

    def _end_round(self, running: asyncio.Future[None]) -> None:
        self._is_round_running = False
        unfinished, self._decoding = list(self._decoding), {}
        error = None if running.cancelled() else running.exception()
        if error is not None:
            self._deliver([(part, _failure(error)) for part in unfinished])
        if self._waiting:
            self._dispatch_soon()

    # Weights.

    async def policy_version(self) -> int:
        return self._version

    async def weight_digests(self) -> dict[str, str]:
        return await self._call(
            lambda: {name: tensor_digest(parameter) for name, parameter in self._model.named_parameters()}
        )

    async def begin_update(self, manifest: UpdateManifest) -> None:
        self._update = await self._call(lambda: ModelUpdate(self._model, manifest))

    async def receive(self, bucket: Bucket | RemoteBucket) -> None:
        assert self._update is not None
        update = self._update

        def receive() -> None:
            update.receive(bucket if isinstance(bucket, list) else list(self._inlet.fetch(bucket).items()))

        await self._call(receive)

    async def weight_groups(self) -> list[str | None]:
        return [self._inlet.group_id]

    async def join_group(self, meeting: Meeting, first_rank: int) -> None:
        await self._call(lambda: self._inlet.join(meeting, rank=first_rank))

    async def finish_update(self, version: int) -> None:
        assert self._update is not None
        self._update.check_complete()
        self._update, self._version = None, version

    async def abort_update(self) -> None:
        self._update = None

    # Memory.

    async def sleep(self) -> None:
        await self._move(torch.device("cpu"))

    async def wake_weights(self) -> None:
        await self._move(self._device)

    async def wake_cache(self) -> None:
        """There is no cache to wake: it lives as long as a round."""

    async def _move(self, device: torch.device) -> None:
        """The weights survive sleep in the host's memory."""
        if self._device.type == "cpu":
            return
        await self._call(lambda: self._model.to(device))
        if device.type == "cpu":
            torch.cuda.empty_cache()

    # Life.

    async def close(self) -> None:
        """Ends the round that runs, and frees the model."""
        if self._is_closed:
            return
        self._is_closed = True
        for request, place in self._decoding.values():
            request.cancelled.add(place)
        if self._is_started:
            await self._call(self._free)
        self._thread.shutdown(wait=False)

    def _free(self) -> None:
        self._inlet.leave()
        del self._model, self._decoder
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` in the working thread, after the round that runs."""
        return await self._loop.run_in_executor(self._thread, function)


def _starts_alike(a: Part, b: Part) -> bool:
    return a.prompt is b.prompt and a.sampling == b.sampling and len(a.prefix) == 0 == len(b.prefix)


def _request(part: Part) -> SampleRequest:
    """What was sampled before the part goes on after the largest position of its prompt, as an answer does."""
    prompt, position_ids = part.prompt, part.prompt.position_ids
    if position_ids is not None:
        more = np.arange(len(part.prefix), dtype=np.int32) + position_ids.max() + 1
        position_ids = np.concatenate([position_ids, np.broadcast_to(more, (3, len(more)))], axis=1)
    return SampleRequest(
        part.token_ids, part.sampling, [], position_ids, prompt.mm_inputs, num_sampled=len(part.prefix)
    )


def _failure(cause: BaseException) -> EngineError:
    error = EngineError(f"the local engine failed while it sampled: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error


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


def _total_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
