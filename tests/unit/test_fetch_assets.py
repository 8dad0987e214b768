"""Prefetching for machines without a network, against a made hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rl.tasks import published

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_assets.py"
ROWS = {
    "train": [{"question": "1 + 1?", "answer": "#### 2"}, {"question": "1 + 2?", "answer": "#### 3"}],
    "test": [{"question": "1 + 3?", "answer": "#### 4"}],
}


@pytest.fixture(scope="module")
def script() -> Any:
    spec = importlib.util.spec_from_file_location("fetch_assets", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tiny_qwen3: Path, tmp_path: Path) -> list[Any]:
    """Notes what is asked for."""
    import datasets
    import huggingface_hub
    from huggingface_hub import constants

    asked: list[Any] = []
    snapshot = tmp_path / "0123abc"
    snapshot.symlink_to(tiny_qwen3)

    def snapshot_download(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        return str(snapshot)

    def load_dataset(name: str, config_name: str | None, *, split: str, revision: str | None) -> Any:
        asked.append((name, config_name, split, revision))
        return datasets.Dataset.from_list(ROWS[split])

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", lambda self, path: SimpleNamespace(sha="fedcba"))
    published._problems.cache_clear()
    return asked


def test_model_and_data_are_fetched_and_the_served_revisions_are_printed(script, hub, capsys):
    assert script.main(["model=hf", "model.path=some/model", "task=gsm8k"]) == 0
    assert hub == [
        ("some/model", None),
        ("openai/gsm8k", "main", "train", "fedcba"),
        ("openai/gsm8k", "main", "test", "fedcba"),
    ]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == ["model.revision=0123abc", "task.data.gsm8k.revision=fedcba"]
    assert "data openai/gsm8k (train): 2 rows" in lines


def test_a_revision_that_is_given_is_the_one_that_is_fetched(script, hub, capsys):
    words = ["model=hf", "model.path=some/model", "model.revision=aaa", "task=gsm8k", "task.data.gsm8k.revision=bbb"]
    assert script.main(words) == 0
    assert hub[0] == ("some/model", "aaa") and {asked[-1] for asked in hub[1:]} == {"bbb"}
    assert capsys.readouterr().out.splitlines()[-1] == "task.data.gsm8k.revision=bbb"


def test_the_quickstart_needs_nothing_of_a_hub(script, capsys):
    assert script.main(["experiment=quickstart"]) == 0
    assert capsys.readouterr().out.strip() == "nothing is on a hub: this run reads local files only"


def test_a_mistake_is_one_line(script, capsys):
    assert script.main(["experiment=quickstartt"]) == 2
    assert "quickstart" in capsys.readouterr().err
