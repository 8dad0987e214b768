"""`rl report RUN [RUN ...]`: one HTML file that needs no network and no other file.

What a model wrote is not trusted: the template escapes every value, numbers travel as JSON in which `<` is spelled out,
and the page's own policy lets a browser run only the two scripts that are in it, and load nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from rl import exit_codes
from rl.config.schema import ConfigError
from rl.loggers.samples import Sample
from rl.report.charts import all_published, memory, page_data, phases, results
from rl.report.runs import ReportedRun, find_runs, now, provenance_line, read_runs, settings_that_differ

FILE_NAME = "report.html"
GENERATOR = "rl report"
MAX_RUNS = 40
MAX_SAMPLED_STEPS = 12
"""Of each run: evenly spread, the last one among them."""


def report(words: Sequence[str]) -> int:
    """The command: folders of runs or sweeps, and `output=FILE`."""
    given = [word for word in words if not word.startswith("output=")]
    output = [word.partition("=")[2] for word in words if word.startswith("output=")]
    if not given or any(word.startswith("-") or not word for word in [*given, *output]):
        raise ConfigError("write: rl report RUN_OR_SWEEP [RUN_OR_SWEEP ...] [output=FILE.html]")
    folders = [Path(word).expanduser().resolve() for word in given]
    runs = list(dict.fromkeys(run for folder in folders for run in find_runs(folder)))
    if len(runs) > MAX_RUNS:
        raise ConfigError(f"{len(runs)} runs are too many to tell apart in one picture. Name {MAX_RUNS} at most.")
    path = Path(output[-1]).expanduser().resolve() if output else _default_path(folders)
    _check_destination(path)
    path.write_text(render(read_runs(runs)), encoding="utf-8")
    print(f"report of {len(runs)} run{'s' if len(runs) > 1 else ''}: {path}")
    return exit_codes.DONE


def render(runs: Sequence[ReportedRun]) -> str:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("rl", "report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    folder = files("rl.report")
    scripts = [(folder / name).read_text(encoding="utf-8") for name in ("uplot/uPlot.iife.min.js", "page.js")]
    template = environment.get_template("page.html.jinja")
    return template.render(
        generator=GENERATOR,
        time=now(),
        policy=_policy(scripts),
        scripts=scripts,
        styles=[(folder / name).read_text(encoding="utf-8") for name in ("uplot/uPlot.min.css", "page.css")],
        licence=(folder / "uplot/LICENSE").read_text(encoding="utf-8"),
        data=_json_in_html(page_data(runs)),
        runs=runs,
        provenance=[provenance_line(run) for run in runs],
        results=results(runs),
        differences=settings_that_differ(runs),
        phases=[phases(run) for run in runs],
        memory=[memory(run) for run in runs],
        claims=all_published(runs),
        sources=_sources(runs),
        samples=[_samples_by_step(run.samples) for run in runs],
    )


def _policy(scripts: Sequence[str]) -> str:
    """Content-Security-Policy: these scripts by their digest, styles of the page, and nothing else from anywhere."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests)
    return f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def _json_in_html(data: Any) -> str:
    """JSON that cannot end the script element that it stands in."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _sources(runs: Sequence[ReportedRun]) -> list[dict[str, Any]]:
    """Where the published numbers come from; an address that is no web page is left out."""
    found = [(run.facts.config.get("published") or {}).get("source") for run in runs if run.facts.published]
    sources = {source["title"]: source for source in found if source}
    return [
        {"title": title, "url": source["url"] if str(source.get("url")).startswith("https://") else None}
        for title, source in sources.items()
    ]


def _samples_by_step(samples: Sequence[Sample]) -> dict[int, list[Sample]]:
    steps = list(dict.fromkeys(sample.step for sample in samples))
    if len(steps) > MAX_SAMPLED_STEPS:
        last = len(steps) - 1
        steps = [steps[round(index * last / (MAX_SAMPLED_STEPS - 1))] for index in range(MAX_SAMPLED_STEPS)]
    return {step: [sample for sample in samples if sample.step == step] for step in steps}


def _default_path(folders: Sequence[Path]) -> Path:
    return (folders[0] if len(folders) == 1 else Path.cwd()) / FILE_NAME


def _check_destination(path: Path) -> None:
    """An older report may be replaced, nothing else."""
    if not path.parent.is_dir():
        raise ConfigError(f"output={path}: there is no folder {path.parent}.")
    if path.is_dir():
        raise ConfigError(f"output={path} is a folder. Name a file.")
    if path.exists() and f'content="{GENERATOR}"' not in path.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise ConfigError(
            f"{path} exists and is no report of this command: it is left alone. Name another: output=FILE."
        )
