"""What `smoke=cpu` makes of an experiment, before anything runs."""

from __future__ import annotations

import pytest

from rl.config.check import check_run_config
from rl.config.compose import compose_run_config
from rl.config.load import load_run_config, to_plain
from rl.config.register import experiment_files
from rl.config.schema import ConfigError, FSDPConfig, LocalRolloutConfig, Packing
from rl.config.smoke import run_config, smoke_run_config, split_smoke
from rl.config.tasks import MADE

PUBLISHED = [name for name in experiment_files() if compose_run_config([f"experiment={name}"]).published is not None]


def test_all_five_published_runs_have_one():
    assert len(PUBLISHED) == 5


@pytest.mark.parametrize("name", PUBLISHED)
def test_placement_and_algorithm_stay_and_what_a_cpu_lacks_is_replaced_and_told(name):
    large = compose_run_config([f"experiment={name}", "seed=7"])
    small, text = smoke_run_config([f"experiment={name}", "seed=7"])
    check_run_config(small)
    assert load_run_config(to_plain(small)) == small
    assert small.seed == 7 and small.experiment == name
    sizes = ("prompts_per_step", "prompts_per_mini_batch", "group_size", "response_limit", "overlong_buffer")
    for part in ("algorithm", "placement"):
        before, after = to_plain(large)[part], to_plain(small)[part]
        assert {key for key in before if before[key] != after[key]} <= {*sizes, "trainer_ranks"}
    assert small.algorithm.updates_per_step == large.algorithm.updates_per_step
    assert small.steps == 2 * large.placement.publish_every
    assert isinstance(small.backend.trainer, FSDPConfig)
    assert isinstance(small.backend.rollout, LocalRolloutConfig)
    assert small.backend.trainer.packing is large.backend.trainer.packing
    assert small.backend.trainer.optimizer == large.backend.trainer.optimizer
    assert small.task.data.gsm8k.path == MADE  # type: ignore[attr-defined]
    assert f"model {large.model.path} replaced by random weights" in text
    assert "engine " in text and "replaced by LocalEngine" in text
    assert ("trainer MegatronTrainer replaced by FSDPTrainer" in text) == (
        large.backend.trainer.packing is Packing.one_sequence
    )
    assert f"steps={small.steps} " in text


@pytest.mark.parametrize("word", ["steps=7", "backend/rollout=vllm", "algorithm.group_size=8", "hardware=h200x1"])
def test_a_word_that_the_smoke_run_would_undo_is_refused(word):
    with pytest.raises(ConfigError, match=rf"{word}: smoke=cpu sets this itself"):
        smoke_run_config(["experiment=qwen3_8b_grpo", word])


def test_a_word_that_does_nothing_is_refused_as_in_any_run():
    with pytest.raises(ConfigError, match=r"algorithm\.kl_estimator would do nothing"):
        run_config(["experiment=qwen2_5_math_7b_dapo_colocated", "smoke=cpu", "algorithm.kl_estimator=k2"])


def test_without_the_word_nothing_is_replaced():
    config, replaced = run_config(["experiment=quickstart", "seed=3"])
    assert (config.seed, replaced) == (3, "")


def test_other_smokes_and_other_runs_are_refused():
    assert split_smoke(["seed=1", "smoke=cpu"]) == (["seed=1"], True)
    assert split_smoke(["seed=1"]) == (["seed=1"], False)
    with pytest.raises(ConfigError, match="smoke=gpu: the only smoke run is smoke=cpu"):
        split_smoke(["smoke=gpu"])
    with pytest.raises(ConfigError, match="smoke=cpu is there twice"):
        split_smoke(["smoke=cpu", "smoke=cpu"])
    with pytest.raises(ConfigError, match=r"smoke=cpu changes a run after.*mode=plan prints"):
        compose_run_config(["experiment=qwen3_8b_grpo", "smoke=cpu"])
    with pytest.raises(ConfigError, match="model=tiny_warm_started is none of theirs"):
        smoke_run_config(["experiment=quickstart"])
