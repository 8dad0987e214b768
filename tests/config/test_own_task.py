"""The task of one's own that the README shows."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import rl.tasks
from rl.config.build import build, target_class
from rl.config.compose import compose_run_config
from rl.config.load import load_run_yaml, save_run_yaml
from rl.config.schema import ConfigError
from tests.made_answers import answer, char_renderer

README = Path(__file__).resolve().parents[2] / "README.md"


@pytest.fixture
def shown(own_files: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Python and YAML of the README, each where the README says."""
    text = README.read_text(encoding="utf-8")
    (python,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (yaml,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    (own_files / "tasks").mkdir()
    (own_files / "tasks" / "palindrome.py").write_text(python)
    (own_files / "conf" / "task" / "palindrome.yaml").write_text(yaml)
    monkeypatch.setattr(rl.tasks, "__path__", [*rl.tasks.__path__, str(own_files / "tasks")])
    return python, yaml


def test_the_readme_s_own_task_is_ten_lines_and_scores(shown: tuple[str, str], tmp_path: Path, monkeypatch):
    assert sum(len([line for line in part.splitlines() if line.strip()]) for part in shown) <= 12
    rows = tmp_path / "words.jsonl"
    rows.write_text(json.dumps({"prompt": "a palindrome with b", "answer": "b"}) + "\n")
    config = compose_run_config(["task=palindrome", f"task.path={rows}", "task.eval_limit=3"])
    save_run_yaml(config, tmp_path / "run.yaml")
    assert load_run_yaml(tmp_path / "run.yaml") == config
    assert target_class(config.task._target_).check(config.task) == 1
    task = build(config.task, renderer=char_renderer(tmp_path / "tokenizer"), seed=0)
    prompt = task.prompt(0, 5)
    assert [task.score(prompt, answer(text)).value for text in ("aba", "ab", "aca", " bab ")] == [1.0, 0.0, 0.0, 1.0]


@pytest.mark.usefixtures("shown")
def test_a_typo_in_a_key_of_one_s_own_task_is_found(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"eval_pat.*Did you mean"):
        compose_run_config(["task=palindrome", "task.path=x", "task.eval_pat=y"])


def test_a_class_that_is_not_there_names_the_remedy(own_files: Path):
    file = own_files / "conf" / "task" / "mine.yaml"
    file.write_text("defaults: [schema_jsonl, _self_]\n_target_: rl.tasks.nowhere.Mine\n")
    with pytest.raises(ConfigError, match=r"rl\.tasks\.nowhere\.Mine: there is no module rl\.tasks\.nowhere\. Put"):
        compose_run_config(["task=mine", "task.path=x"])
    file.write_text("defaults: [schema_jsonl, _self_]\n_target_: rl.tasks.jsonl.Mine\n")
    with pytest.raises(ConfigError, match=r"rl\.tasks\.jsonl\.Mine: rl\.tasks\.jsonl has no such class"):
        compose_run_config(["task=mine", "task.path=x"])
