"""What a plan says of several engines."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl.config.compose import compose_run_config
from rl.plan.report import print_plan


@pytest.fixture(autouse=True)
def _nothing_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def plan_of(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    print_plan(compose_run_config(["experiment=quickstart", *words]))
    return [line.strip() for line in capsys.readouterr().out.splitlines()]


def test_engines_stand_on_their_gpus_and_what_was_chosen_is_said(capsys: pytest.CaptureFixture[str]):
    words = ["hardware=h200x1", "hardware.gpus_per_node=3", "placement=fully_async", "backend/rollout=vllm"]
    lines = plan_of(capsys, *words, "backend.rollout.replicas=2", "backend.rollout.replicas_per_device=null")
    assert (
        "4 engine(s): replicas 2 x replicas_per_device 2 (null: by the model's size); memory_fraction 0.3 each" in lines
    )
    assert "node 0 GPU 0: trainer rank 0" in lines
    assert "node 0 GPU 1: engine 0 worker 0, engine 2 worker 0" in lines
    assert "node 0 GPU 2: engine 1 worker 0, engine 3 worker 0" in lines


def test_a_plan_of_one_engine_speaks_of_no_replicas(capsys: pytest.CaptureFixture[str]):
    lines = plan_of(capsys, "hardware=h200x1")
    assert "node 0 GPU 0: trainer rank 0, engine worker 0" in lines
    assert not [line for line in lines if "replica" in line]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["placement=fully_async"], "staleness at most 1; requests that run at a publish finish first"),
        (
            ["placement=fully_async", "placement.in_flight=abort"],
            "staleness at most 1; requests that run at a publish start anew on the new weights",
        ),
        ([], "staleness at most 0"),
    ],
)
def test_the_bound_and_what_a_publish_does_are_said(capsys: pytest.CaptureFixture[str], words, expected):
    (line,) = [line for line in plan_of(capsys, *words) if "staleness" in line]
    assert line.endswith(expected)


def test_on_a_cpu_they_share_its_cores(capsys: pytest.CaptureFixture[str]):
    lines = plan_of(capsys, "backend.rollout.replicas=2")
    assert "2 engine(s): replicas 2 x replicas_per_device 1" in lines
    assert "cpu: all on the host's CPU (trainer rank 0, engine 0 worker 0, engine 1 worker 0)" in lines
