"""vLLM as a rollout engine: its core in a process of its own, driven by one thread of ours, finished answers only.

Threads and processes: the caller's event loop owns all state of `VLLMEngine`; one driving thread makes every call
into vLLM, one step or one command at a time, in order; a watching thread sleeps until the core's process ends.
Each sample is a request of its own, so that its seed is its own and it is handed on the moment it finishes.
"""

from __future__ import annotations

import asyncio
import itertools
import shutil
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch

from rl.config.schema import VLLMRolloutConfig
from rl.protocols import Bucket, EngineCapabilities, EngineError, EngineUnfit, UpdateManifest
from rl.rollout.lifecycle import Lifecycle, Phase
from rl.rollout.vllm_core import (
    Core,
    EngineDeadError,  # pyright: ignore[reportAttributeAccessIssue]  # where vLLM is not installed
    RequestOutput,  # pyright: ignore[reportAttributeAccessIssue]
    block_interrupts,
    start_core,
)
from rl.rollout.vllm_requests import finish_reason, sampled_logprobs
from rl.types import Prompt, Rollout, Sampling

T = TypeVar("T")

MIN_FREED_FRACTION = 0.1
"""Of the engine's memory budget. A sleep that frees less has freed nothing that a trainer could use."""

CLOSE_TIMEOUT_S = 30.0


@dataclass(eq=False, slots=True)
class _Ticket:
    """One call of `generate`. Fields are written by the event loop, before the driving thread sees the ticket."""

    prompt: Prompt
    group_id: int
    n: int
    sampling: Sampling
    results: asyncio.Queue[Rollout | EngineError] = field(default_factory=asyncio.Queue)
    request_ids: list[str] = field(default_factory=list)
    version: int = -1
    started: float = 0.0
    num_running: int = 0


class VLLMEngine:
    """`protocols.RolloutEngine` over vLLM. Built for one event loop; weights come by updates alone."""

    def __init__(self, config: VLLMRolloutConfig, *, model_folder: Path, device: str) -> None:
        self.capabilities = EngineCapabilities(seeded=True, frees_memory_asleep=device != "cpu", in_flight_update=False)
        self._config = config
        self._model_folder = model_folder
        self._device = device
        self._lifecycle = Lifecycle("vLLM")
        self._version = -1
        self._starting: Future[Core] | None = None
        self._death: str | None = None
        self._ids = itertools.count()
        self._active: set[_Ticket] = set()
        self._queued: list[_Ticket] = []
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm", initializer=block_interrupts)
        # The driving thread's own: requests that vLLM holds, and whether a step is already in its queue.
        self._requests: dict[str, tuple[_Ticket, int]] = {}
        self._is_stepping = False

    async def start(self) -> None:
        self._lifecycle.check("start")
        self._loop = asyncio.get_running_loop()
        self._log_folder = Path(tempfile.mkdtemp(prefix="rl-vllm-"))
        self._starting = self._thread.submit(self._start_core)
        self._core = await asyncio.wrap_future(self._starting)
        if self._lifecycle.phase is Phase.CLOSED:
            raise EngineError("the vLLM engine was closed while it started.")
        threading.Thread(target=self._watch, name="vllm-watch", daemon=True).start()
        self._lifecycle.phase = Phase.AWAKE

    def _start_core(self) -> Core:
        return start_core(
            self._config,
            model_folder=self._model_folder,
            device=self._device,
            log_file=self._log_folder / "vllm.log",
        )

    # Requests, on the event loop.

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self._check("generate")
        num_tokens = len(prompt.token_ids) + sampling.max_new_tokens
        if num_tokens > self._core.max_model_len:
            raise EngineError(
                f"{len(prompt.token_ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} do not fit vLLM's "
                f"context of {self._core.max_model_len} tokens (the model's, or what its cache has memory for)."
            )
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

    def _submit(self, ticket: _Ticket) -> None:
        ticket.version = self._version
        ticket.started = time.monotonic()
        ticket.request_ids = [str(next(self._ids)) for _ in range(ticket.n)]
        ticket.num_running = ticket.n
        self._active.add(ticket)
        self._idle.clear()
        self._run(lambda: self._add(ticket), on_error=lambda error: self._refuse(ticket, error))

    def _discard(self, ticket: _Ticket) -> None:
        """Ends a call of `generate`, whose caller may have left before all its samples came."""
        if ticket in self._queued:
            self._queued.remove(ticket)
        if ticket in self._active:
            self._finish(ticket)
            if self._death is None and self._lifecycle.phase is not Phase.CLOSED:
                self._run(lambda: self._abort(ticket))

    def _finish(self, ticket: _Ticket) -> None:
        self._active.discard(ticket)
        if not self._active:
            self._idle.set()

    def _refuse(self, ticket: _Ticket, error: BaseException) -> None:
        ticket.results.put_nowait(error if isinstance(error, EngineError) else EngineError(f"vLLM refused: {error}"))

    def _deliver(self, results: list[tuple[_Ticket, Rollout | EngineError]]) -> None:
        for ticket, result in results:
            ticket.results.put_nowait(result)
            ticket.num_running -= 1
            if ticket.num_running == 0:
                self._finish(ticket)

    # What the driving thread does.

    def _add(self, ticket: _Ticket) -> None:
        for index, request_id in enumerate(ticket.request_ids):
            self._core.add(request_id, ticket.prompt, ticket.sampling, group_id=ticket.group_id, index=index)
            self._requests[request_id] = (ticket, index)
        if not self._is_stepping:
            self._is_stepping = True
            self._run(self._step)

    def _abort(self, ticket: _Ticket) -> None:
        running = [request_id for request_id in ticket.request_ids if self._requests.pop(request_id, None) is not None]
        self._core.abort(running)

    def _step(self) -> None:
        """One iteration of vLLM, then back to the end of the queue: commands that came meanwhile go first."""
        results = []
        # Without requests (all aborted since) the core says nothing, and a step would wait for ever.
        outputs = self._core.step() if self._core.has_unfinished else []
        for output in outputs:
            ticket, index = self._requests.pop(output.request_id, (None, 0))
            if ticket is not None:
                results.append((ticket, self._result(ticket, index, output)))
        if results:
            self._loop.call_soon_threadsafe(self._deliver, results)
        self._is_stepping = self._core.has_unfinished
        if self._is_stepping:
            self._run(self._step)

    def _result(self, ticket: _Ticket, index: int, output: RequestOutput) -> Rollout | EngineError:
        try:
            return self._rollout(ticket, index, output)
        except EngineError as error:
            return error

    def _rollout(self, ticket: _Ticket, index: int, output: RequestOutput) -> Rollout:
        prompt_ids = ticket.prompt.token_ids
        if not np.array_equal(prompt_ids, np.asarray(output.prompt_token_ids)):
            raise EngineError(
                f"vLLM sampled from {len(output.prompt_token_ids or ())} prompt tokens that are not the "
                f"{len(prompt_ids)} of prompt {ticket.prompt.prompt_id}."
            )
        answer = output.outputs[0]
        token_ids = list(answer.token_ids)
        logprobs: Any = answer.logprobs
        zeros = np.zeros(len(prompt_ids), dtype=np.float32)
        return Rollout(
            group_id=ticket.group_id,
            index=index,
            token_ids=np.concatenate([prompt_ids, np.asarray(token_ids, dtype=np.int32)]),
            loss_mask=np.arange(len(prompt_ids) + len(token_ids)) >= len(prompt_ids),
            rollout_logprobs=np.concatenate([zeros, sampled_logprobs(token_ids, logprobs)]),
            temperature=ticket.sampling.temperature,
            min_policy_version=ticket.version,
            max_policy_version=ticket.version,
            finish_reason=finish_reason(answer.finish_reason),
            text=self._core.decode(token_ids),
            generation_s=time.monotonic() - ticket.started,
        )

    # Weights.

    async def policy_version(self) -> int:
        self._check_alive()
        versions = set(await self._call(lambda: self._core.rpc("rl_policy_version")))
        if len(versions) != 1:
            raise EngineError(f"vLLM's workers hold different policy versions: {sorted(versions)}.")
        return versions.pop()

    async def open_update(self, manifest: UpdateManifest) -> _UpdateSession:
        """Waits until the running requests have finished; new ones queue until the update ends."""
        self._check("open_update")
        self._lifecycle.is_updating = True
        is_begun = False
        try:
            await self._idle.wait()
            self._check_alive()
            is_begun = True
            tensors = [(spec.name, spec.dtype, list(spec.shape)) for spec in manifest.tensors]
            await self._call(lambda: self._core.rpc("rl_begin_update", tensors))
        except BaseException:
            self._end_update("a weight update failed as it began" if is_begun else self._lifecycle.unfit_reason)
            raise
        return _UpdateSession(self, manifest.version)

    def _end_update(self, unfit_reason: str | None) -> None:
        """Lets queued requests go, on complete weights (None), or refuses them."""
        self._lifecycle.is_updating = False
        self._lifecycle.unfit_reason = unfit_reason
        queued, self._queued = self._queued, []
        for ticket in queued:
            if self._death is not None:
                ticket.results.put_nowait(EngineError(self._death))
            elif unfit_reason is not None:
                ticket.results.put_nowait(EngineUnfit(f"the vLLM engine refuses to sample: {unfit_reason}."))
            else:
                self._submit(ticket)

    # Memory.

    async def sleep(self) -> None:
        self._check("sleep")
        if self._active:
            raise EngineError(f"sleep while {len(self._active)} calls of generate are running.")
        self._lifecycle.phase = Phase.ASLEEP  # also where this fails: its memory may be gone
        if self.capabilities.frees_memory_asleep:
            self._lifecycle.unfit_reason = "its weights were dropped when it slept"
            await self._call(self._sleep_and_measure)

    def _sleep_and_measure(self) -> None:
        """Believes the device, not the framework: on some ROCm versions sleep returns and the memory stays taken."""
        before = self._core.rpc("rl_free_memory")
        self._core.sleep()
        after = self._core.rpc("rl_free_memory")
        for rank, ((free_before, total), (free_after, _)) in enumerate(zip(before, after, strict=True)):
            freed, needed = free_after - free_before, MIN_FREED_FRACTION * self._config.memory_fraction * total
            if freed < needed:
                raise EngineError(
                    f"vLLM's worker {rank} went to sleep but freed {freed / 2**30:.1f} GiB of its device (at least "
                    f"{needed / 2**30:.1f} expected), so the trainer would run out of memory. Use "
                    "placement=fully_async, or a driver and vLLM whose sleep mode works; PYTORCH_CUDA_ALLOC_CONF="
                    "expandable_segments:True in the engine's environment also prevents it."
                )

    async def wake_weights(self) -> None:
        self._check("wake_weights")
        if self.capabilities.frees_memory_asleep:
            await self._call(lambda: self._core.wake("weights"))
        self._lifecycle.phase = Phase.WEIGHTS_AWAKE

    async def wake(self) -> None:
        """Without a publish since `sleep` on a device that frees memory, `generate` raises `EngineUnfit` afterwards."""
        self._check("wake")
        if self.capabilities.frees_memory_asleep:
            if self._lifecycle.phase is Phase.ASLEEP:
                await self._call(lambda: self._core.wake("weights"))
            await self._call(lambda: self._core.wake("kv_cache"))
        self._lifecycle.phase = Phase.AWAKE

    # Life and death.

    async def close(self) -> None:
        """Ends the core's processes and fails whatever still waits. May be called twice, and after a death."""
        if self._lifecycle.phase is Phase.CLOSED:
            return
        self._lifecycle.phase = Phase.CLOSED
        self._fail_waiters("the vLLM engine was closed.")
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
        if self._lifecycle.phase is Phase.CLOSED:
            return
        status = self._core.exit_status()
        self._core.unblock()
        self._loop.call_soon_threadsafe(self._die, status)

    def _die(self, status: str) -> None:
        if self._death is None and self._lifecycle.phase is not Phase.CLOSED:
            self._death = f"vLLM's engine died: {status}"
            self._fail_waiters(self._death)

    def _fail_waiters(self, message: str) -> None:
        waiting = [*self._active, *self._queued]
        self._active.clear()
        self._queued.clear()
        self._idle.set()
        for ticket in waiting:
            ticket.results.put_nowait(EngineError(message))  # one each: a shared one would collect their tracebacks

    def _check(self, action: str) -> None:
        self._check_alive()
        self._lifecycle.check(action)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(self._death)
        if self._lifecycle.phase in {Phase.NEW, Phase.CLOSED}:
            raise EngineError(f"the vLLM engine is {self._lifecycle.phase.value}.")

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

    def _run(self, function: Callable[[], None], *, on_error: Callable[[BaseException], None] | None = None) -> None:
        """Queues `function` for the driving thread; nobody waits for it. A death is reported by the watching thread."""

        def report(future: Future[None]) -> None:
            error = None if future.cancelled() else future.exception()
            if error is not None and not isinstance(error, EngineDeadError):
                self._loop.call_soon_threadsafe(on_error or self._break, error)

        self._thread.submit(function).add_done_callback(report)

    def _break(self, error: BaseException) -> None:
        """A step failed though the core lives: nothing that runs will ever finish."""
        self._die(f"{type(error).__name__}: {error}")


class _UpdateSession:
    """Safetensors bytes by RPC, which CPU and GPU workers take alike."""

    def __init__(self, engine: VLLMEngine, version: int) -> None:
        self._engine = engine
        self._version = version
        self._is_open = True

    async def send(self, bucket: Bucket) -> None:
        await self._guarded(lambda: self._engine._core.rpc("rl_receive", _payload(bucket)))

    async def commit(self, version: int) -> None:
        if version != self._version:
            await self.abort()
            raise EngineError(f"commit of version {version} to an update whose manifest says {self._version}.")
        await self._guarded(self._finish)
        self._is_open = False
        self._engine._version = version
        self._engine._end_update(None)

    def _finish(self) -> None:
        """Caches go first: if that fails, the workers still report the old version."""
        core = self._engine._core
        core.drop_caches()
        core.rpc("rl_finish_update", self._version)

    async def abort(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        try:
            if self._engine._death is None and self._engine._lifecycle.phase is not Phase.CLOSED:
                await self._engine._call(lambda: self._engine._core.rpc("rl_abort_update"))
        finally:
            self._engine._end_update("its last weight update did not complete")

    async def _guarded(self, function: Callable[[], Any]) -> None:
        """Whatever goes wrong on the way, a cancellation included, leaves the engine unfit."""
        if not self._is_open:
            raise EngineError("this weight update has ended.")
        try:
            await self._engine._call(function)
        except BaseException:
            await self.abort()
            raise


def _payload(bucket: Bucket) -> bytes:
    """The seam for a transport between processes on one GPU: what this makes, `WeightReceiver.rl_receive` reads."""
    return safetensors.torch.save({name: tensor.detach().cpu() for name, tensor in bucket})
