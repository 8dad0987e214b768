from __future__ import annotations

import logging
import math

import pytest

from rl.config.schema import Dtype
from rl.config.sentinels import SentinelAction, SentinelConfig, SentinelsConfig
from rl.loggers.names import unlisted
from rl.sentinels import WATCHES, SentinelError, Sentinels

HEALTHY = {
    "train/old_logprob_difference_max": 0.0,
    "sentinel/padding_leak": 0.0,
    "mismatch/kl_k3": 1e-4,
    "canary/kl_k3": 2e-3,
    "rollout/nonfinite_logprobs": 0.0,
    "train/nonfinite_logprobs": 0.0,
    "offpolicy/effective_sample_fraction": 0.98,
    "reward/uniform_group_fraction": 0.5,
    "train/entropy": 0.4,
}
SICK = [
    ("old_logprobs", "train/old_logprob_difference_max", 2e-5),
    ("padding", "sentinel/padding_leak", math.inf),
    ("mismatch", "mismatch/kl_k3", 0.02),
    ("mismatch", "canary/kl_k3", 0.02),
    ("nonfinite", "rollout/nonfinite_logprobs", 1.0),
    ("nonfinite", "train/nonfinite_logprobs", 1.0),
    ("effective_samples", "offpolicy/effective_sample_fraction", 0.1),
    ("uniform_groups", "reward/uniform_group_fraction", 1.0),
    ("entropy", "train/entropy", 1e-5),
]


def sentinels(dtype: Dtype = Dtype.float32, **changes: SentinelConfig) -> Sentinels:
    return Sentinels(SentinelsConfig(**changes), compute_dtype=dtype)


def test_every_sentinel_has_a_limit_and_reads_listed_metrics():
    assert {watch.sentinel for watch in WATCHES} == set(SentinelsConfig.__dataclass_fields__)
    assert {key for watch in WATCHES for key in watch.keys} == set(HEALTHY)
    assert not unlisted(HEALTHY)


def test_a_healthy_step_trips_nothing():
    assert sentinels().find(HEALTHY) == []


@pytest.mark.parametrize(("name", "key", "value"), SICK)
def test_each_value_past_its_limit_trips_its_own_sentinel(name, key, value):
    trips = sentinels().find(HEALTHY | {key: value})
    assert [trip.sentinel for trip in trips] == [name]
    assert f"sentinels.{name}.limit=" in trips[0].message and key in trips[0].message


def test_the_limit_of_bfloat16_is_wider():
    metrics = HEALTHY | {"train/old_logprob_difference_max": 2e-5}
    assert sentinels(Dtype.bfloat16).find(metrics) == []


def test_a_limit_of_ones_own_wins():
    found = sentinels(old_logprobs=SentinelConfig(1e-9)).find(HEALTHY | {"train/old_logprob_difference_max": 1e-8})
    assert [trip.sentinel for trip in found] == ["old_logprobs"]


def test_what_is_missing_or_not_a_number_is_not_judged():
    assert sentinels().find({}) == []
    assert sentinels().find(dict.fromkeys(HEALTHY, math.nan)) == []


@pytest.mark.parametrize(("name", "key", "value"), SICK)
def test_each_sentinel_can_stop_the_run(name, key, value):
    watch = sentinels(**{name: SentinelConfig(getattr(SentinelsConfig(), name).limit, SentinelAction.stop)})
    with pytest.raises(SentinelError, match=rf"^step 7: .*sentinels\.{name}\.action=stop"):
        watch.act(watch.find(HEALTHY | {key: value}), step=7)


@pytest.mark.parametrize(("name", "key", "value"), SICK)
def test_each_sentinel_can_warn_and_let_the_run_go_on(name, key, value, caplog):
    watch = sentinels()
    with caplog.at_level(logging.WARNING):
        watch.act(watch.find(HEALTHY | {key: value}), step=7)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"step 7: {key} is ") and f"sentinels.{name}.limit=" in record.getMessage()


def test_where_no_answer_is_fresh_the_canary_tells_of_the_mismatch():
    stale = HEALTHY | {"mismatch/kl_k3": math.nan, "canary/kl_k3": 0.02}
    assert [trip.sentinel for trip in sentinels().find(stale)] == ["mismatch"]


def test_a_warning_comes_once_until_the_value_was_inside_again(caplog):
    watch = sentinels()
    sick = HEALTHY | {"train/entropy": 0.0}
    with caplog.at_level(logging.WARNING):
        for step, metrics in enumerate([sick, sick, HEALTHY, sick]):
            watch.act(watch.find(metrics), step=step)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == ["step 0", "step 3"]
