"""What a person types and sees."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from rl.loggers.jsonl import read_metrics
from tests.command import cpu_s, environment, rl, run_ok

SMALL = ("steps=2", "algorithm.prompts_per_step=4", "algorithm.prompts_per_mini_batch=4", "task.eval_limit=20")


def small_run(model: Path, folder: Path) -> list[str]:
    return ["experiment=quickstart", "model=hf", f"model.path={model}", *SMALL, f"output_dir={folder}"]


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_help_lists_groups_and_experiments_in_less_than_1_5_s_without_torch(tmp_path: Path):
    def median_of_3() -> float:
        seconds = []
        for _ in range(3):
            began = cpu_s()
            output = run_ok("--help", cwd=tmp_path)
            seconds.append(cpu_s() - began)
            assert "quickstart" in output
            assert "backend/rollout" in output
        return sorted(seconds)[1]

    assert median_of_3() < 1.5
    code = "import sys, rl.help; rl.help.help_text(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    assert done.stdout.strip() == "False"


def complete(line: str, cwd: Path) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-m", "rl", "-sc", "query=bash"],
        cwd=cwd,
        env=environment(COMP_LINE=line, COMP_POINT=str(len(line))),
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("rl experiment=quick", ["experiment=quickstart"]),
        ("rl algorithm=r", ["algorithm=reinforce_pp", "algorithm=reinforce_pp_baseline", "algorithm=rloo"]),
        ("rl backend/rollout=", ["backend/rollout=local", "backend/rollout=sglang", "backend/rollout=vllm"]),
        ("rl algorithm.clip_h", ["algorithm.clip_high="]),
        ("rl algorithm=s", []),  # schema_grpo and so on start a YAML file; nobody chooses them
    ],
)
def test_tab_completes_keys_options_and_experiments_and_no_schema(line: str, expected: list[str], tmp_path: Path):
    assert complete(line, tmp_path) == expected


def test_cfg_prints_what_would_run_and_refuses_what_would_not(tmp_path: Path):
    output = run_ok("experiment=quickstart", "seed=7", "--cfg", "job", "--resolve", cwd=tmp_path)
    config = yaml.safe_load(output)
    assert (config["experiment"], config["seed"], config["algorithm"]["group_size"]) == ("quickstart", 7, 16)
    part = run_ok(
        "experiment=quickstart", "algorithm=dapo", "--cfg", "job", "--resolve", "-p", "algorithm", cwd=tmp_path
    )
    assert yaml.safe_load(part)["response_limit"] == 4
    for word in ("algorithm.clip_hihg=1", "+seeed=1", "algorithm=gppo"):
        done = rl("experiment=quickstart", word, "--cfg", "job", cwd=tmp_path)
        assert (done.returncode, "Did you mean" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    assert list(tmp_path.iterdir()) == []


def test_a_run_leaves_everything_a_person_needs(warm_model: Path, tmp_path: Path):
    folder = tmp_path / "run"
    output = run_ok(*small_run(warm_model, folder), "logger.sample_every=1", cwd=tmp_path)
    assert "overlap with held-out: validation 0, warm start 0, training 0" in output
    assert "finished at step 2 of 2" in output
    assert "planned and measured" in output
    files = ("metrics.jsonl", "samples.txt", "run.yaml", "provenance.json", "plan.json", "answers.jsonl", "checkpoints")
    for name in files:
        assert (folder / name).exists(), name
    assert (folder / "curves.png").read_bytes()[:4] == b"\x89PNG"
    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    planned = json.loads((folder / "plan.json").read_text())["planned"]["memory/rss_gib"]
    assert rows[1]["plan/memory/rss_gib"] == rows[2]["plan/memory/rss_gib"] == planned
    assert rows[2]["memory/rss_gib"] / 2 < planned < 2 * rows[2]["memory/rss_gib"]
    assert rows[2]["memory/train_gib"] / 2 < planned < 2 * rows[2]["memory/train_gib"]
    assert (tmp_path / "outputs" / "measurements.jsonl").read_text().count("\n") == 1
    for phase in ("sleep", "onload", "publish", "offload", "wake"):
        assert all(row[f"time/{phase}_s"] >= 0 and row[f"memory/{phase}_gib"] > 0 for row in rows), phase
    assert rows[0]["time/start_s"] > 0
    assert "time/step_s" not in rows[0], "a step is what training takes"
    assert rows[2]["prompts_trained"] == 8
    assert rows[2]["tokens_trained"] <= 8 * 16 * 4
    assert json.loads((folder / "provenance.json").read_text())["overrides"][0] == "experiment=quickstart"


@pytest.mark.slow
def test_the_same_command_twice_gives_the_same_run(warm_model: Path, tmp_path: Path):
    curves = []
    for name in ("a", "b"):
        run_ok(*small_run(warm_model, tmp_path / name), cwd=tmp_path)
        rows = read_metrics(tmp_path / name / "metrics.jsonl")
        curves.append([(row.get("train/loss"), row.get("reward/mean"), row.get("train/grad_norm")) for row in rows])
    assert curves[0] == curves[1]


def test_export_gives_a_folder_that_transformers_loads_with_the_trained_weights(warm_model: Path, tmp_path: Path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = tmp_path / "run"
    run_ok(*small_run(warm_model, folder), cwd=tmp_path)
    run_ok("export", str(folder), cwd=tmp_path)
    exported = folder / "export" / "step-000002"
    after = AutoModelForCausalLM.from_pretrained(exported).state_dict()
    before = AutoModelForCausalLM.from_pretrained(warm_model).state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in after)
    assert AutoTokenizer.from_pretrained(exported).decode([2, 3]) == "01"
    again = rl("export", str(folder), cwd=tmp_path)
    assert again.returncode == 2
    assert "not empty" in again.stderr


@pytest.mark.slow
def test_eval_mode_writes_every_answer_and_agrees_with_a_run_s_first_and_last_evaluation(
    warm_model: Path, tmp_path: Path
):
    run_ok(*small_run(warm_model, tmp_path / "run"), cwd=tmp_path)
    model = ("experiment=quickstart", "model=hf", f"model.path={warm_model}", "task.eval_limit=20", "mode=eval")
    output = run_ok(*model, f"output_dir={tmp_path / 'eval'}", cwd=tmp_path)
    assert "eval/arithmetic/greedy" in output
    (row,) = json_lines(tmp_path / "eval" / "eval_metrics.jsonl")
    first, *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["value"] == first["eval/arithmetic/greedy"]
    assert (row["num_problems"], row["step"]) == (20, 0)
    answers = json_lines(tmp_path / "eval" / "eval.jsonl")
    assert len(answers) == 20 and sum(answer["correct"] for answer in answers) == 20 * row["value"]

    run = tmp_path / "run"
    words = [*model, f"output_dir={tmp_path / 'later'}"]
    output = run_ok(*words, f"evaluation.checkpoint={run}", cwd=tmp_path)
    (row,) = json_lines(tmp_path / "later" / "eval_metrics.jsonl")
    assert (row["value"], row["step"]) == (last["eval/arithmetic/greedy"], last["step"])
    assert f"evaluating step {last['step']} of {run}" in output


def test_plan_prints_parts_devices_and_the_staleness_bound_without_starting(tmp_path: Path):
    words = ("experiment=quickstart", "hardware=h200x1", "placement=fully_async", "hardware.gpus_per_node=4")
    output = run_ok(*words, "mode=plan", cwd=tmp_path)
    assert "rl.trainer.fsdp_trainer.FSDPTrainer" in output
    assert "node 0 GPU 0: trainer rank 0" in output
    assert "node 0 GPU 1: engine worker 0" in output
    assert "node 0 GPU 3: idle" in output
    assert "staleness at most 1" in output
    assert "evaluation every 50 steps, at the start, at the end: all problems x 1 answer(s)" in output
    assert list(tmp_path.iterdir()) == []


def test_plan_says_which_package_is_missing_or_none(tmp_path: Path):
    too_small = rl("experiment=quickstart", "hardware=h200x1", "placement=fully_async", "mode=plan", cwd=tmp_path)
    assert too_small.returncode == 2
    assert "needs 2" in too_small.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_control_with_shuffled_rewards_does_not_learn(warm_model: Path, tmp_path: Path):
    run_ok(
        *("experiment=quickstart", "model=hf", f"model.path={warm_model}", "task.reward=shuffled", "steps=60"),
        *("evaluation.every=20", f"output_dir={tmp_path / 'run'}"),
        cwd=tmp_path,
        timeout_s=800,
    )
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    accuracies = [row["eval/arithmetic/greedy"] for row in rows if "eval/arithmetic/greedy" in row]
    assert max(accuracies) <= accuracies[0] + 0.05
