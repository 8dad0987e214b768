import json

import pytest

from rl.config.compose import compose_run_config
from rl.config.load import to_plain
from rl.config.lock import config_digest, published_status
from rl.loggers.facts import read_provenance, reference_lines, run_facts
from rl.provenance import write_provenance


def claim(**values):
    facts = {"metric": "eval/sums/greedy", "statistic": "max", "value": 0.9, "first_step": None, "last_step": None}
    return facts | values


def published(**claims):
    return {"experiment": "x", "published": {"claims": claims}}


def test_a_run_is_grouped_by_its_experiment_and_a_point_of_a_sweep_by_the_sweeps_folder(tmp_path):
    config = {"experiment": "quickstart", "seed": 0}
    alone = run_facts(tmp_path / "2026-01-01_00-00-00", config=config, provenance={})
    point = run_facts(tmp_path / "clip" / "003", config=config, provenance={})
    assert (alone.name, alone.group) == ("quickstart/2026-01-01_00-00-00", "quickstart")
    assert (point.name, point.group) == ("quickstart/003", "clip")
    unnamed = run_facts(tmp_path / "run", config={"experiment": None}, provenance={})
    assert (unnamed.name, unnamed.group, unnamed.tags) == ("default/run", "default", ("default",))


@pytest.mark.parametrize(("words", "tag"), [([], "published"), (["algorithm.clip_high=0.3"], "modified")])
def test_the_tags_say_whether_a_published_experiment_was_changed(tmp_path, words, tag):
    config = compose_run_config(["experiment=qwen3_8b_grpo", *words])
    status = published_status(config)
    assert status is not None
    extra = {"published": {"tag": status.tag, "changed": status.changed}}
    written = write_provenance(tmp_path, overrides=words, config_plain=to_plain(config), extra=extra)
    for provenance in (written, read_provenance(tmp_path)):
        assert run_facts(tmp_path, config=to_plain(config), provenance=provenance).tags == ("qwen3_8b_grpo", tag)


def test_the_record_of_a_run_has_its_settings_their_digest_the_commit_and_package_versions(tmp_path):
    plain = to_plain(compose_run_config(["experiment=quickstart"]))
    provenance = write_provenance(tmp_path, overrides=[], config_plain=plain)
    config = run_facts(tmp_path, config=plain, provenance=provenance).config
    assert {key: value for key, value in config.items() if key != "provenance"} == plain
    assert config["provenance"]["config_digest"] == config_digest(plain)
    assert "commit" in config["provenance"]["code"]
    assert config["provenance"]["packages"]["torch"].startswith("2.")
    json.dumps(config)


def test_claims_become_lines_of_their_metric_and_a_ratio_to_another_run_does_not():
    config = published(peak=claim(), faster=claim(metric="time/step_s", statistic="ratio", versus="other"))
    (line,) = reference_lines(config)
    assert (line.key, line.metric, line.value) == ("published/peak", "eval/sums/greedy", 0.9)
    assert reference_lines({"experiment": "x", "published": None}) == []


def test_a_line_holds_within_its_window_both_ends_included():
    (line,) = reference_lines(published(late=claim(first_step=3, last_step=5)))
    assert [step for step in range(8) if line.holds_at(step)] == [3, 4, 5]
    (line,) = reference_lines(published(late=claim(first_step=3)))
    assert [step for step in range(6) if line.holds_at(step)] == [3, 4, 5]


def test_a_start_is_claimed_of_one_step_and_people_read_the_window_in_words():
    lines = reference_lines(
        published(
            a=claim(statistic="start"), b=claim(statistic="start", first_step=2), c=claim(first_step=3), d=claim()
        )
    )
    assert [line.window for line in lines] == ["0", "2", "3 to the last", "0 to the last"]
    assert [step for step in range(4) if lines[1].holds_at(step)] == [2]


@pytest.mark.parametrize(("hardware", "names"), [("here", ["a", "b"]), ("same", ["a", "b"]), ("other", ["a"])])
def test_a_speed_is_claimed_only_of_the_hardware_that_its_source_speaks_of(hardware, names):
    config = published(a=claim(), b=claim(metric="time/step_s"))
    config["published"] |= {"measured_on": "here", "carried_over": {"same": "because"}}
    lines = reference_lines(config | {"hardware": {"name": hardware}})
    assert [line.claim for line in lines] == names


def test_a_time_of_a_step_that_is_four_rows_here_is_a_quarter_in_each_and_a_share_is_the_same():
    config = published(
        step_s=claim(metric="time/step_s", value=200.0, rows_per_step=4),
        reward=claim(metric="reward/mean", value=0.6, rows_per_step=4),
    )
    assert [line.value for line in reference_lines(config)] == [50.0, 0.6]
