"""Published experiments: where each value comes from, and what is claimed."""

from __future__ import annotations

import pytest

from rl.config.compose import compose_run_config
from rl.config.evidence import evidence_of, evidence_problems, settings_to_justify
from rl.config.published import ClaimOrigin, PublishedConfig, Statistic, origin_on
from rl.config.register import experiment_files, option_names
from rl.config.schema import RunConfig
from rl.loggers.names import find

NAMES = (
    "qwen3_8b_grpo",
    "qwen2_5_math_7b_dapo_fully_async",
    "qwen2_5_math_7b_dapo_colocated",
    "qwen3_5_35b_a3b_grpo_colocated",
    "qwen3_5_35b_a3b_grpo_fully_async",
)


@pytest.fixture(scope="module")
def configs() -> dict[str, RunConfig]:
    return {name: compose_run_config([f"experiment={name}"]) for name in NAMES}


@pytest.fixture(scope="module")
def published(configs) -> dict[str, PublishedConfig]:
    return {name: config.published for name, config in configs.items() if config.published is not None}


def test_the_five_published_runs_are_there(published):
    assert set(NAMES) <= set(experiment_files()) and set(published) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_value_that_differs_from_a_default_has_one_piece_of_evidence(name, configs):
    assert evidence_problems(configs[name]) == []


def test_a_missing_a_superfluous_and_a_double_entry_are_found():
    config = compose_run_config(["experiment=qwen3_8b_grpo", "algorithm.clip_high=0.28", "algorithm.dual_clip=null"])
    assert config.published is not None
    config.published.evidence.deviation["task"] = "again"
    assert evidence_problems(config) == [
        "algorithm.clip_high differs from its default and has no evidence",
        "algorithm.dual_clip has evidence, but is what it is by default",
        "task has evidence of two kinds",
    ]


def test_facts_of_a_model_and_of_hardware_need_none_but_changes_of_them_do(configs):
    keys = settings_to_justify(configs["qwen2_5_math_7b_dapo_fully_async"])
    assert "model.hf_overrides.max_position_embeddings" in keys and "hardware.nodes" in keys
    assert "model.num_params" not in keys and "hardware.memory_gib" not in keys
    assert "task.max_prompt_tokens" in keys  # from conf/task, and not the default of its class


def test_every_note_says_something(published):
    for name, of in published.items():
        notes = [note for _, _, note in evidence_of(of)] + list(of.not_offered.values())
        assert all(note.strip() for note in notes), name
        assert of.source.title and of.source.date and of.hardware, name


def test_every_claim_is_of_a_metric_that_exists_and_can_be_judged(published):
    for name, of in published.items():
        assert of.claims and of.measured_on in option_names("hardware"), name
        assert set(of.carried_over) <= set(option_names("hardware")), name
        for key, claim in of.claims.items():
            where = f"{name} {key}"
            assert find(claim.metric) is not None, where
            assert claim.tolerance > 0 and claim.rows_per_step >= 1, where
            assert (claim.statistic is Statistic.ratio) == (claim.versus is not None), where
            assert claim.versus is None or claim.versus in published, where
            if claim.first_step is not None and claim.last_step is not None:
                assert claim.first_step <= claim.last_step, where


def test_an_evaluation_that_is_claimed_is_one_that_the_run_makes(configs):
    for name in ("qwen3_8b_grpo", "qwen2_5_math_7b_dapo_fully_async"):
        task, claims = configs[name].task, configs[name].published.claims.values()
        benchmarks = {claim.metric.split("/")[1] for claim in claims if claim.metric.startswith("eval/")}
        assert benchmarks == set(task.evaluate)


def test_modes_with_steps_of_unequal_data_are_compared_per_prompt_or_per_token(configs, published):
    """A ratio of step times would compare 128 prompts with 512."""
    ratios = [claim for of in published.values() for claim in of.claims.values() if claim.versus]
    assert len(ratios) == 2
    assert all(claim.metric.startswith("throughput/") for claim in ratios)
    asynchronous = configs["qwen2_5_math_7b_dapo_fully_async"]
    colocated = configs["qwen2_5_math_7b_dapo_colocated"]
    rows = {claim.rows_per_step for claim in asynchronous.published.claims.values() if claim.metric == "time/step_s"}
    assert rows == {asynchronous.placement.publish_every} == {4}
    assert asynchronous.algorithm.prompts_per_step * 4 == colocated.algorithm.prompts_per_step == 512
    assert asynchronous.steps == 4 * colocated.steps == 1600  # 204,800 prompts either way


def test_what_a_source_logs_once_a_publish_is_compared_with_as_many_rows(configs):
    """verl's trainer logs what it trains on once a parameter sync; an evaluation belongs to a single row."""
    for name in ("qwen2_5_math_7b_dapo_fully_async", "qwen3_5_35b_a3b_grpo_fully_async"):
        every = configs[name].placement.publish_every
        assert every == 4
        for key, claim in configs[name].published.claims.items():
            expected = 1 if claim.metric.startswith("eval/") else every
            assert claim.rows_per_step == expected, f"{name} {key}"
            for step in (claim.first_step and claim.first_step - 1, claim.last_step):
                assert step is None or step % every == 0, f"{name} {key}: the window ends within a step of the source"


@pytest.mark.parametrize(
    ("metric", "hardware", "expected"),
    [
        ("eval/gsm8k/published/greedy", "mi350xx8", ClaimOrigin.vendor_measured),
        ("eval/gsm8k/published/greedy", "h200x8", ClaimOrigin.vendor_measured),
        ("eval/gsm8k/published/greedy", "mi355xx8", ClaimOrigin.derived),
        ("time/step_s", "mi350xx8", ClaimOrigin.vendor_measured),
        ("time/step_s", "mi355xx8", ClaimOrigin.derived),
        ("throughput/tokens_per_s_per_gpu", "h200x8", None),
    ],
)
def test_a_claim_stands_on_hardware_by_who_measured_it_there(metric, hardware, expected, published):
    of = published["qwen3_8b_grpo"]
    claim = of.claims["gsm8k_peak"]
    claim = type(claim)(**{**vars(claim), "metric": metric})
    assert origin_on(of, claim, hardware) is expected
