"""scripts/rocm_container.sh: the command that it would run, and the comparison of versions. Runs no container."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "rocm_container.sh"

IMAGE = {
    "torch": "2.12.0+rocm7.14",
    "triton": "3.7.0+git1234",
    "vllm": "0.22.1rc1.dev17+g18d87a87d.rocm714",
    "sglang": "0.5.15",
    "flash_attn": "2.8.3",
    "transformer_engine": "2.14.0",
    "megatron-core": "0.18.0",
    "flash-linear-attention": "0.5.1",
    "datasets": "5.0.0",
    "accelerate": "1.14.0",
    "mathruler": "0.1.0",
    "qwen-vl-utils": "0.0.14",
    "xgrammar": "0.1.32",
    "numpy": "2.3.0",
}


def run(*words: str, cwd: Path | None = None, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(SCRIPT), *words],
        cwd=cwd,
        env={"PATH": os.environ["PATH"], **env},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )


def planned(*words: str, cwd: Path | None = None, **env: str) -> list[str]:
    done = run("--dry-run", *words, cwd=cwd, **env)
    assert (done.returncode, done.stderr) == (0, "")
    split = subprocess.run(["bash", "-c", f"printf '%s\\0' {done.stdout}"], capture_output=True, text=True, check=True)
    return split.stdout.split("\0")[:-1]


def compared(tmp_path: Path, packages: dict[str, str]) -> subprocess.CompletedProcess[str]:
    file = tmp_path / "image.txt"
    file.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
    return run("--compare", str(file))


def test_it_is_a_script_that_bash_can_read():
    assert subprocess.run(["bash", "-n", str(SCRIPT)], capture_output=True, check=False).returncode == 0


def test_the_dry_run_prints_the_published_image_the_devices_and_the_words(tmp_path: Path):
    words = planned("rl", "experiment=qwen3_8b_grpo", "model.path=a b", cwd=tmp_path, HOME="/home/me")
    assert words[:2] == ["docker", "run"]
    assert "verlai/verl:rocm7.14_torch2.12_release_0724" in words
    devices = [words[index + 1] for index, word in enumerate(words) if word == "--device"]
    assert devices == ["/dev/kfd", "/dev/dri"]
    volumes = [words[index + 1] for index, word in enumerate(words) if word == "--volume"]
    assert volumes == [f"{SCRIPT.parents[1]}:/suite:ro", f"{tmp_path}:/work", "/home/me/.cache/huggingface:/hub"]
    assert words[-3:] == ["rl", "experiment=qwen3_8b_grpo", "model.path=a b"]


def test_models_are_loaded_once_into_the_users_own_cache_of_the_hub(tmp_path: Path):
    words = planned("rl", "--help", HOME="/home/me", HF_HOME="/big/hf")
    assert "/big/hf:/hub" in words
    assert words[words.index("HF_HOME=/hub") - 1] == "--env"
    assert f"{tmp_path}/hf:/hub" in planned(
        "rl", cwd=tmp_path, HF_HOME="hf"
    )  # a bare word would name a volume of docker


def test_what_runs_inside_is_bash_too_and_keeps_the_image_s_own_torch():
    words = planned("rl", "--help")
    inside = words[words.index("-c") + 1]
    assert subprocess.run(["bash", "-n", "-c", inside], capture_output=True, check=False).returncode == 0
    assert "--system-site-packages" in inside and "--constraint" in inside
    assert words[words.index("-c") + 2 :] == ["rl", "rl", "--help"]  # $0, and what exec is given


def test_engines_do_not_get_the_expandable_segments_that_the_image_sets_for_every_process():
    """With them all five experiments are refused: tests/config/test_platform_rules.py."""
    inside = planned("rl", "--help")[-4]
    settings = [line for line in inside.splitlines() if line.startswith(("set ", "unset ", "export "))]
    env = {"PATH": os.environ["PATH"], "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    script = "\n".join([*settings, "env"])
    done = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=True)
    assert "PATH=" in done.stdout and "ALLOC_CONF" not in done.stdout


def test_to_check_versions_nothing_is_installed_and_the_exit_code_is_the_comparison_s(tmp_path: Path):
    words = planned("--check-versions")
    inside = words[words.index("-c") + 1]
    assert "install" not in inside and words[words.index("-c") + 2 :] == ["rl"]
    listed = tmp_path / "python3"  # stands for the image's, whose torch differs
    packages = {**IMAGE, "torch": "2.11.0"}
    listed.write_text("#!/bin/sh\n" + "".join(f"echo {name}=={version}\n" for name, version in packages.items()))
    listed.chmod(0o755)
    here = inside.replace("/suite/", f"{SCRIPT.parents[1]}/")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(["bash", "-c", here], env={"PATH": path}, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and done.stdout.split() == ["torch", "expected", "2.12.0", "found", "2.11.0"]


def test_it_asks_for_no_privilege_that_it_does_not_need():
    words = planned("rl")
    assert words[words.index("--cap-drop") + 1] == "ALL"
    assert words[words.index("--user") + 1] == f"{os.getuid()}:{os.getgid()}"
    assert words[words.index("--network") + 1] == "bridge"
    assert not {"--privileged", "--cap-add", "--pid"} & set(words)
    options = [words[index + 1] for index, word in enumerate(words) if word == "--security-opt"]
    assert options == ["no-new-privileges"]


def test_a_secret_goes_by_name_and_is_not_printed():
    done = run("--dry-run", "rl", WANDB_API_KEY="k3y-of-somebody")
    assert "--env WANDB_API_KEY" in done.stdout and "k3y-of-somebody" not in done.stdout
    assert "WANDB_API_KEY" not in run("--dry-run", "rl").stdout


def test_image_tool_network_and_further_options_can_be_chosen():
    words = planned(
        "rl",
        RL_ROCM_IMAGE="amdagi/verl-dev:rocm7.14_torch2.12_release_0724",
        CONTAINER="podman",
        RL_ROCM_NETWORK="host",
        RL_ROCM_OPTIONS="--cap-add SYS_PTRACE",
    )
    assert words[0] == "podman" and "amdagi/verl-dev:rocm7.14_torch2.12_release_0724" in words
    assert words[words.index("--network") + 1] == "host" and words[words.index("--cap-add") + 1] == "SYS_PTRACE"


def test_the_published_image_has_every_expected_version(tmp_path: Path):
    """Whatever the builder appended, and with - or _ in a name."""
    done = compared(tmp_path, IMAGE)
    assert (done.returncode, done.stdout) == (0, "  every expected version is there\n")


def test_versions_that_differ_and_packages_that_are_missing_are_named(tmp_path: Path):
    packages = {**IMAGE, "torch": "2.12.1+rocm7.14", "vllm": "0.27.0"}
    del packages["megatron-core"]
    done = compared(tmp_path, packages)
    assert done.returncode == 1
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["torch", "expected", "2.12.0", "found", "2.12.1+rocm7.14"],
        ["vllm", "expected", "0.22.1rc1", "found", "0.27.0"],
        ["megatron-core", "expected", "0.18.0", "not", "installed"],
    ]


@pytest.mark.parametrize("words", [[], ["--dry-run"], ["--privileged", "rl"], ["--compare"], ["--compare", "/nowhere"]])
def test_what_it_does_not_understand_shows_its_usage(words: list[str]):
    done = run(*words)
    assert done.returncode == 2 and "rocm_container.sh [--dry-run] rl" in done.stderr


@pytest.mark.skipif(os.path.exists("/dev/kfd"), reason="there is an AMD GPU")
def test_without_an_amd_gpu_it_says_so_before_it_starts_anything():
    done = run("rl", CONTAINER="false")
    assert done.returncode == 1 and "/dev/kfd is not here" in done.stderr
