"""The seams of the suite. Each has a contract suite in tests/contract that runs against every implementation."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rl.types import (
    DeviceUse,
    EvalResult,
    EvalSet,
    FloatArray,
    IntArray,
    LossCounts,
    MicroBatch,
    Prompt,
    PublishStats,
    RenderedWithImages,
    Reward,
    Rollout,
    RolloutGroup,
    Sampling,
    StepStats,
    TrainBatch,
)

if TYPE_CHECKING:
    import torch


class PromptRenderer(Protocol):
    """Turns the messages of a prompt into token ids, once, for engine, trainer and evaluator alike."""

    num_truncated: int
    """Over-long prompts that were cut on the left so far."""
    num_dropped: int
    """Over-long prompts that were dropped so far."""

    def render(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], *, names: Sequence[str]
    ) -> list[IntArray | None]:
        """[L_p] of each prompt's messages; None where it is over-long and such prompts are dropped.

        `names` say which prompts they are, for errors.
        """
        ...

    def render_with_images(
        self, messages: Sequence[Mapping[str, Any]], images: Sequence[bytes], *, name: str
    ) -> RenderedWithImages | None:
        """One prompt whose contents are lists of parts, `{"type": "image"}` for each of `images` in order.

        None where it is over-long and such prompts are dropped.
        """
        ...


@runtime_checkable
class Task(Protocol):
    """Data and reward. Knows nothing of engines, trainers and GPUs."""

    num_prompts: int
    """Training prompts in one epoch."""

    def prompt(self, seed: int, index: int) -> Prompt:
        """The prompt at `index` of the endless training order: epoch `index // num_prompts`, shuffled by (seed, epoch).

        Random access, so that a resumed stream can ask again for exactly the prompts that were in flight.
        """
        ...

    async def grade(self, prompt: Prompt, rollouts: list[Rollout]) -> list[Reward]:
        """Rewards of these rollouts of one prompt, in order. Raises `RewardError` if the grader itself fails.

        It runs in the event loop, so what takes long must be awaited. Cancelled, it ends: its time is over.
        """
        ...

    def eval_sets(self) -> list[EvalSet]: ...

    def demonstrations(self) -> list[tuple[Prompt, str]]:
        """Prompts with a right response text, for a supervised warm start; shares no problem with `eval_sets()`.

        Empty where the task has none.
        """
        ...

    def validation_demonstrations(self) -> list[tuple[Prompt, str]]:
        """Likewise, to decide when a warm start stops; shares no problem with `demonstrations()` or `eval_sets()`."""
        ...

    def fingerprint(self) -> str:
        """Digest of the training rows and how they are rendered; a checkpoint refuses another one."""
        ...


@dataclass(frozen=True, slots=True)
class TensorSpec:
    name: str
    """Hugging Face parameter name."""
    dtype: str
    """For example `float32`, `bfloat16`."""
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class UpdateManifest:
    """What a weight update will send, checked by the receiver tensor by tensor."""

    version: int
    tensors: tuple[TensorSpec, ...]


Bucket = list[tuple[str, "torch.Tensor"]]
"""(Hugging Face name, full contiguous tensor) pairs."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where the trainer's rank 0, as rank 0, and all workers of the engines form a process group for weights."""

    group_id: str
    """Unique: a group that lost a member is never formed again."""
    address: str
    """`host:port` of the store that rank 0 serves."""
    num_ranks: int
    backend: str
    """`nccl`, which is RCCL under ROCm, or `gloo`."""
    timeout_s: float
    """How long a member waits for another, as the group is formed and at each bucket."""


@dataclass(frozen=True, slots=True)
class BroadcastBucket:
    """A bucket that rank 0 of a process group broadcasts to the others, as one buffer of bytes."""

    group_id: str
    tensors: tuple[TensorSpec, ...]
    """In the order in which `rl.weights.flat.flat_places` lays them out."""
    num_bytes: int
    """Of the tensors."""


@dataclass(frozen=True, slots=True)
class StoredBucket:
    """A bucket in a safetensors file that trainer and engines see, until the next one is posted."""

    path: str
    digest: str
    """BLAKE2b of the file."""
    num_bytes: int
    """Of the tensors."""


@dataclass(frozen=True, slots=True)
class MemoryHandle:
    """One buffer that other processes of the machine can open: numbers and text, of which nothing is unpickled."""

    memory: str
    """Of a GPU: its IPC handle in hexadecimal. Of the host: the path of a file that exists in memory alone."""
    num_bytes: int
    offset: int = 0
    """Of the buffer in the allocation that a GPU's handle stands for; bytes."""
    counter: str = ""
    counter_offset: int = 0
    """PyTorch's count of those who have a GPU's memory open."""
    event: str = ""
    waits_for_event: bool = False


@dataclass(frozen=True, slots=True)
class SharedBucket:
    """A bucket that every trainer rank holds on its own device, for processes that use the same one to copy.

    It lies there until the next one is posted.
    """

    handles: dict[str, MemoryHandle]
    """By `rl.weights.ipc.device_key`."""
    tensors: tuple[TensorSpec, ...]
    """In the order in which `rl.weights.flat.flat_places` lays them out."""
    num_bytes: int
    """Of the tensors."""


RemoteBucket = BroadcastBucket | StoredBucket | SharedBucket
"""A bucket that is not in this process, and how every worker of an engine gets it. Plain data."""


class UpdateSession(Protocol):
    """Receives one weight update, in place: after `abort()` or an error the engine is unfit until a complete one."""

    keeps_copies: bool
    """Whether each remote bucket must be followed by `keep`: for engines that start later."""

    async def send(self, bucket: Bucket | RemoteBucket) -> None: ...

    def keep(self, copy: Any) -> None:
        """What `Trainer.copy_posted` made of the bucket that was sent last."""
        ...

    async def groups(self) -> list[str | None]:
        """Of each worker, in order of rank, the id of the process group for weights that it is in."""
        ...

    async def join(self, meeting: Meeting, *, first_rank: int = 1) -> None:
        """Makes the workers members of a new group, with ranks from `first_rank` on. Returns when it is formed."""
        ...

    async def commit(self, version: int) -> None:
        """Checks that every tensor of the manifest arrived, drops caches of old weights, then advances the version."""
        ...

    async def abort(self) -> None: ...


@dataclass(frozen=True, slots=True)
class EngineCapabilities:
    seeded: bool
    """Equal seeds and an identical batch give equal tokens."""
    loses_weights_asleep: bool
    """`sleep` frees the memory of the weights without a copy: only a publish brings them back."""
    renormalizes: bool
    """With top_k or top_p, log-probs are those of the distribution that is left; False: of the whole one."""
    takes_images: bool = False
    """Prompts with images are sampled from, if the model takes them; False: refused by name."""


class EngineError(RuntimeError):
    """The engine failed or was in the wrong state. An infrastructure error, never a wrong answer."""


class RequestError(EngineError):
    """The engine lives, and refused this one request or ended it by itself. Others go on, and asking again may help."""


class EngineUnfit(EngineError):
    """The last weight update did not complete; only a complete one makes the engine fit again."""


class PauseMode(StrEnum):
    """What becomes of the requests that run when an engine is paused."""

    WAIT = "wait"
    """They finish first."""
    KEEP = "keep"
    """They stop, keep their tokens, and go on from there when the engine resumes, on whatever weights it then has."""
    ABORT = "abort"
    """They end: each is yielded with the tokens it has and `FinishReason.ABORT`; one without tokens starts anew."""
    RESTART = "restart"
    """They stop, lose their tokens, and start anew, whole and with the same seed, when the engine resumes."""


class RolloutEngine(Protocol):
    """Samples from a policy that it receives by weight updates only. Knows no rewards, algorithms or trainers."""

    capabilities: EngineCapabilities

    async def start(self) -> None: ...

    def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        """n samples, each yielded when it finishes. The first call enqueues before its first suspension point.

        Raises `RequestError` if the engine lives and does not serve this request, `EngineUnfit` after a failed update
        and `EngineError` if it dies or sleeps.
        """
        ...

    async def policy_version(self) -> int:
        """The version that the engine's own workers report; -1 before the first complete update."""
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Returns when nothing runs. Requests made from now on wait for `resume()`."""
        ...

    async def resume(self) -> None: ...

    async def open_update(self, manifest: UpdateManifest) -> UpdateSession:
        """Waits until no request is running, then takes tensors. Requests made from now on wait for its end.

        To update in the middle of running requests, pause first.
        """
        ...

    async def weight_digests(self) -> dict[str, str]:
        """Of every parameter, by the engine's own name for it: what an update changed is what differs afterwards."""
        ...

    def counters(self) -> dict[str, int]:
        """Requests that were re-dispatched and replicas that were restarted, so far; empty where neither can be."""
        ...

    async def sleep(self) -> None:
        """Frees what can be freed for the trainer. Only with no request running."""
        ...

    async def wake_weights(self) -> None:
        """Makes room for a weight update. No-op on an engine that frees nothing."""
        ...

    async def wake(self) -> None: ...

    async def wait_for_death(self) -> str:
        """Why it can never answer again. A call that waits then raises it too, but there may be none."""
        ...

    async def close(self) -> None: ...


class Algorithm(Protocol):
    """Pure arithmetic of one policy-gradient method. No files, network, processes, or config of other parts."""

    uses_reference: bool
    """The trainer keeps a frozen copy of the initial policy."""
    penalizes_reward: bool
    """`assign_advantages` needs the `ref_logprobs` of every rollout."""
    skips_zero_advantage: bool
    """Tokens of advantage 0 have a gradient of exactly 0, so that they need not be run."""
    uses_entropy_gradient: bool

    def shape_reward(self, rollout: Rollout) -> float:
        """The reward that advantages are computed from, for example with an overlong penalty."""
        ...

    def keep(self, group: RolloutGroup) -> bool:
        """False sends the group's slot back for another prompt (dynamic sampling). Judges the raw reward."""
        ...

    def assign_advantages(self, groups: Sequence[RolloutGroup]) -> None:
        """Sets the advantage of every rollout of a step's groups, from `shaped_reward`."""
        ...

    def loss(self, inputs: LossInputs) -> LossOutput: ...


MAX_LOG_RATIO = 20.0
"""Bound of a log-ratio before exp; exp(20) = 4.9e8: past every clip bound and far from the fp32 overflow at 88."""


@dataclass(slots=True)
class LossInputs:
    """One micro-batch, as tensors [T]. Log-probs are at the sampling temperature."""

    logprobs: torch.Tensor
    """Live, with gradient."""
    entropy: torch.Tensor
    old_logprobs: torch.Tensor
    rollout_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    """bool"""
    cu_seqlens: torch.Tensor
    """[n+1] int32"""
    group_loss_tokens: torch.Tensor
    """[n] int32"""
    counts: LossCounts


@dataclass(slots=True)
class LossOutput:
    loss: torch.Tensor
    """This micro-batch's share: summed over micro-batches and ranks it is the loss of the update."""
    token_sums: dict[str, torch.Tensor]
    """Metric -> sum over loss tokens; divided by the loss tokens run, after summing over micro-batches and ranks."""
    maxima: dict[str, torch.Tensor]
    """Metric -> maximum over loss tokens."""
    sequence_sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Metric -> sum over sequences with loss tokens; divided by their number likewise."""


class WeightSource(Protocol):
    """Where published weights come from."""

    async def manifest(self, version: int) -> UpdateManifest: ...

    def buckets(self) -> AsyncIterator[Bucket]:
        """Full weights in Hugging Face names, in manifest order. Collective over ranks; the driver gets them once."""
        ...

    async def outlet(self, method: str, *arguments: Any) -> Any:
        """Calls a method of the `rl.weights.outlet.WeightOutlet` that is beside each rank's weights."""
        ...

    def post_buckets(self, method: str, *arguments: Any) -> AsyncIterator[RemoteBucket]:
        """As `buckets`, but each goes by a method of the ranks' outlets, and the driver gets only where it is."""
        ...

    async def copy_posted(self) -> Any:
        """The bucket that was posted last, where engines can take it from at any time (`rl.rollout.replicas`)."""
        ...


class Trainer(WeightSource, Protocol):
    """Owns the policy's master weights, its optimizer and schedule. The driver's handle on one or many ranks."""

    num_ranks: int
    """Data-parallel ranks that a `TrainBatch` is split over."""

    async def start(self) -> None: ...

    async def step(self, batch: TrainBatch) -> StepStats: ...

    async def logprobs(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[FloatArray]:
        """[L] each, under the weights as they are, at the rollout's temperature; 0 where `loss_mask` is False.

        `prompts[i]` is that of `rollouts[i]`.
        """
        ...

    async def reference_logprobs(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[FloatArray]:
        """Likewise of the reference policy, which the algorithm must use."""
        ...

    async def weights_digest(self) -> str:
        """16 hex digits of the master weights; equal for bitwise equal ones on equally many ranks."""
        ...

    async def device_uses(self) -> list[list[DeviceUse]]:
        """Of each rank's GPU since the last call, by all processes; empty on a CPU."""
        ...

    async def release_cache(self) -> None:
        """Gives back what its allocators keep for later: the engine, another owner, could not have it otherwise."""
        ...

    async def offload(self) -> None: ...

    async def onload(self) -> None: ...

    async def save(self, folder: Path) -> None:
        """Weights, optimizer, schedule and RNG of every rank into `folder`, which exists and is empty."""
        ...

    async def load(self, folder: Path) -> None: ...

    async def export(self, folder: Path) -> None:
        """A Hugging Face folder that `AutoModelForCausalLM.from_pretrained` loads."""
        ...

    async def failure(self) -> BaseException:
        """Waits for the end of a rank. A call that runs then raises it too, but there may be none."""
        ...

    async def close(self) -> None: ...


class TrainerRank(Protocol):
    """One data-parallel rank of a trainer, in this process or in an actor. Every method is collective over the ranks.

    Built as `build(config.backend.trainer, model_folder=..., algorithm=<AlgorithmConfig>, device=..., rank=...,
    num_ranks=..., store=<torch.distributed.Store address or None>, seed=..., total_updates=...)`.
    """

    def step(self, mini_batches: list[list[MicroBatch]], loss_counts: list[LossCounts]) -> StepStats:
        """`mini_batches` is [update][micro], this rank's share; counts are global, metrics come back reduced."""
        ...

    def logprobs(self, micro_batches: list[MicroBatch]) -> list[FloatArray]:
        """[T] each, of this rank's share; equally many on every rank."""
        ...

    def reference_logprobs(self, micro_batches: list[MicroBatch]) -> list[FloatArray]:
        """Likewise of the reference policy."""
        ...

    def manifest(self, version: int) -> UpdateManifest: ...

    def buckets(self) -> Iterator[Bucket]:
        """On every rank, so that the gather is collective; only rank 0's are used."""
        ...

    def weights_digest(self) -> str:
        """Of this rank's share of the master weights."""
        ...

    def release_cache(self) -> None: ...

    def offload(self) -> None: ...

    def onload(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...

    def export(self, folder: Path) -> None: ...

    def close(self) -> None: ...


class Residency(Protocol):
    """The time during which the trainer holds the devices."""

    async def publish(self, version: int) -> PublishStats: ...


Phases = Callable[[str], AbstractContextManager[Any]]
"""`Clock.phase`, which measures what is done inside, under that name."""


class Placement(Protocol):
    """Which devices do what, and who holds them when. Knows no algorithm."""

    samples_while_training: bool
    """False: inside `training()` the engine sleeps, and no request may run."""

    async def start(self) -> None:
        """Starts trainer and engine and publishes version 0 weights nowhere: the loop does that."""
        ...

    def training(self, phase: Phases) -> AbstractAsyncContextManager[Residency]:
        """Inside, the trainer is resident. Colocated: the engine sleeps. Fully async: nothing waits.

        What hands the devices over goes on in phases of its own.
        """
        ...

    async def arrived(self) -> None:
        """Waits until the engine has the weights of the last publish, which may be overlapped, and raises its error."""
        ...

    async def failure(self) -> BaseException:
        """Waits for an error of what goes on while nobody waits for it, such as an overlapped publish."""
        ...

    async def close(self) -> None: ...


class RolloutStream(Protocol):
    """Admission, order and staleness of groups. `async with` runs its producer, whose error surfaces here."""

    async def next_batch(self) -> list[RolloutGroup]:
        """P kept groups, graded and with advantages, taken by the window rule."""
        ...

    def release(self) -> None:
        """The groups of the batches since the last publish are trained on and published: their slots are free."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-able position: everything admitted and not yet trained is asked for again after `restore()`."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None: ...

    def metrics(self) -> dict[str, float]:
        """Groups started, trained, dropped and in flight, for one row; asserts that they are the same ones."""
        ...

    async def failure(self) -> BaseException:
        """Waits for an error that ends the stream. `next_batch` raises it too, but not during a long step."""
        ...

    def busy_s(self) -> float:
        """Seconds so far in which the engine had at least one request of this stream."""
        ...

    async def __aenter__(self) -> RolloutStream: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Evaluator(Protocol):
    async def evaluate(self, engine: RolloutEngine, *, step: int) -> list[EvalResult]: ...


class CheckpointStore(Protocol):
    async def save(self, *, step: int, state: Mapping[str, Any], trainer: Trainer) -> None:
        """All or nothing: a checkpoint that can be found is complete."""
        ...


class RunLogger(Protocol):
    """Where metrics go. Trouble in a tracker never stops or slows a run."""

    def log_rollouts(self, groups: Sequence[RolloutGroup], *, step: int) -> None:
        """Of a step whose row comes next: trackers are given both at once."""
        ...

    def log(self, metrics: Mapping[str, float], *, step: int) -> None: ...

    def log_digests(self, digests: Mapping[str, str], *, step: int) -> None:
        """Stage of `rl.digests.STAGES` -> digest. One row a step, in order."""
        ...

    def close(self, *, failed: bool) -> None: ...
