"""What one engine must do for `rl.rollout.engine.Engine`, which owns queueing, pauses, versions and updates for all."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rl.protocols import Bucket, EngineCapabilities, EngineError, Meeting, RemoteBucket, UpdateManifest
from rl.types import FinishReason, FloatArray, IntArray, Prompt, Sampling, sample_seed


@dataclass(frozen=True, eq=False, slots=True)
class Part:
    """One request to a sampler: a sample from its first token, or what is left of one that was interrupted."""

    request_id: str
    """Unique over the life of the engine."""
    prompt: Prompt
    prefix: IntArray
    """What was sampled before: goes on from there. Empty for a whole sample."""
    sampling: Sampling
    """`max_new_tokens` is what is left of it."""
    seed: int

    @property
    def token_ids(self) -> IntArray:
        """Prompt and prefix."""
        return np.concatenate([self.prompt.token_ids, self.prefix]) if len(self.prefix) else self.prompt.token_ids


@dataclass(frozen=True, slots=True)
class Sampled:
    """How a part ended."""

    token_ids: IntArray
    """[n], new ones only."""
    logprobs: FloatArray
    """[n], at the temperature sampled with; of greedy samples the model's own, at temperature 1."""
    text: str
    """Decoded `token_ids`, special tokens kept out."""
    finish_reason: FinishReason
    """`ABORT` only where `Sampler.abort` asked for it, and never after an end of text."""

    def __post_init__(self) -> None:
        counts = (len(self.token_ids), len(self.logprobs))
        assert counts[0] == counts[1], f"{counts[0]} tokens came with {counts[1]} log-probs"


NOTHING_SAMPLED = Sampled(np.zeros(0, np.int32), np.zeros(0, np.float32), "", FinishReason.ABORT)
"""Of a part that was aborted before its first token."""

Outcome = tuple[Part, Sampled | EngineError]


def part_seed(sampling: Sampling, group_id: int, index: int, num_before: int) -> int:
    """`sample_seed` of the sample; once it was interrupted, of the place where it goes on, too."""
    seed = sample_seed(sampling.seed, group_id, index)
    if num_before == 0:
        return seed
    digest = hashlib.blake2b(f"{seed}+{num_before}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def stop_reach(stops: Iterable[str]) -> int:
    """Tokens that must be decoded to see a stop string that the last of them completes.

    A token is at least one byte of text, so a match lies within as many; a few more, because a decoder may treat the
    first one differently.
    """
    return max(len(stop.encode()) for stop in stops) + 4


def agreed_version(name: str, versions: Sequence[int]) -> int:
    """What all workers report. Raises `EngineError` if they differ. `name` is the engine's."""
    if len(set(versions)) != 1:
        raise EngineError(f"{name}'s workers hold different policy versions: {sorted(set(versions))}.")
    return versions[0]


def merged_digests(workers: Sequence[dict[str, str]]) -> dict[str, str]:
    """With tensor parallelism, of every worker's share."""
    if len(workers) == 1:
        return workers[0]
    return {f"{name} (worker {rank})": digest for rank, held in enumerate(workers) for name, digest in held.items()}


class Sampler(Protocol):
    """One model server, in this process or with processes of its own. Called from one event loop and never blocks it.

    It need not keep order or state: the engine above calls nothing that is illegal in the phase it is in.
    """

    name: str
    """For messages: `local`, `vLLM`, `SGLang`."""
    capabilities: EngineCapabilities

    async def start(self, *, deliver: Callable[[Sequence[Outcome]], None], die: Callable[[str], None]) -> None:
        """Starts on weights that mean nothing. Later calls `deliver` and `die` on the event loop.

        May be called again where it has raised that a port was taken; each start has a log of its own.

        `die` says that the sampler can never answer again, and why: which process, how it ended, its last lines.
        """
        ...

    def check(self, prompt: Prompt, sampling: Sampling) -> None:
        """Raises `EngineError` for a request that cannot be served, for example one longer than the context."""
        ...

    def submit(self, parts: Sequence[Part]) -> None:
        """Queues them, in order. Each is delivered exactly once."""
        ...

    def abort(self, parts: Sequence[Part]) -> None:
        """Ends them early: each is still delivered, with what it has sampled and `ABORT`, unless it just ended."""
        ...

    def decode(self, token_ids: Sequence[int], *, keep_special: bool) -> str: ...

    async def policy_version(self) -> int:
        """As the workers themselves report it; -1 before the first update."""
        ...

    async def weight_digests(self) -> dict[str, str]:
        """Of every parameter that the workers hold, by the worker's own name for it. Equal values, equal digests."""
        ...

    async def begin_update(self, manifest: UpdateManifest) -> None:
        """No request is running now, nor until `finish_update` or `abort_update`."""
        ...

    async def receive(self, bucket: Bucket | RemoteBucket) -> None:
        """Raises `EngineError` at the first tensor that is not as the manifest says, or if a remote one cannot be had.

        A broadcast is taken before it is looked at, so that a bad tensor holds up no other member of the group.
        """
        ...

    async def weight_groups(self) -> list[str | None]:
        """Of each worker, in order of rank, the id of the process group for weights that it is in."""
        ...

    async def join_group(self, meeting: Meeting, first_rank: int) -> None:
        """Each worker joins, with its own rank after `first_rank`. Raises `EngineError` if no group is formed."""
        ...

    async def finish_update(self, version: int) -> None:
        """Raises `EngineError` unless every tensor arrived; drops caches of old weights, then takes the version."""
        ...

    async def abort_update(self) -> None:
        """Back to where another update can begin. The weights are a mixture."""
        ...

    async def sleep(self) -> None:
        """Frees the device's memory; raises `EngineError` if too little is free afterwards. Weights may be lost."""
        ...

    async def wake_weights(self) -> None: ...

    async def wake_cache(self) -> None: ...

    async def close(self) -> None:
        """Ends every process, in bounded time. May be called at any time, and twice."""
        ...
