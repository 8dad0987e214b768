"""What a plan says of several engines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rl.config.compose import compose_run_config
from rl.plan.report import print_plan
from rl.sweeps.command import run_sweep


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
    (line,) = [line for line in plan_of(capsys, *words) if "staleness at most" in line]
    assert line.endswith(expected)


def test_on_a_cpu_they_share_its_cores(capsys: pytest.CaptureFixture[str]):
    lines = plan_of(capsys, "backend.rollout.replicas=2")
    assert "2 engine(s): replicas 2 x replicas_per_device 1" in lines
    assert "cpu: all on the host's CPU (trainer rank 0, engine 0 worker 0, engine 1 worker 0)" in lines


def test_what_does_not_fit_ends_with_2_and_the_override_that_makes_it_fit(capsys: pytest.CaptureFixture[str]):
    words = ["experiment=qwen3_8b_grpo", "hardware=h200x8", "backend.trainer.recompute=false"]
    assert print_plan(compose_run_config(words)) == 2
    page = " ".join(capsys.readouterr().out.split())
    assert "; try backend.trainer.recompute=true" in page
    assert "verdict: does not fit: train takes " in page and "most of it activations, estimated" in page


def test_where_the_engine_lacks_room_no_setting_of_the_trainer_is_said_to_help(capsys: pytest.CaptureFixture[str]):
    """0.6 x 10 GiB is 1.6 less than half of the weights, and no fraction holds an answer beside them in 10 GiB."""
    assert print_plan(compose_run_config(["experiment=qwen3_8b_grpo", "hardware.memory_gib=10"])) == 2
    verdict = " ".join(capsys.readouterr().out.split()).partition("verdict: ")[2]
    assert "the engine's share of a GPU lacks 1.6 GiB for its weights, without keys and values" in verdict
    assert "try hardware with more memory" in verdict and "backend.trainer" not in verdict


def test_what_the_trainer_moves_out_is_pinned_and_may_take_twice_as_much(capsys: pytest.CaptureFixture[str]):
    print_plan(compose_run_config(["experiment=qwen3_8b_grpo"]))
    (line,) = re.findall(r"host of one node: .*", capsys.readouterr().out)
    assert line.startswith("host of one node: 106.8 GiB of what") and line.endswith("so at most twice as much")


def test_what_the_predicted_time_leaves_out_or_does_not_know_is_said(capsys: pytest.CaptureFixture[str]):
    def page(*words: str) -> str:
        print_plan(compose_run_config(["experiment=qwen2_5_math_7b_dapo_colocated", *words]))
        return capsys.readouterr().out

    handing_over, network = "; evaluations, checkpoints and handing the GPUs over", "16.7 GB/s a GPU between nodes"
    colocated = page()
    assert handing_over in colocated and network in colocated
    assert network not in page("hardware.network_gb_s=400")
    print_plan(compose_run_config(["experiment=qwen3_5_35b_a3b_grpo_fully_async"]))
    apart = capsys.readouterr().out
    assert "; evaluations and checkpoints come on top" in apart and network not in apart


def test_a_small_margin_is_called_tight(capsys: pytest.CaptureFixture[str]):
    words = ["experiment=qwen3_8b_grpo", "hardware=h200x8", "backend.rollout.memory_fraction=0.93"]
    assert print_plan(compose_run_config(words)) == 0
    assert "verdict: fits (margin 4 GiB, tight: below 10% of the memory)" in capsys.readouterr().out


def test_a_model_of_unknown_sizes_is_planned_as_far_as_it_is_known(capsys: pytest.CaptureFixture[str]):
    words = ["experiment=qwen3_8b_grpo", "model=hf", "model.path=nobody/unheard-of"]
    assert print_plan(compose_run_config(words)) == 0
    page = capsys.readouterr().out
    assert "verdict: not known whether it fits, without the model's sizes" in page
    assert "not known: the model's sizes are not here. Give a local folder in model.path, or model.shape" in page
    assert "missing here: model. model.path=nobody/unheard-of" in page
    assert re.search(r"cannot run on this machine as it is: see 'missing here' under parts \(.*model\)$", page.rstrip())


def test_the_plan_of_several_machines_asks_for_their_cluster_until_one_is_named(capsys: pytest.CaptureFixture[str]):
    words = ["experiment=qwen2_5_math_7b_dapo_fully_async", "hardware=h200x8"]
    print_plan(compose_run_config(words))
    page = capsys.readouterr().out
    assert "missing here: Ray cluster. Start one of 4 machines with scripts/ray_cluster.sh" in page
    assert "step_time_median: time/step_s median, up to step 256, 4 of our steps as one = 219 +- 22 s" in page
    print_plan(compose_run_config([*words, "ray.address=10.0.0.1:6379"]))
    assert "Ray cluster" not in capsys.readouterr().out


def test_steps_of_published_data_on_a_hub_are_known_without_it(capsys: pytest.CaptureFixture[str]):
    print_plan(compose_run_config(["experiment=qwen3_8b_grpo"]))
    page = capsys.readouterr().out
    assert "210 steps (15 epochs x (14,973 published rows // 1,024))" in page
    assert (
        "checkpoints every 20 steps: 12 B x 8.19 G = 98.3 GB each; the last 2 and the one being written: 295 GB" in page
    )
    print_plan(compose_run_config(["experiment=qwen3_8b_grpo", "task.data.gsm8k.path=somebody/else"]))
    assert "how many steps is known once the data is loaded" in capsys.readouterr().out


def test_claims_are_printed_with_their_source_and_hardware(capsys: pytest.CaptureFixture[str]):
    print_plan(compose_run_config(["experiment=qwen3_8b_grpo"]))
    page = capsys.readouterr().out
    assert "gsm8k_peak: eval/gsm8k/published/greedy max = 0.956 +- 0.012 fraction (vendor measured, text)" in page
    assert "2026-08-14; https://" in page and "; on 8x MI350" in page


def test_where_figures_are_carried_over_every_claim_is_called_derived(capsys: pytest.CaptureFixture[str]):
    print_plan(compose_run_config(["experiment=qwen3_8b_grpo", "hardware=mi355xx8"]))
    page = capsys.readouterr().out
    assert "gsm8k_peak: eval/gsm8k/published/greedy max = 0.956 +- 0.012 fraction (derived, text)" in page
    assert "vendor measured" not in page


def test_a_sweep_of_plans_ends_as_its_worst_point(capsys: pytest.CaptureFixture[str]):
    words = ["experiment=qwen3_8b_grpo", "hardware=h200x8", "mode=plan"]
    assert run_sweep([*words, "backend.trainer.recompute=true,false"]) == 2
    assert capsys.readouterr().out.count("verdict: ") == 2
