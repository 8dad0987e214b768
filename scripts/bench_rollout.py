"""Measures a rollout engine through our seam: tokens per second beside the engine alone, updates, sleep and wake.

    python scripts/bench_rollout.py throughput --engine vllm --model FOLDER --sequences 256 512 --repeats 3
    python scripts/bench_rollout.py update     --engine vllm --shapes smollm2_135m qwen3_1_7b qwen3_4b
    python scripts/bench_rollout.py update     --engine vllm --apart --transports handed collective disk
    python scripts/bench_rollout.py update     --engine vllm --beside --transports handed shared
    python scripts/bench_rollout.py sleep      --engine vllm --model FOLDER
    python scripts/bench_rollout.py replicas   --engine vllm --model FOLDER --counts 1 2 4

Every command prints one JSON object a line; `--out FILE` appends them to a file, too. `throughput` runs both ways in
one process, in turn, on one device that holds both engines; the way alone is the engine's own offline interface, with
log-probs, as a person would call it. `update` needs no weights on disk: it fills a model of that shape at random. With
`--apart` the engine is in an actor, as in a fully asynchronous run, and on GPU 1 where the weights are on GPU 0; with
`--beside` it is in an actor on the same GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from rl.config.build import build
from rl.config.schema import (
    Dtype,
    LocalRolloutConfig,
    RolloutConfig,
    ServerRolloutConfig,
    SGLangRolloutConfig,
    VLLMRolloutConfig,
)
from rl.protocols import Bucket, RemoteBucket, RolloutEngine, UpdateManifest
from rl.types import Prompt, Sampling
from rl.weights.flat import specs_of
from rl.weights.outlet import WeightOutlet
from rl.weights.publish import HANDED, publish_weights
from rl.weights.transport import Collective, Disk, Shared, Transport

BUCKET_BYTES = 64 * 2**20
QUESTIONS = (
    "A shop sells {a} boxes of {b} pens and gives {c} pens away. How many pens does it sell?",
    "Ann walks {a} km a day for {b} days and then {c} km more. How far does she walk?",
    "A tank holds {a} litres. {b} people take {c} litres each. How much is left?",
    "Each of {a} children has {b} marbles and loses {c}. How many marbles are left in all?",
)

QWEN3 = {
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 151_936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": 0,
}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": QWEN3
    | {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "dtype": "float32",
    },
    "smollm2_135m": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5},
        "tie_word_embeddings": True,
        "dtype": "bfloat16",
        "eos_token_id": 0,
        "bos_token_id": None,
        "pad_token_id": 0,
    },
    "qwen3_1_7b": QWEN3
    | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "qwen3_4b": QWEN3
    | {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
}
"""config.json values of the published models (SmolLM2-135M, Qwen3-1.7B, Qwen3-4B); contexts shortened."""


@dataclass(frozen=True)
class Setup:
    engine: str
    model: Path
    device: str
    dtype: Dtype
    memory_fraction: float
    attention_backend: str | None
    """Of SGLang."""
    max_graph_batch: int | None = None

    def config(self, *, max_num_seqs: int, enforce_eager: bool = False) -> RolloutConfig:
        common: dict[str, Any] = {"dtype": self.dtype, "max_num_seqs": max_num_seqs}
        if self.engine == "local":
            return LocalRolloutConfig(**common)
        common |= {"enforce_eager": enforce_eager, "max_graph_batch": self.max_graph_batch}
        if self.engine == "vllm":
            return VLLMRolloutConfig(**common, memory_fraction=self.memory_fraction)
        return SGLangRolloutConfig(
            **common, memory_fraction=self.memory_fraction, attention_backend=self.attention_backend
        )

    def new_engine(self, *, max_num_seqs: int, enforce_eager: bool = False) -> RolloutEngine:
        config = self.config(max_num_seqs=max_num_seqs, enforce_eager=enforce_eager)
        return build(config, model_folder=self.model, device=self.device)


def make_prompts(model: Path, count: int) -> list[Prompt]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    rng = np.random.default_rng(0)
    prompts = []
    for i in range(count):
        a, b, c = (int(value) for value in rng.integers(2, 40, 3))
        messages = [{"role": "user", "content": QUESTIONS[i % len(QUESTIONS)].format(a=a, b=b, c=c)}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(Prompt(f"bench:{i}", tuple(messages), np.array(ids, dtype=np.int32), "", "bench"))
    return prompts


# Weights.


def weights_of(folder: Path, *, device: str) -> Iterator[Bucket]:
    """The folder's own weights, in buckets."""
    from safetensors import safe_open

    tensors: list[tuple[str, Any]] = []
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt", device=device) as opened:
            tensors += [(name, opened.get_tensor(name)) for name in opened.keys()]  # noqa: SIM118  # not a mapping
    yield from in_buckets(tensors)


def random_weights(folder: Path, *, device: str, dtype: Dtype) -> list[tuple[str, Any]]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    generator = torch.Generator(device=device).manual_seed(0)
    kind = getattr(torch, dtype.value)
    return [
        (name, torch.empty(p.shape, dtype=kind, device=device).normal_(0.0, 0.02, generator=generator))
        for name, p in model.named_parameters()
    ]


def in_buckets(tensors: list[tuple[str, Any]]) -> Iterator[Bucket]:
    bucket: Bucket = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    if bucket:
        yield bucket


class Held:
    """Buckets of this process, as a trainer of one rank sends them: what `publish_weights` needs of a trainer."""

    def __init__(self, buckets: list[Bucket]) -> None:
        self._buckets = buckets
        self._outlet = WeightOutlet(device=buckets[0][0][1].device, host="127.0.0.1")

    async def manifest(self, version: int) -> UpdateManifest:
        specs = [spec for bucket in self._buckets for spec in specs_of(bucket)]
        return UpdateManifest(version, tuple(specs))

    async def buckets(self) -> AsyncIterator[Bucket]:
        for bucket in self._buckets:
            yield bucket

    async def outlet(self, method: str, *arguments: Any) -> Any:
        return await asyncio.to_thread(getattr(self._outlet, method), *arguments)

    async def post_buckets(self, method: str, *arguments: Any) -> AsyncIterator[RemoteBucket]:
        for bucket in self._buckets:
            yield await self.outlet(method, bucket, *arguments)


async def publish(engine: RolloutEngine, held: Any, version: int, transport: Transport = HANDED) -> float:
    """Seconds, from the opening of the update to its commit."""
    return (await publish_weights(held, engine, version=version, transport=transport)).seconds


# Throughput.


async def sample_all(engine: RolloutEngine, prompts: list[Prompt], *, n: int, sampling: Sampling) -> tuple[float, int]:
    """(seconds, sampled tokens)"""

    async def group(group_id: int, prompt: Prompt) -> int:
        samples = engine.generate(prompt, group_id=group_id, n=n, sampling=sampling)
        return sum([rollout.num_response_tokens async for rollout in samples])

    started = time.monotonic()
    counts = await asyncio.gather(*(group(at, prompt) for at, prompt in enumerate(prompts)))
    return time.monotonic() - started, sum(counts)


class VLLMAlone:
    def __init__(self, setup: Setup, *, max_num_seqs: int) -> None:
        import os

        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from vllm import LLM

        self._llm = LLM(
            model=str(setup.model),
            dtype=setup.dtype.value,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=setup.memory_fraction,
            disable_log_stats=True,
        )

    def sample_all(self, prompts: list[Prompt], *, n: int, sampling: Sampling) -> tuple[float, int]:
        from vllm import SamplingParams

        params = SamplingParams(n=n, temperature=sampling.temperature, max_tokens=sampling.max_new_tokens, logprobs=0)
        inputs: Any = [{"prompt_token_ids": prompt.token_ids.tolist()} for prompt in prompts]
        started = time.monotonic()
        outputs = self._llm.generate(inputs, params, use_tqdm=False)
        seconds = time.monotonic() - started
        return seconds, sum(len(answer.token_ids) for output in outputs for answer in output.outputs)

    def close(self) -> None:
        del self._llm


class SGLangAlone:
    def __init__(self, setup: Setup, *, max_num_seqs: int) -> None:
        from rl.rollout.sglang_environment import prepare_environment

        prepare_environment(setup.device, Path(tempfile.mkdtemp(prefix="rl-bench-")))
        import sglang
        from transformers import AutoConfig

        from rl.rollout.sglang_server import server_arguments

        config = setup.config(max_num_seqs=max_num_seqs)
        assert isinstance(config, SGLangRolloutConfig)
        text_config = AutoConfig.from_pretrained(setup.model).get_text_config()
        arguments = server_arguments(config, text_config, model_folder=setup.model, device=setup.device)
        self._engine = sglang.Engine(**arguments | {"load_format": "auto", "enable_memory_saver": False})

    def sample_all(self, prompts: list[Prompt], *, n: int, sampling: Sampling) -> tuple[float, int]:
        params = {"n": n, "temperature": sampling.temperature, "max_new_tokens": sampling.max_new_tokens}
        inputs = [prompt.token_ids.tolist() for prompt in prompts]
        started = time.monotonic()
        outputs = self._engine.generate(input_ids=inputs, sampling_params=params, return_logprob=True)
        seconds = time.monotonic() - started
        return seconds, sum(output["meta_info"]["completion_tokens"] for output in outputs)

    def close(self) -> None:
        self._engine.shutdown()


def throughput(args: argparse.Namespace, setup: Setup, report: Callable[..., None]) -> None:
    prompts = make_prompts(setup.model, max(args.sequences) // args.group_size)
    sampling = Sampling(temperature=1.0, max_new_tokens=args.max_new_tokens, seed=0)
    alone_kind = {"vllm": VLLMAlone, "sglang": SGLangAlone}.get(setup.engine)
    alone = alone_kind(setup, max_num_seqs=max(args.sequences)) if alone_kind else None

    async def measure(engine: RolloutEngine, some: list[Prompt]) -> dict[str, list[float]]:
        rates: dict[str, list[float]] = {"seam": []} | ({"alone": []} if alone else {})
        for repeat in range(args.repeats + 1):
            for way, values in rates.items():
                if alone is None or way == "seam":
                    seconds, tokens = await sample_all(engine, some, n=args.group_size, sampling=sampling)
                else:
                    # In a thread, because SGLang's own interface runs an event loop of its own.
                    seconds, tokens = await asyncio.to_thread(
                        alone.sample_all, some, n=args.group_size, sampling=sampling
                    )
                if repeat:  # the first round warms both up
                    values.append(tokens / seconds)
        return rates

    async def run() -> None:
        engine = setup.new_engine(max_num_seqs=max(args.sequences))
        await engine.start()
        try:
            await publish(engine, Held(list(weights_of(setup.model, device=setup.device))), 0)
            for sequences in args.sequences:
                rates = await measure(engine, prompts[: sequences // args.group_size])
                medians = {way: statistics.median(values) for way, values in rates.items()}
                report(
                    command="throughput",
                    sequences=sequences,
                    tokens_per_s={way: [round(value) for value in values] for way, values in rates.items()},
                    median={way: round(value) for way, value in medians.items()},
                    cost=round(1 - medians["seam"] / medians["alone"], 4) if alone else None,
                )
        finally:
            await engine.close()

    asyncio.run(run())
    if alone:
        alone.close()


def replicas(args: argparse.Namespace, setup: Setup, report: Callable[..., None]) -> None:
    from rl.rollout.remote import RemoteEngine
    from rl.rollout.replicas import ReplicaSet

    prompts = make_prompts(setup.model, max(args.sequences) // args.group_size)
    sampling = Sampling(temperature=1.0, max_new_tokens=args.max_new_tokens, seed=0)
    for count in args.counts:
        config = setup.config(max_num_seqs=max(args.sequences))
        if isinstance(config, ServerRolloutConfig):
            config.memory_fraction = setup.memory_fraction / count

        async def run(config: RolloutConfig, count: int) -> list[float]:
            engine = ReplicaSet(
                lambda index: RemoteEngine(config, model_folder=setup.model, device=setup.device), count, num_groups=1
            )
            await engine.start()
            try:
                await publish(engine, Held(list(weights_of(setup.model, device="cpu"))), 0)
                seconds = []
                for _ in range(args.repeats + 1):
                    seconds.append(await sample_all(engine, prompts, n=args.group_size, sampling=sampling))
                return [tokens / elapsed for elapsed, tokens in seconds[1:]]
            finally:
                await engine.close()

        rates = asyncio.run(run(config, count))
        report(command="replicas", replicas=count, tokens_per_s=[round(rate) for rate in rates])


# Updates and memory.


def update(args: argparse.Namespace, setup: Setup, report: Callable[..., None]) -> None:
    for shape in args.shapes:
        with tempfile.TemporaryDirectory(prefix="rl-bench-") as root:
            folder = write_shape(Path(root) / shape, shape)
            of_shape = replace(setup, model=folder)
            tensors = random_weights(folder, device=setup.device, dtype=setup.dtype)
            asyncio.run(update_times(args, of_shape, tensors, report, shape))


async def update_times(
    args: argparse.Namespace, setup: Setup, tensors: list[tuple[str, Any]], report: Callable[..., None], shape: str
) -> None:
    if args.apart or args.beside:
        engine = in_an_actor(setup, gpu=int(args.apart))
    else:
        engine = setup.new_engine(max_num_seqs=64, enforce_eager=True)  # nothing is sampled
    await engine.start()
    try:
        buckets = list(in_buckets(tensors))
        sources = {"device": Held(buckets)}
        if setup.device != "cpu":
            sources["host"] = Held([[(name, tensor.cpu()) for name, tensor in bucket] for bucket in buckets])
        version = 0
        for way in args.transports:
            transport = transport_of(way, setup.model.parent)
            for place, held in sources.items():
                if way in ("collective", "shared") and place == "host":
                    continue  # they are of GPUs
                seconds = []
                for _ in range(args.repeats + 1):
                    seconds.append(await publish(engine, held, version, transport))
                    version += 1
                await held.outlet("drop")
                report(
                    command="update",
                    shape=shape,
                    apart=args.apart,
                    beside=args.beside,
                    transport=way,
                    weights_in=place,
                    parameters=sum(tensor.numel() for _, tensor in tensors),
                    gigabytes=round(sum(tensor.nbytes for _, tensor in tensors) / 1e9, 3),
                    first_s=round(seconds[0], 4),
                    seconds=[round(value, 4) for value in seconds[1:]],
                )
    finally:
        await engine.close()


def in_an_actor(setup: Setup, *, gpu: int) -> RolloutEngine:
    from rl.rollout.remote import RemoteEngine

    config = setup.config(max_num_seqs=64, enforce_eager=True)
    env = {} if setup.device == "cpu" else {"CUDA_VISIBLE_DEVICES": str(gpu)}
    return RemoteEngine(config, model_folder=setup.model, device=setup.device, env=env)


def transport_of(way: str, folder: Path) -> Transport:
    ways: dict[str, Transport] = {"handed": HANDED, "shared": Shared(), "collective": Collective()}
    return ways.get(way) or Disk(folder / "weights")


def write_shape(folder: Path, shape: str) -> Path:
    """config.json and a tokenizer of the right size; engines start on weights that mean nothing."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    vocabulary = {"<end>": 0} | {f"<{i}>": i for i in range(1, 64)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", pad_token="<end>").save_pretrained(folder)
    return folder


def sleep(args: argparse.Namespace, setup: Setup, report: Callable[..., None]) -> None:
    import torch

    async def cycle() -> None:
        engine = setup.new_engine(max_num_seqs=256)
        started = time.monotonic()
        await engine.start()
        start_s = time.monotonic() - started
        try:
            held = Held(list(weights_of(setup.model, device=setup.device)))
            await publish(engine, held, 0)
            for version in range(1, args.repeats + 1):
                awake = torch.cuda.mem_get_info()[0]
                sleep_s = await timed(engine.sleep)
                asleep = torch.cuda.mem_get_info()[0]
                weights_s = await timed(engine.wake_weights)
                publish_s = await publish(engine, held, version)
                cache_s = await timed(engine.wake)
                report(
                    command="sleep",
                    start_s=round(start_s, 1),
                    freed_gib=round((asleep - awake) / 2**30, 2),
                    sleep_s=round(sleep_s, 3),
                    wake_weights_s=round(weights_s, 3),
                    publish_s=round(publish_s, 3),
                    wake_cache_s=round(cache_s, 3),
                )
        finally:
            await engine.close()

    asyncio.run(cycle())


async def timed(work: Callable[[], Awaitable[None]]) -> float:
    started = time.monotonic()
    await work()
    return time.monotonic() - started


COMMANDS = {"throughput": throughput, "update": update, "sleep": sleep, "replicas": replicas}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--engine", choices=["vllm", "sglang", "local"], required=True)
    parser.add_argument("--model", type=Path, default=Path("."), help="a Hugging Face folder with weights")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--dtype", type=Dtype, choices=list(Dtype), default=Dtype.bfloat16)
    parser.add_argument("--memory-fraction", type=float, default=0.3)
    parser.add_argument("--attention-backend", help="of SGLang; its own choice if not given")
    parser.add_argument("--max-graph-batch", type=int, help="largest decode batch that is captured as a CUDA graph")
    parser.add_argument("--sequences", type=int, nargs="+", default=[256, 512], help="sampled at once")
    parser.add_argument("--group-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3, help="after one round that warms up")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["smollm2_135m", "qwen3_1_7b", "qwen3_4b"])
    parser.add_argument(
        "--transports", nargs="+", choices=["handed", "shared", "collective", "disk"], default=["handed"]
    )
    place = parser.add_mutually_exclusive_group()
    place.add_argument("--apart", action="store_true", help="update: the engine in an actor, on a GPU of its own")
    place.add_argument("--beside", action="store_true", help="update: the engine in an actor, on the weights' GPU")
    parser.add_argument("--counts", type=int, nargs="+", default=[1, 2, 4], help="replicas on the one device")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    setup = Setup(
        args.engine,
        args.model,
        args.device,
        args.dtype,
        args.memory_fraction,
        args.attention_backend,
        args.max_graph_batch,
    )

    def report(**values: Any) -> None:
        line = json.dumps({"engine": args.engine, "model": args.model.name, "device": args.device, **values})
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    COMMANDS[args.command](args, setup, report)


if __name__ == "__main__":
    main()
