"""Which keys the parts read, recorded while they run, against the table of those that are said to do nothing."""

from __future__ import annotations

import os
from pathlib import Path
from pickle import PicklingError
from types import SimpleNamespace

import pytest
from ray import cloudpickle

from rl import driver
from rl.config.compose import compose_run_config
from rl.config.load import save_run_yaml, to_plain
from rl.config.unused import reason
from rl.tasks import scoring
from tests.recorded import keys_read, leaf_keys, recorded

WORDS = (
    *("experiment=quickstart", "model=tiny", "steps=2", "algorithm.prompts_per_step=4", "task.eval_limit=4"),
    *("checkpoint.every=1", "evaluation.every=1", "canary.every=1", "backend.trainer.optimizer.lr_warmup_updates=0"),
)
FOR_PLANS_AND_PEOPLE = {
    *("hardware.architecture", "hardware.bf16_tflops", "hardware.link_gb_s", "hardware.memory_bandwidth_tb_s"),
    *("hardware.memory_gib", "hardware.name", "hardware.network_gb_s", "model.name", "published", "experiment"),
}
"""Facts, names and claims: no part of a run reads them."""
AT_THE_DOOR = {"clean", "output_dir", "mode", "evaluation.checkpoint", "plan.data"}
"""Read before the parts are built; the last two are refused in a mode that has no use for them."""
ONLY_PAST_A_LIMIT = "sentinels."
"""What a sentinel does is read once its limit is passed."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("algorithm.prompts_per_mini_batch=4",),
        ("algorithm.prompts_per_mini_batch=4", "mode=eval"),
        (
            *("algorithm=dapo", "algorithm.prompts_per_mini_batch=2", "algorithm.dynamic_sampling=false"),
            *("algorithm.kl_coef=0.1", "algorithm.correction.weights=token", "algorithm.correction.outside=mask"),
        ),
        ("algorithm=reinforce_pp", "algorithm.prompts_per_mini_batch=2", "algorithm.kl_coef=0.1"),
        ("algorithm.prompts_per_mini_batch=4", "placement=fully_async", "placement.trainer_ranks=2"),
    ],
    ids=["grpo", "eval", "dapo", "reinforce_pp", "actors"],
)
def test_what_no_part_reads_is_said_to_do_nothing_and_nothing_else_is(words, tmp_path: Path, monkeypatch):
    config = compose_run_config([*WORDS, *words])
    notes, run_folder = tmp_path / "notes", tmp_path / "run"
    notes.mkdir()
    run_folder.mkdir()
    # The two that read every key to write it down.
    monkeypatch.setattr(driver, "to_plain", lambda _config: to_plain(config))
    monkeypatch.setattr(driver, "save_run_yaml", lambda _config, path: save_run_yaml(config, path))
    # As Ray does it, so that the process of `score` gets the recording classes whole.
    monkeypatch.setattr(scoring, "pickle", SimpleNamespace(dumps=cloudpickle.dumps, PicklingError=PicklingError))
    assert driver.drive(recorded(config, notes), run_folder, overrides=[]) == 0
    read = keys_read(notes)
    # Of the trainer's settings a driver whose ranks are actors reads few; theirs must have been seen.
    others = set().union(*(keys for process, keys in read.items() if process != os.getpid()))
    has_actors = config.placement.trainer_ranks > 1
    assert ({"backend.trainer.optimizer.lr", "backend.rollout.max_num_seqs"} <= others) == has_actors
    unread = leaf_keys(config) - set().union(*read.values()) - FOR_PLANS_AND_PEOPLE - AT_THE_DOOR
    silent = {key for key in unread if reason(config, key) is None and not key.startswith(ONLY_PAST_A_LIMIT)}
    assert silent == set(), "set by a person, these would do nothing without a word"
