"""What the contract suite cannot see of vLLM: its own traps, and how its processes end."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.config.schema import Dtype, VLLMRolloutConfig
from rl.protocols import EngineError, EngineUnfit
from rl.types import Prompt, Rollout, Sampling
from tests.engine_use import EngineSession, logprobs_of, manifest_of, publish, sample_group, weights_of
from tests.processes import is_alive
from tests.tiny_models import write_tiny_qwen3

pytestmark = pytest.mark.vllm

PROMPT = Prompt("test:0", (), np.arange(2, 12, dtype=np.int32), "", "test")
LONG_PROMPT = Prompt("test:1", (), (np.arange(300, dtype=np.int32) % 40) + 2, "", "test")
"""Longer than two blocks of the prefix cache."""
SAMPLING = Sampling(temperature=0.7, max_new_tokens=12, seed=3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with different weights, tied and padded embeddings included."""
    root = tmp_path_factory.mktemp("models")
    # The CPU kernels of attention know no head of 16.
    return [write_tiny_qwen3(root / str(seed), seed=seed, head_dim=32) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    from transformers import AutoModelForCausalLM

    return [AutoModelForCausalLM.from_pretrained(folder).eval() for folder in folders]


def new_engine(folder: Path, *, cpu_cache_gib: int = 1) -> Any:
    from rl.rollout.vllm_engine import VLLMEngine

    config = VLLMRolloutConfig(dtype=Dtype.float32, max_num_seqs=64, cpu_cache_gib=cpu_cache_gib)
    return VLLMEngine(config, model_folder=folder, device="cpu")


@pytest.fixture(scope="module")
def session(folders: list[Path]) -> Iterator[EngineSession]:
    session = EngineSession(new_engine(folders[0]))
    yield session
    session.close()


async def sample(
    engine: Any, prompt: Prompt = PROMPT, *, n: int = 4, group_id: int = 0, sampling: Sampling = SAMPLING
) -> list[Rollout]:
    return await sample_group(engine, prompt, n=n, group_id=group_id, sampling=sampling)


def test_an_empty_bucket_changes_nothing(session: EngineSession, models: list[Any]):
    async def publish_with_empty_bucket() -> list[Rollout]:
        weights = weights_of(models[1])
        update = await session.engine.open_update(manifest_of(weights, 1))
        for bucket in (weights, []):
            await update.send(bucket)
        await update.commit(1)
        return await sample(session.engine)

    for rollout in session.run(publish_with_empty_bucket()):
        np.testing.assert_allclose(rollout.rollout_logprobs, logprobs_of(models[1], rollout, 0.7), atol=2e-5)


def test_a_manifest_that_lacks_part_of_a_fused_layer_is_noticed(session: EngineSession, models: list[Any]):
    async def publish_without_keys() -> None:
        weights = [(name, tensor) for name, tensor in weights_of(models[0]) if "layers.1.self_attn.k_proj" not in name]
        update = await session.engine.open_update(manifest_of(weights, 8))
        await update.send(weights)
        await update.commit(8)

    with pytest.raises(EngineError, match="only in part"):
        session.run(publish_without_keys())
    with pytest.raises(EngineUnfit):
        session.run(sample(session.engine))


def test_a_prompt_may_fill_the_context_and_no_more(session: EngineSession, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    with pytest.raises(EngineError, match=r"do not fit vLLM's context of 512 tokens"):
        session.run(sample(session.engine, LONG_PROMPT, sampling=Sampling(1.0, 213, 0)))
    outside = Prompt("test:2", (), np.array([2, 5000], dtype=np.int32), "", "test")
    with pytest.raises(EngineError, match="add_request failed"):
        session.run(sample(session.engine, outside))
    assert len(session.run(sample(session.engine, LONG_PROMPT, sampling=Sampling(1.0, 212, 0)))) == 4


def test_more_prompt_tokens_than_one_iteration_takes_are_sampled_from(session: EngineSession, models: list[Any]):
    """40 prompts of 300 tokens: some iteration has room for a part of a prompt only."""
    draw = np.random.default_rng(0).integers
    prompts = [Prompt(f"test:{i}", (), draw(2, 42, 300).astype(np.int32), "", "test") for i in range(40)]

    async def all_at_once() -> list[list[Rollout]]:
        return await asyncio.gather(*(sample(session.engine, prompt, group_id=i) for i, prompt in enumerate(prompts)))

    session.run(publish(session.engine, models[0], 0))
    groups = session.run(all_at_once())
    for rollout in (groups[0][0], groups[13][1], groups[39][3]):
        np.testing.assert_allclose(rollout.rollout_logprobs, logprobs_of(models[0], rollout, 0.7), atol=2e-5)


def test_ctrl_c_does_not_reach_the_core(session: EngineSession, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    for process in session.engine._sampler._core._processes:
        os.kill(process.pid, signal.SIGINT)
    time.sleep(0.2)
    assert len(session.run(sample(session.engine))) == 4


def test_the_cores_death_reaches_every_waiter_within_seconds(folders: list[Path], models: list[Any]):
    async def run() -> None:
        engine = new_engine(folders[0])
        await engine.start()
        await publish(engine, models[0], 0)
        long = Sampling(1.0, 490, 0)
        running = [asyncio.ensure_future(sample(engine, group_id=g, n=32, sampling=long)) for g in range(8)]
        await asyncio.sleep(0.2)
        weights = weights_of(models[0])
        updating = asyncio.ensure_future(engine.open_update(manifest_of(weights, 1)))
        await asyncio.sleep(0)
        queued = asyncio.ensure_future(sample(engine))
        await asyncio.sleep(0)
        (process,) = engine._sampler._core._processes
        started = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        errors = await asyncio.wait_for(asyncio.gather(*running, updating, queued, return_exceptions=True), 10)
        assert time.monotonic() - started < 5
        for error in errors:
            assert isinstance(error, EngineError), error
            assert f"process {process.pid} was ended by signal 9 (SIGKILL)" in str(error)
            assert "last lines of" in str(error)
        for call in (sample(engine), engine.policy_version(), engine.sleep()):
            with pytest.raises(EngineError, match="SIGKILL"):
                await call
        await asyncio.wait_for(engine.close(), 10)
        assert not is_alive(process.pid)

    asyncio.run(run())


def test_a_core_that_cannot_start_says_why(folders: list[Path]):
    async def run() -> None:
        engine = new_engine(folders[0], cpu_cache_gib=100_000)
        with pytest.raises(EngineError, match=r"vLLM did not start(.|\n)*less than requested memory"):
            await engine.start()
        await engine.close()

    asyncio.run(run())


def test_closing_an_engine_whose_start_was_cancelled_leaves_no_core(folders: list[Path]):
    async def run() -> None:
        engine = new_engine(folders[0])
        starting = asyncio.ensure_future(engine.start())
        await asyncio.sleep(1)
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
        await engine.close()
        assert not any(is_alive(process.pid) for process in engine._sampler._core._processes)
        assert not engine._sampler._log_folder.exists()

    asyncio.run(run())


def test_no_core_outlives_a_killed_parent(folders: list[Path], tmp_path: Path):
    import subprocess
    import sys

    script = tmp_path / "parent.py"
    script.write_text(
        "import asyncio, os, signal, sys\n"
        "from pathlib import Path\n"
        "from rl.config.schema import Dtype, VLLMRolloutConfig\n"
        "from rl.rollout.vllm_engine import VLLMEngine\n"
        "async def main():\n"
        "    config = VLLMRolloutConfig(dtype=Dtype.float32)\n"
        "    engine = VLLMEngine(config, model_folder=Path(sys.argv[1]), device='cpu')\n"
        "    await engine.start()\n"
        "    print('CORE', *[p.pid for p in engine._sampler._core._processes], flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "if __name__ == '__main__':\n"
        "    asyncio.run(main())\n"
    )
    done = subprocess.run(
        [sys.executable, str(script), str(folders[0])], stdout=subprocess.PIPE, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("CORE")]
    pids = [int(pid) for pid in line.split()[1:]]
    deadline = time.monotonic() + 5
    while any(is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert pids and not any(is_alive(pid) for pid in pids)
