"""What is particular to an engine in a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.config.schema import ConfigError, Dtype, LocalRolloutConfig
from rl.faults import headline, last_lines
from rl.messages import opened
from rl.placement import ray_runtime
from rl.placement.ray_runtime import actor_env, ensure_ray, set_driver_env, shutdown_ray
from rl.protocols import EngineError
from rl.rollout import remote
from rl.rollout.remote import RemoteEngine, _Call, _EngineHost
from rl.types import FinishReason, Prompt, Rollout, Sampling
from rl.weights.packed import pack, unpack
from tests.engine_use import publish

PROMPT = Prompt("test:0", (), np.arange(2, 8, dtype=np.int32), "", "test")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4)])
def test_tensors_survive_the_way_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]):
    values = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 100).to(dtype)
    ((name, arrived),) = unpack(pack([("weight", values)]))
    assert name == "weight"
    assert (arrived.dtype, arrived.shape) == (values.dtype, values.shape)
    assert torch.equal(arrived, values)
    assert arrived.data_ptr() != values.data_ptr()


def test_a_transposed_tensor_arrives_in_its_own_order():
    values = torch.arange(6.0).reshape(2, 3).T
    assert torch.equal(unpack(pack([("weight", values)]))[0][1], values)


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of libraries, by the user: every actor would get them."""
    for name in [name for name in os.environ if name.startswith(ray_runtime.FORWARDED)]:
        monkeypatch.delenv(name)


def test_what_the_user_has_set_wins_except_over_devices(monkeypatch: pytest.MonkeyPatch, no_settings: None):
    """P158; in the processes of a real run: tests/integration/test_user_environment.py."""
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    env = {"VLLM_LOGGING_LEVEL": "WARNING", "CUDA_VISIBLE_DEVICES": "3", "NCCL_DEBUG": "INFO"}
    expected = {"VLLM_LOGGING_LEVEL": "DEBUG", "CUDA_VISIBLE_DEVICES": "3", "NCCL_DEBUG": "INFO"}
    assert actor_env(env, device="cuda") == expected
    assert actor_env(env, device="cpu") == expected | {"OMP_NUM_THREADS": "1"}
    assert actor_env({"OMP_NUM_THREADS": "4"}, device="cpu") == {"OMP_NUM_THREADS": "4"}
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert actor_env({}, device="cpu") == {"OMP_NUM_THREADS": "2"}
    assert actor_env({"OMP_NUM_THREADS": "4"}, device="cpu") == {"OMP_NUM_THREADS": "2"}


def test_what_a_run_has_set_for_its_driver_is_not_the_users(monkeypatch: pytest.MonkeyPatch, no_settings: None):
    monkeypatch.setattr(ray_runtime._Runtime, "names_set_here", set())
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("NCCL_DEBUG", "unset again after the test")
    monkeypatch.delenv("NCCL_DEBUG")
    set_driver_env({"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "8"})
    assert os.environ["NCCL_DEBUG"] == "INFO"
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert actor_env({"NCCL_DEBUG": "WARN"}, device="cuda") == {"NCCL_DEBUG": "WARN"}


def test_the_users_settings_of_libraries_reach_every_actor_and_their_secrets_none(
    monkeypatch: pytest.MonkeyPatch, no_settings: None
):
    monkeypatch.setattr(ray_runtime._Runtime, "names_set_here", {"NCCL_ALGO"})
    users = {"NCCL_DEBUG": "INFO", "HSA_NO_SCRATCH_RECLAIM": "1", "HF_HOME": "/big/hf", "NCCL_SOCKET_IFNAME": "ib0"}
    others = {"HF_TOKEN": "hf_secretsecret", "NCCL_ALGO": "Ring", "MY_NCCL_DEBUG": "1"}
    for name, value in (users | others).items():
        monkeypatch.setenv(name, value)
    assert actor_env({}, device="cuda") == users
    assert actor_env({"NCCL_DEBUG": "WARN", "NCCL_ALGO": "Tree"}, device="cuda") == users | {"NCCL_ALGO": "Tree"}


@pytest.mark.parametrize("name", ["HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"])
def test_a_second_variable_that_chooses_gpus_is_refused(name: str, monkeypatch: pytest.MonkeyPatch, no_settings: None):
    monkeypatch.setenv(name, "2,3")
    with pytest.raises(ConfigError, match=rf"{name}=2,3 and CUDA_VISIBLE_DEVICES=1"):
        actor_env({"CUDA_VISIBLE_DEVICES": "1"}, device="cuda")
    assert actor_env({"NCCL_DEBUG": "INFO"}, device="cuda") == {"NCCL_DEBUG": "INFO"}


def test_an_obituary_ends_with_the_last_lines_of_the_log(tmp_path: Path):
    log = tmp_path / "worker.err"
    log.write_text("".join(f"line {i}\n" for i in range(30)))
    assert last_lines(str(log), 2) == f"last lines of {log}:\n  line 28\n  line 29"
    assert last_lines(str(tmp_path / "elsewhere")) == ""
    assert last_lines(None) == ""


class SlowEngine:
    """Each call waits until the test lets all of them go."""

    def __init__(self) -> None:
        self.num_running = self.peak = 0
        self.may_end = asyncio.Event()

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        self.num_running += 1
        self.peak = max(self.peak, self.num_running)
        try:
            await self.may_end.wait()
            if group_id % 3 == 1:
                raise ValueError(f"group {group_id}")
            length = len(prompt.token_ids) + 1
            is_response = np.arange(length) == length - 1
            row = np.zeros(length, np.float32)
            versions = np.where(is_response, 0, -1).astype(np.int32)
            ids = np.append(prompt.token_ids, np.int32(0))
            yield Rollout(group_id, 0, ids, is_response, row, 1.0, versions, FinishReason.STOP)
        finally:
            self.num_running -= 1


async def test_a_process_runs_as_many_calls_at_once_as_it_is_given_and_answers_or_forgets_each():
    """Ray itself runs a thousand methods of an actor at once; here a call of `generate` is none of them."""
    host, engine = _EngineHost({}), SlowEngine()
    host._engine = engine  # type: ignore[assignment]  # all that it needs of one
    sampling = Sampling(temperature=1.0, max_new_tokens=8, seed=0)
    calls = [_Call(call_id, PROMPT, call_id, 1, sampling) for call_id in range(1500)]
    await host.submit(calls[:1000])
    await host.submit(calls[1000:])
    await asyncio.sleep(0)
    assert engine.num_running == engine.peak == 1500
    await host.cancel([call_id for call_id in range(1500) if call_id % 3 == 2])
    engine.may_end.set()
    answers: list[tuple[int, Any]] = []
    while len(answers) < 1000:
        answers += opened(await asyncio.wait_for(host.poll(), 5))
    assert sorted(call_id for call_id, _ in answers) == [call_id for call_id in range(1500) if call_id % 3 != 2]
    for call_id, answer in answers:
        if call_id % 3 == 1:
            assert str(answer) == f"ValueError: group {call_id}"
        else:
            assert answer.group_id == call_id
    assert engine.num_running == 0
    assert not host._tasks
    assert not host._results


class PushedEngine:
    """Makes samples as the test pushes them; -1 ends a call."""

    def __init__(self) -> None:
        self.queues: dict[int, asyncio.Queue[int]] = {}

    async def generate(self, prompt: Prompt, *, group_id: int, n: int, sampling: Sampling) -> AsyncIterator[Rollout]:
        queue = self.queues[group_id] = asyncio.Queue()
        while (index := await queue.get()) >= 0:
            is_response = np.arange(3) == 2
            row, versions = np.zeros(3, np.float32), np.where(is_response, 0, -1).astype(np.int32)
            yield Rollout(
                group_id, index, np.arange(3, dtype=np.int32), is_response, row, 1.0, versions, FinishReason.STOP
            )


async def pushed_host(num_calls: int) -> tuple[_EngineHost, dict[int, asyncio.Queue[int]]]:
    host, engine = _EngineHost({}), PushedEngine()
    host._engine = engine  # type: ignore[assignment]
    await host.submit([_Call(i, PROMPT, i, 4, Sampling(1.0, 8, 0)) for i in range(num_calls)])
    await asyncio.sleep(0)
    return host, engine.queues


async def message(host: _EngineHost) -> list[tuple[int, int]]:
    """(call, index of its sample)"""
    return [(call_id, result.index) for call_id, result in opened(await asyncio.wait_for(host.poll(), 5))]


async def test_samples_wait_for_the_rest_of_their_group_and_travel_in_one_message():
    """A message costs the driver a millisecond or two, and a step has thousands of answers."""
    host, queues = await pushed_host(2)
    for index in (2, 0, 3):
        queues[0].put_nowait(index)
    queues[1].put_nowait(1)
    polled = asyncio.ensure_future(message(host))
    await asyncio.sleep(0.1)
    assert not polled.done()
    for index in (1, -1):
        queues[0].put_nowait(index)
    assert await polled == [(0, 2), (0, 0), (0, 3), (1, 1), (0, 1)]
    for index in (0, -1):
        queues[1].put_nowait(index)
    assert await message(host) == [(1, 0)]


async def test_a_group_that_takes_long_does_not_hold_its_samples_for_longer_than_the_limit(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(remote, "HOLD_S", 0.2)
    host, queues = await pushed_host(1)
    began = time.monotonic()
    queues[0].put_nowait(0)
    await asyncio.sleep(0.1)
    queues[0].put_nowait(1)
    assert await message(host) == [(0, 0), (0, 1)]
    assert 0.2 <= time.monotonic() - began < 1.0
    queues[0].put_nowait(2)
    assert await message(host) == [(0, 2)]


async def test_a_group_that_has_ended_waits_for_others_by_a_share_of_its_time_unless_none_is_left(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(remote, "HOLD_FRACTION", 100.0)
    host, queues = await pushed_host(3)
    await asyncio.sleep(0.05)  # so it would wait for 5 s, were it not for the limit of its sample
    monkeypatch.setattr(remote, "HOLD_S", 0.3)
    for index in (0, -1):
        queues[0].put_nowait(index)
    await asyncio.sleep(0.05)
    for index in (0, -1):
        queues[1].put_nowait(index)
    assert await message(host) == [(0, 0), (1, 0)]
    monkeypatch.setattr(remote, "HOLD_S", 60.0)
    for index in (0, -1):
        queues[2].put_nowait(index)
    assert await message(host) == [(2, 0)]


@asynccontextmanager
async def engine_on(folder: Path, **options: Any) -> AsyncIterator[RemoteEngine]:
    engine = RemoteEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=folder, device="cpu", **options)
    await engine.start()
    yield engine
    await engine.close()


async def sample(engine: RemoteEngine, group_id: int = 0) -> list[Rollout]:
    sampling = Sampling(temperature=1.0, max_new_tokens=8, seed=0)
    return [r async for r in engine.generate(PROMPT, group_id=group_id, n=4, sampling=sampling)]


@pytest.mark.slow
def test_an_interrupt_of_the_terminal_does_not_reach_the_engine(tiny_qwen3: Path):
    """Ctrl-C goes to every process of the foreground group; the driver then still wants a checkpoint and an end."""

    async def run() -> None:
        async with engine_on(tiny_qwen3, env={"OMP_NUM_THREADS": "1"}) as engine:
            await publish(engine, AutoModelForCausalLM.from_pretrained(tiny_qwen3), 0)
            assert engine._place is not None
            os.kill(engine._place.pid, signal.SIGINT)
            await asyncio.sleep(0.5)
            assert len(await sample(engine)) == 4
            assert await engine.policy_version() == 0

    asyncio.run(run())
    shutdown_ray()


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path):
    async def run() -> None:
        missing = RemoteEngine(LocalRolloutConfig(), model_folder=tmp_path / "missing", device="cpu")
        with pytest.raises(EngineError, match="missing"):
            await missing.start()
        nowhere = LocalRolloutConfig(_target_="no_such_package.Engine")
        unknown = RemoteEngine(nowhere, model_folder=tmp_path, device="cpu")
        with pytest.raises(ConfigError, match="no_such_package"):
            await unknown.start()

    asyncio.run(run())
    shutdown_ray()


ENDS = {
    "os.kill(os.getpid(), signal.SIGKILL)": "killed by a signal: no word and no exit code, as SIGKILL leaves it",
    "os._exit(3)": "no word and no exit code, as SIGKILL leaves it, or os._exit",  # Ray does not see the 3
    "sys.exit(3)": r"exit: .*exit code 3",
    "raise ImportError('libcudart.so.12: cannot open shared object file')": "import error: ImportError: libcudart",
}
"""What the module of an engine does as it is imported -> what is said first."""


@pytest.mark.slow
def test_how_the_process_of_an_engine_ended_is_the_first_that_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """P155, of real processes; other texts: tests/unit/test_faults.py."""
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path.cwd()}")

    async def end_of(number: int, code: str) -> str:
        (tmp_path / f"end_{number}.py").write_text(f"import os, signal, sys\nprint('on its way', flush=True)\n{code}\n")
        config = LocalRolloutConfig(_target_=f"end_{number}.Engine")
        engine = RemoteEngine(config, model_folder=tmp_path, device="cpu")
        with pytest.raises(EngineError) as caught:
            await engine.start()
        return headline(caught.value)

    async def run() -> list[str]:
        return [await end_of(number, code) for number, code in enumerate(ENDS)]

    for said, expected in zip(asyncio.run(run()), ENDS.values(), strict=True):
        print(said)
        assert re.search(expected, said.partition("\n")[0]), said
    shutdown_ray()


@pytest.mark.slow
def test_ray_is_started_once_and_only_what_was_started_here_is_ended(capfd: pytest.CaptureFixture[str]):
    ensure_ray()
    import ray

    address = ray.get_runtime_context().gcs_address
    ensure_ray()
    assert ray.get_runtime_context().gcs_address == address
    assert address.startswith("127.0.0.1:")
    shutdown_ray()
    assert not ray.is_initialized()
    assert capfd.readouterr() == ("", "")
    ray.init(num_cpus=1, include_dashboard=False, log_to_driver=False)
    ensure_ray()
    shutdown_ray()
    assert ray.is_initialized()
    ray.shutdown()
