"""Writes experiments/resolved/<name>.yaml, each experiment's settings as they resolve now, and experiments/README.md.

    python scripts/lock_experiments.py             after a change that is meant to change an experiment
    python scripts/lock_experiments.py --check     exit code 1 and the difference where a file is not what it would be

A run is `published` only with the settings of its lock. What was measured stands in experiments/results/<name>.yaml,
written by scripts/compare_curves.py, and is copied into the README's tables; an experiment without one is `pending`.
"""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

from rl.comparison.results import Result, read_results
from rl.config.compose import compose_run_config
from rl.config.evidence import evidence_of
from rl.config.load import to_plain
from rl.config.lock import config_digest, deciding_settings
from rl.config.published import ClaimConfig, PublishedConfig, Statistic, is_of_source, window_words
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

`rl experiment=NAME` runs one. Its run is tagged `published` if its settings are those of `resolved/NAME.yaml` and the
source speaks of its hardware, else `modified`, with what differs in its start and in provenance.json. Tolerances are
ours: no source gives one. "Derived" figures were not measured where they are claimed. Each setting that differs from a
default has one of three kinds of evidence, in the experiment's file: the source says it, it is assumed, or we deviate.
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
    results = read_results(FOLDER / "results" / f"{name}.yaml", published)
    num_gpus = config.num_gpus_used
    yield f"## `{name}`\n"
    yield f"The source ran on {published.hardware}. Settings as locked: {num_gpus} GPUs of `{published.measured_on}`."
    source = published.source
    yield f"Source: [{source.title}]({source.url}), {source.date}." if source.url else f"Source: {source.title}."
    for hardware, argument in published.carried_over.items():
        yield f"On `{hardware}` every figure is derived: {argument}."
    kinds = [kind for _, kind, _ in evidence_of(published)]
    yield (
        f"Evidence: {kinds.count('source')} settings from the source, {kinds.count('assumed')} assumed, "
        f"{kinds.count('deviation')} deviating, and {len(published.not_offered)} more listed as not offered.\n"
    )
    yield "| claim | published | ours | status | hardware | GPU-hours |"
    yield "|---|---|---|---|---|---|"
    digest = config_digest(to_plain(config))
    for key, claim in published.claims.items():
        told = [_result_cells(result, key, published, digest) for result in results if key in result.claims]
        for cells in told or [f" | {PENDING} |  | "]:
            yield f"| {_what(key, claim)} | {_published(claim)} | {cells} |"
    yield ""


def _result_cells(result: Result, key: str, published: PublishedConfig, digest: str) -> str:
    claim = result.claims[key]
    is_published = result.config_digest == digest and is_of_source(published, result.hardware)
    modified = "" if is_published else " (modified)"
    hardware = f"{result.num_gpus} GPUs of `{result.hardware}`" if result.num_gpus else f"`{result.hardware}`"
    return f"{claim.ours:.4g} (seed {result.seed}) | {claim.verdict}{modified} | {hardware} | {result.gpu_hours:,.0f}"


def _what(key: str, claim: ClaimConfig) -> str:
    over = f" over `{claim.versus}`" if claim.statistic is Statistic.ratio else ""
    return f"`{key}`: {STATISTICS[claim.statistic]} `{claim.metric}`{over}{window_words(claim)}"


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
