"""What every trainer does, whatever its number of ranks: one in this process, two as Ray actors."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from rl.config.schema import ConfigError, Dtype, FSDPConfig, GRPOConfig, OptimizerConfig, Packing
from rl.protocols import Trainer
from rl.trainer.group import TrainerGroup, TrainerRankError
from rl.trainer.packing import pack
from rl.types import TrainBatch
from tests.made_groups import made_batch

pytestmark = pytest.mark.asyncio(loop_scope="module")

TWO_RANKS = pytest.param(2, marks=pytest.mark.slow, id="two-ranks")
RANKS = [pytest.param(1, id="one-rank"), TWO_RANKS]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(
        num_cpus=2,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


def group(folder: Path, num_ranks: int) -> TrainerGroup:
    return TrainerGroup(
        FSDPConfig(optimizer=OptimizerConfig(lr=1e-2), compute_dtype=Dtype.float32),
        model_folder=folder,
        algorithm=GRPOConfig(prompts_per_step=4, group_size=4, prompts_per_mini_batch=2, kl_coef=0.01),
        device="cpu",
        num_ranks=num_ranks,
        seed=0,
        total_updates=20,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(request: pytest.FixtureRequest, tiny_qwen3: Path) -> AsyncIterator[TrainerGroup]:
    if request.param > 1:
        request.getfixturevalue("ray_cluster")
    built = group(tiny_qwen3, request.param)
    await built.start()
    yield built
    await built.close()


def batch(num_ranks: int, seed: int, *, num_groups: int = 4, **options) -> TrainBatch:
    return pack(
        made_batch(num_groups, 4, seed=seed, **options),
        prompts_per_mini_batch=num_groups // 2,
        num_ranks=num_ranks,
        max_tokens_per_micro_batch=40,
        packing=Packing.tokens,
        policy_version=0,
        skip_zero_advantage=False,
    )


async def weights(of: Trainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for bucket in of.buckets() for name, tensor in bucket}


@pytest.mark.parametrize("trainer", RANKS, indirect=True)
async def test_a_step_updates_the_weights_that_buckets_send(trainer):
    before = await weights(trainer)
    stats = await trainer.step(batch(trainer.num_ranks, 0))
    after = await weights(trainer)
    assert stats.num_updates == 2
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("trainer", RANKS, indirect=True)
async def test_buckets_are_the_manifest_in_order(trainer):
    manifest = await trainer.manifest(3)
    sent = [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        async for bucket in trainer.buckets()
        for name, tensor in bucket
    ]
    assert sent == [(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors]
    assert manifest.version == 3


@pytest.mark.parametrize("trainer", RANKS, indirect=True)
async def test_buckets_can_be_left_early_and_opened_again(trainer):
    async for _ in trainer.buckets():
        break
    assert len(await weights(trainer)) == len((await trainer.manifest(0)).tensors)


@pytest.mark.parametrize("trainer", RANKS, indirect=True)
async def test_offload_and_onload_change_nothing(trainer):
    await trainer.step(batch(trainer.num_ranks, 0))
    before = await weights(trainer)
    await trainer.offload()
    await trainer.onload()
    after = await weights(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (await trainer.step(batch(trainer.num_ranks, 1))).num_updates == 2


@pytest.mark.parametrize("trainer", RANKS, indirect=True)
async def test_load_goes_back_to_what_was_saved(trainer, tmp_path):
    await trainer.step(batch(trainer.num_ranks, 0))
    await trainer.save(tmp_path)
    first = (await trainer.step(batch(trainer.num_ranks, 1))).metrics
    await trainer.step(batch(trainer.num_ranks, 2))
    await trainer.load(tmp_path)
    assert (await trainer.step(batch(trainer.num_ranks, 1))).metrics == first


@pytest.mark.parametrize("trainer", RANKS, indirect=True)
async def test_export_holds_the_weights_that_buckets_send(trainer, tmp_path):
    await trainer.step(batch(trainer.num_ranks, 0))
    await trainer.export(tmp_path)
    expected = await weights(trainer)
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("trainer", [pytest.param(1, id="one-rank")], indirect=True)
async def test_the_event_loop_goes_on_during_a_step(trainer):
    stepping = asyncio.ensure_future(trainer.step(batch(1, 0)))
    ticks = 0
    while not stepping.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 1 and stepping.result().num_updates == 2


@pytest.mark.slow
async def test_two_ranks_equal_one(tiny_qwen3, ray_cluster, tmp_path):
    """Three steps of two updates, with a KL term; then a checkpoint of two ranks goes on with one."""
    one, two = group(tiny_qwen3, 1), group(tiny_qwen3, 2)
    await one.start()
    await two.start()
    for seed in range(3):
        expected = (await one.step(batch(1, seed))).metrics
        got = (await two.step(batch(2, seed))).metrics
        assert expected.keys() == got.keys()
        for key, value in expected.items():
            assert got[key] == pytest.approx(value, abs=1e-6, rel=1e-4), key
        assert got["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    ours, theirs = await weights(one), await weights(two)
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, atol=2e-4, rtol=1e-3, msg=name)
    await two.save(tmp_path)
    await one.load(tmp_path)
    loaded = await weights(one)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in theirs.items())
    expected = (await two.step(batch(2, 9))).metrics
    got = (await one.step(batch(1, 9))).metrics
    assert got["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    assert got["train/lr"] == expected["train/lr"]
    await one.close()
    await two.close()


@pytest.mark.slow
async def test_ranks_with_very_unequal_work_do_not_hang(tiny_qwen3, ray_cluster):
    trainer = group(tiny_qwen3, 2)
    await trainer.start()
    lopsided = batch(2, 0, num_groups=2, response_tokens=[100, 1, 1, 1])
    stats = await asyncio.wait_for(trainer.step(lopsided), timeout=30)
    assert stats.num_updates == 2
    lonely = batch(2, 1, num_groups=2)
    for micro in (micro for ranks in lonely.mini_batches for micro in ranks[1]):
        micro.loss_mask[:] = False
    assert (await asyncio.wait_for(trainer.step(lonely), timeout=30)).num_updates == 2
    await trainer.close()


@pytest.mark.slow
async def test_a_rank_that_dies_is_named_and_nothing_hangs(tiny_qwen3, ray_cluster):
    trainer = group(tiny_qwen3, 2)
    await trainer.start()
    os.kill(trainer._ranks._pids[1], signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(TrainerRankError, match=r"rank 1 \(pid \d+\) of the trainer failed in step"):
        await asyncio.wait_for(trainer.step(batch(2, 0)), timeout=60)
    assert time.monotonic() - begin < 60
    await trainer.close()


@pytest.mark.slow
async def test_more_ranks_than_cores_are_refused_by_name(tiny_qwen3, ray_cluster):
    trainer = group(tiny_qwen3, 3)
    with pytest.raises(ConfigError, match=r"placement\.trainer_ranks=3"):
        await trainer.start()


async def test_an_error_of_the_rank_is_raised_as_it_is(tmp_path):
    trainer = group(tmp_path / "absent", 1)
    with pytest.raises(OSError, match="absent"):
        await trainer.start()
