"""`rl -m experiment=X seed=1,2 key=a,b`: every point of the grid in a child process and a folder of its own.

All points are composed and checked before the first one starts.
"""

from __future__ import annotations

import itertools
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rl import exit_codes
from rl.config.check import check_machine, check_run_config
from rl.config.compose import compose_run_config, parse_overrides
from rl.config.load import save_run_yaml
from rl.config.schema import ConfigError, Mode, RunConfig
from rl.run_folder import create_run_folder


@dataclass(frozen=True, slots=True)
class Point:
    words: list[str]
    """Overrides of this point, without output_dir."""
    label: str
    """The swept ones alone."""
    config: RunConfig


def run_sweep(words: list[str]) -> int:
    """0 if every point ended well. Ctrl-C ends the running point with a checkpoint and starts no other."""
    folder, rest = _sweep_folder(words)
    points = expand(rest)
    for point in points:
        try:
            check_run_config(point.config)
        except ConfigError as error:
            raise ConfigError(f"point {point.label}: {error}") from error
    if points[0].config.mode is not Mode.plan:
        check_machine(points[0].config)
    if points[0].config.mode is Mode.plan:
        return _plan(points)
    point_folders = [
        create_run_folder(_with_output_dir(point.config, folder / f"{index:03d}")) for index, point in enumerate(points)
    ]
    print(f"sweep of {len(points)} points in {folder}", flush=True)
    results: list[int] = []
    for index, (point, point_folder) in enumerate(zip(points, point_folders, strict=True)):
        print(f"\n[{index + 1}/{len(points)}] {point.label}", flush=True)
        save_run_yaml(point.config, point_folder / "run.yaml")
        results.append(_run_child(point_folder, point.words))
        if results[-1] in (exit_codes.INTERRUPTED, -signal.SIGINT):
            break
    return _report(points, results, point_folders)


def expand(words: list[str]) -> list[Point]:
    """The grid: the product of every word that holds several values, in the order given, the last fastest."""
    overrides = parse_overrides(words)
    alternatives: list[list[str]] = []
    swept: list[bool] = []
    for override, word in zip(overrides, words, strict=True):
        if override.is_sweep_override():
            prefix = word.partition("=")[0]
            alternatives.append([f"{prefix}={value}" for value in override.sweep_string_iterator()])
        else:
            alternatives.append([word])
        swept.append(override.is_sweep_override())
    points = []
    for choice in itertools.product(*alternatives):
        label = " ".join(word for word, is_swept in zip(choice, swept, strict=True) if is_swept)
        try:
            config = compose_run_config(list(choice))
        except ConfigError as error:
            raise ConfigError(f"point {label or 'without a swept key'}: {error}") from error
        points.append(Point(list(choice), label or "(one point)", config))
    return points


def _sweep_folder(words: list[str]) -> tuple[Path, list[str]]:
    """Where the points' folders go, and the words without output_dir."""
    given = [word.partition("=")[2] for word in words if word.startswith("output_dir=")]
    rest = [word for word in words if not word.startswith("output_dir=")]
    if given:
        return Path(given[-1]).expanduser().resolve(), rest
    experiment = next((word.partition("=")[2] for word in words if word.startswith("experiment=")), "default")
    name = experiment if experiment.replace("_", "").isalnum() else "several"
    return Path("multirun", name, time.strftime("%Y-%m-%d_%H-%M-%S")).resolve(), rest


def _with_output_dir(config: RunConfig, folder: Path) -> RunConfig:
    config.output_dir = str(folder)
    return config


def _run_child(folder: Path, words: list[str]) -> int:
    """A child shares the terminal, so that Ctrl-C reaches it; this process waits until it has saved its checkpoint."""
    command = [sys.executable, "-m", "rl.driver", str(folder), *words]
    child = subprocess.Popen(command)
    while True:
        try:
            return child.wait()
        except KeyboardInterrupt:
            continue


def _plan(points: list[Point]) -> int:
    """The worst exit code of them."""
    from rl.plan.report import print_plan

    codes = []
    for index, point in enumerate(points):
        print(f"\n[{index + 1}/{len(points)}] {point.label}")
        codes.append(print_plan(point.config))
    return max(codes)


def _report(points: list[Point], results: list[int], folders: list[Path]) -> int:
    named = {exit_codes.DONE: "done", exit_codes.INTERRUPTED: "stopped"}
    print("\nsweep:")
    for index, point in enumerate(points):
        if index >= len(results):
            state = "not started"
        else:
            state = named.get(results[index], f"failed (exit code {results[index]})")
        print(f"  {point.label:<50} {state:<24} {folders[index]}")
    unfinished = [folder for folder, code in itertools.zip_longest(folders, results) if code != 0]
    if unfinished:
        print(f"to continue one: rl resume={shlex.quote(str(unfinished[0]))}")
    return 0 if not unfinished else 1
