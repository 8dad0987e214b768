"""Prefetching by the hub's real clients, from a hub of our own, and what a machine without a network then finds."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from tests.hub_server import Files, HubServer, Repository

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "fetch_assets.py"
CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
---
"""


def parquet(*sums: int) -> bytes:
    file = io.BytesIO()
    rows = [{"question": f"{number} + 1?", "answer": f"#### {number + 1}"} for number in sums]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    return file.getvalue()


def gsm8k(*sums: int) -> Files:
    """The layout of openai/gsm8k."""
    return {
        "README.md": CARD,
        "main/train-00000-of-00001.parquet": parquet(*sums),
        "main/test-00000-of-00001.parquet": parquet(90),
    }


def fetched(hub: HubServer, home: Path, *words: str, is_offline: bool = False) -> list[str]:
    """What the script prints."""
    environment = {
        **os.environ,
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(home),
        "HF_HUB_OFFLINE": str(int(is_offline)),
        "HF_HUB_DISABLE_XET": "1",
    }
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *words], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_a_pinned_run_reads_the_same_data_and_model_after_the_hub_moved_on_and_without_a_network(
    tiny_qwen3: Path, tmp_path: Path
):
    model, data = Repository("models", "some/model"), Repository("datasets", "openai/gsm8k")
    weights = model.commit({file.name: file.read_bytes() for file in tiny_qwen3.iterdir() if file.is_file()})
    first = data.commit(gsm8k(1, 2))
    with HubServer(model, data) as hub:
        words = ["model=hf", "model.path=some/model", "task=gsm8k"]
        lines = fetched(hub, tmp_path, *words)
        pins = [f"model.revision={weights}", f"task.data.gsm8k.revision={first}"]
        assert lines[-2:] == pins
        assert "data openai/gsm8k (train): 2 rows" in lines
        assert "data openai/gsm8k (test): 1 rows" in lines
        second = data.commit(gsm8k(1, 2, 3))
        assert f"task.data.gsm8k.revision={second}" in fetched(hub, tmp_path / "other", *words)
        num_requests = len(hub.requests)
        lines = fetched(hub, tmp_path, *words, *pins, is_offline=True)
        assert "data openai/gsm8k (train): 2 rows" in lines and lines[-2:] == pins
        assert len(hub.requests) == num_requests
