"""What every trainer does, whatever library holds the model and however many ranks: one in this process, or two as
Ray actors."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM

from rl.config.algorithms import GRPOConfig
from rl.config.schema import Dtype, FSDPConfig, MegatronConfig, OptimizerConfig, Packing, TrainerConfig
from rl.protocols import EngineError, Trainer, WeightSource
from rl.run_folder import Checkpoints, open_checkpoint
from rl.trainer.group import TrainerGroup, TrainerRankError
from rl.types import Prompt, Rollout, RolloutGroup, TrainBatch
from rl.weights.inlet import WeightInlet
from rl.weights.kept import KeptWeights
from tests.engine_use import logprobs_of
from tests.made_groups import made_batch, made_group
from tests.made_groups import packed as packed_batch
from tests.megatron.on_cpu import megatron_on_cpu  # noqa: F401

pytestmark = pytest.mark.asyncio(loop_scope="module")

TRAINERS = [
    pytest.param((FSDPConfig, 1), id="fsdp_one_rank"),
    pytest.param((FSDPConfig, 2), marks=pytest.mark.slow, id="fsdp_two_ranks"),
    pytest.param((MegatronConfig, 1), marks=pytest.mark.megatron, id="megatron_one_rank"),
]


@pytest.fixture(scope="module")
def ray_cluster() -> Iterator[None]:
    import ray

    ray.init(
        num_cpus=4,  # of which the module's shared trainer keeps two
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _node_ip_address="127.0.0.1",
    )
    yield
    ray.shutdown()


def group(
    folder: Path,
    num_ranks: int,
    *,
    config: type[TrainerConfig] = FSDPConfig,
    lr: float = 1e-2,
    env: dict[str, str] | None = None,
) -> TrainerGroup:
    return TrainerGroup(
        config(optimizer=OptimizerConfig(lr=lr), compute_dtype=Dtype.float32, max_tokens_per_micro_batch=40),
        model_folder=folder,
        algorithm=GRPOConfig(prompts_per_step=4, group_size=4, prompts_per_mini_batch=2, kl_coef=0.01),
        device="cpu",
        num_ranks=num_ranks,
        seed=0,
        total_updates=20,
        env=env,
    )


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(request: pytest.FixtureRequest, tiny_qwen3: Path) -> AsyncIterator[TrainerGroup]:
    config, num_ranks = request.param
    if num_ranks > 1:
        request.getfixturevalue("ray_cluster")
    if config is MegatronConfig:
        request.getfixturevalue("megatron_on_cpu")
    built = group(tiny_qwen3, num_ranks, config=config)
    await built.start()
    yield built
    await built.close()


def batch(num_ranks: int, seed: int, *, num_groups: int = 4, **options) -> TrainBatch:
    return packed(made_batch(num_groups, 4, seed=seed, **options), num_ranks)


def packed(
    groups: list[RolloutGroup],
    num_ranks: int,
    *,
    max_tokens: int = 40,
    packing: Packing = Packing.tokens,
    updates: int = 2,
) -> TrainBatch:
    return packed_batch(
        groups,
        prompts_per_mini_batch=len(groups) // updates,
        num_ranks=num_ranks,
        max_tokens_per_micro_batch=max_tokens,
        packing=packing,
    )


async def weights(of: WeightSource) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() async for bucket in of.buckets() for name, tensor in bucket}


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_kept_weights_are_those_of_their_moment_though_the_trainer_trains_on(trainer):
    before = await weights(trainer)
    kept = await KeptWeights.of(trainer, 3)
    await trainer.step(batch(trainer.num_ranks, 0))
    for name, tensor in (await weights(kept)).items():
        assert torch.equal(tensor, before[name])
    assert await kept.manifest(3) == await trainer.manifest(3)
    assert kept.num_bytes == sum(tensor.nbytes for tensor in before.values())
    later = await weights(await KeptWeights.of(trainer, 4))
    assert any(not torch.equal(later[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_a_step_updates_the_weights_that_buckets_send(trainer):
    before = await weights(trainer)
    stats = await trainer.step(batch(trainer.num_ranks, 0))
    after = await weights(trainer)
    assert stats.num_updates == 2
    assert any(not torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_the_digest_of_the_weights_changes_with_them_alone(trainer):
    before = await trainer.weights_digest()
    await weights(trainer)
    assert await trainer.weights_digest() == before
    await trainer.step(batch(trainer.num_ranks, 0))
    assert await trainer.weights_digest() != before


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_the_first_loss_is_that_of_the_first_update(trainer):
    """Of two updates the mean of both is the step's loss; of one its own."""
    groups = made_batch(4, 4, seed=5)
    two = await trainer.step(packed(groups, trainer.num_ranks))
    one = await trainer.step(packed(groups, trainer.num_ranks, updates=1))
    assert two.first_loss != pytest.approx(two.metrics["train/loss"], rel=1e-9)
    assert one.first_loss == pytest.approx(one.metrics["train/loss"], rel=1e-9)


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_buckets_are_the_manifest_in_order(trainer):
    manifest = await trainer.manifest(3)
    sent = [
        (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        async for bucket in trainer.buckets()
        for name, tensor in bucket
    ]
    assert sent == [(spec.name, spec.dtype, spec.shape) for spec in manifest.tensors]
    assert manifest.version == 3


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_buckets_can_be_left_early_and_opened_again(trainer):
    async for _ in trainer.buckets():
        break
    assert len(await weights(trainer)) == len((await trainer.manifest(0)).tensors)


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_buckets_that_rank_zero_broadcasts_or_stores_are_those_that_it_hands_over(trainer, tmp_path):
    expected = await weights(trainer)
    inlet = WeightInlet(torch.device("cpu"))
    meeting = await trainer.outlet("meet", 1, 60.0)
    await asyncio.gather(trainer.outlet("join"), asyncio.to_thread(inlet.join, meeting, rank=1))
    assert await trainer.outlet("group") == meeting
    for posting in (trainer.post_buckets("broadcast"), trainer.post_buckets("store", str(tmp_path))):
        received: dict[str, torch.Tensor] = {}
        num_bytes = 0
        async for posted in posting:
            received |= await asyncio.to_thread(inlet.fetch, posted)
            num_bytes += posted.num_bytes
        await trainer.outlet("finish")
        assert received.keys() == expected.keys()
        assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
        assert num_bytes == sum(tensor.nbytes for tensor in expected.values())
    assert list(tmp_path.iterdir()) == []
    await trainer.outlet("drop")
    inlet.leave()


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_an_engine_that_does_not_come_is_an_error_and_no_ranks_death(trainer):
    await trainer.outlet("meet", 1, 0.5)
    with pytest.raises(EngineError, match=r"1 of 1 engine workers did not come .* within 0\.5 s: rank\(s\) 1 of 2"):
        await trainer.outlet("join")
    assert await trainer.outlet("group") is None
    assert len(await weights(trainer)) == len((await trainer.manifest(0)).tensors)


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_offload_and_onload_change_nothing(trainer):
    await trainer.step(batch(trainer.num_ranks, 0))
    before = await weights(trainer)
    await trainer.release_cache()
    await trainer.offload()
    await trainer.onload()
    after = await weights(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (await trainer.step(batch(trainer.num_ranks, 1))).num_updates == 2


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_load_goes_back_to_what_was_saved(trainer, tmp_path):
    await trainer.step(batch(trainer.num_ranks, 0))
    await trainer.save(tmp_path)
    first = (await trainer.step(batch(trainer.num_ranks, 1))).metrics
    after = await weights(trainer)
    await trainer.step(batch(trainer.num_ranks, 2))
    await trainer.load(tmp_path)
    assert (await trainer.step(batch(trainer.num_ranks, 1))).metrics == first
    again = await weights(trainer)
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_export_holds_the_weights_that_buckets_send(trainer, tmp_path):
    await trainer.step(batch(trainer.num_ranks, 0))
    await trainer.export(tmp_path)
    expected = await weights(trainer)
    for name, parameter in AutoModelForCausalLM.from_pretrained(tmp_path).named_parameters():
        assert torch.equal(parameter, expected[name]), name


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_logprobs_of_packed_sequences_equal_padded_ones_of_the_exported_model(trainer, tmp_path):
    """The trainer itself says how far it is from log-probs that plain transformers computed on a padded batch."""
    await trainer.step(batch(trainer.num_ranks, 0))
    await trainer.export(tmp_path)
    groups = made_batch(4, 4, seed=1, temperature=0.8)
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    fill_padded_logprobs(tmp_path, rollouts, temperature=0.8)
    metrics = (await trainer.step(packed(groups, trainer.num_ranks))).metrics
    assert metrics["mismatch/logprob_diff_max"] < 1e-5
    assert metrics["mismatch/kl_k3"] < 1e-9


def fill_padded_logprobs(folder: Path, rollouts: list, *, temperature: float) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder)
    longest = max(len(rollout.token_ids) for rollout in rollouts)
    ids, mask = (torch.zeros(len(rollouts), longest, dtype=torch.int64) for _ in range(2))
    for row, rollout in enumerate(rollouts):
        ids[row, : len(rollout.token_ids)] = torch.from_numpy(rollout.token_ids)
        mask[row, : len(rollout.token_ids)] = 1
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1] / temperature
    logprobs = logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0].numpy()
    for row, rollout in enumerate(rollouts):
        values = np.concatenate([[0.0], logprobs[row, : len(rollout.token_ids) - 1]])
        rollout.rollout_logprobs = np.where(rollout.loss_mask, values, 0.0).astype(np.float32)


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_logprobs_equal_those_of_plain_transformers(trainer, tmp_path):
    """Prompts, answers and temperatures of all kinds, in several micro-batches; back in the order given."""
    await trainer.step(batch(trainer.num_ranks, 0))
    await trainer.export(tmp_path)
    groups = groups_of_all_kinds()
    prompts, rollouts = prompts_and_rollouts(groups)
    got = await trainer.logprobs(prompts, rollouts)
    assert [len(values) for values in got] == [len(rollout.token_ids) for rollout in rollouts]
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    for values, rollout in zip(got, rollouts, strict=True):
        np.testing.assert_allclose(values, logprobs_of(model, rollout, rollout.temperature), atol=1e-5)
        assert values.dtype == np.float32
        assert not values[~rollout.loss_mask].any()


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_reference_logprobs_are_those_of_the_initial_policy(trainer, tiny_qwen3):
    prompts, rollouts = prompts_and_rollouts(groups_of_all_kinds())
    await trainer.step(batch(trainer.num_ranks, 5))
    model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
    for values, rollout in zip(await trainer.reference_logprobs(prompts, rollouts), rollouts, strict=True):
        np.testing.assert_allclose(values, logprobs_of(model, rollout, rollout.temperature), atol=1e-5)


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_logprobs_leave_the_trainer_as_it_was(trainer, tmp_path):
    """Also where there are fewer rollouts than ranks."""
    await trainer.save(tmp_path)
    expected = (await trainer.step(batch(trainer.num_ranks, 1))).metrics
    await trainer.load(tmp_path)
    prompts, rollouts = prompts_and_rollouts(groups_of_all_kinds())
    before = await weights(trainer)
    (alone,) = await trainer.logprobs(prompts[:1], rollouts[:1])
    np.testing.assert_allclose(alone, (await trainer.logprobs(prompts, rollouts))[0], atol=1e-5)
    after = await weights(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (await trainer.step(batch(trainer.num_ranks, 1))).metrics == expected


def groups_of_all_kinds() -> list[RolloutGroup]:
    """More tokens than the shared trainer takes in one micro-batch of 40."""
    kinds = [(3, [1, 9], 1.0), (11, [5, 2], 0.7), (6, [14, 1], 1.3), (1, [30, 3], 0.7)]
    return [
        made_group([0.0, 1.0], group_id=place, prompt_tokens=prompt, response_tokens=lengths, temperature=temperature)
        for place, (prompt, lengths, temperature) in enumerate(kinds)
    ]


def prompts_and_rollouts(groups: list[RolloutGroup]) -> tuple[list[Prompt], list[Rollout]]:
    pairs = [(group.prompt, rollout) for group in groups for rollout in group.rollouts]
    return [prompt for prompt, _ in pairs], [rollout for _, rollout in pairs]


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_accumulation_equals_one_large_batch(trainer, tmp_path):
    """One micro-batch per update and rank, several, and one per sequence. The gradient's norm stands for the gradient:
    AdamW turns its rounding, where it is near 0, into steps of any size."""
    await trainer.save(tmp_path)
    seen = []
    for max_tokens, packing in ((10_000, Packing.tokens), (24, Packing.tokens), (1, Packing.one_sequence)):
        await trainer.load(tmp_path)
        made = packed(made_batch(4, 4, seed=3), trainer.num_ranks, max_tokens=max_tokens, packing=packing)
        metrics = (await trainer.step(made)).metrics
        seen.append((len(made.mini_batches[0][0]), metrics))
    (whole, expected), *split = seen
    assert whole == 1 and all(num_micro > 1 for num_micro, _ in split)
    for _, metrics in split:
        assert metrics["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
        assert metrics["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-4)
        assert metrics["train/entropy"] == pytest.approx(expected["train/entropy"], rel=1e-5)


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_a_gradient_that_is_not_finite_is_skipped_and_counted(trainer):
    before = await weights(trainer)
    poisoned = batch(trainer.num_ranks, 0)
    for update in poisoned.mini_batches:
        micro = update[-1][0]  # of the last rank: the others must skip too
        micro.advantages[micro.loss_mask.nonzero()[0][0]] = np.nan
    stats = await trainer.step(poisoned)
    assert stats.num_updates == 0 and stats.metrics["train/skipped_updates"] == 2.0
    after = await weights(trainer)
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert (await trainer.step(batch(trainer.num_ranks, 1))).num_updates == 2


@pytest.mark.parametrize("trainer", TRAINERS, indirect=True)
async def test_the_event_loop_goes_on_during_a_step(trainer):
    stepping = asyncio.ensure_future(trainer.step(batch(trainer.num_ranks, 0)))
    ticks = 0
    while not stepping.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert ticks > 1 and stepping.result().num_updates == 2


@pytest.mark.slow
async def test_two_ranks_equal_one(tiny_qwen3, ray_cluster, tmp_path):
    """Two steps of two updates, with a KL term; then each goes on from the other's checkpoint.

    At this rate weights move by 4e-5 at most, and by what AdamW makes of rounding far less than 1e-6.
    """
    one, two = group(tiny_qwen3, 1, lr=1e-5), group(tiny_qwen3, 2, lr=1e-5)
    await one.start()
    await two.start()
    begin = await weights(one)
    for seed in range(2):
        await assert_equal_steps(one, two, seed)
    ours, theirs = await weights(one), await weights(two)
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, atol=1e-6, rtol=0, msg=name)
        assert (tensor - begin[name]).abs().max() > 1e-5, name
    for saved, loaded in ((two, one), (one, two)):
        folder = tmp_path / f"of_{saved.num_ranks}"
        folder.mkdir()
        await saved.save(folder)
        await loaded.load(folder)
        expected, got = await weights(saved), await weights(loaded)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        await assert_equal_steps(one, two, 9)
    await one.close()
    await two.close()


async def assert_equal_steps(one: Trainer, two: Trainer, seed: int) -> None:
    expected = (await one.step(batch(1, seed))).metrics
    got = (await two.step(batch(2, seed))).metrics
    assert expected.keys() == got.keys()
    for key, value in expected.items():
        assert got[key] == pytest.approx(value, abs=1e-6, rel=1e-4), key
    prompts, rollouts = prompts_and_rollouts(groups_of_all_kinds())
    for ours, theirs in zip(await one.logprobs(prompts, rollouts), await two.logprobs(prompts, rollouts), strict=True):
        np.testing.assert_allclose(theirs, ours, atol=1e-5)
    assert got["train/loss"] == pytest.approx(expected["train/loss"], abs=1e-6)
    assert got["train/lr"] == expected["train/lr"]


@pytest.mark.slow
async def test_eight_ranks_save_together_twenty_times_and_every_checkpoint_is_whole(tiny_qwen3, ray_cluster, tmp_path):
    """P142: into one folder, each its own files, and what all share once. The last one is gone on from."""
    trainer = group(tiny_qwen3, 8)
    await trainer.start()
    checkpoints = Checkpoints(tmp_path, keep_last=20)
    for step in range(1, 21):
        await checkpoints.save(step=step, state={"step": step}, trainer=trainer)
    expected = await weights(trainer)
    folders = sorted((tmp_path / "checkpoints").iterdir())
    assert len(folders) == 20
    for step, folder in enumerate(folders, start=1):
        saved = open_checkpoint(folder)  # refuses a damaged one
        assert (saved.step, saved.state) == (step, {"step": step})
        ranks = [path.name for path in saved.trainer_folder.glob("rng_*.pt")]
        assert sorted(ranks) == [f"rng_{rank}.pt" for rank in range(8)]
    await trainer.step(batch(8, 0, num_groups=8))
    await trainer.load(open_checkpoint(tmp_path).trainer_folder)
    loaded = await weights(trainer)
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    await trainer.close()


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
    os.kill(trainer._ranks._places[1].pid, signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(TrainerRankError, match=r"rank 1 \(pid \d+\) of the trainer failed in step"):
        await asyncio.wait_for(trainer.step(batch(2, 0)), timeout=60)
    assert time.monotonic() - begin < 60
    await trainer.close()


@pytest.mark.slow
async def test_a_rank_that_dies_while_nothing_is_asked_of_it_is_told_at_once(tiny_qwen3, ray_cluster):
    trainer = group(tiny_qwen3, 2)
    await trainer.start()
    await trainer.step(batch(2, 0))
    failure = asyncio.ensure_future(trainer.failure())
    await trainer.step(batch(2, 1))
    assert not failure.done(), "the watch does not stand in the way of calls"
    os.kill(trainer._ranks._places[1].pid, signal.SIGKILL)  # type: ignore[union-attr]
    error = await asyncio.wait_for(failure, timeout=15)
    assert re.match(r"rank 1 \(pid \d+\) of the trainer died while nothing was asked of it", str(error))
    with pytest.raises(TrainerRankError, match="rank 1"):
        await trainer.step(batch(2, 2))
    await trainer.close()


@pytest.mark.slow
@pytest.mark.parametrize(("users", "expected"), [(None, {b"A=1", b"OMP_NUM_THREADS=3"}), ("2", {b"OMP_NUM_THREADS=2"})])
async def test_ranks_get_the_configured_environment_and_the_users_first(
    tiny_qwen3, ray_cluster, monkeypatch, users, expected
):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if users is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", users)
    trainer = group(tiny_qwen3, 2, env={"A": "1", "OMP_NUM_THREADS": "3"})
    await trainer.start()
    for pid in [place.pid for place in trainer._ranks._places]:
        assert set(Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")) >= expected
    await trainer.close()


async def test_an_error_of_the_rank_is_raised_as_it_is(tmp_path):
    trainer = group(tmp_path / "absent", 1)
    with pytest.raises(OSError, match="absent"):
        await trainer.start()
