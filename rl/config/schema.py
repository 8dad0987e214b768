"""Every setting of a run, its unit and its range; those of the algorithms are in rl/config/algorithms.py. Standard
library and omegaconf only: importing this imports no torch.

A config class names the class that it configures in a `_target_` default; `rl/config/build.py` imports it when it is
needed. Classes are unfrozen because OmegaConf merges over them; after `load_run_config` nobody writes to them. Derived
values are properties and never written back. Enum members are lower case because OmegaConf reads and writes them by
name: `mode=plan` is what people type.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from omegaconf import MISSING

from rl.config.algorithms import AlgorithmConfig
from rl.config.published import PublishedConfig
from rl.config.sentinels import SentinelsConfig
from rl.config.shape import ModelShape
from rl.config.tasks import TaskConfig

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
"""Form of a hub id (`name` or `owner/name`) in model.path and task.path."""


class ConfigError(ValueError):
    """The user's configuration cannot run. The message gives key, value, rule and remedy."""


class Mode(Enum):
    """What the command does."""

    train = "train"
    eval = "eval"
    plan = "plan"


class Dtype(Enum):
    """Type of numbers."""

    float32 = "float32"
    bfloat16 = "bfloat16"


class Packing(Enum):
    """How sequences are laid out in a micro-batch."""

    tokens = "tokens"
    """Many sequences back to back, up to the token budget."""
    one_sequence = "one_sequence"
    """One sequence per micro-batch, for layers that cannot be packed."""


class Schedule(Enum):
    """Of the learning rate, after its warm-up."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"


class InFlight(Enum):
    """What happens to running requests when new weights are published."""

    finish = "finish"
    """The publish waits for them."""
    abort = "abort"
    """They start anew, whole, on the new weights; the tokens that they had are lost."""
    continue_on_new_weights = "continue_on_new_weights"
    """They keep their tokens and go on (partial rollout): each token has the version and the log-prob that it was
    sampled with."""


class WeightTransport(Enum):
    """How published weights get from the trainer to the engines. All carry the same tensors."""

    auto = "auto"
    """ipc where every engine is on devices that trainer ranks have, too, collective where the engines have devices of
    their own, else bytes; see rl/config/transport.py."""
    ipc = "ipc"
    """Each rank lays every bucket out in its device's memory, and the engine's worker on that device copies it from
    there: by a handle of the GPU's memory (CUDA IPC), on a CPU from a file in memory. Within one process the tensors
    are handed over."""
    collective = "collective"
    """Broadcast from rank 0 to all workers of all engines: NCCL (RCCL) on GPUs, gloo on a CPU."""
    bytes = "bytes"
    """Through the host's memory and this process."""
    disk = "disk"
    """Through files in the run folder, which every machine of the run must see."""
    overlapped = "overlapped"
    """Rank 0 copies them to the host's memory, and the engines take them from there while the trainer goes on, as soon
    as `placement.in_flight` lets them: so a long answer that a publish lets finish holds up no training. One machine,
    fully async."""


class CanaryAction(Enum):
    """What happens when engine and trainer disagree on the weights that were just published."""

    warn = "warn"
    """They are published again, and the run goes on."""
    stop = "stop"
    """The run ends; `rl resume=FOLDER` continues from its last checkpoint."""


@dataclass
class WarmStartConfig:
    """A short supervised phase on the task's right answers, stopped early on purpose, before reinforcement learning."""

    target_accuracy: float = 0.22
    """Stop at this greedy accuracy on validation problems that are neither trained on nor held out."""
    max_steps: int = 600
    """The run stops where the accuracy was not reached by then."""
    check_every: int = 2
    """Steps between checks. Greedy accuracy rises from 0.1 to 0.4 within 20 steps: with a check every 10, three of five
    seeds of the quickstart started at 0.38 to 0.42 on held-out problems; with one every 2, at 0.20 to 0.25."""
    batch_size: int = 128
    """Problems of one step."""
    lr: float = 1e-3
    """Learning rate, constant after its warm-up."""
    lr_warmup_steps: int = 50
    """Steps over which the learning rate rises from 0."""


@dataclass
class ModelConfig:
    """Which policy is trained. Weights and tokenizer come from `path`; the plan reads facts, not weights."""

    _target_: str = "rl.model.source.HuggingFaceModel"
    name: str = MISSING
    """For people; nothing depends on it but the architecture of a smoke run."""
    path: str = MISSING
    """Hub id or local folder in Hugging Face layout."""
    revision: str | None = None
    """Hub revision. None: whatever the hub serves, recorded in provenance.json."""
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of the model's config.json to replace, for trainer, engine and export alike."""
    chat_template: str | None = None
    """None: the tokenizer's own. `plain`: message contents joined, for base models."""
    num_params: int | None = None
    """Parameters of the whole model, a vision tower included. None: counted from the shape, or read from its files."""
    shape: ModelShape | None = None
    """Its sizes, for plans made where its config.json is not; where it is, the two are compared. None: only from
    config.json."""


@dataclass
class TinyModelConfig(ModelConfig):
    """A small Qwen3 with one token per character, made from the run's seed: the model of the quickstart."""

    _target_: str = "rl.model.tiny.TinyModel"
    path: str = "tiny"
    layers: int = 2
    """Decoder layers."""
    hidden: int = 128
    """Width of the model."""
    heads: int = 4
    """Query heads of a layer."""
    kv_heads: int = 2
    """Heads of keys and values; divides `heads`."""
    head_dim: int = 32
    """Width of a head."""
    ffn: int = 256
    """Inner width of a feed-forward layer."""
    warm_start: WarmStartConfig | None = None
    """None: random weights."""


class Architecture(Enum):
    """Of the published runs' models, by transformers' model type."""

    qwen3 = "qwen3"
    """Dense."""
    qwen2 = "qwen2"
    """Dense; Qwen2.5."""
    qwen3_5_moe = "qwen3_5_moe"
    """Gated DeltaNet, gated attention, experts and a vision tower."""


@dataclass
class MiniatureModelConfig(ModelConfig):
    """A random model of a published run's architecture, small enough for a smoke run on a CPU."""

    _target_: str = "rl.model.miniature.MiniatureModel"
    path: str = "miniature"
    architecture: Architecture = MISSING


@dataclass
class OptimizerConfig:
    """AdamW on fp32 master weights."""

    lr: float = 1e-6
    """Learning rate after its warm-up."""
    lr_warmup_updates: int = 0
    """Optimizer updates of linear warm-up; the first update of a plan without warm-up has the full rate."""
    schedule: Schedule = Schedule.constant
    """After warm-up. linear and cosine reach 0 at the run's last update."""
    beta1: float = 0.9
    """Decay of the mean of gradients."""
    beta2: float = 0.999
    """Decay of the mean of squared gradients."""
    weight_decay: float = 0.01
    """Decoupled: times the learning rate and the weight, at each update."""
    grad_clip: float | None = 1.0
    """Global gradient norm; None: not clipped."""


@dataclass
class TrainerConfig:
    _target_: str = MISSING
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    compute_dtype: Dtype = Dtype.bfloat16
    """Of forward and backward; master weights and optimizer state are fp32."""
    max_tokens_per_micro_batch: int = 16384
    """Packed tokens per forward pass of one rank; a single longer sequence makes a micro-batch of its own."""
    packing: Packing = Packing.tokens
    recompute: bool = True
    """Recompute activations of each layer in the backward pass."""
    logprob_chunk_tokens: int = 2048
    """Positions whose logits exist at once: peak is chunk x vocabulary x 4 bytes."""
    collective_timeout_s: float = 600.0
    """How long ranks wait for one that does not come to a collective; then the run ends and names it. It must cover
    what one rank may do longer than another: compile, or read weights from a slow disk."""


@dataclass
class FSDPConfig(TrainerConfig):
    _target_: str = "rl.trainer.fsdp_trainer.FSDPTrainer"


@dataclass
class MegatronConfig(TrainerConfig):
    """Megatron-Core's GPTModel, for dense Qwen3 models on one GPU so far: a plan counts with more, a run refuses it."""

    _target_: str = "rl.trainer.megatron_trainer.MegatronTrainer"
    tensor_parallel: int = 1
    """GPUs over which each layer is split. Only 1 so far."""
    expert_parallel: int = 1
    """GPUs over which the experts of each layer are dealt out, each expert whole. Only 1 so far."""


@dataclass
class RolloutConfig:
    _target_: str = MISSING
    dtype: Dtype = Dtype.bfloat16
    """Of the engine's weights."""
    max_num_seqs: int = 256
    """Sequences decoded at once."""
    replicas: int = 1
    """Engines with devices of their own. Groups go to the one with the least to do; one that dies is restarted."""
    replicas_per_device: int | None = 1
    """Engines that share each device, and its memory, for models so small that one leaves it idle. None: decided from
    the model's size, see rl/config/replicas.py."""

    @property
    def num_gpus(self) -> int:
        """Devices of one engine, where there are any."""
        return 1

    @property
    def total_gpus(self) -> int:
        """Devices of all engines, where there are any."""
        return self.replicas * self.num_gpus


@dataclass
class LocalRolloutConfig(RolloutConfig):
    """The embedded engine: a plain copy of the model in this process, or in a process of its own when fully async."""

    _target_: str = "rl.rollout.local_engine.LocalEngine"
    max_num_seqs: int = 1024


@dataclass
class ServerRolloutConfig(RolloutConfig):
    """An engine with processes and a cache of its own."""

    tensor_parallel: int = 1
    """GPUs over which each layer of one engine is split."""
    memory_fraction: float = 0.6
    """Share of GPU memory for weights and cache; ignored on CPU, where `cpu_cache_gib` counts."""
    cpu_cache_gib: int = 1
    """On a CPU, size of the cache of keys and values."""
    enforce_eager: bool = False
    """True: no graph capture, nor compilation in vLLM; starts sooner, samples slower."""
    max_graph_batch: int | None = None
    """Largest decode batch that is captured as a graph; larger ones are launched kernel by kernel. None: 512, or less
    where max_num_seqs is."""
    attention_backend: str | None = None
    """The engine's name of it, for example `TRITON_ATTN` in vLLM and `triton` in SGLang. None: the engine's choice; in
    SGLang on a CPU `torch_native`."""
    custom_all_reduce: bool = True
    """Whether an engine on several GPUs may use its own all-reduce kernels in place of NCCL's (RCCL's)."""

    @property
    def num_gpus(self) -> int:
        return self.tensor_parallel


@dataclass
class VLLMRolloutConfig(ServerRolloutConfig):
    _target_: str = "rl.rollout.vllm_engine.VLLMEngine"


@dataclass
class SGLangRolloutConfig(ServerRolloutConfig):
    _target_: str = "rl.rollout.sglang_engine.SGLangEngine"
    sampling_backend: str | None = None
    """None: `pytorch`, which draws each sample from its own seed. With another, `flashinfer`, seeds have no effect."""


@dataclass
class BackendConfig:
    """A trainer and a rollout engine."""

    trainer: TrainerConfig = MISSING
    rollout: RolloutConfig = MISSING


@dataclass
class PlacementConfig:
    _target_: str = MISSING
    trainer_ranks: int = 1
    """The trainer's processes, each with a GPU where there are any. One runs in this process; more are Ray actors. With
    FSDP all are data-parallel; of Megatron's, tensor_parallel at a time hold one copy of the dense layers."""
    max_staleness: float = 0.0
    """How many published versions older than the trainer's the oldest trained rollout may be, by admission. A window of
    more than one batch adds to it; `mode=plan` prints the bound that follows, and no run exceeds it."""
    publish_every: int = 1
    """Steps per weight publish."""
    weight_transport: WeightTransport = WeightTransport.auto


@dataclass
class ColocatedConfig(PlacementConfig):
    """Trainer and engine share the devices and take turns."""

    _target_: str = "rl.placement.colocated.Colocated"


@dataclass
class FullyAsyncConfig(PlacementConfig):
    """Trainer and engine run at the same time, each on devices of its own; the engine is a Ray actor."""

    _target_: str = "rl.placement.fully_async.FullyAsync"
    share_devices: bool = False
    """Both on the same GPUs all the same, each in its own process and part of the memory: the engine's is
    `backend.rollout.memory_fraction`. For a machine with too few; they slow each other down."""
    max_staleness: float = 1.0
    in_flight: InFlight = InFlight.finish


ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Of PyTorch's settings for GPU memory, under each of their names."""


@dataclass
class HardwareConfig:
    name: str = MISSING
    """Of the option, by which claims about speed are told apart."""
    device: str = MISSING
    """`cpu` or `cuda` (also under ROCm)."""
    nodes: int = 1
    """Machines; above 1 they are a Ray cluster."""
    gpus_per_node: int = 0
    """GPUs of one machine that the run may use; 0 on a CPU."""
    memory_gib: float = MISSING
    """Of one GPU; of the host where device is cpu."""
    architecture: str | None = None
    """For example gfx942 or sm_90. None: a CPU."""
    memory_bandwidth_tb_s: float | None = None
    """Of one GPU's memory, peak. None: unknown, so no time is predicted."""
    bf16_tflops: float | None = None
    """Dense peak of one GPU, without sparsity. None: unknown."""
    link_gb_s: float | None = None
    """Between the GPUs of a node: one GPU's links together, both directions. None: unknown or no links."""
    network_gb_s: float | None = None
    """Between nodes, of one node, in one direction. None: unknown."""
    trainer_env: dict[str, str] = field(default_factory=dict)
    """Environment of the process that holds the trainer; a value that the user has set already wins."""
    rollout_env: dict[str, str] = field(default_factory=dict)
    """Likewise of the engine. A colocated engine shares it with a trainer of one rank, so the two must agree."""


@dataclass
class StreamConfig:
    window: int | None = None
    """Finished groups are taken from the oldest untrained one up to so many places later, in admission order.
    None: prompts_per_step when colocated (first in, first out), prompts_per_step x publish_every when fully async."""
    oversample: float = 1.0
    """Prompts started for each one that a batch takes. Above 1, for algorithms that filter groups: without a surplus
    every refill is a round of its own. What a publish's batches do not take starts anew on its weights, first. The
    recipe published with DAPO starts 1,536 prompts for a batch of 512: 3."""
    max_failed_fraction: float = 0.1
    """The run stops when more of the groups of the last 10 batches were dropped because their grader failed or was not
    done in time (reward_error, reward_timeout), or because the engine failed on their requests (engine_error)."""
    reward_timeout_s: float = 300.0
    """From a group's last answer to its rewards; then its grader has failed, in training and evaluation alike."""
    stall_timeout_s: float = 1800.0
    """The run stops when no group finishes for so long while the trainer waits for a batch, or no problem of an
    evaluation. Also the limit of one publish, and of giving the devices to the trainer or back to the engine: they wait
    for running requests."""


@dataclass
class RayConfig:
    """Ray holds the processes of more than one trainer rank, of several engines and of fully asynchronous ones."""

    address: str | None = None
    """HOST:PORT of a cluster to join, see scripts/ray_cluster.sh. None: the one at RAY_ADDRESS, and where that is unset
    one of the run's own, on this machine alone, when it is needed."""


@dataclass
class PlanConfig:
    """What a plan is told besides the run's settings."""

    response_tokens: float | None = None
    """Mean length of an answer, from which seconds are predicted. None: half of task.sampling.max_new_tokens."""
    data: bool = False
    """mode=plan also reads the data: rows, template, over-long prompts, a test of the reward. Ten seconds."""


@dataclass
class EvaluationConfig:
    every: int = 0
    """Steps between evaluations; 0: never during training."""
    at_start: bool = True
    """Before the first step."""
    at_end: bool = True
    """After the last step."""
    checkpoint: str | None = None
    """What mode=eval evaluates: a run folder (its newest checkpoint) or RUN/checkpoints/step-N. None: the model."""


@dataclass
class CheckpointConfig:
    every: int = 0
    """Steps between checkpoints; 0: only at the end and on Ctrl-C."""
    keep_last: int = 2
    """Newest checkpoints that are kept; older ones are deleted."""
    keep_best: str | None = None
    """Metric, for example eval/gsm8k/greedy, by whose highest value one more checkpoint is kept; of equals, the newest.
    None: none."""


@dataclass
class CanaryConfig:
    """A few fixed prompts that show whether the engine samples from the weights that were published to it."""

    every: int = 10
    """Publishes between checks, beginning with the first; 0: never."""
    prompts: int = 4
    """The first ones of the training order."""
    new_tokens: int = 16
    """Sampled for each, but not more than task.sampling.max_new_tokens."""
    max_logprob_difference: float | None = None
    """Of a token between trainer and engine, in nats, on average. None: by the dtypes that the two compute in."""
    action: CanaryAction = CanaryAction.warn


@dataclass
class LoggerConfig:
    """metrics.jsonl is always written; this adds trackers to it."""

    _target_: str = MISSING
    sample_every: int = 10
    """Steps between sample rollouts written to samples.txt and samples.jsonl."""
    samples: int = 4
    """Rollouts written each time."""


@dataclass
class JsonlLoggerConfig(LoggerConfig):
    _target_: str = "rl.loggers.jsonl.NoTracker"


@dataclass
class WandbLoggerConfig(LoggerConfig):
    """The key is read from the environment (WANDB_API_KEY), never from here."""

    _target_: str = "rl.loggers.wandb.WandbLogger"
    project: str = "rl"
    """W&B project."""
    entity: str | None = None
    """W&B user or team. None: the one that the key belongs to."""
    mode: str = "online"
    """`online` or `offline`."""


@dataclass
class RunConfig:
    experiment: str | None = None
    """Name of the experiment that this run started from; None: the defaults."""
    mode: Mode = Mode.train
    seed: int = 0
    """Of everything random: order of the data, weights that are made, every draw of an answer."""
    steps: int | None = None
    """Stop after so many steps. None: `task.epochs` passes over the data."""
    output_dir: str | None = None
    """Run folder. None: outputs/<experiment>/<time>."""
    clean: bool = False
    """Delete the run that `output_dir` already holds."""
    model: ModelConfig = MISSING
    algorithm: AlgorithmConfig = MISSING
    backend: BackendConfig = field(default_factory=BackendConfig)
    placement: PlacementConfig = MISSING
    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    task: TaskConfig = MISSING
    logger: LoggerConfig = MISSING
    stream: StreamConfig = field(default_factory=StreamConfig)
    ray: RayConfig = field(default_factory=RayConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    canary: CanaryConfig = field(default_factory=CanaryConfig)
    sentinels: SentinelsConfig = field(default_factory=SentinelsConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    published: PublishedConfig | None = None
    """What the experiment's source claims. None: nothing was published of it."""

    @property
    def has_engine_devices(self) -> bool:
        """Whether the engines have devices that the trainer does not use."""
        return isinstance(self.placement, FullyAsyncConfig) and not self.placement.share_devices

    @property
    def driver_env(self) -> dict[str, str]:
        """What this process needs of hardware.trainer_env and rollout_env, for the parts that live in it."""
        has_trainer = self.placement.trainer_ranks == 1
        rollout = self.backend.rollout
        may_be_one = rollout.replicas == 1 and rollout.replicas_per_device in (1, None)
        has_engine = may_be_one and not isinstance(self.placement, FullyAsyncConfig)
        trainer_env = self.hardware.trainer_env if has_trainer else {}
        rollout_env = self.hardware.rollout_env if has_engine else {}
        for name in trainer_env.keys() & rollout_env.keys():
            if trainer_env[name] != rollout_env[name]:
                raise ConfigError(
                    f"hardware.trainer_env.{name}={trainer_env[name]} and hardware.rollout_env.{name}="
                    f"{rollout_env[name]} differ, but trainer and engine share a process. Make them equal, or use "
                    "placement=fully_async or placement.trainer_ranks above 1."
                )
        return {**trainer_env, **rollout_env}

    @property
    def first_engine_gpu(self) -> int:
        """The engines' GPUs begin after the trainer's, or with them where the two share."""
        return self.placement.trainer_ranks if self.has_engine_devices else 0

    @property
    def num_gpus_used(self) -> int:
        """GPUs that trainer and engines take together; 0 on a CPU."""
        if self.hardware.device == "cpu":
            return 0
        ranks, engine_gpus = self.placement.trainer_ranks, self.backend.rollout.total_gpus
        return ranks + engine_gpus if self.has_engine_devices else max(ranks, engine_gpus)

    @property
    def window(self) -> int:
        """Groups; see StreamConfig.window."""
        if self.stream.window is not None:
            return self.stream.window
        if isinstance(self.placement, ColocatedConfig):
            return self.algorithm.prompts_per_step
        return self.algorithm.prompts_per_step * self.placement.publish_every

    @property
    def groups_per_publish(self) -> int:
        return self.algorithm.prompts_per_step * self.placement.publish_every

    @property
    def max_admitted(self) -> int:
        """Groups admitted and not yet trained on and published, at most; over-sampled ones not included."""
        return math.ceil((1 + self.placement.max_staleness) * self.groups_per_publish)

    @property
    def max_surplus(self) -> int:
        """Groups over-sampled on top of `max_admitted`, until the last batch before a publish is taken."""
        return math.ceil((self.stream.oversample - 1) * self.groups_per_publish)

    @property
    def staleness_bound(self) -> int:
        """Largest staleness that admission and window allow, in published versions.

        Group p (in admission order) starts once p - max_admitted + 1 groups are released, so at version
        ceil((p - max_admitted + 1) / per_publish) or later. When it is trained, at most p + window - 1 groups went
        before it (p if the window is one batch: first in, first out), so the version is at most that over per_publish.
        Over-sampling adds nothing: a publish leaves the first max_admitted - per_publish untaken groups in flight, and
        those start at its version, or later, that are behind them.
        """
        overtaking = 0 if self.window == self.algorithm.prompts_per_step else self.window - 1
        return (self.max_admitted - 1 + overtaking) // self.groups_per_publish

    def num_steps(self, num_prompts: int) -> int:
        """Steps of the whole run, given the training prompts of one epoch."""
        if self.steps is not None:
            return self.steps
        return self.task.epochs * (num_prompts // self.algorithm.prompts_per_step)
