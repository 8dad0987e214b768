"""Several engines behind one seam: which of them samples, and what becomes of the work of one that dies."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.config.schema import Dtype, LocalRolloutConfig, VLLMRolloutConfig
from rl.placement.ray_runtime import shutdown_ray
from rl.protocols import (
    Bucket,
    EngineCapabilities,
    EngineError,
    EngineUnfit,
    PauseMode,
    RemoteBucket,
    UpdateManifest,
)
from rl.rollout.local_engine import LocalEngine
from rl.rollout.remote import RemoteEngine
from rl.rollout.replicas import MAX_DEATHS, ReplicaSet
from rl.types import FinishReason, Prompt, Rollout, Sampling
from rl.weights.outlet import WeightOutlet
from rl.weights.publish import publish_weights
from rl.weights.transport import Collective
from tests.engine_use import Source, logprobs_of, manifest_of, publish, sample_group, weights_of
from tests.processes import is_alive
from tests.tiny_models import write_tiny_qwen3

LONG = Sampling(temperature=1.0, max_new_tokens=300, seed=0)
SHORT = Sampling(temperature=1.0, max_new_tokens=8, seed=0)
NO_WEIGHTS = UpdateManifest(0, ())


def prompt_of(group_id: int) -> Prompt:
    length = 5 + group_id % 7
    return Prompt(f"test:{group_id}", (), (np.arange(length, dtype=np.int32) * 7 % 40) + 2, "", "test")


async def until(condition: Callable[[], bool], limit_s: float) -> float:
    """Seconds that it took."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < limit_s, "it did not happen in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - started


# Arithmetic of dispatch, over engines whose samples finish when a test says so.


class Hand:
    """Engine of one set, played by the test: `calls` lists what it was given, `finish` ends one sample of a call."""

    capabilities = EngineCapabilities(seeded=True, loses_weights_asleep=False, renormalizes=True)

    def __init__(self, index: int, may_start: asyncio.Event) -> None:
        self.index = index
        self._may_start = may_start
        self.calls: list[tuple[int, int]] = []
        """(group id, samples)"""
        self.death: str | None = None
        self.version = -1
        self.is_closed = False
        self._is_dead = asyncio.Event()
        self._results: dict[int, asyncio.Queue[int | EngineError]] = {}

    async def start(self) -> None:
        await self._may_start.wait()

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        if self.death is not None:
            raise EngineError(self.death)
        self.calls.append((group_id, n))
        self._results[group_id] = asyncio.Queue()
        for _ in range(n):
            result = await self._results[group_id].get()
            if isinstance(result, EngineError):
                raise result
            yield made_rollout(prompt, group_id, result, by=self.index)

    def finish(self, group_id: int, *indices: int) -> None:
        for index in indices:
            self._results[group_id].put_nowait(index)

    def refuse(self, group_id: int) -> None:
        self._results[group_id].put_nowait(EngineError("the prompt does not fit"))

    def kill(self, reason: str) -> None:
        self.death = reason
        self._is_dead.set()
        for results in self._results.values():
            results.put_nowait(EngineError(reason))

    async def wait_for_death(self) -> str:
        await self._is_dead.wait()
        assert self.death is not None
        return self.death

    async def policy_version(self) -> int:
        if self.death is not None:
            raise EngineError(self.death)
        return self.version

    async def open_update(self, manifest: UpdateManifest) -> Hand:
        return self

    async def share(self, bucket: Bucket) -> Bucket:
        return bucket

    async def send(self, bucket: Bucket) -> None: ...

    async def send_shared(self, shared: Bucket) -> None: ...

    async def commit(self, version: int) -> None:
        self.version = version

    async def abort(self) -> None: ...

    async def pause(self, mode: PauseMode) -> None: ...

    async def resume(self) -> None: ...

    async def weight_digests(self) -> dict[str, str]:
        return {"weight": "0" if self.index < 2 else "1"}

    def counters(self) -> dict[str, int]:
        return {}

    async def sleep(self) -> None: ...

    async def wake_weights(self) -> None: ...

    async def wake(self) -> None: ...

    async def close(self) -> None:
        self.is_closed = True


def made_rollout(prompt: Prompt, group_id: int, index: int, *, by: int) -> Rollout:
    """Of one token, the number of the engine that made it."""
    length = len(prompt.token_ids) + 1
    mask = np.arange(length) == length - 1
    return Rollout(
        group_id=group_id,
        index=index,
        token_ids=np.append(prompt.token_ids, np.int32(by)),
        loss_mask=mask,
        rollout_logprobs=np.zeros(length, np.float32),
        temperature=1.0,
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        finish_reason=FinishReason.LENGTH,
    )


class Table:
    """A set of hands, started and fit."""

    def __init__(self, count: int) -> None:
        self.hands: list[Hand] = []
        """Every engine that was ever made, in the order of their making."""
        self.set = ReplicaSet(self._new, count)
        self.may_start = asyncio.Event()
        self.may_start.set()
        self.tasks: list[asyncio.Task[list[Rollout]]] = []

    def _new(self, index: int) -> Hand:
        self.hands.append(Hand(index, self.may_start))
        return self.hands[-1]

    async def start(self) -> Table:
        await self.set.start()
        await (await self.set.open_update(NO_WEIGHTS)).commit(0)
        return self

    async def ask(self, *sizes: int) -> None:
        """One call after another, of so many samples; their group ids go on from the last."""
        for n in sizes:
            group_id = len(self.tasks)
            work = sample_group(self.set, prompt_of(group_id), n=n, group_id=group_id, sampling=SHORT)
            self.tasks.append(asyncio.create_task(work))
        await self.turn()

    @staticmethod
    async def turn() -> None:
        for _ in range(20):
            await asyncio.sleep(0)

    @property
    def groups(self) -> list[list[int]]:
        """[engine] group ids that it was given."""
        return [[group_id for group_id, _ in hand.calls] for hand in self.hands]


async def test_a_group_goes_whole_to_the_engine_with_the_fewest_unfinished_samples():
    table = await Table(3).start()
    await table.ask(4, 2, 2, 1, 1, 5, 1)
    # Loads after each call: 4,0,0  4,2,0  4,2,2  4,3,2  4,3,3  4,8,3  4,8,4. Equal ones: the lowest index.
    assert table.groups == [[0], [1, 3, 5], [2, 4, 6]]
    assert [n for hand in table.hands for _, n in hand.calls] == [4, 2, 1, 5, 2, 1, 1]
    table.hands[1].finish(5, 0, 1, 2, 3, 4)
    await table.turn()
    await table.ask(1)  # 4,3,4
    assert table.groups[1] == [1, 3, 5, 7]
    await table.set.close()


async def test_a_sample_that_came_makes_room_and_a_caller_that_leaves_all_that_it_had():
    table = await Table(2).start()
    await table.ask(3, 3)
    table.hands[1].finish(1, 2)
    await table.turn()
    await table.ask(1)  # 3,2
    assert table.groups == [[0], [1, 2]]
    table.tasks[0].cancel()
    await table.turn()
    await table.ask(1)  # 0,3
    assert table.groups == [[0, 3], [1, 2]]
    await table.set.close()


async def test_what_waits_for_a_resume_goes_out_in_order_and_to_the_least_loaded():
    table = await Table(2).start()
    await table.set.pause(PauseMode.WAIT)
    await table.ask(1, 2, 1, 1)
    assert table.groups == [[], []]
    table.tasks[2].cancel()
    await table.set.resume()
    await table.turn()
    assert table.groups == [[0, 3], [1]]
    await table.set.close()


async def test_a_dead_engines_groups_go_to_others_and_what_came_is_not_asked_for_again():
    """P118, P121: a lost engine is replaced, and its groups come whole."""
    table = await Table(2).start()
    await table.ask(4, 1)
    table.hands[0].finish(0, 2, 0)
    await table.turn()
    table.may_start.clear()
    table.hands[0].kill("signal 9")
    await table.turn()
    assert table.groups[:2] == [[0], [1, 0]]
    assert table.hands[1].calls[-1] == (0, 4)
    table.hands[1].finish(0, 0, 1, 2, 3)
    group = await table.tasks[0]
    assert [(rollout.index, int(rollout.token_ids[-1])) for rollout in group] == [(0, 0), (1, 1), (2, 0), (3, 1)]
    assert table.set.counters() == {"redispatched_groups": 1, "replica_restarts": 0}
    table.may_start.set()
    await table.turn()
    assert table.set.counters() == {"redispatched_groups": 1, "replica_restarts": 1}
    assert [hand.version for hand in table.hands] == [0, 0, 0]  # the third is the first, started again
    await table.set.close()
    assert all(hand.is_closed for hand in table.hands)


async def test_an_error_of_a_living_engine_is_its_answer():
    table = await Table(2).start()
    await table.ask(1)
    table.hands[0].refuse(0)
    with pytest.raises(EngineError, match="does not fit"):
        await table.tasks[0]
    assert table.set.counters() == {"redispatched_groups": 0, "replica_restarts": 0}
    await table.set.close()


async def test_a_request_that_ends_every_engine_does_so_a_limited_number_of_times():
    table = await Table(2).start()
    await table.ask(1)
    for _ in range(MAX_DEATHS):
        await table.turn()
        next(hand for hand in reversed(table.hands) if hand.calls and hand.death is None).kill("signal 11")
    with pytest.raises(EngineError, match=rf"group 0 was running on {MAX_DEATHS} engines that died.*signal 11"):
        await table.tasks[0]
    await table.set.close()


async def test_a_close_ends_a_sleep_that_waits_for_an_engine_which_is_being_started():
    table = await Table(2).start()
    table.may_start.clear()
    table.hands[0].kill("signal 9")
    await table.turn()
    sleeping = asyncio.create_task(table.set.sleep())
    await table.turn()
    assert not sleeping.done()
    await table.set.close()
    with pytest.raises(EngineError, match="closed"):
        await asyncio.wait_for(sleeping, 5)


async def test_versions_and_weights_that_differ_between_engines_are_an_error():
    table = await Table(3).start()
    table.hands[1].version = 7
    with pytest.raises(EngineError, match=r"different policy versions: \{0: 0, 1: 7, 2: 0\}"):
        await table.set.policy_version()
    with pytest.raises(EngineError, match="parameter weight is not the same in engines 0 and 2"):
        await table.set.weight_digests()
    await table.set.close()


# The real thing: engines in processes of their own.


class Session:
    """A set of two and the event loop that it belongs to, over several tests."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.can_start = True
        self.set = ReplicaSet(self._new, 2)
        self.runner = asyncio.Runner()
        self.run(self.set.start())

    def _new(self, index: int) -> RemoteEngine:
        config = LocalRolloutConfig(dtype=Dtype.float32)
        if not self.can_start:
            config._target_ = "no_such_package.Engine"
        return RemoteEngine(config, model_folder=self.folder, device="cpu")

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(work, 120)

        return self.runner.run(limited())

    @property
    def pids(self) -> list[int]:
        engines: list[Any] = [member.engine for member in self.set._members]
        return [engine._place.pid for engine in engines]

    @property
    def loads(self) -> list[int]:
        return [member.num_unfinished for member in self.set._members]

    async def group(self, group_id: int, *, n: int = 8, sampling: Sampling = LONG) -> list[Rollout]:
        return await sample_group(self.set, prompt_of(group_id), n=n, group_id=group_id, sampling=sampling)

    async def begin(self, num_groups: int) -> list[asyncio.Future[list[Rollout]]]:
        """Groups that are being sampled: one of 8 tokens at most, asked for together with them, has come.

        A time instead would be long enough for all of them on one machine and too short for any on another.
        """
        short = asyncio.ensure_future(self.group(99, n=1, sampling=SHORT))
        groups = [asyncio.ensure_future(self.group(g)) for g in range(num_groups)]
        await short
        return groups

    async def until_restarted(self, num_before: int) -> float:
        return await until(lambda: self.set.counters()["replica_restarts"] == num_before + 1, 90)

    @property
    def num_restarts(self) -> int:
        return self.set.counters()["replica_restarts"]

    async def versions(self) -> list[int]:
        return [await member.engine.policy_version() for member in self.set._members]

    def close(self) -> None:
        self.run(self.set.close())
        self.runner.close()


@pytest.fixture(scope="module", autouse=True)
def ray_ends_with_the_module() -> Iterator[None]:
    yield
    shutdown_ray()


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with different weights."""
    root = tmp_path_factory.mktemp("models")
    return [write_tiny_qwen3(root / str(seed), seed=seed) for seed in range(2)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]


@pytest.fixture(scope="module")
def session(folders: list[Path]) -> Iterator[Session]:
    session = Session(folders[0])
    yield session
    pids = session.pids
    session.close()
    assert not any(is_alive(pid) for pid in pids)


def tokens(group: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in group]


def assert_samples_of(group: list[Rollout], model: Any) -> None:
    for rollout in group:
        expected = logprobs_of(model, rollout, rollout.temperature)
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=1e-5)


@pytest.mark.slow
def test_several_engines_sample_what_one_does_each_with_a_share(session: Session, models: list[Any]):
    async def on_one_engine() -> list[list[Rollout]]:
        engine = LocalEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=session.folder, device="cpu")
        await engine.start()
        await publish(engine, models[0], 0)
        groups = [sample_group(engine, prompt_of(g), n=8, group_id=g, sampling=SHORT) for g in range(12)]
        expected = await asyncio.gather(*groups)
        await engine.close()
        return expected

    async def on_both() -> tuple[list[list[Rollout]], list[int]]:
        work = [asyncio.ensure_future(session.group(g, sampling=SHORT)) for g in range(12)]
        await asyncio.sleep(0)
        loads = session.loads
        return await asyncio.gather(*work), loads

    session.run(publish(session.set, models[0], 0))
    groups, loads = session.run(on_both())
    assert loads == [48, 48]
    assert session.loads == [0, 0]
    assert list(map(tokens, groups)) == list(map(tokens, session.run(on_one_engine())))


@pytest.mark.slow
def test_a_bucket_is_laid_out_once_for_all(session: Session, models: list[Any], monkeypatch: pytest.MonkeyPatch):
    shared: list[int] = []
    share = RemoteEngine.share

    async def counted(bucket: Bucket) -> Any:
        shared.append(len(bucket))
        return await share(bucket)

    monkeypatch.setattr(RemoteEngine, "share", staticmethod(counted))
    session.run(publish(session.set, models[1], 1, per_bucket=5))
    assert sum(shared) == len(weights_of(models[1]))
    assert len(shared) == -(-len(weights_of(models[1])) // 5)
    assert session.run(session.versions()) == [1, 1]


@pytest.mark.slow
def test_a_killed_engine_loses_no_group_and_comes_back_with_the_current_weights(session: Session, models: list[Any]):
    async def kill_amid() -> tuple[list[list[Rollout]], list[list[Rollout]], int]:
        expected = await asyncio.gather(*(session.group(g) for g in range(40)))
        work = await session.begin(40)
        assert min(session.loads) > 0
        os.kill(session.pids[1], signal.SIGKILL)
        noticed_s = await until(lambda: session.set._members[1].engine.death is not None, 10)
        print(f"\ndeath noticed after {noticed_s:.2f} s")
        groups = await asyncio.gather(*work)
        num_redispatched = session.set.counters()["redispatched_groups"]
        print(f"restarted after {await session.until_restarted(num_before) + noticed_s:.1f} s")
        return expected, groups, num_redispatched

    session.run(publish(session.set, models[0], 2))
    num_before, num_redispatched_before = session.num_restarts, session.set.counters()["redispatched_groups"]
    pid = session.pids[1]
    expected, groups, num_redispatched = session.run(kill_amid())
    assert [[rollout.index for rollout in group] for group in groups] == [list(range(8))] * 40
    assert [{rollout.group_id for rollout in group} for group in groups] == [{g} for g in range(40)]
    assert list(map(tokens, groups)) == list(map(tokens, expected))
    assert 1 <= num_redispatched - num_redispatched_before <= 20
    assert not is_alive(pid)
    assert session.pids[1] != pid
    assert session.run(session.versions()) == [2, 2]
    assert tokens(session.run(session.group(1))) == tokens(expected[1])


@pytest.mark.slow
def test_an_engine_that_comes_back_samples_as_before(session: Session, models: list[Any]):
    async def on_the_second() -> list[Rollout]:
        engine = session.set._members[1].engine
        return await sample_group(engine, prompt_of(3), n=8, group_id=3, sampling=LONG)

    async def kill_idle() -> None:
        os.kill(session.pids[1], signal.SIGKILL)
        assert await until(lambda: session.set._members[1].engine.death is not None, 10) < 10
        await session.until_restarted(num_before)

    session.run(publish(session.set, models[1], 3))
    num_before = session.num_restarts
    before = session.run(on_the_second())
    session.run(kill_idle())
    after = session.run(on_the_second())
    assert tokens(after) == tokens(before)
    assert {int(rollout.max_policy_version) for rollout in after} == {3}
    assert_samples_of(after, models[1])
    digests = session.run(session.set.weight_digests())
    assert len(digests) == len(weights_of(models[1]))


@pytest.mark.slow
def test_a_hanging_engine_is_noticed_within_ten_seconds_and_killed(session: Session, models: list[Any]):
    async def stop_amid() -> tuple[float, list[list[Rollout]]]:
        work = await session.begin(8)
        os.kill(pid, signal.SIGSTOP)
        noticed_s = await until(lambda: session.set._members[0].engine.death is not None, 20)
        groups = await asyncio.gather(*work)
        await session.until_restarted(num_before)
        return noticed_s, groups

    session.run(publish(session.set, models[0], 4))
    pid, num_before = session.pids[0], session.num_restarts
    try:
        noticed_s, groups = session.run(stop_amid())
    finally:
        if is_alive(pid) and pid in session.pids:
            os.kill(pid, signal.SIGCONT)
    print(f"\nhang noticed after {noticed_s:.1f} s")
    assert noticed_s < 10
    assert not is_alive(pid)
    assert [[rollout.index for rollout in group] for group in groups] == [list(range(8))] * 8
    assert session.run(session.versions()) == [4, 4]


@pytest.mark.slow
def test_an_engine_that_dies_in_an_update_gets_the_new_weights_as_it_comes_back(session: Session, models: list[Any]):
    async def kill_amid() -> list[list[Rollout]]:
        weights = weights_of(models[1])
        update = await session.set.open_update(manifest_of(weights, 6))
        await update.send(weights[:5])
        os.kill(session.pids[0], signal.SIGKILL)
        await update.send(weights[5:12])
        waiting = [asyncio.ensure_future(session.group(g, sampling=SHORT)) for g in range(4)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        await update.send(weights[12:])
        await update.commit(6)
        assert await session.set.policy_version() == 6
        groups = await asyncio.gather(*waiting)
        await session.until_restarted(num_before)
        return groups

    session.run(publish(session.set, models[0], 5))
    num_before = session.num_restarts
    for group in session.run(kill_amid()):
        assert {rollout.min_policy_version for rollout in group} == {6}
        assert_samples_of(group, models[1])
    assert session.run(session.versions()) == [6, 6]
    session.run(session.set.weight_digests())  # raises where they differ


@pytest.mark.slow
def test_a_broadcast_in_which_an_engine_dies_is_repeated_without_it_and_the_next_group_has_it_again(
    session: Session, models: list[Any], caplog: pytest.LogCaptureFixture
):
    transport = Collective(timeout_s=20.0)
    outlet = WeightOutlet(device=torch.device("cpu"), host="127.0.0.1")

    class Killing(Source):
        """Kills the second engine after its second bucket, once."""

        num_posted = 0

        async def post_buckets(self, method: str, *arguments: Any) -> AsyncIterator[RemoteBucket]:
            async for posted in super().post_buckets(method, *arguments):
                yield posted
                self.num_posted += 1
                if self.num_posted == 2:
                    os.kill(session.pids[1], signal.SIGKILL)

    def num_ranks() -> int:
        meeting = outlet.group()
        assert meeting is not None
        return meeting.num_ranks

    async def by_group(source: Source, version: int) -> None:
        await publish_weights(source, session.set, version=version, transport=transport)  # type: ignore[arg-type]

    async def kill_amid() -> list[list[Rollout]]:
        await by_group(Killing(weights_of(models[1]), outlet=outlet), 6)
        assert num_ranks() == 2
        assert await session.set.policy_version() == 6
        groups = await asyncio.gather(*(session.group(g, sampling=SHORT) for g in range(4)))
        await session.until_restarted(num_before)
        return groups

    session.run(by_group(Source(weights_of(models[0]), outlet=outlet), 5))
    assert num_ranks() == 3
    first, num_before = outlet.group(), session.num_restarts
    for group in session.run(kill_amid()):
        assert {rollout.min_policy_version for rollout in group} == {6}
        assert_samples_of(group, models[1])
    assert "the publish of version 6 failed and is tried again" in caplog.text
    # Back with the current weights, of which the set kept a copy, and in no group yet.
    assert session.run(session.versions()) == [6, 6]
    session.run(session.set.weight_digests())  # raises where they differ
    session.run(by_group(Source(weights_of(models[0]), outlet=outlet), 7))
    assert num_ranks() == 3
    assert outlet.group() != first
    assert session.run(session.versions()) == [7, 7]
    session.run(session.set.weight_digests())
    assert_samples_of(session.run(session.group(0)), models[0])
    outlet.drop()


@pytest.mark.slow
def test_an_engine_that_dies_asleep_is_started_when_the_set_wakes(session: Session, models: list[Any]):
    async def kill_asleep() -> None:
        await session.set.sleep()
        os.kill(session.pids[1], signal.SIGKILL)
        await until(lambda: session.set._members[1].engine.death is not None, 10)
        await asyncio.sleep(1.0)
        assert session.set._members[1].state.value == "down"
        await session.set.wake_weights()
        await publish(session.set, models[0], 8)
        await session.set.wake()
        await session.until_restarted(num_before)

    session.run(publish(session.set, models[1], 7))
    num_before = session.num_restarts
    session.run(kill_asleep())
    assert session.run(session.versions()) == [8, 8]
    assert_samples_of(session.run(session.group(0)), models[0])


@pytest.mark.slow
def test_sleep_waits_for_an_engine_that_is_being_started(session: Session, models: list[Any]):
    async def sleep_amid() -> None:
        os.kill(session.pids[0], signal.SIGKILL)
        await until(lambda: session.set._members[0].state.value == "starting", 20)
        await session.set.sleep()
        assert session.num_restarts == num_before + 1
        await session.set.wake_weights()
        await publish(session.set, models[1], 10)
        await session.set.wake()

    session.run(publish(session.set, models[0], 9))
    num_before = session.num_restarts
    session.run(sleep_amid())
    assert session.run(session.versions()) == [10, 10]


@pytest.mark.slow
def test_one_bad_tensor_leaves_every_engine_unfit_until_a_complete_update(session: Session, models: list[Any]):
    async def fail() -> None:
        weights = weights_of(models[1])
        update = await session.set.open_update(manifest_of(weights, 12))
        await update.send(weights[:3])
        name, tensor = weights[3]
        await update.send([(name, tensor[:-1].clone())])

    session.run(publish(session.set, models[0], 11))
    with pytest.raises(EngineError, match="the manifest says"):
        session.run(fail())
    assert session.run(session.versions()) == [11, 11]
    assert session.run(session.set.policy_version()) == 11
    for engine in [session.set, *(member.engine for member in session.set._members)]:
        with pytest.raises(EngineUnfit, match="did not complete"):
            session.run(sample_group(engine, prompt_of(0), n=1, group_id=0, sampling=SHORT))
    session.run(publish(session.set, models[1], 13))
    assert_samples_of(session.run(session.group(0)), models[1])


@pytest.mark.slow
def test_one_engine_that_refuses_an_update_fails_it_for_all(session: Session, models: list[Any]):
    async def fail() -> None:
        weights = weights_of(models[1])
        update = await session.set.open_update(manifest_of(weights, 15))
        await update.send(weights[:3])
        _, second = update._updates.values()
        await second.send(weights[3:4])  # behind the set's back: for this engine it arrives twice
        await update.send(weights[3:])

    session.run(publish(session.set, models[0], 14))
    with pytest.raises(EngineError, match="arrived twice"):
        session.run(fail())
    assert session.run(session.versions()) == [14, 14]
    with pytest.raises(EngineUnfit):
        session.run(session.group(0))
    session.run(publish(session.set, models[1], 16))
    assert_samples_of(session.run(session.group(0)), models[1])


@pytest.mark.slow
def test_pause_and_resume_reach_every_engine(session: Session, models: list[Any]):
    async def pause() -> tuple[list[list[Rollout]], list[list[Rollout]]]:
        work = await session.begin(4)
        await session.set.pause(PauseMode.KEEP)
        await publish(session.set, models[1], 18)
        late = [asyncio.ensure_future(session.group(g, sampling=SHORT)) for g in range(4, 6)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in late)
        await session.set.resume()
        return await asyncio.gather(*work), await asyncio.gather(*late)

    session.run(publish(session.set, models[0], 17))
    interrupted, late = session.run(pause())
    versions = [{int(v) for r in group for v in np.unique(r.policy_versions[r.loss_mask])} for group in interrupted]
    assert versions == [{17, 18}] * 4
    assert {rollout.min_policy_version for group in late for rollout in group} == {18}


@pytest.mark.slow
def test_requests_wait_while_all_engines_are_being_started_again(session: Session, models: list[Any]):
    async def kill_both() -> list[Rollout]:
        for pid in session.pids:
            os.kill(pid, signal.SIGKILL)
        work = asyncio.ensure_future(session.group(0, sampling=SHORT))
        group = await work
        await until(lambda: session.num_restarts == num_before + 2, 90)
        return group

    session.run(publish(session.set, models[0], 19))
    num_before = session.num_restarts
    assert_samples_of(session.run(kill_both()), models[0])
    assert session.run(session.versions()) == [19, 19]


@pytest.mark.slow
def test_what_died_for_good_says_why_and_nothing_waits_for_it(folders: list[Path], models: list[Any]):
    session = Session(folders[0])

    async def end() -> list[Any]:
        work = await session.begin(6)
        session.can_start = False
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        errors = await asyncio.gather(*work, return_exceptions=True)
        for call in (
            session.group(0),
            session.set.policy_version(),
            session.set.sleep(),
            publish(session.set, models[0], 1),
        ):
            with pytest.raises(EngineError, match="could not be started again"):
                await call
        return errors

    pids = session.pids
    session.run(publish(session.set, models[0], 0))
    errors = session.run(end())
    for error in errors:
        assert isinstance(error, EngineError)
        assert "all 2 engines have died" in str(error)
        assert any(f"process {pid}" in str(error) for pid in pids)
        assert "no_such_package" in str(error)  # why the restarts failed
    session.close()


@pytest.mark.slow
def test_a_close_ends_a_restart_too(folders: list[Path], models: list[Any]):
    session = Session(folders[0])

    async def close_amid() -> set[int]:
        before = own_engine_processes()
        os.kill(session.pids[0], signal.SIGKILL)
        await until(lambda: bool(own_engine_processes() - before), 20)
        await asyncio.sleep(1.0)  # it is importing
        new = own_engine_processes() - before
        await session.set.close()
        return new

    session.run(publish(session.set, models[0], 0))
    pids = session.pids
    new = session.run(close_amid())
    assert len(new) == 1
    assert not any(is_alive(pid) for pid in [*pids, *new])
    session.close()


@pytest.mark.vllm
@pytest.mark.timeout(600)
def test_an_engine_that_dies_in_a_living_process_comes_back_too(tmp_path: Path):
    """vLLM's core is a process below the actor's: either may be killed, and neither outlives the other."""
    folder = write_tiny_qwen3(tmp_path / "model", head_dim=32)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    config = VLLMRolloutConfig(dtype=Dtype.float32, max_num_seqs=64)

    async def kill_each() -> None:
        engines = ReplicaSet(lambda _: RemoteEngine(config, model_folder=folder, device="cpu"), 1)
        await engines.start()
        await publish(engines, model, 0)
        expected = await sample_group(engines, prompt_of(0), n=8, group_id=0, sampling=LONG)
        first: Any = engines._members[0].engine
        (core,) = cores_below(first._place.pid)
        running = asyncio.ensure_future(sample_group(engines, prompt_of(0), n=8, group_id=0, sampling=LONG))
        await sample_group(engines, prompt_of(1), n=1, group_id=99, sampling=SHORT)
        os.kill(core, signal.SIGKILL)
        print(f"\ndeath of the core noticed after {await until(lambda: first.death is not None, 10):.2f} s")
        assert f"process {core} was ended by signal 9" in first.death
        assert tokens(await running) == tokens(expected)
        assert not is_alive(first._place.pid)
        second: Any = engines._members[0].engine
        (core,) = cores_below(second._place.pid)
        os.kill(second._place.pid, signal.SIGKILL)
        await until(lambda: second.death is not None and not is_alive(core), 10)
        await engines.close()

    with asyncio.Runner() as runner:
        runner.run(asyncio.wait_for(kill_each(), 500))


def cores_below(pid: int) -> list[int]:
    """Its vLLM cores, which threads of it have started."""
    children = [
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    ]
    return [child for child in children if "EngineCore" in Path(f"/proc/{child}/cmdline").read_text()]


def own_engine_processes() -> set[int]:
    """By the name that Ray gives an actor's process. Another test beside this one has engines, too."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if "_EngineHost" in " ".join(process.cmdline()):
                found.add(process.pid)
    return found
