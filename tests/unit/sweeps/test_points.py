from __future__ import annotations

from pathlib import Path

import pytest

from rl.config.schema import ConfigError
from rl.config.sweep import Launcher, SweepConfig
from rl.sweeps.points import expand, setting_of, split_words

BASE = "experiment=quickstart"


def labels(*words: str) -> list[str]:
    return [point.label for point in expand([BASE, *words])]


def test_the_grid_is_the_product_in_the_order_given_the_last_fastest():
    points = expand([BASE, "seed=1,2", "algorithm.clip_high=0.2,0.28"])
    assert [point.label for point in points] == [
        "seed=1 algorithm.clip_high=0.2",
        "seed=1 algorithm.clip_high=0.28",
        "seed=2 algorithm.clip_high=0.2",
        "seed=2 algorithm.clip_high=0.28",
    ]
    assert [(point.config.seed, point.config.algorithm.clip_high) for point in points] == [  # type: ignore[attr-defined]
        (1, 0.2),
        (1, 0.28),
        (2, 0.2),
        (2, 0.28),
    ]
    assert points[0].setting == "algorithm.clip_high=0.2"
    assert setting_of(["seed=3"]) == "all"


def test_range_choice_and_glob():
    assert labels("seed=range(1,4)") == ["seed=1", "seed=2", "seed=3"]
    assert labels("seed=choice(4,2)") == ["seed=4", "seed=2"]
    assert labels("algorithm=glob(*grpo)") == ["algorithm=dr_grpo", "algorithm=grpo"]


def test_a_command_without_a_swept_word_is_a_sweep_of_one():
    assert labels() == ["(one point)"]


def test_a_sweep_of_smoke_runs_has_points_that_a_cpu_runs():
    words = ["experiment=glob(qwen2*)", "smoke=cpu", "algorithm.clip_high=0.25"]
    points = expand(words)
    assert [(point.label, point.config.experiment) for point in points] == [
        (f"experiment={name}", name) for name in ("qwen2_5_math_7b_dapo_colocated", "qwen2_5_math_7b_dapo_fully_async")
    ]
    for point in points:
        assert (point.config.hardware.device, point.config.algorithm.clip_high) == ("cpu", 0.25)  # type: ignore[attr-defined]
        assert "smoke=cpu" in point.words and "replaced by random weights" in point.replaced
    with pytest.raises(ConfigError, match=r"2 of 2 points cannot run(?s:.*)steps=7: smoke=cpu sets this itself"):
        expand([*words, "steps=7"])


def test_every_bad_point_is_named_before_one_starts():
    with pytest.raises(ConfigError) as error:
        expand([BASE, "algorithm.clip_high=0.2,-1", "seed=0,-5"])
    message = str(error.value)
    assert message.startswith("3 of 4 points cannot run, so none is started:")
    for words in ("clip_high=0.2 seed=-5: seed=-5 is out", "clip_high=-1 seed=0: algorithm.clip_high=-1.0", "seed=-5"):
        assert words in message


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["seed=1,1"], r"the point seed=1 is there twice"),
        (["seed=1,2", "seed=3,4"], r"seed is set twice"),
        (["algorithm=glob(x*)"], r"stands for no value\. Options of algorithm: cispo"),
        (["seed=glob(*)"], r"stands for no value\. Options of seed: none"),
        (["seed=interval(0,1)"], r"interval"),
        (["algorithm=grpo,drgrpo"], r"point algorithm=drgrpo: algorithm 'drgrpo' not found\. Did you mean 'dr_grpo'"),
        (["mode=train,plan"], r"mode is swept"),
    ],
)
def test_a_grid_that_makes_no_sense_is_refused(words, message):
    with pytest.raises(ConfigError, match=message):
        expand([BASE, *words])


def test_the_settings_of_a_sweep_are_taken_off_the_words_of_its_runs():
    words = [BASE, "sweep.jobs=2", "seed=1,2", "output_dir=/x", "sweep.slurm.timeout_min=5", "sweep.launcher=slurm"]
    settings, folder, rest = split_words(words)
    assert settings == SweepConfig(jobs=2, launcher=Launcher.slurm, slurm={"timeout_min": 5})
    assert (folder, rest) == ("/x", [BASE, "seed=1,2"])
    assert split_words([BASE]) == (SweepConfig(), None, [BASE])


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sweep.jbos=2", r"unknown key 'sweep\.jbos'\. Did you mean 'sweep\.jobs'"),
        ("sweep.jobs=0", r"sweep\.jobs=0 is out of range"),
        ("sweep.jobs=two", r"sweep\.jobs"),
        ("sweep.jobs=1,2", r"sweep\.jobs=1,2: it is of the whole sweep, so it has one value"),
        ("output_dir=a,b", r"output_dir=a,b: it is of the whole sweep"),
        ("sweep.launcher=lsf", r"launcher"),
        ("clean=true", r"clean: a sweep never deletes"),
        ("output_dir=", r"output_dir: '' must not be empty"),
    ],
)
def test_a_wrong_setting_of_a_sweep_is_refused(word, message):
    with pytest.raises(ConfigError, match=message):
        split_words([BASE, word])


def test_a_setting_of_a_sweep_without_a_sweep_is_refused(tmp_path: Path):
    from rl.config.compose import compose_run_config

    with pytest.raises(ConfigError, match=r"sweep\.jobs.*rl -m"):
        compose_run_config([BASE, "sweep.jobs=2"])
