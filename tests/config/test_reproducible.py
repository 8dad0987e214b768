"""What is promised of a second run. That bitwise runs are so: tests/integration/test_command.py and test_resume.py."""

from __future__ import annotations

import pytest

from rl.config.compose import compose_run_config
from rl.config.reproducible import promise

GPU = ["hardware=h200x1", "hardware.gpus_per_node=2"]


@pytest.mark.parametrize(
    ("words", "reasons"),
    [
        ([], []),
        (["placement=fully_async", "placement.max_staleness=0"], []),
        (["placement=fully_async"], ["staleness up to 1 lets time decide"]),
        (["backend/rollout=vllm"], ["VLLMEngine sums differently"]),
        (["placement.trainer_ranks=2"], ["gradients are added up over ranks"]),
        (["backend.rollout.replicas=2"], ["an engine takes what comes"]),
        ([*GPU, "backend/rollout=sglang"], ["sums on a GPU", "SGLangEngine sums differently"]),
    ],
    ids=lambda words: " ".join(words),
)
def test_bitwise_is_promised_only_where_nothing_stands_against_it_and_each_reason_is_said(words, reasons):
    found = promise(compose_run_config(["experiment=quickstart", *words]))
    assert found.level == ("seeded" if reasons else "bitwise")
    assert len(found.reasons) == len(reasons)
    assert all(reason in line for reason, line in zip(reasons, found.reasons, strict=True))
    assert found.level in found.line and all(reason in found.line for reason in reasons)
