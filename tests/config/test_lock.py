"""Locks of experiments: up to date, broken by a changed default, and what a run is told about them."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from rl.config import lock
from rl.config.algorithms import DrGRPOConfig
from rl.config.comparable import keys_that_matter
from rl.config.compose import checked_run_config
from rl.config.flat import flat
from rl.config.load import to_plain
from rl.config.lock import PublishedStatus, deciding_settings, lock_file, published_lines, published_status
from rl.config.published import ClaimConfig
from rl.config.register import experiment_files, package_folder
from rl.config.schema import ConfigError, Mode, RunConfig, WandbLoggerConfig
from rl.loggers.facts import run_facts
from scripts import lock_experiments
from tests.composed import config_of

NAME = "qwen3_8b_grpo"


def lines_of(config: RunConfig) -> list[str]:
    return published_lines(config, published_status(config))


@pytest.fixture
def one_experiment(monkeypatch: pytest.MonkeyPatch) -> None:
    """To compose all takes seconds."""
    files = {NAME: experiment_files()[NAME]}
    monkeypatch.setattr(lock_experiments, "experiment_files", lambda: files)


def test_locks_and_readme_are_up_to_date(capsys):
    assert lock_experiments.main(["--check"]) == 0, capsys.readouterr().out


def test_a_changed_default_breaks_the_lock(own_files: Path, one_experiment: None, capsys):
    with (own_files / "conf" / "algorithm" / "grpo.yaml").open("a") as file:
        file.write("clip_high: 0.3\n")
    assert lock_experiments.main(["--check"]) == 1
    said = capsys.readouterr()
    assert "-  clip_high: 0.2" in said.out and "+  clip_high: 0.3" in said.out
    assert "python scripts/lock_experiments.py" in said.err


def test_a_lock_without_an_experiment_is_removed(tmp_path, one_experiment: None, monkeypatch, capsys):
    (tmp_path / "resolved").mkdir()
    (tmp_path / "resolved" / "gone.yaml").write_text("seed: 0\n")
    monkeypatch.setattr(lock_experiments, "FOLDER", tmp_path)
    assert lock_experiments.main(["--check"]) == 1
    assert lock_experiments.main([]) == 0
    assert [path.stem for path in (tmp_path / "resolved").iterdir()] == [NAME]
    assert lock_experiments.main(["--check"]) == 0
    capsys.readouterr()


def test_the_experiment_as_it_is_is_published_whatever_logs_it_and_wherever_it_runs():
    config = config_of(f"experiment={NAME}")
    config.logger, config.output_dir, config.mode = WandbLoggerConfig(), "x", Mode.plan
    config.ray.address, config.hardware.network_gb_s = "10.0.0.1:6379", 50.0
    status = published_status(config)
    assert status == PublishedStatus({}) and status.tag == "published"
    assert lines_of(config) == [f"published: the settings of {NAME} as locked"]


def test_settings_that_differ_are_named_with_both_values():
    config = config_of(f"experiment={NAME}")
    config.seed, config.backend.trainer.optimizer.lr = 1, 2e-6
    status = published_status(config)
    assert status is not None and status.tag == "modified"
    assert status.changed == {"seed": (0, 1), "backend.trainer.optimizer.lr": (1e-6, 2e-6)}
    assert status.facts() == {"tag": "modified", "changed": {key: list(pair) for key, pair in status.changed.items()}}
    assert lines_of(config) == [
        f"modified: 2 settings are not those locked for {NAME}",
        "  seed: 0 -> 1",
        "  backend.trainer.optimizer.lr: 1e-06 -> 2e-06",
        "  not comparable, because of backend.trainer.optimizer.lr: every claim",
    ]
    config.seed = 0
    assert lines_of(config)[0] == f"modified: 1 setting is not that locked for {NAME}"


@pytest.mark.parametrize(
    "word",
    [
        "published.claims.gsm8k_peak.tolerance=0.5",
        "published.measured_on=h200x8",
        "published={hardware: x}",
    ],
)
def test_what_was_published_cannot_be_changed_by_a_run(word: str):
    """It decides nothing, so the run would stay `published`, and would be judged by its own tolerance."""
    with pytest.raises(ConfigError, match=r"has published.*edit the experiment's file"):
        checked_run_config([f"experiment={NAME}", word])


def test_a_run_can_do_without_what_was_published():
    assert checked_run_config([f"experiment={NAME}", "published=null"]).published is None


def test_a_setting_that_only_one_side_has_is_a_difference():
    config = config_of(f"experiment={NAME}")
    settings = {**vars(config.algorithm), "_target_": DrGRPOConfig._target_}
    del settings["advantage_scale"]
    config.algorithm = DrGRPOConfig(**settings)
    status = published_status(config)
    assert status is not None
    assert status.changed == {
        "algorithm._target_": ("rl.algorithms.grpo.GRPO", "rl.algorithms.dr_grpo.DrGRPO"),
        "algorithm.advantage_scale": ("group", None),
    }


def test_a_tracker_gets_the_experiment_and_the_tag(tmp_path):
    def tags(config: RunConfig) -> tuple[str, ...]:
        status = published_status(config)
        provenance = {"published": None if status is None else status.facts()}
        return run_facts(tmp_path, config=to_plain(config), provenance=provenance).tags

    config = config_of(f"experiment={NAME}")
    assert tags(config) == (NAME, "published")
    config.seed = 1
    assert tags(config) == (NAME, "modified")
    assert tags(config_of("experiment=quickstart")) == ("quickstart",)


def test_where_nothing_is_published_there_is_no_status():
    config = config_of(f"experiment={NAME}")
    config.published = None
    for other in (config, config_of("experiment=quickstart")):
        assert published_status(other) is None and lines_of(other) == []


def test_without_a_lock_there_is_no_status(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "package_folder", lambda name: tmp_path / name)
    assert published_status(config_of(f"experiment={NAME}")) is None


def test_on_other_hardware_the_claims_that_are_lost_are_named():
    config = config_of("experiment=qwen3_5_35b_a3b_grpo_fully_async", "hardware=h200x8")
    lines = "\n".join(lines_of(config))
    assert lines.startswith("modified: ") and "hardware=h200x8" in lines
    assert (
        "not comparable on h200x8, because they are about speed: throughput_all_gpus, throughput_training_gpus, "
        "throughput_over_colocated"
    ) in lines


def test_a_setting_that_moves_speed_alone_loses_the_claims_of_speed_on_the_published_hardware_too():
    config = config_of("experiment=qwen2_5_math_7b_dapo_fully_async", "backend.rollout.memory_fraction=0.5")
    assert lines_of(config)[2:] == [
        "  not comparable, because of backend.rollout.memory_fraction: step_time_median, step_time_mean, "
        "speedup_over_colocated"
    ]


def test_what_works_around_a_fault_of_rocm_can_be_undone_and_no_claim_of_learning_is_lost():
    config = config_of(
        "experiment=qwen2_5_math_7b_dapo_fully_async",
        "hardware=h200x8",
        "hardware.nodes=4",
        "backend.rollout.custom_all_reduce=true",
        "backend.rollout.attention_backend=FLASH_ATTN",
    )
    lost, by_hardware = lines_of(config)[-2:]
    assert lost.endswith(
        "because of backend.rollout.attention_backend, backend.rollout.custom_all_reduce: step_time_median, "
        "step_time_mean, speedup_over_colocated"
    )
    assert by_hardware.endswith("no other claim is about speed, so the others stay comparable")


def test_on_other_hardware_a_setting_that_changes_what_is_learnt_loses_every_claim():
    assert lines_of(config_of(f"experiment={NAME}", "hardware=h200x8", "algorithm.prompts_per_step=64"))[-1] == (
        "  not comparable, because of algorithm.prompts_per_step: every claim"
    )


def test_on_the_hardware_that_a_source_argues_about_every_claim_is_derived():
    config = config_of(f"experiment={NAME}", "hardware=mi355xx8")
    first, second = lines_of(config)
    assert first == f"published: the settings of {NAME} as locked"  # the same architecture and environment
    assert second.strip().startswith("every claim is derived on mi355xx8: the blog argues")


@pytest.mark.parametrize("name", ["qwen2_5_math_7b_dapo_colocated", "qwen2_5_math_7b_dapo_fully_async"])
def test_a_card_that_no_source_speaks_of_makes_a_run_modified_though_it_is_set_up_alike(name: str):
    """An MI325X has the architecture and the environment of the MI300X that the runs were published of."""
    config = config_of(f"experiment={name}", "hardware=mi325xx8", "hardware.nodes=4")
    status = published_status(config)
    assert status is not None and status.tag == "modified"
    assert status.changed == {"hardware.name": ("mi300xx8", "mi325xx8")}
    first, second, third = lines_of(config)
    assert first == f"modified: the settings of {name} as locked"
    assert second == "  hardware=mi325xx8: its source speaks of no such"
    assert "not comparable on mi325xx8, because they are about speed: step_time_median" in third
    learning = ClaimConfig(metric="eval/dapo_aime_2024/published/avg@32", last_step=1)
    assert keys_that_matter(learning, list(status.changed)) == []


def test_a_lock_holds_what_decides_and_nothing_of_the_host():
    locked = yaml.safe_load(lock_file(NAME).read_text(encoding="utf-8"))
    assert not {"logger", "output_dir", "mode", "clean", "published", "ray"} & set(locked)
    assert set(locked["hardware"]) == {"device", "architecture", "trainer_env", "rollout_env"}
    assert deciding_settings(locked) == locked


def test_keys_are_dotted_and_lists_and_empty_mappings_are_values():
    assert flat({"a": {"b": 1, "c": {}, "d": [1, {"e": 2}]}, "f": None}) == {
        "a.b": 1,
        "a.c": {},
        "a.d": [1, {"e": 2}],
        "f": None,
    }


def test_locks_travel_in_a_wheel_and_are_no_experiments():
    """The wheel holds experiments/ as rl/_experiments, subfolders and all (pyproject.toml, force-include)."""
    pyproject = (Path(__file__).resolve().parents[2] / "pyproject.toml").read_text(encoding="utf-8")
    assert 'experiments = "rl/_experiments"' in pyproject
    folder = package_folder("experiments")
    assert lock_file(NAME) == folder / "resolved" / f"{NAME}.yaml" and lock_file(NAME).is_file()
    assert {path.parent for path in experiment_files().values()} == {folder}


def test_a_result_is_shown_beside_its_claim_and_one_of_other_settings_is_marked(tmp_path, monkeypatch):
    config = config_of(f"experiment={NAME}")
    monkeypatch.setattr(lock_experiments, "FOLDER", tmp_path)
    assert "pending" in lock_experiments.readme_text({NAME: config})
    entry = {"started": "2026-12-01T00:00:00Z", "steps": 210, "commit": None, "is_dirty": None}
    claims = {"gsm8k_peak": {"ours": 0.9512, "verdict": "reproduced"}}
    digest = lock.config_digest(lock_experiments.to_plain(config))
    on_own = {"seed": 0, "config_digest": digest, "hardware": "mi350xx8", "num_gpus": 8, "gpu_hours": 41.6}
    on_other = {"seed": 1, "config_digest": "other", "hardware": "h200x8", "num_gpus": 8, "gpu_hours": 52.0}
    alike = {"seed": 2, "config_digest": digest, "hardware": "mi325xx8", "num_gpus": 8, "gpu_hours": 41.6}
    (tmp_path / "results").mkdir()
    file = tmp_path / "results" / f"{NAME}.yaml"
    file.write_text(yaml.safe_dump([entry | one | {"claims": claims} for one in (on_own, on_other, alike)]))
    rows = [row for row in lock_experiments.readme_text({NAME: config}).splitlines() if "`gsm8k_peak`" in row]
    assert rows[0].endswith("| 0.956 +- 0.012 | 0.9512 (seed 0) | reproduced | 8 GPUs of `mi350xx8` | 42 |")
    assert rows[1].endswith("| 0.9512 (seed 1) | reproduced (modified) | 8 GPUs of `h200x8` | 52 |")
    assert rows[2].endswith("| 0.9512 (seed 2) | reproduced (modified) | 8 GPUs of `mi325xx8` | 42 |")
    file.write_text(yaml.safe_dump([entry | on_own | {"claims": {"gsm8k_peek": claims["gsm8k_peak"]}}]))
    with pytest.raises(ConfigError, match="gsm8k_peek: the experiment makes no such claim"):
        lock_experiments.readme_text({NAME: config})
    file.write_text(yaml.safe_dump([{"claims": {}}]))
    with pytest.raises(ConfigError, match=r"is not what scripts/compare_curves\.py --record writes"):
        lock_experiments.readme_text({NAME: config})
