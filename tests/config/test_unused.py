"""A key that does nothing for the parts that were chosen is refused; where it does something it is not."""

from __future__ import annotations

import ast
import dataclasses
from pathlib import Path

import pytest

from rl.config.compose import checked_run_config, compose_run_config, parse_overrides
from rl.config.given import given_experiment, given_words
from rl.config.register import GROUPS, experiment_files
from rl.config.schema import ConfigError, RunConfig
from rl.config.unused import UNUSED, check_unused, reason

BASE = "experiment=quickstart"
VLLM = "backend/rollout=vllm"
GPU = ["hardware=h200x1", VLLM]

# (words with a key that does nothing, part of the message, words with which it does something)
CASES = [
    (["mode=eval", "checkpoint.every=3"], "mode=eval trains nothing", ["checkpoint.every=3"]),
    (["mode=eval", "algorithm.clip_high=0.3"], "mode=eval trains nothing", ["algorithm.clip_high=0.3"]),
    (["mode=eval", "backend.trainer.optimizer.lr=1"], "mode=eval", ["backend.trainer.optimizer.lr=1"]),
    (["task.epochs=3"], "steps is set", ["task.epochs=3", "steps=null"]),
    (["clean=true"], "always has a new folder", ["clean=true", "output_dir=x"]),
    (["canary.every=0", "canary.action=stop"], "canary.every=0", ["canary.every=1", "canary.action=stop"]),
    (["stream.oversample=2"], "filters no groups", ["algorithm=dapo", "stream.oversample=2"]),
    (
        ["algorithm=dapo", "algorithm.dynamic_sampling=false", "algorithm.max_sampled_batches=3"],
        "filters no groups",
        ["algorithm=dapo", "algorithm.max_sampled_batches=3"],
    ),
    (
        ["algorithm=dapo", "algorithm.overlong_buffer=0", "algorithm.overlong_penalty=2"],
        "makes no answer overlong",
        ["algorithm=dapo", "algorithm.overlong_buffer=1", "algorithm.overlong_penalty=2"],
    ),
    (["algorithm.kl_estimator=k2"], "kl_coef=0", ["algorithm.kl_coef=0.1", "algorithm.kl_estimator=k2"]),
    (
        ["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_gradient=unbiased"],
        "no gradient of its own",
        ["algorithm.kl_coef=0.1", "algorithm.kl_gradient=unbiased"],
    ),
    (
        ["algorithm.correction.high=3"],
        "no weights to bound",
        ["algorithm.correction.weights=token", "algorithm.correction.high=3"],
    ),
    (
        ["algorithm.correction.weights=token", "algorithm.correction.low=0"],
        "outside=mask has a lower bound",
        ["algorithm.correction.weights=token", "algorithm.correction.outside=mask", "algorithm.correction.low=0"],
    ),
    ([VLLM, "backend.rollout.memory_fraction=0.5"], "cpu_cache_gib", [*GPU, "backend.rollout.memory_fraction=0.5"]),
    ([*GPU, "backend.rollout.cpu_cache_gib=2"], "memory_fraction", [VLLM, "backend.rollout.cpu_cache_gib=2"]),
    (["hardware.gpus_per_node=2"], "has no GPUs", ["hardware=h200x1", "hardware.gpus_per_node=2"]),
    (["ray.address=h:6379"], "live in this process", ["placement=fully_async", "ray.address=h:6379"]),
    (["task=jsonl", "task.path={rows}", "task.eval_limit=3"], "has no evaluation set", None),
    (
        ["task=jsonl", "task.path={rows}", "task.eval_path={rows}", "task.eval_limit=3", "evaluation.at_start=false"],
        None,
        None,
    ),
    (["task.checker.workers=2"], "without the checker", ["task=jsonl", "task.path={rows}", "task.checker.workers=2"]),
    (
        ["evaluation.every=0", "evaluation.at_start=false", "evaluation.at_end=false", "task.eval_limit=3"],
        "this run never evaluates",
        ["task.eval_limit=3"],
    ),
]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text('{"prompt": "1", "answer": "1"}\n' * 100)
    return path


def refusal(words: list[str], rows: Path) -> str | None:
    words = [BASE, *(word.format(rows=rows) for word in words)]
    try:
        check_unused(compose_run_config(words), given_words(parse_overrides(words)))
    except ConfigError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("words", "message", "used"), CASES, ids=lambda value: " ".join(value) if isinstance(value, list) else None
)
def test_a_key_that_does_nothing_is_refused_and_says_what_would_make_it_count(words, message, used, rows):
    found = refusal(words, rows)
    if message is None:
        assert found is None
    else:
        key = words[-1].partition("=")[0]
        assert found is not None and message in found and found.startswith(f"{key} would do nothing: "), found
        assert words[-1].format(rows=rows) in found
    if used is not None:
        assert refusal(used, rows) is None


def test_every_row_of_the_table_has_a_case(rows):
    refused = set()
    for words, message, _ in CASES:
        filled = [BASE, *(word.format(rows=rows) for word in words)]
        config = compose_run_config(filled)
        keys = [given.key for given in given_words(parse_overrides(filled))]
        refused |= {row.why for row in UNUSED for key in keys if message and row.covers(key) and row.applies(config)}
    assert {row.why for row in UNUSED} - refused == set()


def test_data_that_the_task_does_not_take():
    config = compose_run_config(["task=gsm8k"])
    assert "math is not among" in (reason(config, "task.data.math.path") or "")
    assert reason(config, "task.data.gsm8k.path") is None


def test_an_experiment_may_set_what_the_mode_of_the_command_line_does_not_use():
    checked_run_config([BASE, "mode=eval"])  # it sets checkpoint.every


def test_an_experiment_s_own_dead_key_is_named_with_the_experiment(own_files: Path):
    (own_files / "experiments" / "mine.yaml").write_text(
        "# @package _global_\ndefaults:\n  - /experiment/quickstart\n  - _self_\nstream:\n  oversample: 3.0\n"
    )
    with pytest.raises(ConfigError, match=r"stream\.oversample would do nothing.*in experiment mine"):
        checked_run_config(["experiment=mine", "seed=1"])


@pytest.mark.parametrize("name", sorted(experiment_files()))
def test_a_shipped_experiment_sets_no_key_that_does_nothing(name: str):
    check_unused(compose_run_config([f"experiment={name}"]), given_experiment(name))


def _attributes_read(root: Path) -> set[str]:
    names = set()
    for path in root.rglob("*.py"):
        if path.parts[-2:] in (("config", "check.py"), ("config", "unused.py")):
            continue  # rules look at keys to refuse
        tree = ast.parse(path.read_text(encoding="utf-8"))
        names |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        names |= {
            node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
    return names


FACTS = {"architecture", "bf16_tflops", "link_gb_s", "network_gb_s", "memory_bandwidth_tb_s", "memory_gib"}
"""Of hardware: for whoever plans."""


def test_every_setting_has_a_reader():
    read = _attributes_read(Path(__file__).resolve().parents[2] / "rl")
    classes = [RunConfig, *(config_class for classes in GROUPS.values() for config_class in classes)]
    names, queue = set(), list(classes)
    while queue:
        config_class = queue.pop()
        for field in dataclasses.fields(config_class):
            names.add(field.name)
            default = field.default_factory() if field.default_factory is not dataclasses.MISSING else None
            if dataclasses.is_dataclass(default):
                queue.append(type(default))
    assert names - read - FACTS - {"_target_", "published"} == set()
