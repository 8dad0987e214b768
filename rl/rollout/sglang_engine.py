"""SGLang as a rollout engine: in a host process of its own, many messages at a time, finished answers only.

Threads: one starts the host and reads what it says until it ends, one writes to it, so that the caller's event loop
never waits for a pipe; one packs weights.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import io
import itertools
import multiprocessing
import queue
import shutil
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.multiprocessing.reductions  # registers how tensors cross processes
from transformers import AutoTokenizer

from rl.config.schema import SGLangRolloutConfig
from rl.faults import last_lines
from rl.protocols import (
    Bucket,
    EngineCapabilities,
    EngineError,
    Meeting,
    RemoteBucket,
    TensorSpec,
    UpdateManifest,
)
from rl.rollout.engine import Engine
from rl.rollout.manifest_check import ManifestCheck
from rl.rollout.memory import check_freed
from rl.rollout.processes import block_interrupts, describe_exit
from rl.rollout.sampler import Outcome, Part
from rl.rollout.sglang_environment import is_seeded
from rl.rollout.sglang_host import Abort, Answer, Call, Close, Failed, Finished, Started, Submit, host_main
from rl.rollout.sglang_requests import request_of, rid_of
from rl.rollout.versions import warn_if_untested
from rl.types import Prompt, Sampling
from rl.weights.flat import flattened
from rl.weights.inlet import to_json

CLOSE_TIMEOUT_S = 20.0
EXIT_TIMEOUT_S = 5.0


class SGLangEngine(Engine):
    def __init__(self, config: SGLangRolloutConfig, *, model_folder: Path, device: str) -> None:
        super().__init__(SGLangSampler(config, model_folder=model_folder, device=device))


class SGLangSampler:
    """Implements `rl.rollout.sampler.Sampler`."""

    name = "SGLang"

    def __init__(self, config: SGLangRolloutConfig, *, model_folder: Path, device: str) -> None:
        self._frees_memory = device != "cpu"  # SGLang's own release ends the scheduler of a CPU
        self._is_seeded = is_seeded(config)
        self.capabilities = EngineCapabilities(
            seeded=self._is_seeded, loses_weights_asleep=self._frees_memory, renormalizes=False
        )
        self._config = config
        self._model_folder = Path(model_folder)
        self._device = device
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None
        self._thread: threading.Thread | None = None
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._packing = ThreadPoolExecutor(1, thread_name_prefix="sglang-pack")
        self._is_closed = False
        self._has_started = False
        self._death: str | None = None
        self._parts: dict[str, Part] = {}
        self._call_ids = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._update: ManifestCheck | None = None

    @property
    def _pid(self) -> int | None:
        """Of the host, once there is one."""
        return None if self._process is None else self._process.pid

    async def start(self, *, deliver: Callable[[Sequence[Outcome]], None], die: Callable[[str], None]) -> None:
        warn_if_untested("sglang")
        self._loop = asyncio.get_running_loop()
        self._deliver = deliver
        self._report_death = die
        self._log_folder = Path(tempfile.mkdtemp(prefix="rl-sglang-"))
        self._death = None
        self._started: asyncio.Future[Started] = self._loop.create_future()
        self._thread = threading.Thread(target=self._run_host, name="sglang-read", daemon=True)
        self._thread.start()
        self._tokenizer: Any = await asyncio.to_thread(AutoTokenizer.from_pretrained, self._model_folder)
        try:
            self._limits = await self._started
        except EngineError:
            await asyncio.to_thread(self._thread.join)  # what it says last is not of the next one
            raise

    def _run_host(self) -> None:
        """Starts the host and reads from it until it ends. The kernel ties the host's life to this thread's."""
        block_interrupts()
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        process = context.Process(
            target=host_main,
            args=(theirs, self._config),
            kwargs={"model_folder": self._model_folder, "device": self._device, "log_folder": self._log_folder},
            name="rl-sglang",
        )
        try:
            process.start()
        except Exception as error:  # noqa: BLE001  # whatever it is, `start` waits for an answer
            self._call_soon(self._die, f"its process could not be started: {type(error).__name__}: {error}")
            return
        theirs.close()
        self._process, self._connection = process, ours
        atexit.register(process.kill)  # multiprocessing would wait for it at the interpreter's end
        writer = threading.Thread(target=self._write, args=(ours,), name="sglang-write", daemon=True)
        writer.start()
        while True:
            try:
                messages = ours.recv()
            except (EOFError, OSError):
                break
            self._call_soon(self._receive, messages)
        self._outbox.put(None)
        writer.join()
        process.join(EXIT_TIMEOUT_S)
        atexit.unregister(process.kill)
        exit_code = process.exitcode
        log = last_lines(self._log_folder / "sglang.log")
        self._call_soon(self._die, f"process {process.pid} {describe_exit(exit_code)}. {log}")

    def _write(self, connection: Connection) -> None:
        """Everything that has gathered meanwhile goes together. None ends this thread."""
        while True:
            messages = [self._outbox.get()]
            while not self._outbox.empty():
                messages.append(self._outbox.get())
            try:
                connection.send([message for message in messages if message is not None])
            except OSError:  # the host is gone; the reader tells
                return
            except Exception as error:  # noqa: BLE001  # nothing would be sent any more, and everybody would wait
                self._call_soon(self._die, f"a message to it could not be sent: {type(error).__name__}: {error}")
                return
            if None in messages:
                return

    def _call_soon(self, function: Callable[..., None], *arguments: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody listens any more
            self._loop.call_soon_threadsafe(function, *arguments)

    # Requests.

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        if prompt.images or prompt.mm_inputs:
            raise EngineError(f"prompt {prompt.prompt_id} has images, and the SGLang engine samples from text so far.")
        ids, limits = prompt.token_ids, self._limits
        if len(ids) == 0 or ids.min() < 0 or ids.max() >= limits.vocab_size:  # the scheduler would end
            raise EngineError(
                f"prompt {prompt.prompt_id} has {len(ids)} tokens; it needs one at least, each below the vocabulary's "
                f"{limits.vocab_size}."
            )
        if len(ids) + sampling.max_new_tokens > limits.max_model_len:
            raise EngineError(
                f"{len(ids)} prompt tokens and max_new_tokens={sampling.max_new_tokens} do not fit SGLang's context of "
                f"{limits.max_model_len} tokens (the model's, or what its cache has memory for)."
            )

    def submit(self, parts: Sequence[Part]) -> None:
        requests, refused = [], []
        for part in parts:
            try:
                request = request_of(part, is_seeded=self._is_seeded)
            except EngineError as error:
                refused.append((part, error))
            else:
                self._parts[request.rid] = part
                requests.append(request)
        if refused:
            self._loop.call_soon(self._deliver, refused)
        if requests:
            self._outbox.put(Submit(requests))

    def abort(self, parts: Sequence[Part]) -> None:
        rids = [rid for part in parts if (rid := rid_of(part.request_id)) in self._parts]
        if rids:
            self._outbox.put(Abort(rids))

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not keep_special)

    def _receive(self, messages: list[Any]) -> None:
        outcomes: list[Outcome] = []
        for message in messages:
            match message:
                case Finished(rid, result):
                    outcomes.append((self._parts.pop(rid), result))
                case Answer(call_id, value, error):
                    waiting = self._calls.pop(call_id)
                    if waiting.done():  # its caller was cancelled
                        continue
                    if error is None:
                        waiting.set_result(value)
                    else:
                        waiting.set_exception(EngineError(error))
                case Started():
                    if not self._started.done():
                        self._started.set_result(message)
                    self._has_started = True
                case Failed(reason) if not self._is_closed:
                    log = last_lines(self._log_folder / "sglang.log")
                    if not self._started.done():
                        self._started.set_exception(EngineError(f"SGLang did not start: {reason}\n{log}"))
        if outcomes:
            self._deliver(outcomes)

    async def _call(self, method: str, *arguments: Any) -> Any:
        if self._death is not None:
            raise EngineError(self._death)
        call_id = next(self._call_ids)
        answer = self._calls[call_id] = self._loop.create_future()
        self._outbox.put(Call(call_id, method, arguments))
        return await answer

    # Weights.

    async def policy_version(self) -> int:
        return await self._call("policy_version")

    async def weight_digests(self) -> dict[str, str]:
        return await self._call("weight_digests")

    async def begin_update(self, manifest: UpdateManifest) -> None:
        self._update = ManifestCheck(manifest)
        await self._call("begin_update")

    async def receive(self, bucket: Bucket | RemoteBucket) -> None:
        """Through shared memory: of the device if the tensors are there, else of the host."""
        assert self._update is not None
        if not isinstance(bucket, list):
            fetched = await self._call("fetch", to_json(bucket))
            self._update.accept_specs(TensorSpec(name, dtype, tuple(shape)) for name, dtype, shape in fetched)
            await self._call("load_fetched")
            return
        self._update.accept(bucket)
        if not bucket:
            return
        payloads, flat = await self._loop.run_in_executor(
            self._packing, pack_bucket, bucket, self._config.tensor_parallel
        )
        await self._call("load", payloads)
        del flat  # what the workers read until here

    async def weight_groups(self) -> list[str | None]:
        return await self._call("weight_groups")

    async def join_group(self, meeting: Meeting, first_rank: int) -> None:
        await self._call("join_group", to_json(meeting), first_rank)

    async def finish_update(self, version: int) -> None:
        assert self._update is not None
        self._update.check_complete()
        await self._call("finish_update", version)
        self._update = None

    async def abort_update(self) -> None:
        self._update = None
        await self._call("abort_update")

    # Memory.

    async def sleep(self) -> None:
        """Believes the device, not the framework."""
        if not self._frees_memory:
            return
        check_freed(
            self.name,
            await self._call("sleep"),
            memory_fraction=self._config.memory_fraction,
            remedy="It frees memory with the package torch_memory_saver alone: install it, or use "
            "placement=fully_async.",
        )

    async def wake_weights(self) -> None:
        if self._frees_memory:
            await self._call("wake", ["weights"])

    async def wake_cache(self) -> None:
        if self._frees_memory:
            await self._call("wake", ["kv_cache", "cuda_graph"])

    # Life and death.

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._packing.shutdown(wait=False)
        if self._thread is None:
            return
        self._outbox.put(Close())
        await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._thread.is_alive() and self._process is not None:
            self._process.kill()  # it hangs; the kernel kills its children with it
            await asyncio.to_thread(self._thread.join, CLOSE_TIMEOUT_S)
        if self._death is None:
            shutil.rmtree(self._log_folder, ignore_errors=True)

    def _die(self, status: str) -> None:
        if self._death is not None:
            return
        reason = "the SGLang engine was closed." if self._is_closed else f"SGLang's engine died: {status}"
        waiting = list(self._calls.values())
        self._calls.clear()
        for future in (self._started, *waiting):
            if not future.done():
                future.set_exception(EngineError(reason))
        if not self._is_closed:
            self._death = reason
            if self._has_started:  # else `start` raises it
                self._report_death(reason)


def pack_bucket(bucket: Bucket, num_readers: int) -> tuple[list[bytes], torch.Tensor]:
    """What SGLang's `flattened_bucket` format reads, once for each reader, and the memory that it refers to.

    That memory must stay until the last reader is done. It is the device's if all tensors are on the same one.
    """
    devices = {tensor.device for _, tensor in bucket}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    flat, places = flattened(bucket, device=device)
    metadata = [
        SimpleNamespace(
            name=name,
            shape=tensor.shape,
            dtype=tensor.dtype,
            start_idx=start,
            end_idx=start + tensor.nbytes,
            numel=tensor.nbytes,
        )
        for (name, tensor), start in zip(bucket, places, strict=True)
    ]
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    content = {"flattened_tensor": flat, "metadata": metadata}
    return [_pickled(content) for _ in range(num_readers)], flat


def _pickled(content: Any) -> bytes:
    buffer = io.BytesIO()
    _TensorPickler(buffer).dump(content)
    return buffer.getvalue()


class _TensorPickler(ForkingPickler):
    """Names a CUDA device by its UUID, as SGLang reads it: the index may be another in another process."""

    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        rebuild, arguments = cast(tuple[Any, Any], torch.multiprocessing.reductions.reduce_tensor(obj))
        at = 6  # the place of the device in `rebuild_cuda_tensor`'s arguments
        uuid = str(torch.cuda.get_device_properties(arguments[at]).uuid)
        return rebuild, (*arguments[:at], uuid, *arguments[at + 1 :])
