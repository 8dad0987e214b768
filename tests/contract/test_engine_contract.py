"""What every rollout engine does: in this process, in an actor of its own, vLLM and SGLang, on a CPU and on a GPU."""

from __future__ import annotations

import asyncio
import copy
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rl.config.algorithms import GRPOConfig
from rl.config.schema import (
    Dtype,
    FSDPConfig,
    LocalRolloutConfig,
    OptimizerConfig,
    SGLangRolloutConfig,
    VLLMRolloutConfig,
)
from rl.placement.ray_runtime import ensure_ray, shutdown_ray
from rl.protocols import EngineError, EngineUnfit, PauseMode, RequestError, RolloutEngine
from rl.trainer.group import TrainerGroup
from rl.types import FinishReason, Prompt, Rollout, Sampling
from rl.weights.outlet import WeightOutlet
from rl.weights.publish import publish_weights
from rl.weights.transport import Collective, Disk, Handed, Shared, Transport
from tests.engine_use import EngineSession, Source, logprobs_of, manifest_of, publish, sample_group, weights_of
from tests.processes import descendants, is_alive
from tests.tiny_models import write_tiny_qwen3

Weights = list[tuple[str, torch.Tensor]]

VLLM = pytest.param("vllm", marks=pytest.mark.vllm)
SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
REMOTE = pytest.param("remote", marks=pytest.mark.slow)
REPLICAS = pytest.param("replicas", marks=pytest.mark.slow)
ENGINES = ["local", REMOTE, REPLICAS, VLLM, SGLANG]

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
"""The suite is the same on both."""

DTYPE = Dtype.float32 if DEVICE == "cpu" else Dtype.bfloat16
"""Of vLLM and SGLang; some kernels of theirs have no other on a GPU."""

ATOL = {"local": 1e-5, "remote": 1e-5, "replicas": 1e-5, "vllm": 2e-5, "sglang": 2e-5}
"""Against the model in fp32. Engines add up in another order."""
BF16_ATOL = 0.25
"""Weights and activations with 8 bits; the models of the suite differ from each other by several nats."""

EOS = 1
PROMPT = Prompt("test:0", (), np.arange(2, 12, dtype=np.int32), "", "test")
SAMPLING = Sampling(temperature=0.7, max_new_tokens=12, seed=3)
GREEDY = replace(SAMPLING, temperature=0.0)


def prompt_of(length: int) -> Prompt:
    return Prompt(f"test:{length}", (), (np.arange(length, dtype=np.int32) * 7 % 40) + 2, "", "test")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models with different weights."""
    root = tmp_path_factory.mktemp("models")
    # vLLM's CPU attention knows no head of 16.
    return [write_tiny_qwen3(root / str(seed), seed=seed, head_dim=32) for seed in (0, 1)]


@pytest.fixture(scope="module")
def models(folders: list[Path]) -> list[Any]:
    return [AutoModelForCausalLM.from_pretrained(folder).eval().to(DEVICE) for folder in folders]


def new_engine(kind: str, folder: Path) -> RolloutEngine:
    if kind == "local":
        from rl.rollout.local_engine import LocalEngine

        return LocalEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=folder, device=DEVICE)
    if kind == "remote":
        from rl.rollout.remote import RemoteEngine

        return RemoteEngine(LocalRolloutConfig(dtype=Dtype.float32), model_folder=folder, device=DEVICE)
    if kind == "replicas":
        from rl.rollout.remote import RemoteEngine
        from rl.rollout.replicas import ReplicaSet

        config = LocalRolloutConfig(dtype=Dtype.float32)
        return ReplicaSet(
            lambda _: RemoteEngine(config, model_folder=folder, device=DEVICE),
            2,
            num_groups=1 if DEVICE == "cuda" else 2,
        )
    if kind == "vllm":
        from rl.rollout.vllm_engine import VLLMEngine

        config = VLLMRolloutConfig(dtype=DTYPE, max_num_seqs=64, memory_fraction=0.3, enforce_eager=True)
        return VLLMEngine(config, model_folder=folder, device=DEVICE)
    from rl.rollout.sglang_engine import SGLangEngine

    config = SGLangRolloutConfig(
        dtype=DTYPE,
        max_num_seqs=64,
        memory_fraction=0.3,
        enforce_eager=True,
        attention_backend=os.environ.get("RL_TEST_SGLANG_ATTENTION"),
    )
    return SGLangEngine(config, model_folder=folder, device=DEVICE)


class Session(EngineSession):
    def __init__(self, kind: str, folder: Path) -> None:
        super().__init__(new_engine(kind, folder))
        self.kind = kind
        is_exact = DEVICE == "cpu" or kind in ("local", "remote", "replicas")
        self.atol = (ATOL[kind] if DEVICE == "cpu" else 1e-4) if is_exact else BF16_ATOL
        self.outlet = WeightOutlet(device=torch.device(DEVICE), host="127.0.0.1")
        """The trainer's end, over all tests: its process group is formed once."""
        self.version_at_start = self.run(self.engine.policy_version())
        self.refusal_at_start = self.error_of(sample(self.engine))

    def error_of(self, work: Coroutine[Any, Any, Any]) -> BaseException | None:
        try:
            self.run(work)
        except EngineError as error:
            return error
        return None

    def publish_by(
        self, transport: Transport, model: Any, version: int, *, spoil: Callable[[Weights], Weights] | None = None
    ) -> None:
        """`spoil` changes what is sent, and not the manifest."""
        weights = weights_of(model)
        source: Any = Source(weights, outlet=self.outlet, sent=None if spoil is None else spoil(weights))
        self.run(publish_weights(source, self.engine, version=version, transport=transport))

    @property
    def pid(self) -> int:
        """Of the engine's own process."""
        if self.kind in ("remote", "replicas"):
            return (self.engine if self.kind == "remote" else self.engine._members[0].engine)._place.pid
        return self.engine._sampler._core._processes[0].pid if self.kind == "vllm" else self.engine._sampler._pid


@pytest.fixture(scope="module", autouse=True)
def ray_ends_with_the_module() -> Iterator[None]:
    yield
    shutdown_ray()


@pytest.fixture(scope="module", params=ENGINES)
def session(request: pytest.FixtureRequest, folders: list[Path]) -> Iterator[Session]:
    if request.param in ("remote", "replicas"):
        ensure_ray()  # its own shared memory lives as long as the module
    before = shared_memory()
    session = Session(request.param, folders[0])
    yield session
    session.outlet.drop()
    pids = [] if session.kind == "local" else [session.pid, *descendants(session.pid)]
    session.close()
    assert not any(is_alive(pid) for pid in pids)
    assert shared_memory() <= before, "the engine left shared memory behind"


OWNED_SHARED_MEMORY = re.compile(
    r"torch_(?P<pid>\d+)_|cuda\.shm\.\d+\.(?P<hex_pid>[0-9a-f]+)\.|sem\.loky-(?P<pid_>\d+)-"
)
"""Names that say whose they are: torch's, the CUDA driver's and loky's."""


def shared_memory() -> set[str]:
    """Without what other living processes keep: this one, the sender of weights, and tests that run beside it."""
    return {path.name for path in Path("/dev/shm").iterdir() if not _is_of_a_living_process(path.name)}


def _is_of_a_living_process(name: str) -> bool:
    found = OWNED_SHARED_MEMORY.match(name)
    if found is None:
        return False
    return is_alive(int(found["pid"]) if found["pid"] else int(found["hex_pid"], 16))


def next_logits(model: Any, token_ids: np.ndarray) -> torch.Tensor:
    """[L, V], on the CPU."""
    with torch.no_grad():
        return model(torch.tensor(token_ids[None].astype(np.int64), device=DEVICE)).logits[0].cpu()


async def sample(
    engine: RolloutEngine, prompt: Prompt = PROMPT, *, n: int = 4, group_id: int = 0, sampling: Sampling = SAMPLING
) -> list[Rollout]:
    return await sample_group(engine, prompt, n=n, group_id=group_id, sampling=sampling)


def assert_samples_of(rollouts: list[Rollout], model: Any, *, atol: float) -> None:
    for rollout in rollouts:
        expected = logprobs_of(model, rollout, rollout.temperature or 1.0)
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=atol)


def tokens(rollouts: list[Rollout]) -> list[list[int]]:
    return [rollout.token_ids.tolist() for rollout in rollouts]


# Before the first weights.


def test_an_engine_without_weights_has_version_minus_one_and_refuses_to_sample(session: Session):
    assert session.version_at_start == -1
    assert isinstance(session.refusal_at_start, EngineUnfit)


# Samples.


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_logprobs_are_the_models_at_the_sampling_temperature(session: Session, models: list[Any], temperature: float):
    session.run(publish(session.engine, models[0], 0))
    assert session.run(session.engine.policy_version()) == 0
    rollouts = session.run(sample(session.engine, n=8, sampling=replace(SAMPLING, temperature=temperature)))
    assert {rollout.temperature for rollout in rollouts} == {temperature}
    assert_samples_of(rollouts, models[0], atol=session.atol)


def test_a_group_is_complete_and_its_mask_is_true_exactly_on_the_response(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 4))
    rollouts = session.run(sample(session.engine, n=8, group_id=17))
    assert [rollout.index for rollout in rollouts] == list(range(8))
    length = len(PROMPT.token_ids)
    for rollout in rollouts:
        assert rollout.group_id == 17
        assert (rollout.token_ids.dtype, rollout.rollout_logprobs.dtype) == (np.int32, np.float32)
        np.testing.assert_array_equal(rollout.token_ids[:length], PROMPT.token_ids)
        assert rollout.loss_mask.tolist() == [False] * length + [True] * (len(rollout.token_ids) - length)
        assert rollout.policy_versions.tolist() == np.where(rollout.loss_mask, 4, -1).tolist()
    assert len({tuple(rollout.token_ids) for rollout in rollouts}) > 4


@pytest.mark.parametrize("length", [3, 40])
def test_greedy_tokens_are_those_that_transformers_generates(session: Session, models: list[Any], length: int):
    """Up to a tie: two tokens may change places where their log-probs differ by less than the two engines do."""
    session.run(publish(session.engine, models[0], 0))
    prompt = prompt_of(length)
    rollouts = session.run(sample(session.engine, prompt, n=2, sampling=replace(GREEDY, max_new_tokens=30)))
    ids = torch.tensor(prompt.token_ids[None].astype(np.int64), device=DEVICE)
    expected = models[0].generate(ids, do_sample=False, max_new_tokens=30, eos_token_id=EOS, pad_token_id=0)[0].tolist()
    for rollout in rollouts:
        tokens = rollout.token_ids.tolist()
        if tokens == expected:
            continue
        at = next(i for i, (ours, theirs) in enumerate(zip(tokens, expected, strict=False)) if ours != theirs)
        logits = next_logits(models[0], rollout.token_ids[:at])[-1]
        assert logits[expected[at]] - logits[tokens[at]] < 2 * session.atol


def test_groups_of_different_lengths_and_samplings_run_together(session: Session, models: list[Any]):
    async def together() -> list[list[Rollout]]:
        cases = [(3, 1, SAMPLING), (40, 4, replace(SAMPLING, temperature=1.0)), (1, 3, GREEDY), (17, 2, SAMPLING)]
        cases.append((100, 2, replace(SAMPLING, max_new_tokens=40)))
        return await asyncio.gather(
            *(
                sample(session.engine, prompt_of(length), n=n, group_id=group_id, sampling=sampling)
                for group_id, (length, n, sampling) in enumerate(cases)
            )
        )

    session.run(publish(session.engine, models[0], 0))
    groups = session.run(together())
    assert [len(group) for group in groups] == [1, 4, 3, 2, 2]
    for length, group in zip((3, 40, 1, 17, 100), groups, strict=True):
        for rollout in group:
            np.testing.assert_array_equal(rollout.token_ids[:length], prompt_of(length).token_ids)
        assert_samples_of(group, models[0], atol=session.atol)


def test_equal_seeds_and_an_identical_batch_give_equal_tokens(session: Session, models: list[Any]):
    if not session.engine.capabilities.seeded:
        pytest.skip("the engine promises nothing about seeds")

    async def batch(seed: int) -> list[list[list[int]]]:
        sampling = replace(SAMPLING, seed=seed)
        groups = [sample(session.engine, prompt_of(5 + g), group_id=g, sampling=sampling) for g in range(6)]
        return [tokens(group) for group in await asyncio.gather(*groups)]

    session.run(publish(session.engine, models[0], 0))
    first, again, other = (session.run(batch(seed)) for seed in (3, 3, 4))
    assert first == again
    assert all(a != b for a, b in zip(first, other, strict=True))


def test_samples_are_distributed_as_the_model_says(session: Session, models: list[Any]):
    """Chi-square over the next token of 4,000 samples; its 0.999 quantile by Wilson and Hilferty (1931)."""

    async def first_tokens() -> Counter[int]:
        sampling = Sampling(temperature=1.3, max_new_tokens=1, seed=11)
        groups = [sample(session.engine, n=500, group_id=g, sampling=sampling) for g in range(8)]
        return Counter(int(rollout.token_ids[-1]) for group in await asyncio.gather(*groups) for rollout in group)

    session.run(publish(session.engine, models[0], 0))
    observed = session.run(first_tokens())
    logits = next_logits(models[0], PROMPT.token_ids)[-1]
    expected = 4000 * torch.softmax(logits / 1.3, -1).double().numpy()
    counts = np.array([observed[token] for token in range(len(expected))])
    assert counts.sum() == 4000
    rare = expected < 5
    expected = np.append(expected[~rare], expected[rare].sum())
    counts = np.append(counts[~rare], counts[rare].sum())
    freedom = len(expected) - 1
    assert freedom > 10, "too few likely tokens for a meaningful test"
    statistic = ((counts - expected) ** 2 / expected).sum()
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit


def test_truncated_logprobs_are_of_what_is_kept_or_of_all_as_declared(session: Session, models: list[Any]):
    async def first_tokens(sampling: Sampling) -> list[Rollout]:
        return await sample(session.engine, n=200, sampling=sampling)

    session.run(publish(session.engine, models[0], 0))
    logits = next_logits(models[0], PROMPT.token_ids)[-1]
    probs = torch.softmax(logits / 1.5, -1).double().numpy()
    order = np.argsort(-probs)

    def logprobs_among(kept: np.ndarray) -> dict[int, float]:
        mass = probs[kept].sum() if session.engine.capabilities.renormalizes else 1.0
        return {int(token): np.log(probs[token] / mass) for token in kept}

    needed = int((np.cumsum(probs[order]) < 0.6).sum()) + 1
    assert needed > 2
    sampling = Sampling(temperature=1.5, max_new_tokens=1, seed=0)
    for case, num_kept in [(replace(sampling, top_k=4), 4), (replace(sampling, top_p=0.6), needed)]:
        kept = logprobs_among(order[:num_kept])
        rollouts = session.run(first_tokens(case))
        assert {int(rollout.token_ids[-1]) for rollout in rollouts} == set(kept)
        for rollout in rollouts:
            assert rollout.rollout_logprobs[-1] == pytest.approx(kept[int(rollout.token_ids[-1])], abs=2 * session.atol)


# Ends of answers.


def test_end_of_text_is_a_sampled_token_and_ends_the_answer(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    rollouts = session.run(sample(session.engine, n=16, sampling=Sampling(2.0, 100, 0)))
    reasons = {rollout.finish_reason for rollout in rollouts}
    assert reasons == {FinishReason.STOP, FinishReason.LENGTH}
    for rollout in rollouts:
        answer = rollout.token_ids[10:]
        assert "<eos>" not in rollout.text
        assert EOS not in answer[:-1]
        if rollout.finish_reason is FinishReason.STOP:
            assert answer[-1] == EOS
            assert rollout.loss_mask[-1]
        else:
            assert len(answer) == 100
            assert rollout.is_truncated
    assert_samples_of(rollouts, models[0], atol=session.atol)


def test_a_stop_string_ends_the_answer_and_stays_in_it(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    plain = session.run(sample(session.engine, n=1))[0]
    stop = plain.text[3:5]
    (rollout,) = session.run(sample(session.engine, n=1, sampling=replace(SAMPLING, stop=("never so", stop))))
    assert rollout.finish_reason is FinishReason.STOP
    assert rollout.text.endswith(stop)
    assert plain.text.startswith(rollout.text)
    assert rollout.num_response_tokens == len(rollout.text)


def test_a_caller_that_leaves_early_holds_nothing_back(session: Session, models: list[Any]):
    async def leave() -> None:
        generation: Any = session.engine.generate(PROMPT, group_id=0, n=16, sampling=Sampling(2.0, 400, 0))
        await anext(generation)
        await generation.aclose()
        cancelled = asyncio.ensure_future(sample(session.engine, sampling=Sampling(2.0, 400, 0)))
        await asyncio.sleep(0)
        cancelled.cancel()
        await asyncio.gather(cancelled, return_exceptions=True)
        await publish(session.engine, models[1], 31)
        await session.engine.sleep()
        await session.engine.wake()

    session.run(publish(session.engine, models[0], 30))
    session.run(leave())
    session.run(publish(session.engine, models[1], 32))
    assert_samples_of(session.run(sample(session.engine)), models[1], atol=session.atol)


def test_a_prompt_that_does_not_fit_is_refused_and_others_go_on(session: Session, models: list[Any]):
    async def both() -> list[Rollout]:
        outside = Prompt("test:1", (), np.array([2, 5000], dtype=np.int32), "", "test")
        refused = [
            sample(session.engine, outside),
            sample(session.engine, prompt_of(300), sampling=Sampling(1.0, 213, 0)),
        ]
        *errors, rollouts = await asyncio.gather(*refused, sample(session.engine), return_exceptions=True)
        assert all(isinstance(error, RequestError) for error in errors)
        assert isinstance(rollouts, list)
        return rollouts

    session.run(publish(session.engine, models[0], 0))
    assert_samples_of(session.run(both()), models[0], atol=session.atol)


def test_an_image_for_a_model_of_text_is_refused_by_name_and_others_go_on(session: Session, models: list[Any]):
    async def both() -> list[Rollout]:
        picture = replace(PROMPT, prompt_id="test:7", images=(b"png",))
        error, rollouts = await asyncio.gather(
            sample(session.engine, picture), sample(session.engine), return_exceptions=True
        )
        assert isinstance(error, RequestError)
        assert "prompt test:7 has images" in str(error)
        assert isinstance(rollouts, list)
        return rollouts

    session.run(publish(session.engine, models[0], 0))
    assert_samples_of(session.run(both()), models[0], atol=session.atol)


# Weights.


@pytest.fixture(params=["handed", "shared", "collective", "disk"])
def transport(request: pytest.FixtureRequest, session: Session, tmp_path: Path) -> Transport:
    """The way of the weights, forced: between trainer and engine, or through this process."""
    if request.param == "collective" and DEVICE == "cuda":
        pytest.skip("NCCL refuses two ranks on one GPU")
    if request.param == "shared" and DEVICE == "cuda" and session.kind == "local":
        pytest.skip("CUDA opens no handle in the process that made it")
    return {
        "handed": Handed(),
        "shared": Shared(),
        "collective": Collective(timeout_s=20.0),
        "disk": Disk(tmp_path / "weights"),
    }[request.param]


def test_new_weights_are_used_and_nothing_cached_of_the_old_ones(
    session: Session, models: list[Any], transport: Transport, tmp_path: Path
):
    for version, model in enumerate([models[0], models[1], models[0]], start=10):
        session.publish_by(transport, model, version)
        assert session.run(session.engine.policy_version()) == version
        rollouts = session.run(sample(session.engine, prompt_of(300)))
        assert {rollout.min_policy_version for rollout in rollouts} == {version}
        assert_samples_of(rollouts, model, atol=session.atol)
    assert not any(path.is_file() for path in tmp_path.rglob("*")), "a file was left behind"


def test_the_group_for_weights_is_formed_once_and_anew_when_the_trainers_is_another(
    session: Session, models: list[Any]
):
    if DEVICE == "cuda":
        pytest.skip("NCCL refuses two ranks on one GPU")
    transport = Collective(timeout_s=20.0)
    session.publish_by(transport, models[0], 15)
    first = session.outlet.group()
    session.publish_by(transport, models[1], 16)
    assert session.outlet.group() == first
    session.outlet.drop()  # as when a bucket did not get through
    session.publish_by(transport, models[0], 17)
    assert session.outlet.group() not in (None, first)
    assert_samples_of(session.run(sample(session.engine)), models[0], atol=session.atol)


def test_a_trainer_that_is_lost_in_a_broadcast_leaves_the_engine_unfit_in_time(session: Session, models: list[Any]):
    """Its announcement of a bucket came, and the bucket does not."""
    if DEVICE == "cuda":
        pytest.skip("NCCL refuses two ranks on one GPU")
    weights = weights_of(models[1])

    class Lost(Source):
        async def post_buckets(self, method: str, *arguments: Any) -> Any:
            async for posted in super().post_buckets(method, *arguments):
                yield posted
                break
            yield replace(posted, tensors=manifest_of(weights[5:6], 0).tensors)

    async def lose() -> None:
        source: Any = Lost(weights, outlet=session.outlet)
        await publish_weights(source, session.engine, version=19, transport=Collective(timeout_s=1.0))

    session.run(publish(session.engine, models[0], 18))
    session.outlet.drop()
    began = time.monotonic()
    with pytest.raises(EngineError, match=r"did not pass on a bucket of weights within 1 s"):
        session.run(lose())
    assert time.monotonic() - began < 20  # two attempts
    assert session.run(session.engine.policy_version()) == 18
    with pytest.raises(EngineUnfit, match="did not complete"):
        session.run(sample(session.engine))
    session.publish_by(Collective(timeout_s=20.0), models[1], 20)
    assert_samples_of(session.run(sample(session.engine)), models[1], atol=session.atol)


def test_the_trainers_own_buckets_make_the_engine_the_trainers_policy(
    session: Session, folders: list[Path], models: list[Any], transport: Transport
):
    async def publish_from_trainer() -> list[Rollout]:
        trainer = TrainerGroup(
            FSDPConfig(optimizer=OptimizerConfig(), compute_dtype=Dtype.float32),
            model_folder=folders[1],
            algorithm=GRPOConfig(prompts_per_step=4, group_size=4),
            device=DEVICE,
            num_ranks=1,
            seed=0,
            total_updates=1,
        )
        await trainer.start()
        stats = await publish_weights(trainer, session.engine, version=50, transport=transport)
        await trainer.close()
        assert stats.num_bytes == sum(tensor.nbytes for _, tensor in weights_of(models[1]))
        return await sample(session.engine)

    assert_samples_of(session.run(publish_from_trainer()), models[1], atol=session.atol)


def wrong_shape(weights: Weights) -> Weights:
    (name, tensor), *rest = weights
    return [(name, tensor[:-1].clone()), *rest]


def wrong_name(weights: Weights) -> Weights:
    (_, tensor), *rest = weights
    return [("model.nothing.weight", tensor), *rest]


def wrong_dtype(weights: Weights) -> Weights:
    (name, tensor), *rest = weights
    return [(name, tensor.bfloat16()), *rest]


def one_missing(weights: Weights) -> Weights:
    return weights[:-1]


def one_twice(weights: Weights) -> Weights:
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
def test_an_update_with_a_bad_tensor_leaves_the_engine_unfit_until_a_complete_one(
    session: Session, models: list[Any], spoil: Callable[[Weights], Weights], message: str, transport: Transport
):
    session.run(publish(session.engine, models[0], 5))
    with pytest.raises(EngineError, match=message):
        session.publish_by(transport, models[1], 6, spoil=spoil)
    assert session.run(session.engine.policy_version()) == 5
    with pytest.raises(EngineUnfit, match="did not complete"):
        session.run(sample(session.engine))
    session.publish_by(transport, models[1], 7)
    assert_samples_of(session.run(sample(session.engine)), models[1], atol=session.atol)


def test_a_manifest_that_lacks_a_tensor_of_the_model_is_never_committed(session: Session, models: list[Any]):
    async def publish_without_keys() -> None:
        weights = [(name, tensor) for name, tensor in weights_of(models[1]) if "layers.1.self_attn.k_proj" not in name]
        update = await session.engine.open_update(manifest_of(weights, 8))
        await update.send(weights)
        await update.commit(8)

    session.run(publish(session.engine, models[0], 7))
    with pytest.raises(EngineError):
        session.run(publish_without_keys())
    assert session.run(session.engine.policy_version()) == 7
    with pytest.raises(EngineUnfit):
        session.run(sample(session.engine))


def test_a_commit_of_another_version_than_the_manifests_fails(session: Session, models: list[Any]):
    async def commit_another() -> None:
        weights = weights_of(models[0])
        update = await session.engine.open_update(manifest_of(weights, 9))
        await update.send(weights)
        await update.commit(10)

    session.run(publish(session.engine, models[0], 8))
    with pytest.raises(EngineError, match="manifest says 9"):
        session.run(commit_another())
    assert session.run(session.engine.policy_version()) == 8


def test_an_aborted_update_refuses_what_queued_behind_it(session: Session, models: list[Any]):
    async def abort() -> None:
        weights = weights_of(models[1])
        update = await session.engine.open_update(manifest_of(weights, 9))
        await update.send(weights[:3])
        queued = asyncio.ensure_future(sample(session.engine))
        await asyncio.sleep(0.05)
        assert not queued.done()
        await update.abort()
        with pytest.raises(EngineUnfit):
            await queued
        with pytest.raises(EngineError, match="has ended"):
            await update.send(weights[3:])
        await update.abort()

    session.run(publish(session.engine, models[0], 0))
    session.run(abort())
    with pytest.raises(EngineUnfit):
        session.run(sample(session.engine))
    assert session.run(session.engine.policy_version()) == 0
    session.run(publish(session.engine, models[0], 1))
    assert_samples_of(session.run(sample(session.engine)), models[0], atol=session.atol)


def test_an_update_waits_for_running_requests_and_new_ones_wait_for_it(session: Session, models: list[Any]):
    async def overlap() -> tuple[list[Rollout], list[Rollout]]:
        running = asyncio.ensure_future(sample(session.engine, sampling=Sampling(1.0, 100, 0)))
        await asyncio.sleep(0)
        publishing = asyncio.ensure_future(publish(session.engine, models[1], 21))
        await asyncio.sleep(0.01)
        queued = asyncio.ensure_future(sample(session.engine))
        await publishing
        return await running, await queued

    session.run(publish(session.engine, models[0], 20))
    before, after = session.run(overlap())
    assert {(r.min_policy_version, r.max_policy_version) for r in before} == {(20, 20)}
    assert {(r.min_policy_version, r.max_policy_version) for r in after} <= {(20, 20), (21, 21)}
    assert_samples_of(before, models[0], atol=session.atol)
    assert_samples_of(after, models[after[0].min_policy_version - 20], atol=session.atol)


# Pauses.

LONG = Sampling(temperature=1.0, max_new_tokens=300, seed=5)


async def begin(engine: RolloutEngine, *, num_groups: int = 3, sampling: Sampling = LONG) -> asyncio.Future[Any]:
    """Groups of 4 that are being sampled: a short sample has come that was asked for together with them.

    Together, because the embedded engine starts what waits in one round, and what comes later in the next.
    """
    short = asyncio.ensure_future(sample(engine, group_id=99, n=1, sampling=replace(sampling, max_new_tokens=20)))
    groups = [sample(engine, prompt_of(5 + g), group_id=g, sampling=sampling) for g in range(num_groups)]
    running = asyncio.ensure_future(asyncio.gather(*groups))
    await short
    return running


async def disturbed(engine: RolloutEngine, mode: PauseMode, *, update: tuple[Any, int] | None = None) -> list[Rollout]:
    """3 groups that are paused in the middle. `update`: model and version that are published meanwhile."""
    running = await begin(engine)
    await engine.pause(mode)
    if update is not None:
        model, version = update
        await publish(engine, model, version)
    await engine.resume()
    return [rollout for group in await running for rollout in group]


def test_an_update_in_the_middle_marks_which_weights_sampled_which_tokens(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 60))
    rollouts = session.run(disturbed(session.engine, PauseMode.KEEP, update=(models[1], 61)))
    assert len(rollouts) == 12
    mixed = [rollout for rollout in rollouts if rollout.min_policy_version != rollout.max_policy_version]
    assert mixed
    for rollout in rollouts:
        versions = rollout.policy_versions[rollout.loss_mask].tolist()
        assert versions == sorted(versions)
        assert set(versions) <= {60, 61}
        # Keys and values are computed anew, so that each token's log-prob is that of one policy, given all before it.
        old, new = (logprobs_of(model, rollout, 1.0) for model in models)
        expected = np.where(rollout.policy_versions == 60, old, new)
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=session.atol)


def test_a_pause_that_keeps_requests_loses_no_token_and_no_budget(session: Session, models: list[Any]):
    async def pause_often() -> list[Rollout]:
        running = await begin(session.engine, sampling=replace(LONG, max_new_tokens=60))
        for _ in range(4):
            await session.engine.pause(PauseMode.KEEP)
            await session.engine.resume()
            await sample(session.engine, group_id=98, n=1)
        return [rollout for group in await running for rollout in group]

    session.run(publish(session.engine, models[0], 0))
    rollouts = session.run(pause_often())
    assert sorted((rollout.group_id, rollout.index) for rollout in rollouts) == [
        (g, i) for g in range(3) for i in range(4)
    ]
    assert_samples_of(rollouts, models[0], atol=session.atol)
    for rollout in rollouts:
        is_cut = rollout.finish_reason is FinishReason.LENGTH
        assert rollout.num_response_tokens == 60 if is_cut else rollout.token_ids[-1] == EOS
    assert any(rollout.is_truncated for rollout in rollouts)


def test_a_pause_that_aborts_yields_every_token_sampled_so_far(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 0))
    rollouts = session.run(disturbed(session.engine, PauseMode.ABORT))
    assert len(rollouts) == 12
    aborted = [rollout for rollout in rollouts if rollout.finish_reason is FinishReason.ABORT]
    assert aborted
    assert all(0 < rollout.num_response_tokens < 300 for rollout in aborted)
    assert_samples_of(rollouts, models[0], atol=session.atol)


def test_a_pause_that_restarts_starts_what_runs_anew_whole_on_the_new_weights(session: Session, models: list[Any]):
    session.run(publish(session.engine, models[0], 60))
    rollouts = session.run(disturbed(session.engine, PauseMode.RESTART, update=(models[1], 61)))
    assert sorted((rollout.group_id, rollout.index) for rollout in rollouts) == [
        (g, i) for g in range(3) for i in range(4)
    ]
    assert {rollout.finish_reason for rollout in rollouts} <= {FinishReason.STOP, FinishReason.LENGTH}
    assert any(rollout.num_discarded_tokens > 0 for rollout in rollouts)
    for rollout in rollouts:
        assert rollout.min_policy_version == rollout.max_policy_version
        assert rollout.num_discarded_tokens < 300
        is_anew = rollout.max_policy_version == 61
        assert is_anew or rollout.num_discarded_tokens == 0
        assert_samples_of([rollout], models[is_anew], atol=session.atol)


def test_a_pause_that_waits_lets_requests_finish_and_holds_new_ones(session: Session, models: list[Any]):
    async def wait() -> list[Rollout]:
        running = await begin(session.engine, num_groups=1)
        await session.engine.pause(PauseMode.WAIT)
        await asyncio.wait_for(running, 1)
        held = asyncio.ensure_future(sample(session.engine))
        await asyncio.sleep(0.05)
        assert not held.done()
        await session.engine.resume()
        return await held

    session.run(publish(session.engine, models[0], 0))
    assert len(session.run(wait())) == 4


def test_of_a_thousand_requests_with_pauses_and_aborts_none_is_lost_or_doubled(session: Session, models: list[Any]):
    """250 groups of 4 with 1 to 40 tokens; every 7th caller leaves early, and pauses of all kinds happen meanwhile."""
    limits = np.random.default_rng(0).integers(1, 41, 250)
    seen: Counter[tuple[int, int]] = Counter()

    async def ask(group_id: int) -> None:
        sampling = Sampling(1.0, int(limits[group_id]), 0)
        generation: Any = session.engine.generate(
            prompt_of(3 + group_id % 60), group_id=group_id, n=4, sampling=sampling
        )
        async for rollout in generation:
            assert rollout.group_id == group_id
            assert 1 <= rollout.num_response_tokens <= limits[group_id]
            seen[group_id, rollout.index] += 1
            if group_id % 7 == 0:
                break
        await generation.aclose()

    async def pause() -> None:
        for mode in [PauseMode.KEEP, PauseMode.ABORT, PauseMode.RESTART, PauseMode.WAIT, PauseMode.KEEP]:
            await asyncio.sleep(0.05)
            await session.engine.pause(mode)
            await session.engine.resume()

    async def all_at_once() -> None:
        await asyncio.gather(pause(), *(ask(group_id) for group_id in range(250)))

    session.run(publish(session.engine, models[0], 0))
    session.run(all_at_once())
    assert set(seen.values()) == {1}
    per_group = Counter(group_id for group_id, _ in seen)
    assert all(per_group[group_id] == (1 if group_id % 7 == 0 else 4) for group_id in range(250))
    assert len(session.run(sample(session.engine))) == 4


# Digests.


def test_digests_tell_which_parameters_an_update_changed(session: Session, models: list[Any]):
    async def digests_after(model: Any, version: int) -> dict[str, str]:
        await publish(session.engine, model, version)
        return await session.engine.weight_digests()

    changed = copy.deepcopy(models[0])
    changed.model.layers[1].mlp.down_proj.weight.data[3, 5] += 1.0
    before, same, after = (
        session.run(digests_after(model, version)) for version, model in enumerate([models[0], models[0], changed])
    )
    assert before == same
    assert list(before) == list(after)
    assert [name for name in before if before[name] != after[name]] == ["model.layers.1.mlp.down_proj.weight"]


# States.


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
    rollouts = session.run(cycle())
    assert {rollout.min_policy_version for rollout in rollouts} == {41}
    assert_samples_of(rollouts, models[1], atol=session.atol)


def test_sleep_is_refused_while_a_request_runs(session: Session, models: list[Any]):
    async def sleep_early() -> list[Rollout]:
        running = asyncio.ensure_future(sample(session.engine, sampling=Sampling(1.0, 100, 0)))
        await asyncio.sleep(0)
        with pytest.raises(EngineError, match="running"):
            await session.engine.sleep()
        return await running

    session.run(publish(session.engine, models[0], 0))
    assert len(session.run(sleep_early())) == 4


@pytest.mark.parametrize("kind", [REMOTE, VLLM, SGLANG])
def test_the_death_of_an_idle_engine_reaches_whoever_waits_for_it(kind: str, folders: list[Path], models: list[Any]):
    session = Session(kind, folders[0])

    async def die() -> str:
        waiting = asyncio.ensure_future(session.engine.wait_for_death())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        os.kill(session.pid, signal.SIGKILL)
        return await asyncio.wait_for(waiting, 15)

    session.run(publish(session.engine, models[0], 0))
    reason = session.run(die())
    session.close()
    assert str(session.pid) in reason


@pytest.mark.parametrize("kind", [REMOTE, VLLM, SGLANG])
def test_the_death_of_its_process_reaches_every_waiting_call(kind: str, folders: list[Path], models: list[Any]):
    session = Session(kind, folders[0])

    async def die() -> float:
        sampling = Sampling(2.0, 450, 0)
        short = asyncio.ensure_future(
            sample(session.engine, group_id=99, n=1, sampling=replace(sampling, max_new_tokens=8))
        )
        waiting = [asyncio.ensure_future(sample(session.engine, group_id=g, n=8, sampling=sampling)) for g in range(3)]
        await short
        os.kill(session.pid, signal.SIGKILL)
        started = time.monotonic()
        results = await asyncio.gather(*waiting, return_exceptions=True)
        elapsed = time.monotonic() - started
        for result in results:
            assert isinstance(result, EngineError)
            assert str(session.pid) in str(result)
        for call in (sample(session.engine), session.engine.policy_version(), publish(session.engine, models[0], 1)):
            with pytest.raises(EngineError, match=str(session.pid)):
                await call
        return elapsed

    session.run(publish(session.engine, models[0], 0))
    elapsed = session.run(die())
    session.close()
    assert elapsed < 10.0


@pytest.mark.parametrize("kind", ENGINES)
def test_an_engine_that_was_never_started_refuses_and_closes(kind: str, folders: list[Path]):
    async def close_unused() -> None:
        engine = new_engine(kind, folders[0])
        for call in (sample(engine), engine.policy_version()):
            with pytest.raises(EngineError, match="not started"):
                await call
        await engine.close()
        await engine.close()
        with pytest.raises(EngineError, match="closed"):
            await sample(engine)

    asyncio.run(close_unused())
