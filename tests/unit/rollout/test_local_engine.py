"""What the contract suite cannot see of the local engine: its batches, its buffers and other architectures."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rl.config.schema import Dtype, LocalRolloutConfig
from rl.protocols import EngineError
from rl.rollout.decoding import SampleRequest
from rl.rollout.local_engine import LocalEngine, empty_model, end_tokens
from rl.rollout.sampler import Part
from rl.types import Prompt, Rollout, Sampling
from tests.engine_use import logprobs_of, publish, sample_group
from tests.tiny_models import write_char_tokenizer

SAMPLING = Sampling(temperature=1.0, max_new_tokens=20, seed=0)


def prompt_of(length: int) -> Prompt:
    return Prompt(f"test:{length}", (), (np.arange(length, dtype=np.int32) * 7 % 40) + 2, "", "test")


@asynccontextmanager
async def engine_on(folder: Path, **config: Any) -> AsyncIterator[LocalEngine]:
    engine = LocalEngine(LocalRolloutConfig(dtype=Dtype.float32, **config), model_folder=folder, device="cpu")
    await engine.start()
    await publish(engine, AutoModelForCausalLM.from_pretrained(folder), 0)
    yield engine
    await engine.close()


async def sample(
    engine: LocalEngine, prompt: Prompt, *, n: int = 1, group_id: int = 0, sampling: Sampling = SAMPLING
) -> list[Rollout]:
    return await sample_group(engine, prompt, n=n, group_id=group_id, sampling=sampling)


@contextmanager
def recorded_shapes(engine: LocalEngine) -> Iterator[list[tuple[int, int]]]:
    """(rows, tokens per row) of every forward pass."""
    shapes: list[tuple[int, int]] = []

    def record(_module: Any, _args: Any, kwargs: dict[str, Any]) -> None:
        shapes.append(tuple(kwargs["input_ids"].shape))

    hook = engine._sampler._model.register_forward_pre_hook(record, with_kwargs=True)
    yield shapes
    hook.remove()


def assert_logprobs_of(model: Any, rollouts: list[Rollout], *, atol: float = 1e-5) -> None:
    for rollout in rollouts:
        expected = logprobs_of(model, rollout, rollout.temperature)
        np.testing.assert_allclose(rollout.rollout_logprobs, expected, atol=atol)


SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
ARCHITECTURES = {
    "llama, untied": ("llama", SMALL | {"tie_word_embeddings": False}),
    "llama, scaled rope": (
        "llama",
        SMALL
        | {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            }
        },
    ),
    "qwen2, biases": ("qwen2", SMALL | {"tie_word_embeddings": True}),
    "mistral, sliding window": ("mistral", SMALL | {"sliding_window": 8}),
    "gemma2, softcap and window": ("gemma2", SMALL | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8}),
    "qwen3, experts": (
        "qwen3_moe",
        SMALL | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8},
    ),
    "gpt2, learned positions": (
        "gpt2",
        {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256, "initializer_range": 0.2},
    ),
}


def write_model(folder: Path, model_type: str, values: dict[str, Any]) -> Path:
    tokenizer = write_char_tokenizer(folder)
    ids = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values, **ids))
        with torch.no_grad():  # biases and norms start as zeros and ones, which would hide a wrong one
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_of_many_architectures_equal_their_own_forward_pass(name: str, tmp_path: Path):
    model_type, values = ARCHITECTURES[name]
    folder = write_model(tmp_path / "model", model_type, values)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()

    async def run() -> list[Rollout]:
        async with engine_on(folder) as engine:
            groups = [sample(engine, prompt_of(length), n=3, group_id=length) for length in (2, 13, 30)]
            return [rollout for group in await asyncio.gather(*groups) for rollout in group]

    rollouts = asyncio.run(run())
    assert sum(rollout.num_response_tokens for rollout in rollouts) > 40
    assert_logprobs_of(model, rollouts)


def test_longrope_is_sampled_before_it_stretches_and_refused_after(tmp_path: Path):
    """Past 40 positions its frequencies are those of the longest sequence in the batch."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    values = SMALL | {"rope_parameters": rope | {"original_max_position_embeddings": 40}}
    folder = write_model(tmp_path / "model", "llama", values)

    async def run() -> list[Rollout]:
        async with engine_on(folder) as engine:
            with pytest.raises(EngineError, match=r"do not fit the model's context of 40 tokens"):
                await sample(engine, prompt_of(30), sampling=Sampling(1.0, 11, 0))
            return await sample(engine, prompt_of(30), n=3, sampling=Sampling(1.0, 10, 0))

    assert_logprobs_of(AutoModelForCausalLM.from_pretrained(folder).eval(), asyncio.run(run()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_that_no_update_brings_are_those_of_the_loaded_model(tiny_qwen3: Path, dtype: torch.dtype):
    loaded = AutoModelForCausalLM.from_pretrained(tiny_qwen3, dtype=dtype)
    empty = empty_model(AutoConfig.from_pretrained(tiny_qwen3), dtype=dtype, device=torch.device("cpu"))
    buffers = dict(empty.named_buffers())
    assert set(buffers) == {name for name, _ in loaded.named_buffers()}
    assert buffers
    for name, expected in loaded.named_buffers():
        assert buffers[name].dtype == expected.dtype
        assert torch.equal(buffers[name], expected)
    assert {name: p.dtype for name, p in empty.named_parameters()} == {n: p.dtype for n, p in loaded.named_parameters()}


def test_starting_an_engine_draws_no_random_numbers_of_others(tiny_qwen3: Path):
    async def run() -> None:
        async with engine_on(tiny_qwen3) as engine:
            await sample(engine, prompt_of(5))

    before = torch.random.get_rng_state()
    asyncio.run(run())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_calls_of_one_turn_are_one_batch_whose_samples_share_the_prefill(tiny_qwen3: Path):
    async def run() -> list[tuple[int, int]]:
        async with engine_on(tiny_qwen3) as engine:
            with recorded_shapes(engine) as shapes:
                sampling = Sampling(1.0, 3, 0)
                await asyncio.gather(
                    *(sample(engine, prompt_of(6), n=4, group_id=g, sampling=sampling) for g in range(5))
                )
            return shapes

    assert asyncio.run(run()) == [(5, 6), (20, 1), (20, 1)]


def test_a_sample_is_the_same_alone_and_among_others(tiny_qwen3: Path):
    async def run() -> None:
        async with engine_on(tiny_qwen3) as engine:
            alone = await sample(engine, prompt_of(9), n=4, group_id=3)
            groups = await asyncio.gather(*(sample(engine, prompt_of(3 * g), n=4, group_id=g) for g in range(1, 6)))
        assert [r.token_ids.tolist() for r in alone] == [r.token_ids.tolist() for r in groups[2]]

    asyncio.run(run())


def test_max_num_seqs_bounds_every_batch_and_splits_a_large_group(tiny_qwen3: Path):
    async def run() -> None:
        async with engine_on(tiny_qwen3, max_num_seqs=4) as engine:
            with recorded_shapes(engine) as shapes:
                groups = await asyncio.gather(
                    *(sample(engine, prompt_of(4 + g), n=n, group_id=g) for g, n in enumerate([3, 7, 1]))
                )
            assert max(rows for rows, _ in shapes) == 4
            assert [[r.index for r in group] for group in groups] == [[0, 1, 2], list(range(7)), [0]]
            whole = await sample(engine, prompt_of(5), n=2, group_id=1)
            assert [r.token_ids.tolist() for r in whole] == [r.token_ids.tolist() for r in groups[1][:2]]

    asyncio.run(run())


def test_a_round_takes_no_more_samples_than_its_cache_has_memory_for(tiny_qwen3: Path):
    async def run() -> None:
        async with engine_on(tiny_qwen3) as engine:
            engine._sampler._max_cached_tokens = 100  # tokens; a sample below needs 30, one of the long prompt 120
            with recorded_shapes(engine) as shapes:
                short = await sample(engine, prompt_of(10), n=8)
                assert max(rows for rows, _ in shapes) == 3
                long = await sample(engine, prompt_of(100), n=2)
            assert (len(short), len(long)) == (8, 2)

    asyncio.run(run())


def test_finished_samples_leave_the_batch(tiny_qwen3: Path):
    async def run() -> list[int]:
        async with engine_on(tiny_qwen3) as engine:
            with recorded_shapes(engine) as shapes:
                short, long = (Sampling(1.0, limit, 0) for limit in (2, 12))
                await asyncio.gather(
                    sample(engine, prompt_of(5), n=9, sampling=short), sample(engine, prompt_of(8), n=1, sampling=long)
                )
            return [rows for rows, _ in shapes]

    rows = asyncio.run(run())
    assert rows[:2] == [2, 10]
    assert set(rows[2:]) == {1}


def test_samples_whose_caller_left_are_given_up(tiny_qwen3: Path):
    async def run(*, leave: bool) -> int:
        async with engine_on(tiny_qwen3) as engine:
            with recorded_shapes(engine) as shapes:
                long = asyncio.create_task(sample(engine, prompt_of(5), n=16, sampling=Sampling(2.0, 400, 0)))
                await sample(engine, prompt_of(5), sampling=Sampling(1.0, 1, 0))
                if leave:
                    long.cancel()
                await asyncio.gather(long, return_exceptions=True)
                await asyncio.wait_for(engine._idle.wait(), 10)
            return len(shapes)

    assert 0 < asyncio.run(run(leave=True)) < asyncio.run(run(leave=False))


def test_an_error_of_the_model_reaches_every_caller_with_its_cause(tiny_qwen3: Path):
    async def run() -> None:
        async with engine_on(tiny_qwen3) as engine:

            def fail(_module: Any, _args: Any) -> None:
                raise ValueError("out of luck")

            hook = engine._sampler._model.model.layers[1].register_forward_pre_hook(fail)
            calls = [sample(engine, prompt_of(5), n=2, group_id=g) for g in range(3)]
            results = await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), 10)
            for result in results:
                assert isinstance(result, EngineError)
                assert isinstance(result.__cause__, ValueError)
                assert "out of luck" in str(result)
            hook.remove()
            assert len(await sample(engine, prompt_of(5), n=2)) == 2

    asyncio.run(run())


def test_closing_ends_what_runs_and_tells_who_waits(tiny_qwen3: Path):
    async def run() -> None:
        async with engine_on(tiny_qwen3) as engine:
            short = asyncio.create_task(sample(engine, prompt_of(6), group_id=1, sampling=Sampling(1.0, 4, 0)))
            calls = [
                asyncio.create_task(sample(engine, prompt_of(5), sampling=Sampling(1.0, 400, s))) for s in range(2)
            ]
            await short
            await asyncio.wait_for(engine.close(), 10)
            for result in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(result, EngineError)

    asyncio.run(run())


def test_ends_of_text_and_padding_inside_a_prompt_are_tokens_as_any_other(tiny_qwen3: Path):
    """A chat template writes the end of text after each turn, and many tokenizers pad with it."""

    async def run() -> None:
        model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
        turns = Prompt("test:turns", (), np.array([0, 5, 1, 6, 0, 1], dtype=np.int32), "", "test")
        async with engine_on(tiny_qwen3) as engine:
            rollouts, _ = await asyncio.gather(sample(engine, turns, n=8), sample(engine, prompt_of(30), n=2))
        for rollout in rollouts:
            assert rollout.loss_mask.tolist() == [False] * 6 + [True] * (len(rollout.token_ids) - 6)
        assert_logprobs_of(model, rollouts)

    asyncio.run(run())


def test_neither_publishes_nor_samples_leave_anything_behind(tiny_qwen3: Path):
    async def run() -> list[Counter[type]]:
        model = AutoModelForCausalLM.from_pretrained(tiny_qwen3)
        counts = []
        async with engine_on(tiny_qwen3) as engine:
            for version in range(1, 9):
                await publish(engine, model, version)
                await asyncio.gather(*(sample(engine, prompt_of(5 + g), n=4, group_id=g) for g in range(3)))
                leaving: Any = engine.generate(prompt_of(5), group_id=9, n=4, sampling=SAMPLING)
                await anext(leaving)
                await leaving.aclose()
                await asyncio.wait_for(engine._idle.wait(), 10)
                await engine._sampler._call(lambda: None)  # what was delivered may be of a round that is still ending
                gc.collect()
                counts.append(Counter(type(thing) for thing in gc.get_objects()))
        return counts

    counts = asyncio.run(run())
    assert counts[2][torch.nn.Parameter] > 0
    for kind in (torch.Tensor, torch.nn.Parameter, Part, SampleRequest, asyncio.Queue, asyncio.Task):
        assert counts[-1][kind] <= counts[2][kind], f"{kind.__name__} objects gather"


def test_images_are_refused(tiny_qwen3: Path):
    async def run() -> None:
        async with engine_on(tiny_qwen3) as engine:
            prompt = Prompt(
                "test:image", (), np.array([2], dtype=np.int32), "", "test", (np.zeros((1, 1, 3), np.uint8),)
            )
            with pytest.raises(EngineError, match="has images"):
                await sample(engine, prompt)

    asyncio.run(run())


def test_a_stop_string_is_found_in_the_response_alone_and_across_tokens(tiny_qwen3: Path):
    async def run() -> None:
        async with engine_on(tiny_qwen3) as engine:
            (plain,) = await sample(engine, prompt_of(12), sampling=Sampling(1.0, 20, 0))
            stops = [plain.text[at : at + 3] for at in (2, 6, 9)]
            in_prompt = engine._sampler._tokenizer.decode(prompt_of(12).token_ids[-2:].tolist()) + plain.text[0]
            for stop in stops:
                sampling = Sampling(1.0, 20, 0, stop=(in_prompt, stop))
                (rollout,) = await sample(engine, prompt_of(12), sampling=sampling)
                end = plain.text.index(stop) + 3
                assert rollout.text == plain.text[:end]

    asyncio.run(run())


def test_ends_of_text_are_the_generation_configs_and_the_tokenizers(tiny_qwen3: Path, tmp_path: Path):
    from transformers import AutoTokenizer, GenerationConfig

    config, tokenizer = AutoConfig.from_pretrained(tiny_qwen3), AutoTokenizer.from_pretrained(tiny_qwen3)
    config.eos_token_id = 9
    assert end_tokens(tiny_qwen3, config, tokenizer) == {1}
    assert end_tokens(tmp_path, config, tokenizer) == {1, 9}
    GenerationConfig(eos_token_id=[3, 4]).save_pretrained(tmp_path)
    assert end_tokens(tmp_path, config, tokenizer) == {1, 3, 4}
