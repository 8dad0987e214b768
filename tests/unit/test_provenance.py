import json
import subprocess
import sys

import pytest

from rl import provenance
from rl.provenance import config_digest, write_provenance

CONFIG = {
    "seed": 0,
    "mode": "train",
    "clean": False,
    "output_dir": "a",
    "algorithm": {"clip_low": 0.2, "clip_high": 0.28},
    "hardware": {"name": "cpu", "device": "cpu", "nodes": 1, "gpus_per_node": 0, "memory_gib": 8.0, "trainer_env": {}},
    "logger": {"project": "rl"},
}


def changed(**values):
    return CONFIG | values


def test_the_digest_ignores_order_logger_folder_and_host_but_not_settings():
    digest = config_digest(CONFIG)
    assert config_digest(dict(reversed(CONFIG.items()))) == digest
    assert config_digest(changed(logger={"project": "x"}, output_dir="b", clean=True, mode="plan")) == digest
    assert config_digest(changed(hardware=CONFIG["hardware"] | {"name": "big", "memory_gib": 80.0})) == digest
    assert config_digest(changed(hardware=CONFIG["hardware"] | {"trainer_env": {"A": "1"}})) != digest
    assert config_digest(changed(seed=1)) != digest
    assert config_digest(changed(algorithm={"clip_low": 0.2, "clip_high": 0.2})) != digest


def test_taking_the_digest_leaves_the_config_as_it_was():
    before = json.dumps(CONFIG)
    config_digest(CONFIG)
    assert json.dumps(CONFIG) == before


def test_the_file_holds_command_code_packages_and_machine(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "orig_argv", ["python", "-m", "rl", "output_dir=a folder"])
    facts = write_provenance(tmp_path, overrides=["seed=1"], config_plain=CONFIG, extra={"dataset": "sums@1"})
    assert json.loads((tmp_path / "provenance.json").read_text()) == facts
    assert facts["overrides"] == ["seed=1"]
    assert facts["config_digest"] == config_digest(CONFIG)
    assert facts["packages"]["torch"].startswith("2.")
    assert facts["packages"]["rl"]
    assert facts["python"] == sys.version.split()[0]
    assert facts["cpu"]["usable_cores"] >= 1
    assert facts["dataset"] == "sums@1"
    assert facts["command"] == "python -m rl 'output_dir=a folder'"


def test_a_resumed_run_keeps_the_first_file(tmp_path):
    for overrides in (["seed=1"], ["logger=jsonl"]):
        write_provenance(tmp_path, overrides=overrides, config_plain=CONFIG)
    assert json.loads((tmp_path / "provenance.json").read_text())["overrides"] == ["seed=1"]
    (second,) = tmp_path.glob("provenance.2*.json")
    assert json.loads(second.read_text())["overrides"] == ["logger=jsonl"]


def git(folder, *arguments):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A git checkout that holds a copy of the module."""
    folder = tmp_path / "checkout"
    (folder / "rl").mkdir(parents=True)
    module = folder / "rl" / "provenance.py"
    module.write_text("first = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "-m", "first")
    monkeypatch.setattr(provenance, "__file__", str(module))
    return folder


def write(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir(exist_ok=True)
    return folder, write_provenance(folder, overrides=[], config_plain=CONFIG)


def test_a_clean_checkout_gives_its_commit_and_no_diff(tmp_path, checkout):
    folder, facts = write(tmp_path)
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=checkout, check=True, capture_output=True, text=True)
    assert facts["code"] == {"commit": head.stdout.strip(), "dirty": False}
    assert not (folder / "uncommitted.diff").exists()


def test_uncommitted_changes_are_kept_as_a_diff_that_git_applies(tmp_path, checkout):
    (checkout / "rl" / "provenance.py").write_text("first = 2\n")
    (checkout / "new.py").write_text("")
    folder, facts = write(tmp_path)
    assert facts["code"]["dirty"] is True
    assert facts["code"]["untracked"] == ["new.py"]
    git(checkout, "checkout", "rl/provenance.py")
    git(checkout, "apply", str(folder / facts["code"]["diff_file"]))
    assert (checkout / "rl" / "provenance.py").read_text() == "first = 2\n"


def test_a_large_diff_is_cut(tmp_path, checkout, monkeypatch):
    monkeypatch.setattr(provenance, "MAX_DIFF_BYTES", 200)
    (checkout / "rl" / "provenance.py").write_text("x = 1\n" * 1000)
    folder, _ = write(tmp_path)
    diff = (folder / "uncommitted.diff").read_text()
    assert len(diff) < 300
    assert diff.endswith("[cut at 200 bytes]\n\n")


def test_an_installed_package_below_a_foreign_repository_has_no_commit(tmp_path, checkout, monkeypatch):
    (checkout / ".gitignore").write_text("site-packages\n")
    module = checkout / "site-packages" / "rl" / "provenance.py"
    module.parent.mkdir(parents=True)
    module.write_text("")
    monkeypatch.setattr(provenance, "__file__", str(module))
    _, facts = write(tmp_path)
    assert facts["code"] == {"commit": None, "dirty": None}


def test_secrets_of_the_environment_are_masked_everywhere(tmp_path, checkout, monkeypatch):
    secret = "marker5ecret'quoted"
    monkeypatch.setenv("WANDB_API_KEY", secret)
    monkeypatch.setattr(sys, "orig_argv", ["rl", f"model.token={secret}", secret])
    (checkout / "rl" / "provenance.py").write_text(f'key = "{secret}"\n')
    folder = tmp_path / "run"
    folder.mkdir()
    write_provenance(folder, overrides=[f"a={secret}"], config_plain=CONFIG, extra={secret: [{"x": f"<{secret}>"}]})
    for path in folder.iterdir():
        assert "marker5ecret" not in path.read_text(), path.name
    facts = json.loads((folder / "provenance.json").read_text())
    assert facts["overrides"] == ["a=***"]
    assert facts["***"] == [{"x": "<***>"}]
