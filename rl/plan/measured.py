"""What runs took, beside what their plans said.

Each run that trained appends one line to `outputs/measurements.jsonl` in the folder that it was started from, where run
folders go by default. A plan finds there the last one of the same settings on the same hardware, whatever its number of
steps and its seed. plan.json in the run folder is the same line.
"""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from statistics import median
from typing import Any

from rl.config.load import to_plain
from rl.config.lock import config_digest
from rl.config.schema import RunConfig
from rl.loggers.jsonl import Row, read_metrics
from rl.plan.forecast import MEASURED_AS, planned_metrics

log = logging.getLogger(__name__)

FILE = Path("outputs/measurements.jsonl")
TIMES = ("time/step_s", "time/wait_for_batch_s", "time/train_s", "time/publish_s")
PEAKS = ("memory/gpu_peak_gib", *(f"memory/gpu_{phase}_gib" for phase in MEASURED_AS.values()), "memory/rss_gib")
OTHERS = ("rollout/response_tokens_mean", "rollout/tokens_per_s")


def conclude(config: RunConfig, run_folder: Path) -> list[str]:
    """Writes plan.json and the line of measurements; returns the table for the terminal. Nothing without a step."""
    rows = [row for row in read_metrics(run_folder / "metrics.jsonl") if row["step"] > 0]
    if not rows:
        return []
    planned = {key.removeprefix("plan/"): value for key, value in planned_metrics(config).items()}
    record = {
        "time": time.strftime("%Y-%m-%d %H:%M", time.gmtime()),
        "run_folder": str(run_folder),
        "settings": settings_digest(config),
        "hardware": hardware_of(config),
        "steps": len(rows),
        "planned": planned,
        "measured": measured(rows),
    }
    try:
        (run_folder / "plan.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        FILE.parent.mkdir(parents=True, exist_ok=True)
        with FILE.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        log.warning("what this run took could not be written down: %s", error)
    return table(record)


def measured(rows: list[Row]) -> dict[str, float]:
    """Medians of times, maxima of memory. The first step, in which things are compiled and cached, is left out of the
    times where there are others; so are steps without the phase."""
    timed = rows[1:] or rows
    values = {key: [row[key] for row in timed if row.get(key) is not None] for key in (*TIMES, *OTHERS)}
    peaks = {key: [row[key] for row in rows if row.get(key) is not None] for key in PEAKS}
    found = {key: float(median(of_key)) for key, of_key in values.items() if of_key}
    return found | {key: float(max(of_key)) for key, of_key in peaks.items() if of_key}


def table(record: dict[str, Any]) -> list[str]:
    """Planned, measured and by how much the plan was off."""
    planned, real = record["planned"], record["measured"]
    lines = [f"{'planned and measured':<32}{'planned':>10}{'measured':>10}{'error':>8}"]
    for key in (*TIMES, *PEAKS):
        if key in real:
            said = planned.get(key)
            cells = f"{'-':>10}{real[key]:>10.3g}" if said is None else f"{said:>10.3g}{real[key]:>10.3g}"
            off = "" if not said or not real[key] else f"{100 * (said / real[key] - 1):+.0f} %"
            lines.append(f"{key:<32}{cells}{off:>8}")
    return lines


def measured_lines(config: RunConfig) -> list[str]:
    """For the plan: the last run like this one."""
    record = last_like(config)
    if record is None:
        return [f"nothing yet: no run of these settings on this hardware is in {FILE}"]
    when = f"{record['time']} UTC, {record['steps']} step(s), {record['run_folder']}"
    length = record["measured"].get("rollout/response_tokens_mean")
    words = "" if length is None else f"; answers of {length:,.0f} tokens on average"
    return [f"{when}{words}", *table(record)]


def last_like(config: RunConfig) -> dict[str, Any] | None:
    """Lines that are no record, of another version or cut off as a disk ran full, are passed over."""
    if not FILE.is_file():
        return None
    digest, hardware = settings_digest(config), hardware_of(config)
    found = None
    with FILE.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            if digest not in line:
                continue
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if record.get("settings") == digest and record.get("hardware") == hardware:
                found = record
    return found


def settings_digest(config: RunConfig) -> str:
    """Of everything that decides what a step takes: neither the number of steps nor the seed does."""
    plain = to_plain(config)
    for key in ("steps", "seed", "checkpoint", "evaluation"):
        plain.pop(key)
    return config_digest(plain)


def hardware_of(config: RunConfig) -> dict[str, Any]:
    hardware = config.hardware
    return {"name": hardware.name, "nodes": hardware.nodes, "gpus_per_node": hardware.gpus_per_node}
