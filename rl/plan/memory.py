"""Memory of each kind of GPU in each phase of a step, term by term. Arithmetic over numbers: nothing is measured here.

What is counted is what the parts of this suite keep: rl/trainer/fsdp_trainer.py and megatron_trainer.py, the engines'
memory_fraction, and who is resident when (rl/placement). `tests/unit/plan` works the terms out by hand.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rl.config.schema import WeightTransport
from rl.config.shape import TRAINED_BYTES_PER_PARAM, ModelShape
from rl.plan.sizes import RunSizes, Sharing, TrainerSizes

GIB = 2**30
PROCESS_GIB = 1.0
"""Assumed, of each process on a GPU: context, kernels, communication buffers."""
HOST_PROCESS_GIB = 0.5
"""Of Python, torch and the libraries of one process on a CPU; measured: a whole quickstart keeps 0.59 GiB resident."""
OUTSIDE_FRACTION_GIB = 4.0
"""Assumed, of SGLang beside its memory_fraction: activations, sampler, captured graphs."""
LOCAL_CACHE_FRACTION = 0.25
"""Of the device, at most: the embedded engine's keys and values (rl/rollout/local_engine.py)."""
BUCKET_BYTES = 64 * 2**20
"""See rl/trainer/rank.py."""
LOGIT_COPIES = 5
"""fp32 tensors of one chunk that exist at once, in the backward pass: logits, exponentials, gradients. Counted: 4.8."""
LAYER_COPIES = 1.5
"""What a layer that is computed again takes, gradients included, over `layer_width`. Counted: 1.5 in bf16, 1.3 in
fp32."""
KEPT_COPIES = 1.3
"""What a layer leaves for its backward pass, over `layer_width`. Counted: 1.35 in bf16, 1.2 in fp32."""
ENGINE_STEP_TOKENS = 8192
"""That vLLM and SGLang take through the model at once, by their defaults on large GPUs."""


@dataclass(frozen=True, slots=True)
class Line:
    what: str
    how: str
    """The formula with its numbers; empty for a plain assumption."""
    num_bytes: float

    @property
    def gib(self) -> float:
        return self.num_bytes / GIB


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    """`train`, `publish`, `wake` or `generate`."""
    where: str
    """Which GPUs it is of, and who is resident there."""
    lines: Sequence[Line]

    @property
    def gib(self) -> float:
        return sum(line.gib for line in self.lines)

    @property
    def largest(self) -> Line:
        return max(self.lines, key=lambda line: line.num_bytes)


@dataclass(frozen=True, slots=True)
class Cache:
    """Of one engine."""

    gib: float
    """For keys and values; below zero where the weights alone take more than the engine's share."""
    tokens: int
    sequences: int
    """Of the longest length that the run allows; each of them has room at once."""


def phases(run: RunSizes) -> list[Phase]:
    """In the order of a step. The GPUs of a kind are all alike, so each phase is of one GPU."""
    if run.device.is_cpu:
        return [_on_the_host(run)]
    trainer, engine = _trainer_lines(run), generate_lines(run)
    state, reference = _state_lines(run.shape, run.trainer, with_gradients=False), _reference_lines(run)
    transit = [_transit_line(run, 3, "trainer")]
    engine_processes = 0 if run.engine.name == "local" and run.sharing is Sharing.turns else run.engine.per_device
    asleep = _process_line(1 + engine_processes)
    # vLLM counts its own context within memory_fraction.
    awake = _process_line(1 + (0 if run.engine.name == "vllm" else engine_processes))
    match run.sharing:
        case Sharing.turns:
            weights, arriving = _weights_lines(run), [_transit_line(run, 1, "engine")]
            return [
                Phase("train", "every GPU, engine asleep", [*trainer, asleep]),
                Phase(
                    "publish",
                    "trainer and the engine's weights",
                    [*state, *reference, *weights, *transit, *arriving, asleep],
                ),
                Phase("wake", "trainer moved out to the host, the cache moves in", [*engine, awake]),
                Phase("generate", "trainer on the host", [*engine, awake]),
            ]
        case Sharing.apart:
            arriving = [_transit_line(run, 1, "engine")]
            return [
                Phase("train", "trainer's GPUs", [*trainer, _process_line(1)]),
                Phase("publish", "trainer's GPUs", [*state, *reference, *transit, _process_line(1)]),
                Phase("generate", "engines' GPUs, publish included", [*engine, *arriving, *_own_process(run)]),
            ]
        case _:
            both = [*trainer, *engine, awake]
            return [
                Phase("train", "trainer and engine at once", both),
                Phase("publish", "likewise", [*state, *reference, *engine, *transit, awake]),
                Phase("generate", "as train: both work", both),
            ]


def trainer_gib(run: RunSizes) -> float:
    """What one rank's allocator holds at its peak, `memory/gpu_peak_gib`; on a CPU what all of them hold."""
    return sum(line.gib for line in _trainer_lines(run)) * (run.trainer.ranks if run.device.is_cpu else 1)


def trainable_params(shape: ModelShape, trainer: TrainerSizes) -> tuple[float, str]:
    """Parameters whose masters, gradients and moments one rank keeps, and how that is divided."""
    assert shape.num_params is not None
    if not trainer.is_megatron:
        return shape.num_params / trainer.ranks, f"{count(shape.num_params)} / {trainer.ranks} rank(s)"
    experts = shape.all_expert_params
    rest = (shape.num_params - experts) / trainer.tensor_parallel
    words = f"({count(shape.num_params - experts)} / tensor parallel {trainer.tensor_parallel}"
    if not experts:
        return rest, f"{words})"
    return rest + experts / trainer.expert_parallel, (
        f"{words} + {count(experts)} of experts / expert parallel {trainer.expert_parallel})"
    )


def _state_lines(shape: ModelShape, trainer: TrainerSizes, *, with_gradients: bool) -> list[Line]:
    held, words = trainable_params(shape, trainer)
    per_param = TRAINED_BYTES_PER_PARAM - (0 if with_gradients else 4)  # gradients are freed after each update
    what = "fp32 masters, gradients, AdamW" if with_gradients else "fp32 masters, AdamW"
    lines = [Line(what, f"{per_param} B x {words}", per_param * held)]
    if trainer.is_megatron and trainer.compute_bytes < 4:
        lines.append(Line("bf16 copy that computes", f"2 B x {words}", 2 * held))
    kept, size = (what, per_param) if trainer.trains_on_images else ("fp32 masters, no image to train it", 4)
    return [*lines, *_tower_lines(f"vision tower: {kept}", size, shape, trainer)]


def _tower_lines(what: str, size: int, shape: ModelShape, trainer: TrainerSizes) -> list[Line]:
    """None without a tower, and none under Megatron, which builds the decoder alone."""
    params = shape.vision_params
    if not params or trainer.is_megatron:
        return []
    return [Line(what, f"{size} B x {count(params)} / {trainer.ranks} rank(s)", size * params / trainer.ranks)]


def _reference_lines(run: RunSizes) -> list[Line]:
    if not run.trainer.has_reference:
        return []
    held, words = trainable_params(run.shape, run.trainer)
    size = run.trainer.compute_bytes
    policy = Line("reference policy", f"{size} B x {words}", size * held)
    return [policy, *_tower_lines("vision tower of the reference policy", size, run.shape, run.trainer)]


def _trainer_lines(run: RunSizes) -> list[Line]:
    """The larger of the two moments of a step: forward and backward, or the optimizer's update after them."""
    shape, trainer = run.shape, run.trainer
    fixed = [*_state_lines(shape, trainer, with_gradients=True), *_reference_lines(run)]
    held, words = trainable_params(shape, trainer)
    update = [Line("the update's own tensors", f"4 B x {words}", 4 * held)]
    if trainer.trains_on_images:
        update += _tower_lines("vision tower: the update's own tensors", 4, shape, trainer)
    passes = [*_gathered_lines(shape, trainer), *activation_lines(shape, trainer)]
    larger = max((passes, update), key=lambda lines: sum(line.num_bytes for line in lines))
    return [*fixed, *larger]


def _gathered_lines(shape: ModelShape, trainer: TrainerSizes) -> list[Line]:
    """FSDP2 gathers embeddings and head for a whole pass, and the layer that runs with the one after it. What a vision
    tower has outside its layers is gathered with embeddings and head; its layers are small beside the decoder's.

    Gradients of what is gathered are whole until they are scattered, of a layer in fp32 too. Megatron keeps all of it.
    """
    if trainer.is_megatron:
        return []
    size, root, layer = trainer.compute_bytes, shape.root_params, shape.largest_layer_params
    if shape.vision is not None:
        root += shape.vision.outer_params(shape.hidden)
        layer = max(layer, shape.vision.layer_params)
    return [
        Line(
            "gathered embeddings and head, with gradients",
            f"2 x {size} B x {count(root)}",
            2 * size * root,
        ),
        Line(
            "gathered layers, gradients of one",
            f"(3 x {size} + 4) B x {count(layer)} of a layer",
            (3 * size + 4) * layer,
        ),
    ]


def layer_width(shape: ModelShape) -> int:
    """Numbers that the forward pass of one layer leaves for its backward pass, per token; estimated.

    Inputs of norms and projections, queries, keys, values, attention's output, and four tensors of the feed-forward
    width; of experts, what a token's own experts see.
    """
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    attention = (3 if shape.gated_attention else 2) * queries + 2 * keys if shape.full_attention_layers else 0
    linear = 3 * shape.linear_key_heads * shape.linear_key_dim + 4 * shape.linear_value_heads * shape.linear_value_dim
    if shape.experts:
        expert = shape.experts_per_token * (2 * shape.hidden + 4 * shape.expert_ffn) + 4 * shape.shared_expert_ffn
        return 6 * shape.hidden + max(attention, linear) + expert
    return 6 * shape.hidden + max(attention, linear) + 4 * shape.ffn


def activation_lines(shape: ModelShape, trainer: TrainerSizes) -> list[Line]:
    """At their peak. With recompute the output head's backward pass is over when the first layer is computed again."""
    size, tokens, width = trainer.compute_bytes, trainer.micro_batch_tokens, layer_width(shape)
    logits = _logits_line(shape, trainer)
    if not trainer.recompute:
        how = f"{shape.layers} layers x {KEPT_COPIES:g} x {size} B x {tokens:,} tokens x {width:,}"
        kept = Line("activations, estimated", how, shape.layers * KEPT_COPIES * size * tokens * width)
        return [kept, logits]
    inputs = Line(
        "activations kept: inputs of layers",
        f"{shape.layers} x {size} B x {tokens:,} tokens x {shape.hidden:,}",
        shape.layers * size * tokens * shape.hidden,
    )
    layer = Line(
        "a layer computed again, with gradients, estimated",
        f"{LAYER_COPIES:g} x {size} B x {tokens:,} tokens x {width:,}",
        LAYER_COPIES * size * tokens * width,
    )
    return [inputs, max(layer, logits, key=lambda line: line.num_bytes)]


def _logits_line(shape: ModelShape, trainer: TrainerSizes) -> Line:
    chunk = min(trainer.chunk_tokens, trainer.micro_batch_tokens)
    how = f"{LOGIT_COPIES} x 4 B x {chunk:,} positions x {shape.vocab:,}"
    return Line("fp32 logits of a chunk, with gradients", how, LOGIT_COPIES * 4 * chunk * shape.vocab)


def largest_tensor(shape: ModelShape) -> int:
    """Parameters of it. transformers keeps the experts of a layer in one tensor each for gate and up, and for down."""
    return max(shape.embedding_params, shape.experts * 2 * shape.expert_ffn * shape.hidden)


def _transit_line(run: RunSizes, copies: int, whose: str) -> Line:
    size, largest = run.trainer.compute_bytes, largest_tensor(run.shape)
    bucket = max(size * largest, BUCKET_BYTES)
    by = "through the host" if run.transport in (WeightTransport.bytes, WeightTransport.disk) else run.transport.value
    how = f"{copies} x {size} B x {count(largest)}, the largest tensor ({by})"
    return Line(f"buckets of weights, {whose}'s", how, copies * bucket)


def _weights_lines(run: RunSizes) -> list[Line]:
    engine, params = run.engine, run.shape.num_params
    assert params is not None
    each = engine.weight_bytes * params / engine.gpus * engine.per_device
    shares = "" if engine.per_device == 1 else f" x {engine.per_device} engines"
    how = f"{engine.weight_bytes} B x {count(params)} / tensor parallel {engine.gpus}{shares}"
    lines = [Line("engine weights", how, each)]
    if tower := run.shape.vision_params:
        how = f"{engine.weight_bytes} B x {count(tower)} / tensor parallel {engine.gpus}{shares}"
        lines.append(Line("vision tower of the engine", how, each * tower / params))
    return lines


def generate_lines(run: RunSizes) -> list[Line]:
    """vLLM's memory_fraction is of all that it takes; SGLang's is of weights and cache, and leaves the rest out."""
    engine = run.engine
    if engine.memory_fraction is None:
        return [*_weights_lines(run), _local_cache_line(run)]
    share = engine.memory_fraction * engine.per_device
    total = share * run.device.memory_gib * GIB
    weights = _weights_lines(run)
    used = sum(line.num_bytes for line in weights)
    cache, work = cache_of(run), _engine_work(run)
    words = f"memory_fraction {share:g} x {run.device.memory_gib:g} GiB - weights"
    lines = [*weights]
    if engine.name == "vllm":
        lines.append(Line("engine's work space, estimated", work[1], work[0]))
        words, used = f"{words} - work space", used + work[0]
    room = f"; {cache.tokens:,} tokens" if cache.gib > 0 else ""
    lines.append(Line("engine cache of keys and values", f"{words}{room}", max(0.0, total - used)))
    if engine.name == "sglang":
        lines.append(
            Line("beside memory_fraction, assumed", "work space and captured graphs", OUTSIDE_FRACTION_GIB * GIB)
        )
    return lines


def _engine_work(run: RunSizes) -> tuple[float, str]:
    shape, engine = run.shape, run.engine
    logits = 8 * engine.max_num_seqs * shape.vocab
    width = layer_width(shape)
    how = f"8 B x {engine.max_num_seqs:,} x {shape.vocab:,} of logits + 2 B x {ENGINE_STEP_TOKENS:,} x {width:,}"
    return engine.per_device * (logits + 2 * ENGINE_STEP_TOKENS * width), how


def _local_cache_line(run: RunSizes) -> Line:
    """A round's keys and values: as many answers as fit a quarter of the device."""
    shape, engine, step = run.shape, run.engine, run.step
    per_token = shape.kv_bytes_per_token(bytes_per_element=engine.weight_bytes)
    rows = min(engine.max_num_seqs, -(-step.rollouts // engine.count))
    most = LOCAL_CACHE_FRACTION * run.device.memory_gib * GIB
    wanted = rows * (step.max_sequence * per_token + shape.state_bytes_per_sequence(bytes_per_element=2))
    how = f"{rows:,} answers x {step.max_sequence:,} tokens x {per_token:,} B, at most a quarter of the memory"
    return Line("keys and values of a round", how, engine.per_device * min(wanted, most))


def cache_of(run: RunSizes) -> Cache:
    """What one engine has for keys and values. Queries of grouped heads are split, keys too, down to one head a GPU."""
    shape, engine = run.shape, run.engine
    per_token = shape.kv_bytes_per_token(bytes_per_element=2)
    split = min(engine.gpus, shape.kv_heads)
    state = shape.state_bytes_per_sequence(bytes_per_element=2) / engine.gpus
    if engine.memory_fraction is None:
        line = _local_cache_line(run)
        free, split = line.num_bytes / engine.per_device, 1
    elif run.device.is_cpu:
        free = float(engine.cpu_cache_gib * GIB)
    else:
        free = engine.memory_fraction * run.device.memory_gib * GIB
        free -= engine.weight_bytes * run.engine_params / engine.gpus
        if engine.name == "vllm":
            free -= _engine_work(run)[0] / engine.per_device
    sequence = run.step.max_sequence * per_token / split + state
    room = max(free, 0.0)
    return Cache(free / GIB, int(room // (per_token / split)) if per_token else 0, int(room // sequence))


def _process_line(processes: int) -> Line:
    return Line("contexts and communication, assumed", f"{processes} process(es)", processes * PROCESS_GIB * GIB)


def _own_process(run: RunSizes) -> list[Line]:
    return [] if run.engine.name == "vllm" else [_process_line(run.engine.per_device)]


def _on_the_host(run: RunSizes) -> Phase:
    """All of it at once: on a CPU nothing moves out of the way."""
    trainer = [
        Line(line.what, line.how if run.trainer.ranks == 1 else f"{run.trainer.ranks} ranks x ({line.how})", each)
        for line in _trainer_lines(run)
        for each in [line.num_bytes * run.trainer.ranks]
    ]
    engine = [Line(line.what, line.how, line.num_bytes * run.engine.count) for line in _weights_lines(run)]
    if run.engine.memory_fraction is None:
        cache = _local_cache_line(run)
    else:
        cache = Line("engine cache", f"cpu_cache_gib {run.engine.cpu_cache_gib}", run.engine.cpu_cache_gib * GIB)
    processes = (run.trainer.ranks if run.trainer.ranks > 1 else 0) + 1
    if run.engine.count > 1 or run.sharing is not Sharing.turns or run.engine.name != "local":
        processes += run.engine.count
    base = Line(
        "Python and libraries, measured",
        f"{processes} process(es) x {HOST_PROCESS_GIB:g} GiB",
        processes * HOST_PROCESS_GIB * GIB,
    )
    return Phase("train", "the host: trainer and engine at once", [*trainer, *engine, cache, base])


def host_bytes(run: RunSizes) -> tuple[float, str]:
    """What is kept in the host's memory of one node besides processes, and what it is."""
    if run.transport is WeightTransport.overlapped:
        return (
            run.trainer.compute_bytes * run.trainer_params,
            "the weights that engines take while the trainer goes on",
        )
    if run.device.is_cpu or run.sharing is not Sharing.turns:
        return 0.0, ""
    moved = [*_state_lines(run.shape, run.trainer, with_gradients=False), *_reference_lines(run)]
    held = sum(line.num_bytes for line in moved) * min(run.trainer.ranks, run.device.gpus_per_node)
    return held, (
        "what the trainer moves out while engines have the GPUs, in pinned memory: PyTorch keeps that, and rounds each "
        "tensor up to a power of two, so at most twice as much"
    )


def count(number: float) -> str:
    """8190735360 as `8.19 G`, 298112 as `298 k`; a unit may follow: `count(bytes)` + `B`."""
    for limit, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number / limit:.3g} {unit}"
    return f"{number:g}"
