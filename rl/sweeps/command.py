"""`rl -m ...` runs a sweep or goes on with it; `rl sweep show FOLDER` says how far it is."""

from __future__ import annotations

import argparse
import math
import shlex
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rl import exit_codes
from rl.config.check import check_machine
from rl.config.schema import ConfigError, Mode, RunConfig
from rl.config.sweep import Launcher, SweepConfig
from rl.loggers.console import accuracies, duration
from rl.loggers.jsonl import read_metrics
from rl.run_folder import locked
from rl.sweeps import compare, ledger
from rl.sweeps.devices import Slots, slots_for
from rl.sweeps.ledger import Entry, State
from rl.sweeps.points import Point, expand, setting_of, split_words
from rl.sweeps.queue import Job, Queue

ENDING_LIMIT_S = 60.0
"""How long points of a sweep whose process was killed may take to save their checkpoint."""


def run_sweep(words: Sequence[str]) -> int:
    """Runs what is missing. 0 if every point is done, 1 if one failed, 130 if it was stopped."""
    settings, output_dir, rest = split_words(words)
    points = expand(rest)
    for replaced in dict.fromkeys(point.replaced for point in points if point.replaced):
        print(replaced, flush=True)
    if points[0].config.mode is Mode.plan:
        return _plan(points)
    slots = None
    if settings.launcher is Launcher.local:
        for point in points:
            check_machine(point.config)
        slots = slots_for([point.config for point in points], settings.jobs)
    folder = Path(output_dir).expanduser().resolve() if output_dir else _default_folder(rest)
    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder):
        ledger.open_sweep(folder, rest, points)
        if settings.launcher is Launcher.slurm:
            from rl.sweeps.slurm import forget_dead_jobs

            forget_dead_jobs(folder, settings)
        else:
            _wait_for_orphans(folder)
        entries = ledger.read_ledger(folder)
        missing = [entry for entry in entries if entry.record.state not in (State.done, State.submitted, State.running)]
        print(f"sweep of {len(entries)} points in {folder}")
        print("\n".join(_lines(entries)))
        by_label = {point.label: point.config for point in points}
        print(_time_line(entries, by_label, jobs=1 if slots is None else slots.jobs), flush=True)
        if slots is None:
            from rl.sweeps.slurm import submit

            return submit(folder, missing, settings)
        finished = _run(missing, points, slots)
    print("\n" + "\n".join(_lines(ledger.read_ledger(folder))))
    _compare(folder, settings)
    return _outcome(folder, words, finished=finished)


def _run(missing: Sequence[Entry], points: Sequence[Point], slots: Slots) -> bool:
    """False if a signal kept a point from starting."""
    configs = {tuple(sorted(point.words)): point.config for point in points}
    jobs = [Job(entry.folder, entry.words, entry.label, configs[tuple(sorted(entry.words))]) for entry in missing]

    def on_end(job: Job, exit_code: int) -> None:
        record = ledger.read_record(job.folder)
        if record.exit_code != exit_code:  # killed before it could say so itself
            record = ledger.end(job.folder, exit_code)
        print(f"[{job.folder.name}] {record.state.value} {record.why}".rstrip(), flush=True)

    return Queue(jobs, slots, on_end=on_end).run()


def _outcome(folder: Path, words: Sequence[str], *, finished: bool) -> int:
    states = [entry.record.state for entry in ledger.read_ledger(folder)]
    if all(state is State.done for state in states):
        return exit_codes.DONE
    given = [word for word in words if not word.startswith("output_dir=")]
    print(f"to go on with what is missing: rl -m {shlex.join([*given, f'output_dir={folder}'])}")
    was_stopped = not finished or State.interrupted in states
    return exit_codes.INTERRUPTED if was_stopped else exit_codes.FAILED


def _default_folder(words: Sequence[str]) -> Path:
    experiment = next((word.partition("=")[2] for word in words if word.startswith("experiment=")), "default")
    name = experiment if experiment.replace("_", "").isalnum() else "several"
    return Path("multirun", name, time.strftime("%Y-%m-%d_%H-%M-%S")).resolve()


def _wait_for_orphans(folder: Path) -> None:
    """Points that outlive a killed sweep have been told to end, and save a checkpoint first."""
    began = time.monotonic()
    while held := [entry for entry in ledger.read_ledger(folder) if entry.record.state is State.running]:
        if time.monotonic() - began > ENDING_LIMIT_S:
            raise ConfigError(f"{held[0].folder} is still running. Wait for it, or stop it first.")
        time.sleep(0.2)


def _plan(points: Sequence[Point]) -> int:
    from rl.plan.report import print_plan

    codes = []
    for index, point in enumerate(points):
        print(f"\n[{index:03d}] {point.label}")
        codes.append(print_plan(point.config))
    print(f"\nplan of a sweep: {len(points)} points")
    for index, (point, code) in enumerate(zip(points, codes, strict=True)):
        print(f"  {index:03d}  {point.label}{'' if code == 0 else '  cannot run, see its verdict'}")
    planned = [planned_s(point.config) for point in points]
    total = None if None in planned else sum(seconds for seconds in planned if seconds is not None)
    print("  one after the other: " + ("not known" if total is None else f"about {duration(total)} of steps"))
    return max(codes)


def _lines(entries: Sequence[Entry]) -> list[str]:
    """A line for each point: state, time, how far it is, and why it failed."""
    width = min(max((len(entry.label) for entry in entries), default=0), 70)
    return [f"  {entry.folder.name}  {entry.label:<{width}}  {_state_words(entry)}" for entry in entries]


def _state_words(entry: Entry) -> str:
    record = entry.record
    seconds = record.seconds + (time.time() - record.started if record.state is State.running else 0.0)
    words = [f"{record.state.value:<11}"]
    if seconds:
        words.append(f"{duration(seconds):>7}")
    if record.state is State.submitted:
        words.append(f"Slurm job {record.job_id}")
    rows = read_metrics(entry.folder / "metrics.jsonl")
    if rows and record.state is not State.pending:
        words.append(f"step {rows[-1]['step']}")
        evals = [accuracies(row) for row in rows]
        last = next((found for found in reversed(evals) if found), {})
        words += [f"{key.removeprefix('eval/')} {value:.3f}" for key, value in list(last.items())[:2]]
    if record.why:
        words.append(record.why if len(record.why) < 160 else record.why[:160] + " ...")
    return "  ".join(words).rstrip()


def _time_line(entries: Sequence[Entry], configs: Mapping[str, RunConfig], *, jobs: int) -> str:
    """How much is left, and for how long: as finished points took, else as the plan says of `configs`, by label."""
    left = [entry for entry in entries if entry.record.state is not State.done]
    took = [entry.record.seconds for entry in entries if entry.record.state is State.done]
    if not left:
        return "all points are done"
    words = f"{len(left)} to run, {jobs} at a time"
    if took:
        each = statistics.median(took)
        total = each * math.ceil(len(left) / jobs)
        return f"{words}; about {duration(total)}, as {len(took)} finished point(s) took {duration(each)}"
    planned = [planned_s(configs[entry.label]) for entry in left if entry.label in configs]
    if not planned or None in planned:
        return f"{words}; how long is not known until a point is done"
    total = sum(seconds for seconds in planned if seconds is not None) / jobs
    return f"{words}; about {duration(total)} of steps, by the plan"


def planned_s(config: RunConfig) -> float | None:
    """Of all steps of a run: as in the last run of such settings, else as predicted. None: neither is known."""
    from rl.plan.forecast import forecast
    from rl.plan.measured import last_like

    if config.steps is None or config.mode is not Mode.train:
        return None
    measured = (last_like(config) or {}).get("measured", {}).get("time/step_s")
    if measured is not None:
        return measured * config.steps
    found = forecast(config)
    return None if found is None or found.times is None else found.times.step * config.steps


def _compare(folder: Path, settings: SweepConfig | None = None) -> None:
    """The table, and sweep.png. Nothing where no point is done, or nothing was trained."""
    found: dict[str, compare.Setting] = {}
    for entry in ledger.read_ledger(folder):
        name = setting_of(entry.swept)
        setting = found.setdefault(name, compare.Setting(name, []))
        if entry.record.state is State.done and (entry.folder / "metrics.jsonl").exists():
            setting.runs.append(compare.read_run(entry.folder))
        else:
            setting.unfinished += 1
    _show_comparison(list(found.values()), folder / "sweep.png", metric=settings.metric if settings else None)


def _show_comparison(settings: Sequence[compare.Setting], picture: Path | None, *, metric: str | None) -> None:
    if not any(setting.runs for setting in settings):
        return
    metric = metric or compare.default_metric(settings)
    print("\n" + compare.comparison(settings, metric))
    if picture is not None:
        compare.draw(settings, picture, metric=metric, title=picture.parent.name)
        print(f"picture: {picture}")


def show(words: Sequence[str]) -> int:
    """`rl sweep show FOLDER [FOLDER ...] [--by KEY ...] [--metric KEY]`."""
    parser = argparse.ArgumentParser(
        prog="rl sweep",
        description="How far a sweep is, and its settings against each other, mean +/- std over seeds. Settings of a "
        "sweep, beside -m: sweep.jobs, sweep.metric, sweep.launcher, sweep.slurm.KEY (rl/config/sweep.py).",
    )
    commands = parser.add_subparsers(required=True)
    shows = commands.add_parser("show", help="states, table and sweep.png, also while it runs")
    shows.add_argument("folders", nargs="+", type=Path, help="of sweeps; several, with --by, in one table")
    shows.add_argument("--by", nargs="+", metavar="KEY", help="keys of run.yaml that make a row, for example algorithm")
    shows.add_argument("--metric", help="key of metrics.jsonl; the first accuracy if left out")
    try:
        arguments = parser.parse_args(list(words))
    except SystemExit as error:  # argparse has said why
        return exit_codes.REFUSED if error.code else exit_codes.DONE
    folders = [folder.expanduser().resolve() for folder in arguments.folders]
    if arguments.by:
        settings = compare.settings_by_keys(folders, arguments.by)
        if not any(setting.runs for setting in settings):
            raise ConfigError(f"no finished run in {', '.join(map(str, folders))}.")
        _show_comparison(settings, None, metric=arguments.metric)
        return exit_codes.DONE
    if len(folders) > 1:
        raise ConfigError("several folders make one table by the keys that tell runs apart: add --by KEY.")
    entries = ledger.read_ledger(folders[0])
    print(f"sweep of {len(entries)} points in {folders[0]}")
    print("\n".join(_lines(entries)))
    print(_time_line(entries, {}, jobs=1))
    _compare(folders[0], SweepConfig(metric=arguments.metric))
    return exit_codes.DONE
