"""Commands and files that are wrong in one place, drawn by a script: none accepted, none a traceback, each in under 3 s
of CPU. The script itself makes 500; here are fewer, in this process, and some by the real command."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.command import cpu_s, rl

SCRIPT = Path(__file__).parents[2] / "scripts" / "mutate_commands.py"
NUM_KINDS = 31


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate_commands", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_one_of_each_kind_is_refused_in_words(script: ModuleType):
    with script.own_files() as files:
        verdicts = [script.judge(mutant, files) for mutant in script.mutants(NUM_KINDS, seed=1)]
    assert len({verdict.mutant.kind for verdict in verdicts}) == NUM_KINDS
    assert [script.shown(verdict) for verdict in verdicts if script.is_bad(verdict)] == []


def test_the_same_seed_makes_the_same_mutants(script: ModuleType):
    assert list(script.mutants(60, seed=3)) == list(script.mutants(60, seed=3))


def test_a_mutant_that_is_accepted_would_be_found(script: ModuleType):
    with script.own_files() as files:
        verdict = script.judge(script.Mutant("none", ("experiment=quickstart", "seed=5")), files)
    assert verdict.message is None and script.is_bad(verdict)
    assert "| none | 1 | 1 | 0 |" in script.table([verdict])


@pytest.mark.slow
def test_some_by_the_real_command(script: ModuleType, tmp_path: Path):
    chosen = [mutant for mutant in script.mutants(19, seed=2) if len("".join(mutant.words)) < 50_000][::3]
    for mutant in chosen:
        began = cpu_s()
        done = rl(*mutant.words, cwd=tmp_path)
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), (mutant, done.stderr)
        assert done.stderr.startswith("rl: ")
        assert cpu_s() - began < 3
    assert list(tmp_path.iterdir()) == []
