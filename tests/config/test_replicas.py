"""How many rollout engines a run has, and on which devices."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl.config.compose import compose_run_config
from rl.config.replicas import Replicas, auto_replicas_per_device, replicas_of
from tests.command import with_words

GPU = ["experiment=quickstart", "hardware=h200x1"]
AUTO = "backend.rollout.replicas_per_device=null"


@pytest.mark.parametrize(
    ("num_params", "expected"),
    [(298_112, 2), (134_515_008, 2), (499_999_999, 2), (500_000_000, 1), (8_190_735_360, 1), (None, 1)],
)
def test_two_engines_share_a_gpu_below_half_a_billion_parameters(num_params: int | None, expected: int):
    assert auto_replicas_per_device(num_params) == expected


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], Replicas(1, 1, 1)),
        (["backend.rollout.replicas=3"], Replicas(3, 1, 1)),
        (["backend.rollout.replicas=3", "backend.rollout.replicas_per_device=2"], Replicas(3, 2, 1)),
        ([AUTO], Replicas(1, 2, 1)),  # the quickstart's own model has 0.3 million parameters
        ([AUTO, "hardware=cpu"], Replicas(1, 1, 1)),
        ([AUTO, "backend/rollout=vllm", "backend.rollout.tensor_parallel=2"], Replicas(1, 1, 2)),
        (
            ["backend/rollout=vllm", "backend.rollout.replicas=2", "backend.rollout.tensor_parallel=4"],
            Replicas(2, 1, 4),
        ),
    ],
)
def test_engines_of_a_config(words: list[str], expected: Replicas):
    assert replicas_of(compose_run_config(with_words(GPU, *words))) == expected


def test_a_model_of_which_only_the_config_is_here_is_counted_from_it(tmp_path: Path):
    shape = {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 16, "vocab_size": 32000}
    for layers, expected in [(2, Replicas(1, 2, 1)), (24, Replicas(1, 1, 1))]:  # 0.27 and 1.7 billion parameters
        values = {"model_type": "llama", "num_hidden_layers": layers, **shape}
        (tmp_path / "config.json").write_text(json.dumps(values))
        assert replicas_of(compose_run_config([*GPU, AUTO, "model=hf", f"model.path={tmp_path}"])) == expected


def test_neighbours_in_order_are_on_different_devices():
    replicas = Replicas(num_groups=3, per_device=2, gpus_per_engine=1)
    assert replicas.count == 6
    assert [replicas.first_gpu(engine) for engine in range(6)] == [0, 1, 2, 0, 1, 2]
    assert [Replicas(2, 1, 4).first_gpu(engine) for engine in range(2)] == [0, 4]
