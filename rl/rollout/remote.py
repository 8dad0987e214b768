"""Any rollout engine in a process of its own: a Ray actor that hosts it, and the driver's handle.

Calls of `generate` that are made together go in one message, in their order, and results come back in bulk from a
standing request for calls that have ended: a message costs a millisecond, and a step has thousands of rollouts.

The end of the process ends that standing request, so it is noticed at once. A process that lives and hangs is noticed
by a beat that its event loop must answer, and an engine that died or hangs inside a sound process by a question that
it must answer itself.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import os
import time
from collections.abc import AsyncIterator, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl.config.build import build
from rl.config.schema import ConfigError, RolloutConfig
from rl.faults import last_lines
from rl.messages import Parcel, opened, parcel
from rl.placement.ray_runtime import (
    Place,
    Seat,
    actor_env,
    end_process,
    ensure_ray,
    is_here,
    obituary,
    own_place,
    seat_options,
)
from rl.protocols import (
    Bucket,
    EngineCapabilities,
    EngineError,
    Meeting,
    PauseMode,
    RemoteBucket,
    RolloutEngine,
    UpdateManifest,
    UpdateSession,
)
from rl.rollout.liveness import BEAT_INTERVAL_S, PROCESS_LIMIT_S, Probe, as_engine_error, is_done_within
from rl.types import Prompt, Rollout, Sampling
from rl.weights.packed import PackedBucket, pack, unpack

START_TIMEOUT_S = 600.0
CLOSE_TIMEOUT_S = 60.0
HOLD_S = 2.0
"""For which samples of a call that goes on wait in the process of the engine, for the rest of it to go with them."""
HOLD_FRACTION = 0.02
"""Of the time that it took, for which a call that has ended waits there for others, unless none is left."""


@dataclass(frozen=True, slots=True)
class _Call:
    call_id: int
    prompt: Prompt
    group_id: int
    n: int
    sampling: Sampling


_Results = list[tuple[int, Rollout | EngineError]]
"""By `_Call.call_id`."""


class _EngineHost:
    """The body of the actor. Errors that callers know travel as values: Ray would wrap them in its own."""

    def __init__(self, env: dict[str, str]) -> None:
        os.environ.update(env)  # Ray may have hidden devices from an actor that asked for none
        self._probe = Probe()
        self._results: _Results = []
        self._due: asyncio.TimerHandle | None = None
        self._is_due = asyncio.Event()
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._engine: RolloutEngine | None = None
        self._session: UpdateSession | None = None

    @property
    def _started(self) -> RolloutEngine:
        assert self._engine is not None, "the engine was not started"
        return self._engine

    async def where(self) -> Place:
        return own_place()

    async def start(self, config: RolloutConfig, model_folder: str, device: str) -> EngineCapabilities | Exception:
        async def start() -> EngineCapabilities:
            self._probe.has_bounded_steps = device != "cpu"
            engine: RolloutEngine = build(config, model_folder=Path(model_folder), device=device)
            self._engine = engine
            await engine.start()
            return engine.capabilities

        return await _known_error_as_value(start())

    async def submit(self, calls: list[_Call]) -> None:
        for call in calls:
            task = self._tasks[call.call_id] = asyncio.create_task(self._generate(call))
            task.add_done_callback(functools.partial(self._end, call, time.monotonic()))

    async def _generate(self, call: _Call) -> None:
        samples = self._started.generate(call.prompt, group_id=call.group_id, n=call.n, sampling=call.sampling)
        async for rollout in samples:
            self._probe.has_sampled = True
            self._put(call, rollout)

    def _end(self, call: _Call, began: float, task: asyncio.Task[None]) -> None:
        del self._tasks[call.call_id]
        error = None if task.cancelled() else task.exception()
        if error is not None:
            self._put(call, as_engine_error(error))
        if self._results:
            self._be_due_in((time.monotonic() - began) * HOLD_FRACTION if self._tasks else 0.0)

    def _put(self, call: _Call, result: Rollout | EngineError) -> None:
        self._results.append((call.call_id, result))
        self._be_due_in(HOLD_S)

    def _be_due_in(self, seconds: float) -> None:
        """At the latest."""
        loop = asyncio.get_running_loop()
        due_at = loop.time() + seconds
        if self._due is None or self._due.when() > due_at:
            self._stop_timer()
            self._due = loop.call_at(due_at, self._is_due.set)

    def _stop_timer(self) -> None:
        if self._due is not None:
            self._due.cancel()
            self._due = None

    async def cancel(self, call_ids: list[int]) -> None:
        for call_id in call_ids:
            if call_id in self._tasks:
                self._tasks[call_id].cancel()

    async def poll(self) -> Parcel:
        """`_Results` since the last time; waits for some, and for others to go with them."""
        await self._is_due.wait()
        self._is_due.clear()
        self._stop_timer()
        results, self._results = self._results, []
        return parcel(results)

    async def beat(self) -> EngineError | None:
        """The answer itself says that the process is well; the error, that the engine in it is not."""
        return self._probe.look_at(self._started)

    async def call(self, method: str, *arguments: Any) -> Any:
        return await _known_error_as_value(getattr(self._started, method)(*arguments))

    async def command(self, method: str, *arguments: Any) -> Any:
        """A call that may keep the engine from answering anything else."""
        with self._probe.command():
            return await self.call(method, *arguments)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()

    async def open_update(self, manifest: UpdateManifest) -> Any:
        async def open_update() -> None:
            if self._session is not None:
                await self._session.abort()  # does nothing if it has ended; else its caller has left before it opened
            self._session = await self._started.open_update(manifest)

        with self._probe.command():
            return await _known_error_as_value(open_update())

    async def update(self, method: str, *arguments: Any, **options: Any) -> Any:
        assert self._session is not None, "no update is open"
        with self._probe.command():
            return await _known_error_as_value(getattr(self._session, method)(*arguments, **options))

    async def send(self, packed: PackedBucket) -> Any:
        return await self.update("send", unpack(packed))


async def _known_error_as_value(work: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await work
    except (EngineError, ConfigError) as error:
        return error
    except SystemExit as end:  # in an actor's event loop Ray may not see it for minutes
        what = f"process {os.getpid()} of the engine called sys.exit"
        return EngineError(obituary(what, RuntimeError(f"exit code {end.code}"), own_place()))


class RemoteEngine:
    """Implements `protocols.RolloutEngine` for the engine that `config` names. `capabilities` are known once started.

    `env` is the environment of its process, CUDA_VISIBLE_DEVICES included: Ray gives it no device. A value that the
    user has set already wins. `seat` says where it runs in a cluster. Silent for `silence_limit_s`, it is killed.
    """

    capabilities: EngineCapabilities

    def __init__(
        self,
        config: RolloutConfig,
        *,
        model_folder: Path | str,
        device: str,
        env: dict[str, str] | None = None,
        seat: Seat | None = None,
        silence_limit_s: float = PROCESS_LIMIT_S,
    ) -> None:
        self._config = config
        self._model_folder = Path(model_folder)
        self._device = device
        self._env = env or {}
        self._seat = seat
        self._silence_limit_s = silence_limit_s
        self._actor: Any = None
        self._place: Place | None = None
        self._death: str | None = None
        self._is_dead = asyncio.Event()
        self._closing: asyncio.Future[None] | None = None
        self._ids = itertools.count()
        self._waiting: dict[int, asyncio.Queue[Rollout | EngineError]] = {}
        self._outbox: list[_Call] = []
        self._has_outgoing = asyncio.Event()
        self._is_flushed = asyncio.Event()
        self._is_flushed.set()
        self._loops: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        import ray

        ensure_ray()
        env = actor_env({**self._env, **({} if self._seat is None else self._seat.env)}, device=self._device)
        actor_class = ray.remote(_EngineHost).options(
            num_cpus=0, num_gpus=0, max_restarts=0, runtime_env={"env_vars": env}, **seat_options(self._seat)
        )
        self._actor = actor_class.remote(env)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                self._place = await self._ask("start", self._actor.where.remote())
                start = self._actor.start.remote(self._config, str(self._model_folder.resolve()), self._device)
                self.capabilities = await self._ask("start", start)
        except BaseException as error:
            await self.close()
            if isinstance(error, TimeoutError):
                raise EngineError(f"the rollout engine did not start in {START_TIMEOUT_S:.0f} s.") from error
            raise
        loops = (self._send_calls(), self._receive_results(), self._watch())
        self._loops = [asyncio.create_task(loop) for loop in loops]
        for loop in self._loops:
            loop.add_done_callback(self._loop_ended)

    # Requests.

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self._check_running()
        call = _Call(next(self._ids), prompt, group_id, n, sampling)
        results = self._waiting[call.call_id] = asyncio.Queue()
        self._outbox.append(call)
        self._is_flushed.clear()
        self._has_outgoing.set()
        num_left = n
        try:
            while num_left > 0:
                result = await results.get()
                if isinstance(result, EngineError):
                    num_left = 0
                    raise result
                num_left -= 1
                yield result
        finally:
            del self._waiting[call.call_id]
            if num_left > 0:
                self._cancel(call)

    def _cancel(self, call: _Call) -> None:
        if call in self._outbox:
            self._outbox.remove(call)
        elif self._death is None:
            self._actor.cancel.remote([call.call_id])

    async def _send_calls(self) -> None:
        """One message for all calls of a turn of the event loop, and the next only when it has arrived."""
        while True:
            await self._has_outgoing.wait()
            self._has_outgoing.clear()
            calls, self._outbox = self._outbox, []
            if calls:
                await self._ask("generate", self._actor.submit.remote(calls))
            if not self._outbox:
                self._is_flushed.set()

    async def _receive_results(self) -> None:
        while True:
            for call_id, result in opened(await self._ask("generate", self._actor.poll.remote())):
                if call_id in self._waiting:
                    self._waiting[call_id].put_nowait(result)

    def _loop_ended(self, loop: asyncio.Task[None]) -> None:
        if not loop.cancelled() and (error := loop.exception()) is not None:
            self._fail(str(as_engine_error(error)))

    # Health.

    @property
    def death(self) -> str | None:
        """Why it can never answer again; None while it can."""
        return self._death

    async def wait_for_death(self) -> str:
        await self._is_dead.wait()
        assert self._death is not None
        return self._death

    def kill(self, reason: str) -> None:
        """Ends the process at once, and whatever waits for it with `reason`."""
        if self._death is None:
            log = "" if self._place is None else last_lines(self._place.log)
            self._fail("\n".join(line for line in (f"{self._process} was killed: {reason}", log) if line))
            end_process(self._actor, self._place)

    async def _watch(self) -> None:
        while self._death is None:
            await asyncio.sleep(BEAT_INTERVAL_S)
            beat = asyncio.ensure_future(self._ask("beat", self._actor.beat.remote()))
            try:
                if not await is_done_within(beat, self._silence_limit_s):
                    self.kill(f"it has not answered for {self._silence_limit_s:.0f} s: it hangs.")
                elif (error := beat.exception()) is not None:
                    self.kill(str(error))  # does nothing where the process has died and this is its obituary
            finally:
                beat.cancel()

    # Everything else.

    async def policy_version(self) -> int:
        return await self._call("policy_version")

    async def open_update(self, manifest: UpdateManifest) -> _RemoteSession:
        """As the hosted engine does: calls of `generate` made before it finish on the old weights."""
        self._check_running()
        await self._is_flushed.wait()
        self._check_running()
        await self._ask("open_update", self._actor.open_update.remote(manifest), is_cancelled_with_caller=True)
        return _RemoteSession(self)

    @staticmethod
    async def share(bucket: Bucket) -> Any:
        """`bucket` where every engine can take it from, by `send_shared`, for as long as the result is held.

        It lies in Ray's object store, in the host's memory; what is more than the store holds Ray writes to disk.
        """
        import ray
        from ray.exceptions import RayError

        try:
            return await asyncio.to_thread(lambda: ray.put(pack(bucket)))
        except RayError as error:
            raise EngineError(f"Ray's object store did not take a bucket of weights: {error}") from error

    async def pause(self, mode: PauseMode) -> None:
        await self._call("pause", mode, is_cancelled_with_caller=True)

    async def resume(self) -> None:
        await self._call("resume")

    async def weight_digests(self) -> dict[str, str]:
        return await self._command("weight_digests")

    def counters(self) -> dict[str, int]:
        return {}

    async def sleep(self) -> None:
        await self._command("sleep")

    async def wake_weights(self) -> None:
        await self._command("wake_weights")

    async def wake(self) -> None:
        await self._command("wake")

    async def close(self) -> None:
        """Closes the engine and ends its process. May be called twice, after a death, and again when cancelled."""
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        self._fail("the rollout engine was closed.")
        for loop in self._loops:
            loop.cancel()
        await asyncio.gather(*self._loops, return_exceptions=True)
        if self._actor is None:
            return
        import ray
        from ray.exceptions import RayActorError, RayError

        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._actor.close.remote()
        except RayActorError:
            pass  # it is dead, and its number may be another process's by now
        except (RayError, TimeoutError):
            end_process(self._actor, self._place)  # it does not close, or hangs
        ray.kill(self._actor)
        self._actor = None
        if (pid := self._local_pid()) is not None:
            await asyncio.to_thread(_wait_for_end, pid)

    def _local_pid(self) -> int | None:
        """None: not started, or on another machine."""
        return self._place.pid if self._place is not None and is_here(self._place) else None

    async def _command(self, method: str) -> Any:
        self._check_running()
        await self._is_flushed.wait()
        return await self._ask(method, self._actor.command.remote(method))

    async def _call(self, method: str, *arguments: Any, is_cancelled_with_caller: bool = False) -> Any:
        self._check_running()
        await self._is_flushed.wait()
        reference = self._actor.call.remote(method, *arguments)
        return await self._ask(method, reference, is_cancelled_with_caller=is_cancelled_with_caller)

    async def _ask(self, what: str, reference: Any, *, is_cancelled_with_caller: bool = False) -> Any:
        """The actor's answer; an error that it returns is raised as itself."""
        import ray
        from ray.exceptions import RayActorError, RayError

        try:
            result = await reference
        except RayActorError as error:
            self._fail(self._obituary(what, error))
            raise EngineError(self._death) from error
        except asyncio.CancelledError:
            if is_cancelled_with_caller:
                ray.cancel(reference)
            raise
        except RayError as error:
            raise EngineError(obituary(f"{self._process} failed in {what}", error, self._place)) from error
        if isinstance(result, EngineError | ConfigError):
            raise result
        return result

    def _obituary(self, what: str, error: Exception) -> str:
        return obituary(f"{self._process} died during {what}", error, self._place)

    @property
    def _process(self) -> str:
        return "the rollout engine's process" if self._place is None else f"process {self._place.pid} of the engine"

    def _fail(self, reason: str) -> None:
        """Nothing will answer any more."""
        if self._death is not None:
            return
        self._death = reason
        self._is_dead.set()
        for results in self._waiting.values():
            results.put_nowait(EngineError(reason))  # one each: a shared one would collect their tracebacks
        self._is_flushed.set()

    def _check_running(self) -> None:
        if self._death is not None:
            raise EngineError(self._death)
        if self._actor is None:
            raise EngineError("the rollout engine is not started.")


class _RemoteSession:
    """One bucket at a time: the next leaves the trainer when the engine has taken the last."""

    keeps_copies = False

    def __init__(self, engine: RemoteEngine) -> None:
        self._engine = engine

    async def send(self, bucket: Bucket | RemoteBucket) -> None:
        if isinstance(bucket, list):
            await self.send_shared(pack(bucket))
        else:
            await self._update("send", bucket)

    async def send_shared(self, shared: Any) -> None:
        """A bucket that `RemoteEngine.share` has laid out for all engines."""
        self._engine._check_running()
        await self._engine._ask("send", self._engine._actor.send.remote(shared))

    def keep(self, copy: Any) -> None:
        raise AssertionError("one engine starts once, so it keeps no copies")

    async def groups(self) -> list[str | None]:
        return await self._update("groups")

    async def join(self, meeting: Meeting, *, first_rank: int = 1) -> None:
        await self._update("join", meeting, first_rank=first_rank)

    async def commit(self, version: int) -> None:
        await self._update("commit", version)

    async def abort(self) -> None:
        """Nothing on an engine that is dead or closed: it holds no weights."""
        if self._engine._death is None:
            await self._update("abort")

    async def _update(self, method: str, *arguments: Any, **options: Any) -> Any:
        self._engine._check_running()
        return await self._engine._ask(method, self._engine._actor.update.remote(method, *arguments, **options))


def _wait_for_end(pid: int) -> None:
    deadline = time.monotonic() + CLOSE_TIMEOUT_S
    while _is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
