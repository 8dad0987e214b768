"""Imports point one way: types <- protocols <- parts <- assemble <- driver and entrypoint."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "rl").rglob("*.py"))

THIRD_PARTY = {
    "vllm": ("rl/rollout/vllm_*.py",),
    "sglang": ("rl/rollout/sglang_*.py",),
    "ray": ("rl/placement/ray_*.py", "rl/rollout/remote.py", "rl/trainer/group.py"),
    "megatron": ("rl/trainer/megatron_*.py",),
    "wandb": ("rl/loggers/wandb_process.py",),
    "reasoning_gym": ("rl/tasks/reasoning_gym.py",),
    "hydra": ("rl/__main__.py", "rl/config/*.py", "rl/comparison/origins.py", "rl/sweeps/points.py"),
    "submitit": ("rl/sweeps/slurm.py",),
}
"""Package -> the only files that may import it, at the top or inside a function."""

CONFIG_DOOR = {
    "rl.config.schema",
    "rl.config.algorithms",
    "rl.config.published",
    "rl.config.sentinels",
    "rl.config.shape",
    "rl.config.tasks",
    "rl.config.build",
}
"""All that a part may know of the configuration: its own settings and how to build a class from them."""
BASE = {"rl.types", "rl.protocols", "rl.faults", "rl.grading", "rl.messages", "rl.progress"} | CONFIG_DOOR

PARTS = {
    "algorithms": set(),
    "evaluation": set(),
    "loggers": set(),
    "model": set(),
    "tasks": set(),
    "weights": set(),
    "placement": {"rl.weights", "rl.config.secrets"},
    "rollout": {"rl.weights", "rl.placement.ray_runtime", "rl.model.placeholders", "rl.model.positions"},
    "trainer": {"rl.weights", "rl.placement.ray_runtime", "rl.model.placeholders"},
}
"""Part -> what else of the package it may import. `ray_runtime` starts Ray for the actors of engine and trainer, and
both must treat image placeholders alike. An engine takes sequences as long as a plan reads in config.json. Which of the
user's variables go to actors, `rl.config.secrets` limits."""

MODULES = {
    "rl.types": set(),
    "rl.protocols": {"rl.types"},
    "rl.config.algorithms": set(),
    "rl.config.published": set(),
    "rl.config.sentinels": set(),
    "rl.config.shape": set(),
    "rl.config.tasks": set(),
    "rl.config.schema": {
        "rl.config.algorithms",
        "rl.config.published",
        "rl.config.sentinels",
        "rl.config.shape",
        "rl.config.tasks",
    },
    "rl.sentinels": {"rl.config.schema", "rl.config.sentinels"},
    "rl.accounting": set(),
    "rl.faults": set(),
    "rl.grading": {"rl.types", "rl.protocols"},
    "rl.messages": set(),
    "rl.progress": set(),
    "rl.resident": set(),
    "rl.stream": {"rl.types", "rl.protocols", "rl.config.schema", "rl.accounting", "rl.grading"},
    "rl.canary": {"rl.types", "rl.protocols", "rl.config.schema"},
    "rl.clock": {"rl.types", "rl.resident"},
    "rl.digests": {"rl.types"},
    "rl.loop": {
        "rl.types",
        "rl.protocols",
        "rl.config.schema",
        "rl.canary",
        "rl.clock",
        "rl.digests",
        "rl.resident",
        "rl.sentinels",
        "rl.throughput",
    },
    "rl.throughput": {"rl.types", "rl.config.shape"},
    "rl.run_folder": {"rl.types", "rl.protocols", "rl.config.schema"},
    "rl.provenance": {"rl.config.lock", "rl.config.secrets"},
    "rl.exit_codes": {"rl.config.schema", "rl.config.secrets"},
}
"""Module of no part -> all that it may import of the package."""

TOP = (
    "rl.assemble",
    "rl.comparison",
    "rl.driver",
    "rl.sweeps",
    "rl.plan",
    "rl.report",
    "rl.help",
    "rl.__main__",
)
"""Nothing below may import these."""


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, *, top_level_only: bool = False) -> Iterator[str]:
    """Modules that a file imports, anywhere in it; `from rl.a import b` is `rl.a.b` where that is a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in tree.body if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            assert node.module is not None
            for alias in node.names:
                longer = f"{node.module}.{alias.name}"
                is_module = (ROOT / (longer.replace(".", "/") + ".py")).is_file()
                yield longer if is_module else node.module


def is_under(module: str, packages: set[str]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def own(path: Path) -> set[str]:
    return {name for name in imports(path) if is_under(name, {"rl"})}


@pytest.mark.parametrize("package", THIRD_PARTY)
def test_a_heavy_package_is_imported_only_where_it_belongs(package):
    importers = {
        str(path.relative_to(ROOT)) for path in FILES if any(is_under(name, {package}) for name in imports(path))
    }
    assert {path for path in importers if not any(fnmatch(path, allowed) for allowed in THIRD_PARTY[package])} == set()


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_base_and_itself_and_no_other_part(part):
    allowed = BASE | {f"rl.{part}"} | PARTS[part]
    wrong = {
        f"{module_of(path)} -> {name}"
        for path in sorted((ROOT / "rl" / part).rglob("*.py"))
        for name in own(path)
        if not is_under(name, allowed)
    }
    assert wrong == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_base_module_imports_only_what_is_below_it(module):
    path = ROOT / (module.replace(".", "/") + ".py")
    assert {name for name in own(path) if not is_under(name, MODULES[module])} == set()


def test_the_configuration_imports_only_itself():
    wrong = {
        f"{module_of(path)} -> {name}"
        for path in (ROOT / "rl" / "config").glob("*.py")
        for name in own(path)
        if not is_under(name, {"rl.config"})
    }
    assert wrong == set()


def test_every_module_is_in_this_table():
    known = {f"rl.{part}" for part in PARTS} | set(MODULES) | set(TOP) | {"rl", "rl.config"}
    unknown = {module for module in map(module_of, FILES) if module != "rl" and not is_under(module, known - {"rl"})}
    assert unknown == set()


def test_nothing_below_imports_the_top():
    wrong = {
        f"{module_of(path)} -> {name}"
        for path in FILES
        if not is_under(module_of(path), set(TOP))
        for name in own(path)
        if is_under(name, set(TOP))
    }
    assert wrong == set()


def test_torch_stays_out_of_what_the_command_line_needs():
    """At the top of a file; functions that run later may."""
    light = [path for path in FILES if is_under(module_of(path), {"rl.config", "rl.types", "rl.protocols", "rl.tasks"})]
    heavy = {"torch", "transformers", "ray", "wandb", "datasets", "matplotlib", "pyarrow"}
    wrong = {
        f"{module_of(path)} -> {name}"
        for path in light
        for name in imports(path, top_level_only=True)
        if is_under(name, heavy)
    }
    assert wrong == set()


@pytest.mark.parametrize("module", ["rl.__main__", "rl.config.compose", "rl.config.check"])
def test_the_entrypoint_leaves_heavy_packages_out(module):
    """Each TAB completion runs the program anew, so imports are time that a person waits."""
    code = (
        f"import sys, {module}; heavy = 'torch ray transformers wandb datasets matplotlib vllm'.split(); "
        "print(*[name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")
