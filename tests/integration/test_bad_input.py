"""Bad input gets a clear error in under 3 seconds, before any model loads, and exit code 2."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import cpu_s, environment, rl

CASES = {
    "unknown key": (["algorithm.clip_hihg=0.2"], ["algorithm.clip_hihg", "'algorithm.clip_high'"]),
    "unknown key with +": (["+algorithm.clip_hihg=0.2"], ["algorithm.clip_hihg", "'algorithm.clip_high'"]),
    "unknown key with ++": (["++algorithm.clip_hihg=0.2"], ["algorithm.clip_hihg", "'algorithm.clip_high'"]),
    "unknown top-level key": (["outputdir=x"], ["outputdir", "'output_dir'"]),
    "unknown experiment": (["experiment=quikstart"], ["quikstart", "'quickstart'", "quickstart"]),
    "unknown option": (["backend/rollout=vlm"], ["vlm", "'vllm'", "local, sglang, vllm"]),
    "wrong type": (["algorithm.group_size=many"], ["algorithm.group_size", "many"]),
    "temperature 0 in training": (["task.sampling.temperature=0"], ["task.sampling.temperature=0", "above 0"]),
    "no model": (["model=hf", "model.path=/nowhere"], ["model.path=/nowhere", "no such folder"]),
    "no path": (["task=jsonl"], ["task.path"]),
    "missing data file": (["task=jsonl", "task.path=/nowhere.jsonl"], ["/nowhere.jsonl"]),
    "staleness when colocated": (["placement.max_staleness=1"], ["placement.max_staleness=0", "fully_async"]),
    "mini-batches that do not divide": (["algorithm.prompts_per_mini_batch=7"], ["7", "64"]),
    "no GPU": (["hardware=h200x1"], ["hardware=h200x1", "hardware=cpu"]),
}


def refused(words: list[str], cwd: Path) -> str:
    began = cpu_s()
    done = rl(*words, cwd=cwd)
    seconds = cpu_s() - began
    assert done.returncode == 2, (done.stdout, done.stderr)
    assert seconds < 3, f"{seconds:.1f} s"
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.mark.parametrize("name", CASES)
def test_a_mistake_is_named_with_its_remedy(name: str, tmp_path: Path):
    words, expected = CASES[name]
    base = [] if any(word.startswith("experiment=") for word in words) else ["experiment=quickstart"]
    message = refused([*base, *words], tmp_path)
    for part in expected:
        assert part in message, message
    assert list(tmp_path.iterdir()) == [], "nothing may be left behind"


def write_rows(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_an_empty_file_is_named(tmp_path: Path):
    path = write_rows(tmp_path / "empty.jsonl", [])
    assert str(path) in refused(["experiment=quickstart", "task=jsonl", f"task.path={path}"], tmp_path)


def test_a_row_without_its_column_is_named_by_number(tmp_path: Path):
    rows = [{"prompt": "1+1=", "answer": "2"}] * 3
    rows[1] = {"prompt": "1+1="}
    path = write_rows(tmp_path / "rows.jsonl", rows)
    message = refused(["experiment=quickstart", "task=jsonl", f"task.path={path}"], tmp_path)
    assert "answer" in message
    assert "row 2" in message


def test_a_batch_larger_than_the_data_is_refused_with_the_arithmetic(tmp_path: Path):
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(100)])
    words = ["task=jsonl", f"task.path={path}", "algorithm.prompts_per_step=128"]
    message = refused(words, tmp_path)
    for part in ("100", "128", "= 0 steps"):
        assert part in message, message


def test_a_folder_with_another_run_is_refused_and_left_alone(tmp_path: Path):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text("seed: 1\n")
    message = refused(["experiment=quickstart", f"output_dir={folder}"], tmp_path)
    for choice in (f"rl resume={folder}", "clean=true", "another output_dir"):
        assert choice in message
    assert [path.name for path in folder.iterdir()] == ["run.yaml"]


def test_clean_never_deletes_a_folder_that_holds_no_run(tmp_path: Path):
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "chapter1.txt").write_text("years of work")
    assert "holds no run" in refused(["experiment=quickstart", f"output_dir={folder}", "clean=true"], tmp_path)
    assert (folder / "chapter1.txt").exists()


def test_refusals_come_before_torch_is_imported(tmp_path: Path):
    code = (
        "import sys\n"
        "from rl.__main__ import main\n"
        "code = main(['experiment=quickstart', 'algorithm.prompts_per_mini_batch=7'])\n"
        "print(code, 'torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment(), cwd=tmp_path
    )
    assert done.stdout.split() == ["2", "False", "False"]
