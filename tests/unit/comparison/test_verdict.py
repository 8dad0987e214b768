"""Claims judged against curves whose statistics are worked out by hand."""

from __future__ import annotations

import copy
import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from rl.comparison.claims import Window, value_of, window_of
from rl.comparison.curves import ELAPSED, Axis, Curves, NotComparable, join_rows, read_csv
from rl.comparison.report import print_findings
from rl.comparison.verdict import (
    Comparison,
    Finding,
    Verdict,
    claims_of_metrics,
    claims_of_points,
    exit_code,
    judge,
    verdict_of,
)
from rl.config.compose import compose_run_config
from rl.config.published import ClaimConfig, ClaimOrigin, PublishedConfig, Statistic
from rl.config.register import package_folder
from rl.config.schema import RunConfig

ACCURACY = "eval/arithmetic/greedy"


@pytest.fixture(scope="module")
def config() -> RunConfig:
    """128 prompts x 16 answers a step."""
    return compose_run_config(["experiment=qwen2_5_math_7b_dapo_fully_async"])


def run(values: list[float | None], metric: str = ACCURACY, *, prompts: int = 8, **options: Any) -> Curves:
    """One value a step from step 1 on; every step trains on `prompts` prompts of 10 answer tokens."""
    rows = [
        {"step": step, "prompts_trained": prompts * step, "tokens_trained": 10 * prompts * step, metric: value}
        for step, value in enumerate(values, start=1)
    ]
    return Curves(options.pop("name", "run"), rows, **options)


def of(metric: str = ACCURACY, statistic: str = "max", **options: Any) -> ClaimConfig:
    return ClaimConfig(metric=metric, statistic=Statistic[statistic], **{"tolerance": 0.1, **options})


def judge_one(claim: ClaimConfig, ours: Curves, **options: Any) -> Finding:
    (finding,) = judge(Comparison(ours, {"claim": claim}, **options))
    return finding


def statistic(claim: ClaimConfig, ours: Curves, axis: Axis = Axis.STEP) -> float:
    return value_of(claim, ours, window_of(claim, ours, axis), axis, rows_per_step=claim.rows_per_step)


@pytest.mark.parametrize("axis", list(Axis))
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("start", 5.0),
        ("max", 9.0),
        ("settles_at", 3.0),  # of the last two, 2 and 4
        ("median", 4.5),
        ("mean", 4.5),
    ],
)
def test_statistics_of_eight_steps(name: str, expected: float, axis: Axis):
    """5 1 9 3 5 7 2 4: sorted 1 2 3 4 5 5 7 9, sum 36."""
    assert statistic(of(statistic=name), run([5, 1, 9, 3, 5, 7, 2, 4]), axis) == expected


@pytest.mark.parametrize("axis", list(Axis))
@pytest.mark.parametrize(("name", "expected"), [("start", 1.0), ("max", 9.0), ("median", 4.0), ("mean", 4.5)])
def test_a_window_has_both_its_ends(name: str, expected: float, axis: Axis):
    """Steps 2 to 5 of 5 1 9 3 5 7 2 4 are 1 9 3 5."""
    claim = of(statistic=name, first_step=2, last_step=5)
    assert statistic(claim, run([5, 1, 9, 3, 5, 7, 2, 4]), axis) == expected


@pytest.mark.parametrize("axis", list(Axis))
def test_a_curve_settles_at_the_median_of_the_last_quarter_of_its_window(axis: Axis):
    """Steps 1 to 12 of 20: the last quarter is 10, 11 and 12, whose values are 1, 30 and 2."""
    values: list[float | None] = [100.0] * 20
    values[9:12] = [1.0, 30.0, 2.0]
    assert statistic(of(statistic="settles_at", last_step=12), run(values), axis) == 2.0
    assert statistic(of(statistic="settles_at", first_step=9, last_step=12), run(values), axis) == 2.0
    assert Window(0.0, 100.0).last_quarter == Window(75.0, 100.0)
    assert Window(float("-inf"), 100.0).last_quarter == Window(75.0, 100.0)


def test_a_value_that_does_not_exist_is_no_point():
    assert statistic(of(statistic="start"), run([None, 0.0, 2.0])) == 0.0
    assert statistic(of(statistic="mean"), run([None, 0.0, 2.0])) == 1.0


def test_rows_are_joined_as_their_metric_is_reduced():
    """Pairs of 1 2 3 4 5: times 3 and 7, shares 1.5 and 3.5, maxima 2 and 4; the fifth is left over."""
    for metric, expected in [
        ("time/step_s", [3.0, 7.0]),
        ("reward/mean", [1.5, 3.5]),
        ("staleness/max", [2.0, 4.0]),
        ("policy_version", [2.0, 4.0]),
    ]:
        rows = [{"step": 0, metric: 9.0}, *run([1, 2, 3, 4, 5], metric).rows]
        assert [row[metric] for row in join_rows(rows, metric, 2)] == [9.0, *expected]
    claim = of("time/step_s", "median", rows_per_step=2)
    assert statistic(claim, run([1, 2, 3, 4, 5], "time/step_s")) == 5.0


def test_rates_of_several_rows_are_all_that_was_done_over_all_the_time():
    """128 prompts in 40, 40, 40 and 99 s, where a publish comes fourth: 512 in 219 s, not the mean of four rates."""
    metric, times = "throughput/prompts_per_s", [40.0, 40.0, 40.0, 99.0]
    ours = run([128 / seconds for seconds in times], metric)
    for row, seconds in zip(ours.rows, times, strict=True):
        row["time/step_s"] = seconds
    claim = of(metric, "median", rows_per_step=4)
    assert statistic(claim, ours) == pytest.approx(512 / 219)
    del ours.rows[2]["time/step_s"]
    assert judge_one(claim, ours).verdict == "not comparable"
    with pytest.raises(NotComparable, match=r"throughput/prompts_per_s of several rows needs time/step_s of each"):
        statistic(claim, ours)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        (0.8, "reproduced"),
        (0.9, "reproduced"),
        (0.7, "reproduced"),
        (0.91, "partial"),
        (0.61, "partial"),
        (1.0, "failed"),
        (0.6, "failed"),
        (0.0, "failed"),
    ],
)
def test_within_the_tolerance_is_reproduced_and_from_twice_of_it_on_failed(ours: float, verdict: str):
    finding = judge_one(of(value=0.8), run([ours]))
    assert (finding.verdict, finding.ours, finding.theirs) == (verdict, ours, 0.8)
    assert finding.difference == pytest.approx(ours - 0.8)


def test_of_several_points_some_within_the_tolerance_are_partial():
    assert verdict_of([0.0, -0.1, 0.1], 0.1) is Verdict.REPRODUCED
    assert verdict_of([0.0, 5.0], 0.1) is Verdict.PARTIAL
    assert verdict_of([0.2, -0.3], 0.1) is Verdict.FAILED
    assert verdict_of([0.15, 0.15], 0.1) is Verdict.PARTIAL
    assert verdict_of([0.0], 0.0) is Verdict.REPRODUCED
    assert verdict_of([1e-3], 0.0) is Verdict.FAILED


@pytest.mark.parametrize("name", ["colocated", "fully_async"])
@pytest.mark.parametrize("axis", [Axis.STEP, Axis.PROMPTS])
@pytest.mark.parametrize(
    ("shift", "verdict"), [(0, "reproduced"), (1, "reproduced"), (1.5, "partial"), (2, "failed"), (-2, "failed")]
)
def test_a_tabled_published_curve_is_judged_against_itself(name: str, axis: Axis, shift: float, verdict: str):
    """`shift` in tolerances. The run's rows are the table's own points, the whole curve moved."""
    path = package_folder("experiments") / "curves" / f"verl_h20_qwen2_5_math_7b_dapo_{name}.csv"
    table, tolerance = read_csv(path, renamed={}), 600.0
    rows = [{**row, ELAPSED: row[ELAPSED] + shift * tolerance} for row in table.rows]
    ours = Curves("run", rows, hardware=table.hardware)
    claims = claims_of_points({"elapsed": of(ELAPSED, tolerance=tolerance)}, table)
    (finding,) = judge(Comparison(ours, claims, axis=axis, against=table))
    assert finding.verdict == verdict
    assert finding.difference == pytest.approx(shift * tolerance)
    assert finding.what == "4 points, the worst"


def test_one_point_of_a_table_that_is_missed_makes_it_partial():
    table = Curves("table", run([0.1, 0.2, 0.3]).rows, is_tabled=True)
    finding = judge_one(of(), run([0.1, 0.2, 0.9]), against=table)
    assert (finding.verdict, finding.ours, finding.theirs) == ("partial", 0.9, 0.3)


def test_between_two_of_our_points_the_curve_is_a_straight_line():
    """Evaluated at steps 1 and 3 with 0.1 and 0.5: 0.3 at step 2."""
    table = Curves("table", run([None, 0.3]).rows, is_tabled=True)
    assert judge_one(of(tolerance=1e-9), run([0.1, None, 0.5]), against=table).verdict == "reproduced"


def test_a_table_is_not_compared_beyond_the_run():
    table = Curves("table", run([0.1, 0.2, 0.3]).rows, is_tabled=True)
    finding = judge_one(of(), run([0.1, 0.2]), against=table)
    assert finding.why == "the last point is at 24 prompts, and the run's last value at 16"


def test_what_was_not_logged_is_not_comparable():
    finding = judge_one(of("eval/gsm8k/published/greedy"), run([0.1]))
    assert finding.verdict == "not comparable"
    assert finding.why == "eval/gsm8k/published/greedy was not logged by run. Did you mean 'eval/arithmetic/greedy'?"
    assert judge_one(of(), run([None, None])).verdict == "not comparable"


def test_a_window_that_was_not_reached_is_not_comparable():
    finding = judge_one(of(last_step=30, value=0.5), run([0.5] * 29))
    assert (finding.verdict, finding.why) == ("not comparable", "the window ends at step 30 and the run is at 29")
    assert judge_one(of(last_step=30, value=0.5), run([0.5] * 30)).verdict == "reproduced"
    unfinished = run([0.5] * 29, total_steps=30)
    assert judge_one(of(value=0.5), unfinished).why == "the window ends at step 30 and the run is at 29"


def test_the_start_needs_no_end():
    assert judge_one(of(statistic="start", value=0.5), run([0.5, 0.9], total_steps=100)).verdict == "reproduced"


def test_a_window_without_a_value_is_not_comparable():
    finding = judge_one(of(first_step=3, last_step=4), run([0.5, 0.5, None, None, 0.5]))
    assert finding.why == f"run has no value of {ACCURACY} in the window"


def test_a_speed_is_comparable_on_its_own_hardware_alone():
    published = PublishedConfig(measured_on="mi350xx8", carried_over={"mi355xx8": "the same architecture"})
    claim = of("time/step_s", "median", value=219.0, tolerance=22.0)
    for hardware, verdict in [("mi350xx8", "reproduced"), ("mi355xx8", "reproduced"), ("h200x8", "not comparable")]:
        ours = run([200.0, 230.0], "time/step_s", hardware=hardware)
        finding = judge_one(claim, ours, published=published)
        assert (finding.verdict, finding.is_derived) == (verdict, hardware == "mi355xx8")
    assert finding.why == "a speed on mi350xx8, and the run was on h200x8"
    accuracy = judge_one(of(value=0.5), run([0.5], hardware="h200x8"), published=published)
    assert accuracy.verdict == "reproduced"


@pytest.mark.parametrize("key", ["steps", "task.epochs"])
def test_of_a_run_of_another_length_only_what_does_not_hang_on_its_end_is_comparable(key: str):
    """30 steps cannot tell where 210 settle, nor how high they come, and would be called failed."""
    ours = run([0.5] * 30)
    for claim in (of(statistic="settles_at", value=0.9), of(value=0.9)):
        finding = judge_one(claim, ours, changed=[key])
        assert (finding.verdict, finding.why) == ("not comparable", f"the run is modified: {key}")
    for claim in (of(last_step=30, value=0.5), of(statistic="start", value=0.5), of(statistic="median", value=0.5)):
        assert judge_one(claim, ours, changed=[key]).verdict == "reproduced"


def test_a_derived_number_is_called_so_beside_its_value():
    derived = of(value=0.5, unit="fraction", origin=ClaimOrigin.derived)
    findings = [judge_one(one, run([0.5]), published=PublishedConfig()) for one in (of(value=0.5), derived)]
    assert [finding.is_derived for finding in findings] == [False, True]
    said = io.StringIO()
    print_findings(findings, picture=Path("verdict.png"), console=Console(file=said))
    assert said.getvalue().count("0.5 (derived)") == 1


@pytest.mark.parametrize(
    ("changed", "of_accuracy", "of_speed"),
    [
        (["algorithm.clip_high"], ["algorithm.clip_high"], ["algorithm.clip_high"]),
        (["seed", "task.data.gsm8k.path", "hardware.architecture"], [], []),
        (["backend.rollout.memory_fraction"], [], ["backend.rollout.memory_fraction"]),
        (["checkpoint.every", "task.train"], ["task.train"], ["checkpoint.every", "task.train"]),
    ],
)
def test_a_modified_run_is_comparable_where_the_setting_does_not_matter(
    changed: list[str], of_accuracy: list[str], of_speed: list[str]
):
    published = PublishedConfig(measured_on="cpu")
    learning = judge_one(of(value=0.5), run([0.5]), changed=changed)
    speed = run([1.0], "time/step_s", hardware="cpu")
    timing = judge_one(of("time/step_s", value=1.0), speed, changed=changed, published=published)
    for finding, keys in [(learning, of_accuracy), (timing, of_speed)]:
        assert finding.why == (f"the run is modified: {', '.join(keys)}" if keys else "")
        assert finding.verdict == ("not comparable" if keys else "reproduced")


def test_how_often_is_evaluated_matters_for_a_maximum_alone():
    for name, verdict in [("max", "not comparable"), ("settles_at", "reproduced"), ("start", "reproduced")]:
        finding = judge_one(of(statistic=name, value=0.5), run([0.5]), changed=["evaluation.every"])
        assert finding.verdict == verdict


def test_a_ratio_is_that_of_the_medians_over_equal_prompts():
    """Ours: 16 steps of 128 prompts; the other: 4 of 512. The first 8 of ours hold what the first 2 of theirs do.

    Medians: 4.5 of 1 to 8; 1.5 of 1 and 2. Later values are no part of the window.
    """
    metric = "throughput/prompts_per_s"
    ours = run([*range(1, 9), *[99.0] * 8], metric, prompts=128, hardware="cpu")
    other = run([1.0, 2.0, 50.0, 50.0], metric, prompts=512, hardware="cpu")
    claim = of(metric, "ratio", last_step=8, versus="other", value=3.0, tolerance=0.01)
    options: dict[str, Any] = {"versus": {"other": other}, "published": PublishedConfig(measured_on="cpu")}
    finding = judge_one(claim, ours, **options)
    assert (finding.verdict, finding.ours) == ("reproduced", 3.0)


def test_times_of_steps_with_other_data_are_scaled_to_equal_data():
    """10 s for 128 prompts and 20 s for 512 is 40 s and 20 s for 512: half as fast."""
    ours = run([10.0] * 8, "time/step_s", prompts=128, hardware="cpu")
    other = run([20.0] * 2, "time/step_s", prompts=512, hardware="cpu")
    claim = of("time/step_s", "ratio", versus="other", value=2.0, tolerance=1e-6)
    options: dict[str, Any] = {"versus": {"other": other}, "published": PublishedConfig(measured_on="cpu")}
    assert judge_one(claim, ours, **options).ours == pytest.approx(2.0)
    joined = replace(claim, rows_per_step=4)
    assert judge_one(joined, ours, **options).ours == pytest.approx(2.0)
    swapped = judge_one(claim, other, versus={"other": ours}, published=options["published"])
    assert swapped.ours == pytest.approx(0.5)


def test_a_ratio_needs_its_other_run():
    claim = of(statistic="ratio", versus="the_other_mode")
    assert judge_one(claim, run([0.5])).why == "a run of the_other_mode is needed: --versus RUN"
    modified = {"versus": {"the_other_mode": run([0.5])}, "versus_changed": {"the_other_mode": ["task.train"]}}
    assert judge_one(claim, run([0.5]), **modified).why == "the run of the_other_mode is modified: task.train"
    zero = judge_one(claim, run([0.5]), versus={"the_other_mode": run([0.0])})
    assert zero.why == "the other run's value is 0, which nothing can be divided by"
    other = judge_one(claim, run([0.5]), against=run([0.5]), versus={"the_other_mode": run([0.5])})
    assert other.why == "a ratio of two runs is compared with the published one alone"
    short = judge_one(claim, run([0.5, 0.5]), versus={"the_other_mode": run([0.5], name="other")})
    assert short.why == "other ends at 8 prompts of 16"


def test_runs_are_never_compared_step_by_step_where_steps_hold_other_data(config: RunConfig):
    """The same learning by prompts: 4 steps of 128 against 1 of 512."""
    large = copy.deepcopy(config)
    large.algorithm.prompts_per_step = 512
    ours = run([0.1, 0.2, 0.3, 0.4] * 2, prompts=128, config=config)
    other = run([0.4, 0.4], prompts=512, config=large, name="other")
    claim = of(statistic="max", tolerance=0.0)
    by_step = judge_one(claim, ours, against=other, axis=Axis.STEP)
    assert by_step.why == (
        "a step holds 128 prompts x 16 answers here and 512 prompts x 16 answers there: compare by --x prompts"
    )
    assert judge_one(claim, ours, against=other).verdict == "reproduced"


def test_another_run_is_judged_at_the_claims_own_statistic_and_window():
    """Best of steps 1 to 2: 0.3 and 0.35; the 0.9 later is in no window."""
    finding = judge_one(
        of(last_step=2, tolerance=0.06, value=99.0), run([0.2, 0.3, 0.9]), against=run([0.35, 0.1, 0.0])
    )
    assert (finding.verdict, finding.ours, finding.theirs) == ("reproduced", 0.3, 0.35)
    (claim,) = claims_of_metrics({ACCURACY: 0.1}).values()
    settled = judge_one(claim, run([0.0, 0.0, 0.0, 0.5]), against=run([1.0, 1.0, 1.0, 0.55]))
    assert (settled.verdict, settled.ours, settled.theirs) == ("reproduced", 0.5, 0.55)


def test_a_curve_that_says_no_prompts_is_compared_by_steps_alone():
    export = Curves("export", [{"step": 1, ACCURACY: 0.5}, {"step": 2, ACCURACY: 0.6}])
    finding = judge_one(of(), run([0.5, 0.6]), against=export)
    assert (finding.verdict, "--x step" in finding.why) == ("not comparable", True)
    assert judge_one(of(), run([0.5, 0.6]), against=export, axis=Axis.STEP).verdict == "reproduced"


def test_exit_codes():
    def finding(verdict: Verdict) -> Finding:
        return Finding("", "", "", verdict)

    assert exit_code([finding(Verdict.REPRODUCED)] * 2) == 0
    assert exit_code([finding(Verdict.REPRODUCED), finding(Verdict.FAILED), finding(Verdict.NOT_COMPARABLE)]) == 1
    assert exit_code([finding(Verdict.REPRODUCED), finding(Verdict.PARTIAL)]) == 3
    assert exit_code([finding(Verdict.REPRODUCED), finding(Verdict.NOT_COMPARABLE)]) == 3


def test_a_curve_without_the_metric_says_so():
    with pytest.raises(NotComparable, match="reward/mean was not logged by run"):
        run([0.1]).curve("reward/mean", Axis.STEP)


@pytest.mark.parametrize("axis", [Axis.PROMPTS, Axis.TOKENS, Axis.STEP])
@pytest.mark.parametrize("name", ["qwen2_5_math_7b_dapo_fully_async", "qwen3_5_35b_a3b_grpo_fully_async"])
def test_an_asynchronous_run_against_itself_is_reproduced_on_every_axis(name: str, axis: Axis):
    """Every fourth row publishes and takes three times as long: a row alone is not what a claim is about."""
    config = compose_run_config([f"experiment={name}"])
    assert config.published is not None
    claims = {key: claim for key, claim in config.published.claims.items() if claim.statistic is not Statistic.ratio}
    prompts, metrics = config.algorithm.prompts_per_step, {claim.metric for claim in claims.values()}
    rows = []
    for step in range(1, config.steps + 1):
        seconds = 75.0 if step % 4 == 0 else 25.0
        known = {"step": step, "prompts_trained": prompts * step, "tokens_trained": 900 * prompts * step}
        values = dict.fromkeys(metrics, prompts / seconds)
        rows.append(known | values | {"time/step_s": seconds})
    ours = Curves("run", rows, config, config.steps, config.hardware.name)
    findings = judge(Comparison(ours, claims, axis=axis, published=config.published, against=ours))
    assert [(finding.name, finding.ours, finding.verdict) for finding in findings] == [
        (finding.name, finding.theirs, Verdict.REPRODUCED) for finding in findings
    ]
