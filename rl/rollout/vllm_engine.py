"""vLLM as a rollout engine: its core in a process of its own, driven by one thread of ours, finished answers only.

Threads and processes: one driving thread makes every call into vLLM, one step or one command at a time, in order; a
watching thread sleeps until the core's process ends; what they have to tell goes to the caller's event loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from rl.config.schema import VLLMRolloutConfig
from rl.protocols import Bucket, EngineCapabilities, EngineError, Meeting, RemoteBucket, UpdateManifest
from rl.rollout.engine import Engine
from rl.rollout.memory import check_freed
from rl.rollout.processes import block_interrupts
from rl.rollout.sampler import NOTHING_SAMPLED, Outcome, Part, Sampled, agreed_version, merged_digests
from rl.rollout.vllm_core import (
    Core,
    EngineDeadError,  # pyright: ignore[reportAttributeAccessIssue]  # where vLLM is not installed
    RequestOutput,  # pyright: ignore[reportAttributeAccessIssue]
    start_core,
)
from rl.rollout.vllm_requests import finish_reason, sampled_logprobs
from rl.types import Prompt, Sampling
from rl.weights.inlet import to_json
from rl.weights.ipc import HOST, share_bucket

T = TypeVar("T")

CLOSE_TIMEOUT_S = 30.0

ADDED_AT_ONCE = 64
"""Requests between two steps."""


class VLLMEngine(Engine):
    def __init__(self, config: VLLMRolloutConfig, *, model_folder: Path, device: str) -> None:
        super().__init__(VLLMSampler(config, model_folder=model_folder, device=device))


class VLLMSampler:
    """Implements `rl.rollout.sampler.Sampler`."""

    name = "vLLM"

    def __init__(self, config: VLLMRolloutConfig, *, model_folder: Path, device: str) -> None:
        self._frees_memory = device != "cpu"  # vLLM's CPU worker ignores sleep
        self.capabilities = EngineCapabilities(
            seeded=True,
            loses_weights_asleep=self._frees_memory,
            renormalizes=True,
            # The processors of transformers, which vLLM asks about images, want it for videos.
            takes_images=importlib.util.find_spec("torchvision") is not None,
        )
        self._config = config
        self._model_folder = model_folder
        self._device = device
        self._starting: Future[Core] | None = None
        self._is_closed = False
        self._death: str | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm", initializer=block_interrupts)
        # The driving thread's own: parts that vLLM does not have yet, those that it holds, by request id, and whether a
        # step is already in the thread's queue.
        self._waiting: deque[Part] = deque()
        self._parts: dict[str, Part] = {}
        self._is_stepping = False

    async def start(self, *, deliver: Callable[[Sequence[Outcome]], None], die: Callable[[str], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._report_death = die
        self._log_folder = Path(tempfile.mkdtemp(prefix="rl-vllm-"))
        self._starting = self._thread.submit(self._start_core)
        self._core = await asyncio.wrap_future(self._starting)
        threading.Thread(target=self._watch, name="vllm-watch", daemon=True).start()

    def _start_core(self) -> Core:
        return start_core(
            self._config,
            model_folder=self._model_folder,
            device=self._device,
            log_file=self._log_folder / "vllm.log",
        )

    # Requests, on the event loop.

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        if prompt.images and not self.capabilities.takes_images:
            raise EngineError(
                f"prompt {prompt.prompt_id} has images, and vLLM samples from images only where torchvision is "
                "installed, which has no build for vLLM's CPU version. Use backend/rollout=local, or a GPU."
            )
        if len(prompt.token_ids) + sampling.max_new_tokens > self._core.max_model_len:
            raise EngineError(
                f"{len(prompt.token_ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} do not fit vLLM's "
                f"context of {self._core.max_model_len} tokens (the model's, or what its cache has memory for)."
            )

    def submit(self, parts: Sequence[Part]) -> None:
        def queue() -> None:
            self._waiting.extend(parts)
            self._add()

        self._run(queue)

    def abort(self, parts: Sequence[Part]) -> None:
        if parts:
            self._run(lambda: self._abort(parts))

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        return self._core.decode(token_ids, keep_special=keep_special)

    # What the driving thread does.

    def _add(self) -> None:
        """Some at a time, a step between: a burst of images takes long to prepare, and nothing would be answered."""
        refused: list[Outcome] = []
        for _ in range(min(ADDED_AT_ONCE, len(self._waiting))):
            part = self._waiting.popleft()
            try:
                self._core.add(part)
            except EngineError as error:
                refused.append((part, error))
            else:
                self._parts[part.request_id] = part
        self._hand_over(refused)
        if not self._is_stepping:
            self._is_stepping = True
            self._run(self._step)
        if self._waiting:
            self._run(self._add)

    def _abort(self, parts: Sequence[Part]) -> None:
        aborted = set(parts)
        self._hand_over((part, NOTHING_SAMPLED) for part in self._waiting if part in aborted)
        self._waiting = deque(part for part in self._waiting if part not in aborted)
        running = [part.request_id for part in parts if part.request_id in self._parts]
        self._hand_over(self._outcome(output) for output in self._core.abort(running))

    def _step(self) -> None:
        """One iteration of vLLM, then back to the end of the queue: commands that came meanwhile go first."""
        # Without requests (all aborted since) the core says nothing, and a step would wait for ever.
        outputs = self._core.step() if self._core.has_unfinished else []
        self._hand_over(self._outcome(output) for output in outputs if output.request_id in self._parts)
        self._is_stepping = self._core.has_unfinished
        if self._is_stepping:
            self._run(self._step)

    def _hand_over(self, outcomes: Iterable[Outcome]) -> None:
        if finished := list(outcomes):
            self._loop.call_soon_threadsafe(self._deliver, finished)

    def _outcome(self, output: RequestOutput) -> Outcome:
        part = self._parts.pop(output.request_id)
        try:
            return part, self._sampled(part, output)
        except EngineError as error:
            return part, error

    def _sampled(self, part: Part, output: RequestOutput) -> Sampled:
        if not np.array_equal(part.token_ids, np.asarray(output.prompt_token_ids)):
            raise EngineError(
                f"vLLM sampled from {len(output.prompt_token_ids or ())} prompt tokens that are not the "
                f"{len(part.token_ids)} of prompt {part.prompt.prompt_id}."
            )
        answer = output.outputs[0]
        token_ids = list(answer.token_ids)
        logprobs: Any = answer.logprobs
        return Sampled(
            token_ids=np.asarray(token_ids, dtype=np.int32),
            logprobs=sampled_logprobs(token_ids, logprobs),
            text=self._core.decode(token_ids, keep_special=False),
            finish_reason=finish_reason(answer.finish_reason),
        )

    # Weights.

    async def policy_version(self) -> int:
        return agreed_version(self.name, await self._call(lambda: self._core.rpc("rl_policy_version")))

    async def weight_digests(self) -> dict[str, str]:
        return merged_digests(await self._call(lambda: self._core.rpc("rl_weight_digests")))

    async def begin_update(self, manifest: UpdateManifest) -> None:
        tensors = [(spec.name, spec.dtype, list(spec.shape)) for spec in manifest.tensors]
        await self._call(lambda: self._core.rpc("rl_begin_update", manifest.version, tensors))

    async def receive(self, bucket: Bucket | RemoteBucket) -> None:
        """By a handle, because vLLM's RPC moves bytes at 0.25 GB/s."""
        if not isinstance(bucket, list):
            await self._call(lambda: self._core.rpc("rl_fetch", to_json(bucket)))
            return
        if not bucket:
            return

        def hand_over() -> None:
            # Memory of one GPU is not every worker's own; of the host it is.
            is_split = self._config.num_gpus > 1
            shared = share_bucket(bucket, HOST if is_split else torch.device(self._device))
            self._core.rpc("rl_fetch", to_json(shared.bucket))

        await self._call(hand_over)

    async def weight_groups(self) -> list[str | None]:
        return await self._call(lambda: self._core.rpc("rl_weight_group"))

    async def join_group(self, meeting: Meeting, first_rank: int) -> None:
        await self._call(lambda: self._core.rpc("rl_join_group", to_json(meeting), first_rank))

    async def finish_update(self, version: int) -> None:
        def finish() -> None:
            self._core.drop_caches()  # first: if this fails, the workers still report the old version
            self._core.rpc("rl_finish_update", version)

        await self._call(finish)

    async def abort_update(self) -> None:
        await self._call(lambda: self._core.rpc("rl_abort_update"))

    # Memory.

    async def sleep(self) -> None:
        if self._frees_memory:
            await self._call(self._sleep_and_measure)

    def _sleep_and_measure(self) -> None:
        before = self._core.rpc("rl_free_memory")
        self._core.sleep()
        after = self._core.rpc("rl_free_memory")
        check_freed(
            self.name,
            [(free, freed, total) for (free, total), (freed, _) in zip(before, after, strict=True)],
            memory_fraction=self._config.memory_fraction,
            remedy="Use placement=fully_async, or a driver and vLLM whose sleep mode works; PYTORCH_CUDA_ALLOC_CONF="
            "expandable_segments:True in the engine's environment also prevents it.",
        )

    async def wake_weights(self) -> None:
        if self._frees_memory:
            await self._call(lambda: self._core.wake("weights"))

    async def wake_cache(self) -> None:
        if self._frees_memory:
            await self._call(lambda: self._core.wake("kv_cache"))

    # Life and death.

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        if await self._has_core():
            closing = asyncio.wrap_future(self._thread.submit(self._core.close))
            await asyncio.wait({closing}, timeout=CLOSE_TIMEOUT_S)
            if not closing.done():
                self._core.kill()  # it hangs, and the driving thread waits for it
                self._core.unblock()
            await closing
            if self._death is None:
                shutil.rmtree(self._log_folder)
        self._thread.shutdown(wait=False)

    async def _has_core(self) -> bool:
        """Waits for a start that was cancelled: nobody else would end the process that it makes."""
        if self._starting is None:
            return False
        starting = asyncio.wrap_future(self._starting)
        await asyncio.wait({starting})
        if starting.cancelled() or starting.exception() is not None:
            return False
        self._core = starting.result()
        return True

    def _watch(self) -> None:
        self._core.wait_for_death()
        if self._is_closed:
            return
        status = self._core.exit_status()
        self._core.unblock()
        self._loop.call_soon_threadsafe(self._die, status)

    def _die(self, status: str) -> None:
        if self._death is None and not self._is_closed:
            self._death = f"vLLM's engine died: {status}"
            self._report_death(self._death)

    async def _call(self, function: Callable[[], T]) -> T:
        """Runs `function` in the driving thread, between two steps."""
        try:
            return await self._loop.run_in_executor(self._thread, function)
        except EngineDeadError as error:
            raise await self._wait_for_death() from error

    async def _wait_for_death(self) -> EngineError:
        """vLLM may notice before the watching thread, which knows how the process ended."""
        for _ in range(100):
            if self._death is not None:
                return EngineError(self._death)
            await asyncio.sleep(0.05)
        return EngineError("vLLM's engine reports that it is dead, but its process has not ended.")

    def _run(self, function: Callable[[], None]) -> None:
        """Queues `function` for the driving thread; nobody waits for it. A death is reported by the watching thread."""

        def report(future: Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, EngineDeadError):
                # A step failed though the core lives: nothing that runs will ever finish.
                self._loop.call_soon_threadsafe(self._die, f"{type(error).__name__}: {error}")

        self._thread.submit(function).add_done_callback(report)
