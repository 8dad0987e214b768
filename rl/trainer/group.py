"""The driver's handle on one trainer rank in this process, or on several as Ray actors."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Never, NoReturn

import torch

from rl.config.algorithms import AlgorithmConfig
from rl.config.build import build
from rl.config.schema import ConfigError, TrainerConfig
from rl.faults import FaultClass, classify
from rl.placement.ray_runtime import (
    Place,
    Seat,
    actor_env,
    end_process,
    ensure_ray,
    is_on_one_machine,
    obituary,
    own_host,
    own_place,
    seat_options,
)
from rl.protocols import Bucket, EngineError, RemoteBucket, SharedBucket, TrainerRank, UpdateManifest
from rl.trainer.device_memory import DeviceMemory, used_bytes
from rl.trainer.packing import pack_to_score
from rl.trainer.phases import enter_phase, last_phase, record_phases
from rl.types import DeviceUse, FloatArray, Prompt, Rollout, StepStats, TrainBatch
from rl.weights.collective import serve_store
from rl.weights.digest import join_digests
from rl.weights.outlet import OF_EVERY_RANK, WeightOutlet
from rl.weights.packed import pack

START_TIMEOUT_S = 600.0
ROOT_CAUSE_WAIT_S = 5.0
NOTICE_S = 1800.0
"""A call may take as long as the work does, so none has a limit of its own: ranks that wait for each other have
collective_timeout_s. After so long, and again, the log says what goes on."""

WATCH = "watch"
"""Concurrency group of Ray: beside the one call of a rank that runs, one that only its death ends."""

log = logging.getLogger(__name__)


class TrainerRankError(RuntimeError):
    """A rank of the trainer died. The others were ended, because they would wait for it for ever."""


class TrainerGroup:
    """Implements `protocols.Trainer` over `num_ranks` ranks of the class that `config` names."""

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model_folder: Path | str,
        algorithm: AlgorithmConfig,
        device: str,
        num_ranks: int,
        seed: int,
        total_updates: int,
        env: dict[str, str] | None = None,
        seats: Sequence[Seat] | None = None,
    ):
        """`env` is the environment of actors; a value that the user has set already wins.

        `seats`, one a rank, say on which machine they run and name their devices. None: one rank, or ranks on a CPU.
        """
        self.num_ranks = num_ranks
        self._config = config
        arguments = {
            "model_folder": str(model_folder),
            "algorithm": algorithm,
            "device": device,
            "num_ranks": num_ranks,
            "seed": seed,
            "total_updates": total_updates,
        }
        if num_ranks == 1:
            self._ranks: _InProcess | _Actors = _InProcess(config, arguments)
        else:
            self._ranks = _Actors(config, arguments, device=device, env=env or {}, seats=seats)

    async def start(self) -> None:
        await self._ranks.start()

    async def step(self, batch: TrainBatch) -> StepStats:
        shares = [([ranks[rank] for ranks in batch.mini_batches], batch.loss_counts) for rank in range(self.num_ranks)]
        stats: list[StepStats] = await self._call("step", shares)
        return stats[0]

    async def logprobs(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[FloatArray]:
        return await self._score("logprobs", prompts, rollouts)

    async def reference_logprobs(self, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[FloatArray]:
        return await self._score("reference_logprobs", prompts, rollouts)

    async def _score(self, method: str, prompts: Sequence[Prompt], rollouts: Sequence[Rollout]) -> list[FloatArray]:
        packed = pack_to_score(
            prompts,
            rollouts,
            num_ranks=self.num_ranks,
            max_tokens_per_micro_batch=self._config.max_tokens_per_micro_batch,
            packing=self._config.packing,
        )
        return packed.unpack(await self._call(method, [(share,) for share in packed.micro_batches]))

    async def manifest(self, version: int) -> UpdateManifest:
        return (await self._call("manifest", [(version,)] * self.num_ranks))[0]

    async def buckets(self) -> AsyncIterator[Bucket]:
        await self._all("open_buckets")
        while (bucket := (await self._all("next_bucket"))[0]) is not None:
            yield bucket

    async def outlet(self, method: str, *arguments: Any) -> Any:
        return _merged(await self._all("outlet", method, *arguments))

    async def post_buckets(self, method: str, *arguments: Any) -> AsyncIterator[RemoteBucket]:
        await self._all("open_buckets")
        while (posted := _merged(await self._all("post_bucket", method, *arguments))) is not None:
            yield posted

    async def copy_posted(self) -> Any:
        return (await self._all("copy_posted"))[0]

    async def weights_digest(self) -> str:
        return join_digests(await self._all("weights_digest"))

    async def device_uses(self) -> list[list[DeviceUse]]:
        return await self._all("device_uses")

    async def release_cache(self) -> None:
        await self._all("release_cache")

    async def offload(self) -> None:
        await self._all("offload")

    async def onload(self) -> None:
        await self._all("onload")

    async def save(self, folder: Path) -> None:
        await self._all("save", folder)

    async def load(self, folder: Path) -> None:
        await self._all("load", folder)

    async def export(self, folder: Path) -> None:
        await self._all("export", folder)

    async def failure(self) -> BaseException:
        return await self._ranks.failure()

    async def close(self) -> None:
        await self._ranks.close()

    async def _all(self, method: str, *arguments: Any) -> list[Any]:
        return await self._call(method, [arguments] * self.num_ranks)

    async def _call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        call = asyncio.ensure_future(self._ranks.call(method, arguments))
        began = time.monotonic()
        try:
            while not (await asyncio.wait({call}, timeout=NOTICE_S))[0]:
                log.warning(
                    "the trainer works at %s for %.0f s%s", method, time.monotonic() - began, self._ranks.phases()
                )
            return call.result()
        finally:
            call.cancel()


class _RankHost:
    """Holds one rank and its open stream of buckets; the body of an actor, or of the trainer thread."""

    def __init__(self, *, buckets_to_cpu: bool, env: Mapping[str, str] = MappingProxyType({})):
        os.environ.update(env)  # Ray may have hidden devices from an actor that asked for none
        self._rank: TrainerRank | None = None
        self._buckets: Iterator[Bucket] | None = None
        self._buckets_to_cpu = buckets_to_cpu
        self._store: Any = None
        self._device = "cpu"
        self._is_first = False
        self._memory: DeviceMemory | None = None
        self._outlet: WeightOutlet | None = None
        self._posted: Bucket = []
        """The bucket that it sends."""

    def where(self) -> Place:
        place = own_place()
        if (path := _phase_file(place)) is not None:
            record_phases(path)
        return place

    def open_store(self) -> str:
        """Serves the ranks' meeting point on a free port, and gives its address."""
        self._store, address = serve_store(own_host())
        return address

    def build(self, config: TrainerConfig, arguments: dict[str, Any]) -> None:
        self._rank = build(config, **arguments)
        self._device = arguments["device"]
        self._is_first = arguments["rank"] == 0
        if self._device == "cuda":
            self._memory = DeviceMemory(
                functools.partial(used_bytes, torch.device("cuda", torch.cuda.current_device()))
            )

    def stay(self) -> None:
        """Never returns: whoever waits for it learns of this process's end at once."""
        threading.Event().wait()

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        enter_phase(method)
        result = self._call(method, arguments)
        enter_phase(f"idle after {method}")
        return result

    def _call(self, method: str, arguments: Sequence[Any]) -> Any:
        of_host = {
            "open_buckets": self._open_buckets,
            "next_bucket": self._send_bucket,
            "post_bucket": self._post_bucket,
            "copy_posted": self._copy_posted,
            "outlet": self._ask_outlet,
            "device_uses": self._device_uses,
            "close": self._close,
        }
        return (of_host.get(method) or getattr(self._built, method))(*arguments)

    def _open_buckets(self) -> None:
        self._buckets = iter(self._built.buckets())

    def _send_bucket(self) -> Bucket | None:
        bucket = self._next_bucket()
        return [(name, tensor.cpu()) for name, tensor in bucket] if bucket and self._buckets_to_cpu else bucket

    def _post_bucket(self, by: str, *arguments: Any) -> Any:
        bucket = self._next_bucket()
        self._posted = bucket or []
        return None if bucket is None else self._ask_outlet(by, bucket, *arguments)

    def _copy_posted(self) -> Any:
        return _held_by_ray(self._posted) if self._is_first else None

    def _device_uses(self) -> list[DeviceUse]:
        return [] if self._memory is None else self._memory.take()

    def _close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._built.close()

    def _next_bucket(self) -> Bucket | None:
        assert self._buckets is not None, "buckets are not open"
        return next(self._buckets, None)

    def _ask_outlet(self, method: str, *arguments: Any) -> Any:
        """On other ranks than 0 only what each does. An error travels as a value: it is no rank's death."""
        if not self._is_first and method not in OF_EVERY_RANK:
            return None
        if self._outlet is None:  # made when it is needed: by then Ray has started, where there is one
            name = f"cuda:{torch.cuda.current_device()}" if self._device == "cuda" else self._device
            self._outlet = WeightOutlet(device=torch.device(name), host=own_host())
        try:
            return getattr(self._outlet, method)(*arguments)
        except EngineError as error:
            return error

    @property
    def is_built(self) -> bool:
        return self._rank is not None

    @property
    def _built(self) -> TrainerRank:
        assert self._rank is not None, "the trainer was not started"
        return self._rank


class _InProcess:
    """One rank on a thread of its own, so that the event loop goes on during a step."""

    def __init__(self, config: TrainerConfig, arguments: dict[str, Any]):
        self._config = config
        self._arguments = arguments | {"rank": 0, "store": None}
        self._host = _RankHost(buckets_to_cpu=False)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainer")

    async def start(self) -> None:
        await self._run(self._host.build, self._config, self._arguments)

    async def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        return [await self._run(self._host.call, method, arguments[0])]

    async def failure(self) -> Never:
        """It lives and dies with this process."""
        await asyncio.Event().wait()
        raise AssertionError("nobody sets that event")

    def phases(self) -> str:
        return ""

    async def close(self) -> None:
        if self._host.is_built:
            await self.call("close", [()])
        self._thread.shutdown()

    async def _run(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, functools.partial(function, *arguments))


class _Actors:
    """Several ranks, each a Ray actor. Ray gives them no devices: their seats do."""

    def __init__(
        self,
        config: TrainerConfig,
        arguments: dict[str, Any],
        *,
        device: str,
        env: dict[str, str],
        seats: Sequence[Seat] | None,
    ):
        self._config = config
        self._arguments = arguments
        self._num_ranks: int = arguments["num_ranks"]
        self._device = device
        self._env = env
        assert seats is not None or device == "cpu", "ranks on GPUs need seats that name them"
        self._seats = seats or [Seat(0, {})] * self._num_ranks
        self._actors: list[Any] = []
        self._places: list[Place] = []
        self._is_started = asyncio.Event()
        self._num_calls = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._error: TrainerRankError | None = None
        """The end of a rank, and so of all."""

    async def start(self) -> None:
        import ray

        ensure_ray()
        # Ray's annotations do not know its own option.
        actor_class: Any = ray.remote(concurrency_groups={WATCH: 1})(_RankHost)  # pyright: ignore[reportCallIssue]
        for seat in self._seats:
            env = self._env_on(seat)
            actor = actor_class.options(
                num_cpus=0, num_gpus=0, max_restarts=0, runtime_env={"env_vars": env}, **seat_options(seat)
            )
            self._actors.append(actor.remote(buckets_to_cpu=True, env=env))
        self._places = await self._gather("where", [a.where.remote() for a in self._actors], START_TIMEOUT_S)
        store = self._actors[0].open_store.remote()
        address = (await self._gather("open_store", [store], START_TIMEOUT_S))[0]
        builds = [
            actor.build.remote(self._config, self._arguments | {"rank": rank, "store": address})
            for rank, actor in enumerate(self._actors)
        ]
        await self._gather("start", builds, START_TIMEOUT_S)
        self._is_started.set()

    def _env_on(self, seat: Seat) -> dict[str, str]:
        """Gloo and NCCL would otherwise listen on the interface that the host name stands for.

        Not on loopback where any process of the run is elsewhere: rank 0 sends weights to its engines, too.
        """
        loopback = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"} if is_on_one_machine() else {}
        return actor_env({**loopback, **self._env, **seat.env}, device=self._device)

    async def call(self, method: str, arguments: Sequence[Sequence[Any]]) -> list[Any]:
        if self._error is not None:
            raise self._error
        assert self._actors, "the trainer was not started"
        self._num_calls += 1
        self._is_idle.clear()
        try:
            references = [actor.call.remote(method, own) for actor, own in zip(self._actors, arguments, strict=True)]
            return await self._gather(method, references, None)
        finally:
            self._num_calls -= 1
            if self._num_calls == 0:
                self._is_idle.set()

    async def failure(self) -> BaseException:
        """Of a rank that dies while nothing is asked of it. During a call the call itself says more."""
        await self._is_started.wait()
        watches = [
            asyncio.ensure_future(_result_of(actor.stay.options(concurrency_group=WATCH).remote()))
            for actor in self._actors
        ]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            while not self._is_idle.is_set():
                await self._is_idle.wait()
            if self._error is None:
                rank, watch = next((rank, watch) for rank, watch in enumerate(watches) if watch.done())
                error = watch.exception()
                assert error is not None, "only the end of its process ends it"
                what = f"{self._name(rank)} of the trainer died while nothing was asked of it{self._phase(rank)}"
                self._error = TrainerRankError(obituary(what, error, self._places[rank]))
                self._error.__cause__ = error
                self._end()
            return self._error
        finally:
            for watch in watches:
                watch.cancel()

    async def _gather(self, method: str, references: list[Any], timeout_s: float | None) -> list[Any]:
        """All results, or the error of the first rank that fails: nobody waits for ranks that wait for a dead one."""

        tasks = [asyncio.ensure_future(_result_of(reference)) for reference in references]
        done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION, timeout=timeout_s)
        if pending and any(task.exception() for task in done):
            # A survivor may notice the broken connection before Ray notices the death behind it.
            late, pending = await asyncio.wait(pending, timeout=ROOT_CAUSE_WAIT_S)
            done |= late
        failed = [(rank, error) for rank, task in enumerate(tasks) if task in done and (error := task.exception())]
        if not pending and not failed:
            return [task.result() for task in tasks]
        if not failed:
            waiting = [self._name(rank) + self._phase(rank) for rank, task in enumerate(tasks) if task in pending]
            self._end()
            raise TrainerRankError(f"{', '.join(waiting)} of the trainer did not finish {method} in {timeout_s:.0f} s")
        for task in pending:
            task.cancel()
        rank, error = _root_cause(failed)
        try:
            self._raise(method, rank, error, silent=[rank for rank, task in enumerate(tasks) if task in pending])
        finally:
            self._end()

    def _raise(self, method: str, rank: int, error: BaseException, *, silent: list[int]) -> NoReturn:
        """`silent` are the ranks that have neither failed nor finished."""
        from ray.exceptions import RayError

        if isinstance(cause := getattr(error, "cause", None), ConfigError):
            raise cause from error
        if not isinstance(error, RayError):
            raise error
        place = self._places[rank] if self._places else None
        text = obituary(f"{self._name(rank)} of the trainer failed in {method}{self._phase(rank)}", error, place)
        if silent and FaultClass.COLLECTIVE_TIMEOUT in text.partition("\n")[0]:
            hanging = ", ".join(f"{self._name(rank)}{self._phase(rank)}" for rank in silent)
            limit = f"backend.trainer.collective_timeout_s={self._config.collective_timeout_s:g}"
            text = f"{hanging} of the trainer hangs in {method}: {FaultClass.COLLECTIVE_TIMEOUT}, {limit}\n{text}"
        self._error = TrainerRankError(text)
        raise self._error from error

    def _name(self, rank: int) -> str:
        return f"rank {rank} (pid {self._places[rank].pid})" if self._places else f"rank {rank}"

    def _phase(self, rank: int) -> str:
        path = _phase_file(self._places[rank]) if self._places else None
        phase = None if path is None else last_phase(path)
        return "" if phase is None else f" (phase: {phase})"

    def phases(self) -> str:
        """What each rank does, where its record is on this machine; for the log."""
        return "".join(f"; {self._name(rank)}{self._phase(rank)}" for rank in range(self._num_ranks))

    def _end(self) -> None:
        for rank, actor in enumerate(self._actors):
            end_process(actor, self._places[rank] if self._places else None)
        self._actors = []

    async def close(self) -> None:
        """Ranks that answer end themselves, as Ray asks them to; of one that is killed Ray would report a death."""
        if not self._actors:
            return
        import ray

        await self.call("close", [()] * self._num_ranks)
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []


async def _result_of(reference: Any) -> Any:
    return await reference


def _held_by_ray(bucket: Bucket) -> Any:
    """A reference to the packed bucket, for actors to take it from at any time."""
    import ray

    return ray.put(pack(bucket))


def _merged(answers: list[Any]) -> Any:
    """Rank 0's answer, with the handles of all ranks. Raises the first error among them."""
    for answer in answers:
        if isinstance(answer, EngineError):
            raise answer
    first = answers[0]
    if isinstance(first, SharedBucket):
        handles = {key: handle for answer in answers if answer is not None for key, handle in answer.handles.items()}
        return replace(first, handles=handles)
    return first


def _phase_file(place: Place) -> Path | None:
    return None if place.log is None else Path(place.log).with_suffix(".phase")


def _root_cause(failed: list[tuple[int, BaseException]]) -> tuple[int, BaseException]:
    """A dead rank explains a survivor's broken connection, an error a wait that took too long; never the reverse."""
    from ray.exceptions import RayActorError

    def is_consequence(error: BaseException) -> bool:
        return classify(str(error)).fault_class in {FaultClass.PEER, FaultClass.COLLECTIVE_TIMEOUT}

    return min(failed, key=lambda one: (not isinstance(one[1], RayActorError), is_consequence(one[1])))
