"""The real vLLM engine against the same model in transformers, and its failures."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rl.config.schema import Dtype, VLLMRolloutConfig
from rl.protocols import EngineError, EngineUnfit
from rl.types import FinishReason, Prompt, Rollout, Sampling
from tests.engine_use import logprobs_of, manifest_of, publish, sample_group, weights_of
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


class Session:
    """An engine and the event loop that it belongs to, over several tests."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.engine = self.runner.run(self._start(folder))

    async def _start(self, folder: Path) -> Any:
        engine = new_engine(folder)
        await engine.start()
        return engine

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        async def limited() -> Any:
            return await asyncio.wait_for(coroutine, 60)

        return self.runner.run(limited())


@pytest.fixture(scope="module")
def session(folders: list[Path]) -> Iterator[Session]:
    session = Session(folders[0])
    yield session
    pids = [process.pid for process in session.engine._core._processes]
    session.runner.run(session.engine.close())
    session.runner.close()
    assert not any(is_alive(pid) for pid in pids)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def sample(
    engine: Any, prompt: Prompt = PROMPT, *, n: int = 4, group_id: int = 0, sampling: Sampling = SAMPLING
) -> list[Rollout]:
    return await sample_group(engine, prompt, n=n, group_id=group_id, sampling=sampling)


def test_an_engine_without_weights_refuses_to_sample(session: Session):
    assert session.run(session.engine.policy_version()) == -1
    with pytest.raises(EngineUnfit, match="no weights"):
        session.run(sample(session.engine))


def test_logprobs_are_the_models_at_the_sampling_temperature(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    rollouts = session.run(sample(session.engine, n=8))
    assert [rollout.index for rollout in rollouts] == list(range(8))
    for rollout in rollouts:
        np.testing.assert_array_equal(rollout.token_ids[:10], PROMPT.token_ids)
        assert rollout.loss_mask.tolist() == [False] * 10 + [True] * (len(rollout.token_ids) - 10)
        assert (rollout.min_policy_version, rollout.max_policy_version) == (0, 0)
        # fp32 on both sides, sums in another order
        np.testing.assert_allclose(rollout.rollout_logprobs, logprobs_of(models[0], rollout, 0.7), atol=2e-5)
    assert len({tuple(rollout.token_ids) for rollout in rollouts}) > 4


def test_top_k_logprobs_are_renormalized_over_the_kept_tokens(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    sampling = Sampling(temperature=1.0, max_new_tokens=8, seed=1, top_k=1)
    (rollout,) = session.run(sample(session.engine, n=1, sampling=sampling))
    np.testing.assert_allclose(rollout.rollout_logprobs, 0.0, atol=1e-6)


def test_temperature_zero_takes_the_most_likely_token(session: Session, models: list[Any]):
    import torch

    session.run(publish(session.engine, models[0], 0))
    sampling = Sampling(temperature=0.0, max_new_tokens=12, seed=0)
    (rollout,) = session.run(sample(session.engine, n=1, sampling=sampling))
    with torch.no_grad():
        best = models[0](torch.tensor(rollout.token_ids[None].astype(np.int64))).logits[0].argmax(-1)[9:-1]
    np.testing.assert_array_equal(rollout.token_ids[10:], best.numpy())


def test_equal_seeds_and_an_identical_batch_give_equal_tokens(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    first, again = (session.run(sample(session.engine, n=6)) for _ in range(2))
    other = session.run(sample(session.engine, n=6, group_id=1))
    assert [r.token_ids.tolist() for r in first] == [r.token_ids.tolist() for r in again]
    assert [r.token_ids.tolist() for r in first] != [r.token_ids.tolist() for r in other]


def test_new_weights_are_used_and_no_cached_prefix_of_the_old_ones(session: Session, models: list[Any]):
    for version, model in enumerate([models[0], models[1], models[0]], start=10):
        session.run(publish(session.engine, model, version))
        assert session.run(session.engine.policy_version()) == version
        for rollout in session.run(sample(session.engine, LONG_PROMPT)):
            assert rollout.min_policy_version == version
            np.testing.assert_allclose(rollout.rollout_logprobs, logprobs_of(model, rollout, 0.7), atol=2e-5)


def test_end_of_text_is_a_sampled_token_and_ends_the_answer(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    sampling = Sampling(temperature=2.0, max_new_tokens=200, seed=0)
    rollouts = session.run(sample(session.engine, n=16, sampling=sampling))
    stopped = [rollout for rollout in rollouts if rollout.finish_reason is FinishReason.STOP]
    assert stopped
    for rollout in rollouts:
        answer = rollout.token_ids[10:]
        assert rollout.loss_mask[10:].all()
        assert "<eos>" not in rollout.text
        if rollout in stopped:
            assert answer[-1] == 1
            assert 1 not in answer[:-1]
        else:
            assert len(answer) == 200
            assert rollout.is_truncated


def test_a_stop_string_ends_the_answer_and_stays_in_it(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    plain = session.run(sample(session.engine, n=1))[0]
    stop = plain.text[3:5]
    sampling = Sampling(temperature=0.7, max_new_tokens=12, seed=3, stop=(stop,))
    (rollout,) = session.run(sample(session.engine, n=1, sampling=sampling))
    assert rollout.finish_reason is FinishReason.STOP
    assert rollout.text.endswith(stop)
    assert plain.text.startswith(rollout.text)
    assert rollout.num_response_tokens == len(rollout.text)


def wrong_shape(weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    (name, tensor), *rest = weights
    return [(name, tensor[:-1].clone()), *rest]


def wrong_name(weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    (_, tensor), *rest = weights
    return [("model.nothing.weight", tensor), *rest]


def wrong_dtype(weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    (name, tensor), *rest = weights
    return [(name, tensor.bfloat16()), *rest]


def one_missing(weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return weights[:-1]


def one_twice(weights: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    return [*weights, weights[0]]


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (wrong_shape, "the manifest says"),
        (wrong_name, "not in the manifest"),
        (wrong_dtype, "the manifest says"),
        (one_missing, "1 tensors never arrived"),
        (one_twice, "arrived twice"),
    ],
)
def test_an_incomplete_update_leaves_the_engine_unfit_until_a_complete_one(
    session: Session, models: list[Any], spoil: Callable[[Any], Any], message: str
):
    async def fail() -> None:
        weights = weights_of(models[1])
        update = await session.engine.open_update(manifest_of(weights, 6))
        for pair in spoil(weights):
            await update.send([pair])
        await update.commit(6)

    session.run(publish(session.engine, models[0], 5))
    with pytest.raises(EngineError, match=message):
        session.run(fail())
    assert session.run(session.engine.policy_version()) == 5
    with pytest.raises(EngineUnfit, match="did not complete"):
        session.run(sample(session.engine))
    session.run(publish(session.engine, models[1], 7))
    (rollout,) = session.run(sample(session.engine, n=1))
    np.testing.assert_allclose(rollout.rollout_logprobs, logprobs_of(models[1], rollout, 0.7), atol=2e-5)


def test_a_manifest_that_lacks_part_of_a_fused_layer_is_noticed(session: Session, models: list[Any]):
    async def publish_without_keys() -> None:
        weights = [(name, tensor) for name, tensor in weights_of(models[0]) if "layers.1.self_attn.k_proj" not in name]
        update = await session.engine.open_update(manifest_of(weights, 8))
        await update.send(weights)
        await update.commit(8)

    with pytest.raises(EngineError, match="only in part"):
        session.run(publish_without_keys())
    with pytest.raises(EngineUnfit):
        session.run(sample(session.engine))


def test_an_aborted_update_leaves_the_engine_unfit(session: Session, models: list[Any]):
    async def abort() -> None:
        weights = weights_of(models[1])
        update = await session.engine.open_update(manifest_of(weights, 9))
        await update.send(weights[:3])
        queued = asyncio.ensure_future(sample(session.engine))
        await asyncio.sleep(0)
        await update.abort()
        with pytest.raises(EngineUnfit):
            await queued
        with pytest.raises(EngineError, match="has ended"):
            await update.send(weights[3:])

    session.run(publish(session.engine, models[0], 0))
    session.run(abort())
    with pytest.raises(EngineUnfit):
        session.run(sample(session.engine))
    assert session.run(session.engine.policy_version()) == 0


def test_an_update_waits_for_running_requests_and_new_ones_wait_for_it(session: Session, models: list[Any]):
    async def overlap() -> tuple[list[Rollout], list[Rollout]]:
        running = asyncio.ensure_future(sample(session.engine, sampling=Sampling(1.0, 100, 0)))
        await asyncio.sleep(0)
        publishing = asyncio.ensure_future(publish(session.engine, models[1], 21))
        await asyncio.sleep(0)
        queued = asyncio.ensure_future(sample(session.engine))
        await publishing
        assert running.done()
        return await running, await queued

    session.run(publish(session.engine, models[0], 20))
    before, after = session.run(overlap())
    assert {(r.min_policy_version, r.max_policy_version) for r in before} == {(20, 20)}
    assert {(r.min_policy_version, r.max_policy_version) for r in after} == {(21, 21)}
    for model, rollout, temperature in [(models[0], before[0], 1.0), (models[1], after[0], 0.7)]:
        np.testing.assert_allclose(rollout.rollout_logprobs, logprobs_of(model, rollout, temperature), atol=2e-5)


def test_leaving_generate_early_frees_the_engine(session: Session, models: list[Any]):
    async def leave() -> float:
        generation = session.engine.generate(PROMPT, group_id=0, n=4, sampling=Sampling(1.0, 400, 0))
        await anext(generation)
        await generation.aclose()
        started = time.monotonic()
        await publish(session.engine, models[0], 31)
        return time.monotonic() - started

    session.run(publish(session.engine, models[0], 30))
    assert session.run(leave()) < 2.0
    assert len(session.run(sample(session.engine))) == 4


def test_a_prompt_that_does_not_fit_is_refused_and_others_go_on(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    with pytest.raises(EngineError, match=r"do not fit vLLM's context of 512 tokens"):
        session.run(sample(session.engine, LONG_PROMPT, sampling=Sampling(1.0, 213, 0)))
    outside = Prompt("test:2", (), np.array([2, 5000], dtype=np.int32), "", "test")
    with pytest.raises(EngineError, match="vLLM refused"):
        session.run(sample(session.engine, outside))
    assert len(session.run(sample(session.engine, LONG_PROMPT, sampling=Sampling(1.0, 212, 0)))) == 4


def test_more_prompt_tokens_than_one_iteration_takes_are_sampled_from(session: Session, models: list[Any]):
    """40 prompts of 300 tokens: some iteration has room for a part of a prompt only."""
    draw = np.random.default_rng(0).integers
    prompts = [Prompt(f"test:{i}", (), draw(2, 42, 300).astype(np.int32), "", "test") for i in range(40)]

    async def all_at_once() -> list[list[Rollout]]:
        return await asyncio.gather(*(sample(session.engine, prompt, group_id=i) for i, prompt in enumerate(prompts)))

    session.run(publish(session.engine, models[0], 0))
    groups = session.run(all_at_once())
    for rollout in (groups[0][0], groups[13][1], groups[39][3]):
        np.testing.assert_allclose(rollout.rollout_logprobs, logprobs_of(models[0], rollout, 0.7), atol=2e-5)


def test_sleep_and_wake_follow_the_state_machine(session: Session, models: list[Any]):
    async def cycle() -> list[Rollout]:
        engine = session.engine
        await engine.sleep()
        for call in (engine.sleep(), sample(engine), engine.open_update(manifest_of(weights_of(models[1]), 41))):
            with pytest.raises(EngineError, match="'asleep'"):
                await call
        await engine.wake_weights()
        await publish(engine, models[1], 41)
        with pytest.raises(EngineError, match="except for its weights"):
            await sample(engine)
        await engine.wake()
        with pytest.raises(EngineError, match="'awake'"):
            await engine.wake()
        return await sample(engine)

    session.run(publish(session.engine, models[0], 40))
    assert not session.engine.capabilities.frees_memory_asleep
    assert {rollout.min_policy_version for rollout in session.run(cycle())} == {41}


def test_ctrl_c_does_not_reach_the_core(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    for process in session.engine._core._processes:
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
        (process,) = engine._core._processes
        started = time.monotonic()
        os.kill(process.pid, signal.SIGKILL)
        errors = await asyncio.wait_for(asyncio.gather(*running, updating, queued, return_exceptions=True), 10)
        assert time.monotonic() - started < 5
        for error in errors:
            assert isinstance(error, EngineError), error
            assert f"process {process.pid} was ended by signal 9 (SIGKILL)" in str(error)
            assert "Last lines of" in str(error)
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
        assert not any(is_alive(process.pid) for process in engine._core._processes)
        assert not engine._log_folder.exists()

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
        "    print('CORE', *[p.pid for p in engine._core._processes], flush=True)\n"
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
