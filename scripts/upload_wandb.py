"""Uploads a run's metrics.jsonl and samples to Weights & Biases, after the fact: `python scripts/upload_wandb.py RUN`.

The W&B run is the one that `logger=wandb` would have made: same id, keys, axes, tags and group. Rows up to the last one
that W&B has of it are left out, so that a second upload adds nothing. `logger.project=NAME` and `logger.entity=NAME`
override what run.yaml says.
"""

from __future__ import annotations

import logging
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from rl import exit_codes
from rl.config.load import load_run_yaml, to_plain
from rl.config.schema import ConfigError, WandbLoggerConfig
from rl.config.secrets import MaskingFormatter, mask_secrets
from rl.loggers.facts import read_provenance, run_facts
from rl.loggers.jsonl import read_metrics
from rl.loggers.samples import Sample, read_samples
from rl.loggers.wandb import WandbError, WandbLogger
from rl.run_folder import locked

FINISH_LIMIT_S = 3600.0
OVERRIDES = ("logger.project", "logger.entity")


def main(arguments: Sequence[str]) -> int:
    terminal = logging.StreamHandler()
    terminal.setFormatter(MaskingFormatter("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[terminal])
    try:
        folders = [argument for argument in arguments if "=" not in argument]
        if len(folders) != 1:
            raise ConfigError("write: python scripts/upload_wandb.py RUN [logger.project=NAME] [logger.entity=NAME]")
        folder = Path(folders[0]).expanduser().resolve()
        with locked(folder):
            return upload(folder, [argument for argument in arguments if "=" in argument])
    except ConfigError as error:
        return exit_codes.refused(error)


def upload(run_folder: Path, overrides: Sequence[str]) -> int:
    rows = read_metrics(run_folder / "metrics.jsonl")
    if not rows:
        raise ConfigError(f"{run_folder / 'metrics.jsonl'} holds no row: there is nothing to upload.")
    config = load_run_yaml(run_folder / "run.yaml")
    logger_config = config.logger if isinstance(config.logger, WandbLoggerConfig) else WandbLoggerConfig()
    logger_config.mode = "online"
    for override in overrides:
        key, _, value = override.partition("=")
        if key not in OVERRIDES:
            raise ConfigError(f"{key} cannot be set here, only {' and '.join(OVERRIDES)} can.")
        setattr(logger_config, key.removeprefix("logger."), value)
    logger = WandbLogger(
        logger_config,
        run_folder=run_folder,
        facts=run_facts(run_folder, config=mask_secrets(to_plain(config)), provenance=read_provenance(run_folder)),
        first_commit=0,
        finish_limit_s=FINISH_LIMIT_S,
    )
    samples: dict[int, list[Sample]] = defaultdict(list)
    for sample in read_samples(run_folder):
        samples[sample.step].append(sample)
    try:
        logger.open()
        last = -1 if logger.last_step is None else logger.last_step
        missing = [row for row in rows if row["step"] > last]
        for row in missing:
            step = row["step"]
            logger.send({key: row[key] for key in row if key != "step"}, step=step, samples=samples[step])
        logger.finish(failed=False)
    except (WandbError, OSError) as error:
        print(
            mask_secrets(f"the upload failed: {error}. What W&B has is kept; run the same command again."),
            file=sys.stderr,
        )
        return exit_codes.FAILED
    finally:
        logger.kill()
    print(f"uploaded {len(missing)} rows, {len(rows) - len(missing)} were there already: {logger.location}")
    return exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
