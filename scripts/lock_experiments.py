"""Writes experiments/resolved/<name>.yaml, each experiment's settings as they resolve now, and experiments/README.md.

    python scripts/lock_experiments.py             after a change that is meant to change an experiment
    python scripts/lock_experiments.py --check     exit code 1 and the difference where a file is not what it would be

A run is `published` only with the settings of its lock. What was measured stands in experiments/results/<name>.yaml, a
list of results (`Result` below), and is copied into the README's tables; an experiment without one is `pending`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from omegaconf import OmegaConf

from rl.config.compose import compose_run_config
from rl.config.evidence import evidence_of
from rl.config.load import to_plain
from rl.config.lock import config_digest, deciding_settings
from rl.config.published import ClaimConfig, PublishedConfig, Statistic
from rl.config.register import experiment_files
from rl.config.schema import RunConfig

FOLDER = Path(__file__).resolve().parents[1] / "experiments"

LOCK_HEAD = """\
# Written by scripts/lock_experiments.py. Every setting of experiment={name} that decides its outcome, as it resolves
# from conf/, experiments/{name}.yaml and the defaults.
"""

README_HEAD = """\
# Experiments

Written by `python scripts/lock_experiments.py` from the experiments' own files; do not edit.

`rl experiment=NAME` runs one. Its run is tagged `published` if its settings are those of `resolved/NAME.yaml`, else
`modified`, with the settings that differ in its start and in provenance.json. Tolerances are ours: no source gives one.
"Derived" figures were not measured where they are claimed. Each setting that differs from a default has one of three
kinds of evidence, in the experiment's file: the source says it, it is assumed, or we deviate.
"""

PENDING = "pending"
STATISTICS = {
    Statistic.start: "start of",
    Statistic.max: "largest",
    Statistic.settles_at: "median at the end of",
    Statistic.median: "median",
    Statistic.mean: "mean",
    Statistic.ratio: "ratio of medians of",
}


@dataclass
class ClaimResult:
    ours: float | None = None
    """None: not comparable."""
    verdict: str = ""
    """reproduced, partial, failed, or not comparable and why."""


@dataclass
class Result:
    """What one or more runs of an experiment measured."""

    hardware: str = ""
    """With their number, for example 8x MI350X."""
    config_digest: str = ""
    """Of provenance.json. Other than the lock's: the runs were modified."""
    gpu_hours: float = 0.0
    """Of one run."""
    seeds: list[int] = field(default_factory=list)
    claims: dict[str, ClaimResult] = field(default_factory=dict)
    """By the claims' names; the mean over seeds."""


def wanted_files() -> dict[Path, str]:
    """Path -> contents as they should be now."""
    configs = {name: compose_run_config([f"experiment={name}"]) for name in experiment_files()}
    files = {FOLDER / "resolved" / f"{name}.yaml": lock_text(name, config) for name, config in configs.items()}
    files[FOLDER / "README.md"] = readme_text(configs)
    return files


def lock_text(name: str, config: RunConfig) -> str:
    settings = deciding_settings(to_plain(config))
    return LOCK_HEAD.format(name=name) + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)


def readme_text(configs: dict[str, RunConfig]) -> str:
    parts = [README_HEAD]
    for name, config in configs.items():
        if config.published is not None:
            parts.append("\n".join(_section(name, config, config.published)))
    others = [name for name, config in configs.items() if config.published is None]
    if others:
        names = ", ".join(f"`{name}`" for name in others)
        parts.append(f"## Ours\n\nNothing was published of {names}. The project's README says what was measured.\n")
    return "\n".join(parts)


def _section(name: str, config: RunConfig, published: PublishedConfig) -> Iterator[str]:
    results = read_results(name, published)
    num_gpus = config.num_gpus_used
    yield f"## `{name}`\n"
    yield f"Published of {published.hardware}. Settings as locked: {num_gpus} GPUs of `{published.measured_on}`."
    source = published.source
    yield f"Source: [{source.title}]({source.url}), {source.date}." if source.url else f"Source: {source.title}."
    for hardware, argument in published.carried_over.items():
        yield f"On `{hardware}` every figure is derived: {argument}."
    kinds = [kind for _, kind, _ in evidence_of(published)]
    yield (
        f"Evidence: {kinds.count('source')} settings from the source, {kinds.count('assumed')} assumed, "
        f"{kinds.count('deviation')} deviations, and {len(published.not_offered)} more listed as not offered.\n"
    )
    yield "| claim | published | ours | status | hardware | GPU-hours |"
    yield "|---|---|---|---|---|---|"
    digest = config_digest(to_plain(config))
    for key, claim in published.claims.items():
        told = [_result_cells(result, key, digest) for result in results if key in result.claims]
        for cells in told or [f" | {PENDING} |  | "]:
            yield f"| {_what(key, claim)} | {_published(claim)} | {cells} |"
    yield ""


def read_results(name: str, published: PublishedConfig) -> list[Result]:
    """None yet: an empty list. Raises ValueError where a result is about a claim that the experiment does not make."""
    path = FOLDER / "results" / f"{name}.yaml"
    if not path.is_file():
        return []
    results = [
        OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Result), entry))
        for entry in yaml.safe_load(path.read_text(encoding="utf-8"))
    ]
    assert all(isinstance(result, Result) for result in results)
    unknown = {key for result in results for key in result.claims} - set(published.claims)  # type: ignore[union-attr]
    if unknown:
        raise ValueError(f"{path}: {', '.join(sorted(unknown))}: the experiment makes no such claim")
    return results  # type: ignore[return-value]


def _result_cells(result: Result, key: str, digest: str) -> str:
    claim = result.claims[key]
    ours = "" if claim.ours is None else f"{claim.ours:.4g}"
    seeds = f" ({len(result.seeds)} seeds)" if len(result.seeds) > 1 else ""
    modified = "" if result.config_digest == digest else " (modified)"
    return f"{ours}{seeds} | {claim.verdict}{modified} | {result.hardware} | {result.gpu_hours:,.0f}"


def _what(key: str, claim: ClaimConfig) -> str:
    window = "" if claim.first_step is None else f", from step {claim.first_step}"
    window += "" if claim.last_step is None else f", up to step {claim.last_step}"
    window += "" if claim.rows_per_step == 1 else f", {claim.rows_per_step} of our steps as one"
    over = f" over `{claim.versus}`" if claim.statistic is Statistic.ratio else ""
    return f"`{key}`: {STATISTICS[claim.statistic]} `{claim.metric}`{over}{window}"


def _published(claim: ClaimConfig) -> str:
    unit = f" {claim.unit}" if claim.unit not in ("", "fraction") else ""
    origin = "" if claim.origin.value == "vendor_measured" else f", {claim.origin.value}"
    return f"{claim.value:g} +- {claim.tolerance:g}{unit}{origin}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where a file differs")
    check = parser.parse_args(arguments).check
    files = wanted_files()
    stale = set((FOLDER / "resolved").glob("*.yaml")) - set(files)
    changed = [path for path, text in files.items() if not path.is_file() or path.read_text(encoding="utf-8") != text]
    if not check:
        for path in stale:
            path.unlink()
        for path in changed:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path], encoding="utf-8")
        print(f"{len(files)} files, {len(changed)} written, {len(stale)} removed")
        return 0
    for path in [*changed, *sorted(stale)]:
        before = path.read_text(encoding="utf-8") if path.is_file() else ""
        lines = difflib.unified_diff(
            before.splitlines(), files.get(path, "").splitlines(), f"{path} (now)", f"{path} (would be)", lineterm=""
        )
        print("\n".join(lines))
    if changed or stale:
        print(
            "lock_experiments.py: an experiment does not resolve to what is locked. Where that is meant, run: "
            "python scripts/lock_experiments.py",
            file=sys.stderr,
        )
    return 1 if changed or stale else 0


if __name__ == "__main__":
    sys.exit(main())
