"""What is said about the Megatron trainer without Megatron-Core."""

from __future__ import annotations

import sys

import pytest

from rl.config.build import build
from rl.config.check import check_megatron, check_run_config, not_there_yet
from rl.config.compose import compose_run_config
from rl.config.schema import ConfigError, MegatronConfig


@pytest.mark.parametrize("package", ["megatron", "triton"])
def test_a_missing_package_is_named_with_its_remedy(monkeypatch, package):
    for name in list(sys.modules):
        if name.split(".")[0] in (package, "megatron") or name == "rl.trainer.megatron_trainer":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    if package == "triton":  # Megatron-Core is there, and imports a triton that is not
        monkeypatch.setattr(sys, "meta_path", [_MegatronThatNeedsTriton(), *sys.meta_path])
    with pytest.raises(ConfigError, match=rf"needs the package '{package}'.*scripts/install_megatron\.sh"):
        build(MegatronConfig())


class _MegatronThatNeedsTriton:
    def find_spec(self, name, path=None, target=None):
        if name == "megatron":
            import triton  # noqa: F401  # pyright: ignore[reportMissingImports]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["backend.trainer.tensor_parallel=2", "placement.trainer_ranks=2"],
            r"tensor_parallel=2, expert_parallel=1 and placement\.trainer_ranks=2",
        ),
        (
            ["backend.trainer.expert_parallel=2", "placement.trainer_ranks=4"],
            r"tensor_parallel=1, expert_parallel=2 and placement\.trainer_ranks=4",
        ),
        (["placement.trainer_ranks=2"], r"expert_parallel=1 and placement\.trainer_ranks=2"),
    ],
)
def test_what_it_cannot_do_yet_is_refused_by_its_layout_with_a_remedy_that_works_and_can_be_planned(words, message):
    words = ["backend=megatron_vllm", "hardware=h200x8", *words]
    with pytest.raises(ConfigError, match=rf"{message}: it trains on one GPU so far\. backend/trainer=fsdp"):
        check_run_config(compose_run_config(words))
    plan = compose_run_config([*words, "mode=plan"])
    check_run_config(plan)
    assert len(not_there_yet(plan)) == 1


@pytest.mark.parametrize("placement", ["colocated", "fully_async"])
def test_the_published_runs_on_it_run_with_fsdp_as_it_advises(placement):
    experiment = f"experiment=qwen3_5_35b_a3b_grpo_{placement}"
    with pytest.raises(ConfigError, match="backend/trainer=fsdp trains on any number"):
        check_run_config(compose_run_config([experiment]))
    check_run_config(compose_run_config([experiment, "backend/trainer=fsdp"]))


@pytest.mark.parametrize(
    ("sizes", "num_ranks", "device", "message"),
    [
        ({"tensor_parallel": 2}, 3, "cuda", r"backend\.trainer\.tensor_parallel=2 must divide .*trainer_ranks=3"),
        ({"expert_parallel": 8}, 4, "cuda", r"backend\.trainer\.expert_parallel=8 must divide .*trainer_ranks=4"),
        ({}, 1, "cpu", r"hardware\.device=cpu.*GPUs only"),
    ],
)
def test_a_layout_that_no_trainer_could_run_is_refused_in_a_plan_too(sizes, num_ranks, device, message):
    with pytest.raises(ConfigError, match=message):
        check_megatron(MegatronConfig(**sizes), num_ranks=num_ranks, device=device)


def test_one_gpu_is_accepted():
    config = compose_run_config(["backend=megatron_vllm", "hardware=h200x1"])
    check_run_config(config)
    assert not_there_yet(config) == []
