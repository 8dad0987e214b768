"""SGLang inside the host process: every call into it, and with `sglang_worker` all that depends on its version.

Written for SGLang 0.5.16 (CUDA) to 0.5.23 (CPU). `Engine` starts SGLang's processes. Its `TokenizerManager`, in this
process, is called directly, because `Engine`'s own methods drive the event loop that we are in.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import secrets
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from sglang.srt.entrypoints.engine import Engine
from sglang.srt.managers.io_struct import (
    AbortReq,
    GenerateReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    RpcReqInput,
    UpdateWeightsFromTensorReqInput,
    sock_recv,
    sock_send,
)
from transformers import AutoConfig

from rl.config.schema import Dtype, SGLangRolloutConfig
from rl.model.positions import max_positions_of
from rl.protocols import EngineError
from rl.rollout.memory import cache_bytes_per_token
from rl.rollout.sampler import agreed_version, merged_digests
from rl.rollout.sglang_environment import sampling_backend
from rl.rollout.sglang_requests import Request, context_limit
from rl.rollout.sglang_worker import run_detokenizer, run_scheduler

SPARE_CONTEXT = 8
"""Tokens that SGLang keeps free at the end of a context: of prompt and response it refuses or cuts the last few."""

FLUSH_TIMEOUT_S = 30.0


class _Engine(Engine):
    run_scheduler_process_func = staticmethod(run_scheduler)
    run_detokenizer_process_func = staticmethod(run_detokenizer)


class Server:
    """One running SGLang. Every method but the constructor is called on `loop`, which its caller runs."""

    def __init__(self, config: SGLangRolloutConfig, *, model_folder: Path, device: str) -> None:
        self._config = config
        self._frees_memory = device != "cpu"
        text_config = AutoConfig.from_pretrained(model_folder).get_text_config()
        arguments = server_arguments(config, text_config, model_folder=model_folder, device=device)
        self._engine = _Engine(**arguments)
        self._manager: Any = self._engine.tokenizer_manager
        self._rpc_thread = ThreadPoolExecutor(1, thread_name_prefix="sglang-rpc")
        self._is_updating = False
        info = self._engine._scheduler_init_result.scheduler_infos[0]
        self.vocab_size: int = text_config.vocab_size
        tokenizer = self._manager.tokenizer
        self.end_ids: set[int] = {tokenizer.eos_token_id, *(self._manager.model_config.hf_eos_token_id or ())}
        self.max_model_len = context_limit(
            model_length=model_length(text_config),
            cache_tokens=info["max_total_num_tokens"],
            page_size=self._engine.server_args.page_size or 1,
        )

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._engine.loop

    async def listen(self) -> None:
        """Begins to receive answers; SGLang would with the first request."""
        self._manager.auto_create_handle_loop()
        # Every flush of the cache collects garbage: 0.4 s among all that was imported, unless that is set aside.
        await self._manager.freeze_gc()

    # Requests.

    async def generate(self, request: Request) -> dict[str, Any]:
        """Raises whatever SGLang raises for a request that it refuses."""
        obj = GenerateReqInput(
            rid=request.rid,
            input_ids=request.token_ids,
            sampling_params=request.sampling,
            return_logprob=True,
            logprob_start_len=-1,  # of the response alone
            stream=False,
        )
        async for output in self._manager.generate_request(obj, None):
            return output
        raise EngineError("SGLang ended a request without an answer.")

    def abort(self, rids: list[str], *, is_all: bool) -> None:
        """May come before a request has reached the scheduler, which then does not know it: ask again."""
        if is_all:
            self._manager.abort_request(abort_all=True)
            return
        for rid in rids:
            self._manager._dispatch_to_scheduler(AbortReq(rid=rid))

    def decode(self, token_ids: list[int]) -> str:
        return self._manager.tokenizer.decode(token_ids, skip_special_tokens=True)

    # Weights.

    async def policy_version(self) -> int:
        return agreed_version("SGLang", await self._rpc("rl_policy_version"))

    async def weight_digests(self) -> dict[str, str]:
        return merged_digests(await self._rpc("rl_weight_digests"))

    async def begin_update(self) -> None:
        await self.abort_update()
        if self._has_update_sessions:
            from sglang.srt.managers.io_struct import BeginWeightUpdateReqInput

            _check("begin_weight_update", await self._manager.begin_weight_update(BeginWeightUpdateReqInput(), None))
        self._is_updating = True
        await self._rpc("rl_blank_weights")

    async def load(self, payloads: list[bytes]) -> None:
        """One bucket, serialized once for every worker."""
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=payloads, load_format="flattened_bucket", flush_cache=False
        )
        _check("update_weights_from_tensor", await self._manager.update_weights_from_tensor(request, None))

    async def weight_groups(self) -> list[str | None]:
        return await self._rpc("rl_weight_group")

    async def join_group(self, meeting: str, first_rank: int) -> None:
        await self._rpc("rl_join_group", meeting=meeting, first_rank=first_rank)

    async def fetch(self, bucket: str) -> list[tuple[str, str, list[int]]]:
        """(name, dtype, shape) of the tensors that every worker now holds, and has not yet loaded."""
        return (await self._rpc("rl_fetch", bucket=bucket))[0]

    async def load_fetched(self) -> None:
        await self._rpc("rl_load_fetched")

    async def finish_update(self, version: int) -> None:
        await self._rpc("rl_check_weights")
        await self._end_session()
        await self._flush_cache()
        await self._rpc("rl_set_version", version=version)

    async def _flush_cache(self) -> None:
        flushed = await self._manager.flush_cache(timeout_s=FLUSH_TIMEOUT_S)
        if not flushed.success:
            raise EngineError(
                f"SGLang did not flush its cache: some request still holds a part of it. {flushed.message}"
            )

    async def abort_update(self) -> None:
        if self._is_updating:
            await self._end_session()

    async def _end_session(self) -> None:
        self._is_updating = False
        if self._has_update_sessions:
            from sglang.srt.managers.io_struct import EndWeightUpdateReqInput

            _check("end_weight_update", await self._manager.end_weight_update(EndWeightUpdateReqInput(), None))

    @property
    def _has_update_sessions(self) -> bool:
        """0.5.23 has, 0.5.16 has not."""
        return hasattr(self._manager, "begin_weight_update")

    # Memory.

    async def sleep(self) -> list[tuple[int, int, int]]:
        """(free before, free after, total) bytes of each worker's device."""
        before = await self._rpc("rl_free_memory")
        await self._flush_cache()  # waits until the scheduler is idle: it dies if it is not
        await self._manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=None), None)
        after = await self._rpc("rl_free_memory")
        return [(free, freed, total) for (free, total), (freed, _) in zip(before, after, strict=True)]

    async def wake(self, tags: list[str]) -> None:
        await self._manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)

    # The schedulers.

    async def _rpc(self, method: str, **parameters: Any) -> list[Any]:
        """Calls a method of every worker; their answers in order of rank."""
        loop = asyncio.get_running_loop()
        answers = await loop.run_in_executor(self._rpc_thread, self._ask_schedulers, method, parameters)
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise EngineError(f"{method} failed in SGLang's scheduler: {errors[0]}")
        return [answer["value"] for answer in answers]

    def _ask_schedulers(self, method: str, parameters: dict[str, Any]) -> list[dict[str, Any]]:
        socket: Any = self._engine.send_to_rpc
        sock_send(socket, RpcReqInput(method=method, parameters=parameters or None))
        answer = sock_recv(socket, flags=0)
        return json.loads(answer.message)


MAX_GRAPH_BATCH = 512
"""vLLM's bound of what it chooses itself. Each captured size takes memory, and seconds at the start."""


def server_arguments(
    config: SGLangRolloutConfig, text_config: Any, *, model_folder: Path, device: str
) -> dict[str, Any]:
    """Of SGLang's `ServerArgs`. None leaves the choice to SGLang."""
    is_cpu = device == "cpu"
    arguments: dict[str, Any] = {
        "model_path": str(model_folder),
        "load_format": "dummy",
        "dtype": config.dtype.value,
        "context_length": model_length(text_config) + SPARE_CONTEXT,
        "max_running_requests": config.max_num_seqs,
        "tp_size": config.tensor_parallel,
        "attention_backend": config.attention_backend,
        "sampling_backend": sampling_backend(config),
        "grammar_backend": "none",
        "skip_server_warmup": True,
        "sleep_on_idle": True,  # its loop would keep a core busy
        "log_level": "warning",
        "random_seed": secrets.randbelow(2**31),  # never the same in two engines, whose unseeded draws would agree
    }
    if is_cpu:
        bytes_per_token = cache_bytes_per_token(
            text_config, bytes_per_element=4 if config.dtype is Dtype.float32 else 2
        )
        return arguments | {
            "device": "cpu",
            "attention_backend": config.attention_backend or "torch_native",
            "disable_cuda_graph": True,
            "disable_overlap_schedule": True,
            "mem_fraction_static": 0.95,  # of all memory; the cache's size is the next line's
            "max_total_tokens": config.cpu_cache_gib * 2**30 // bytes_per_token,
        }
    return arguments | {
        "mem_fraction_static": config.memory_fraction,
        "disable_cuda_graph": config.enforce_eager,
        # SGLang's own choice is 256: at 512 sequences at once it was slower than at 256.
        "cuda_graph_max_bs_decode": config.max_graph_batch or min(config.max_num_seqs, MAX_GRAPH_BATCH),
        "disable_custom_all_reduce": not config.custom_all_reduce,
        "enable_memory_saver": importlib.util.find_spec("torch_memory_saver") is not None,
    }


def model_length(text_config: Any) -> int:
    """Longest context that the model's config allows."""
    length = max_positions_of(text_config)
    assert length is not None
    return length


def _check(call: str, outcome: tuple[bool, str]) -> None:
    """SGLang returns failures, it does not raise them."""
    is_done, message = outcome
    if not is_done:
        raise EngineError(f"SGLang's {call} failed: {message}")
