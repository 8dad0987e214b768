"""`rl --help`: commands, config groups with their options, experiments, on one screen; `rl --help KEY`: a setting."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING

from rl.config.register import GROUPS, experiment_files, option_names
from rl.config.schema import ConfigError

if TYPE_CHECKING:
    from rl.config.describe import Setting

COMMANDS = """\
Reinforcement-learning post-training of language models.

  rl experiment=quickstart                        train, evaluate, draw the curve
  rl experiment=NAME key=value ...                override any setting
  rl experiment=NAME smoke=cpu                    a published run made tiny: do its parts fit together, on any CPU
  rl experiment=NAME mode=plan                    what it will take, and whether it fits; starts nothing
  rl experiment=NAME mode=eval                    evaluate the policy before training
  rl -m experiment=NAME seed=1,2 key=a,b          a sweep: one child run per point; again: what is missing
  rl sweep show FOLDER                            its points, table and picture, also while it runs
  rl resume=FOLDER [steps=N] [logger=NAME]        continue a run from its last complete checkpoint
  rl export FOLDER [DESTINATION]                  newest checkpoint as a Hugging Face folder
  rl report FOLDER [FOLDER ...] [output=FILE]     one page of the curves of runs and sweeps, side by side
  rl experiment=NAME --cfg job --resolve          the exact config; one part: -p algorithm
  rl experiment=NAME --info defaults-tree         where each part comes from
  rl --help KEY [group=option ...]                what a setting is, or all settings below a key or group
  eval "$(rl -sc install=bash)"                   TAB completion

Top-level keys: experiment, mode (train, eval, plan), seed, steps (stop after so many), output_dir, clean.
"""


NO_SETTINGS = {
    "smoke": "smoke=cpu, beside experiment=NAME: the run made so small that any CPU does it in seconds, with a tiny "
    "model of the same architecture, the same placement and algorithm, and `local` or FSDP in place of an engine or "
    "trainer that is not installed. What is replaced is printed. Nothing is learned.",
    "resume": "resume=FOLDER continues the run of that folder from its last complete checkpoint. Beside it only steps "
    "and logger may be given; every other setting stays.",
    "published": "What a source claims of an experiment, and why each setting has its value; no setting of ours. "
    "`rl experiment=NAME mode=plan` prints the claims, `python scripts/compare_curves.py RUN` judges them.",
    "sweep": "rl -m experiment=NAME key=a,b does a sweep; rl sweep show FOLDER prints its table; rl sweep --help says "
    "what sweep.jobs, sweep.metric, sweep.launcher and sweep.slurm are.",
    "export": "rl export FOLDER [DESTINATION] writes the newest checkpoint of a run as a Hugging Face folder.",
    "report": "rl report FOLDER [FOLDER ...] [output=FILE] writes one page of the curves of runs and sweeps.",
}
"""Words of the command line that a person may ask about, and that are no setting of a run."""


def help_text() -> str:
    groups = [*GROUPS]
    groups.insert(groups.index("backend/trainer"), "backend")
    lines = ["Groups (group=option):"]
    lines += [_entry(group, option_names(group)) for group in groups]
    lines += ["", "Experiments (experiment=NAME):"]
    width = max(len(name) for name in experiment_files()) + 2
    lines += [f"  {name:<{width}}{_headline(name)}" for name in experiment_files()]
    return COMMANDS + "\n" + "\n".join(lines)


def key_help(words: Sequence[str]) -> str:
    """Of the settings that the first word names, with the values that the other words give. Raises ConfigError."""
    from rl.config.compose import compose_run_config
    from rl.config.describe import describe
    from rl.config.flat import flat
    from rl.config.load import to_plain
    from rl.config.other_names import hint

    name, *others = words
    key = name.replace("/", ".")
    first = key.partition(".")[0]
    if (text := NO_SETTINGS.get(first if first in ("published", "sweep") else key)) is not None:
        return "\n".join(_indented(text, 0))
    config = compose_run_config(list(others))
    settings = describe(config, key)
    if not settings:
        known = list(flat(to_plain(config)))
        raise ConfigError(
            f"unknown key '{key}'.{hint(key, [*known, *GROUPS])} Name a key or group, then options that have it: "
            "rl --help algorithm.dynamic_sampling algorithm=dapo"
        )
    return "\n\n".join(_block(setting) for setting in settings)


def _block(setting: Setting) -> str:
    value = setting.value.name if isinstance(setting.value, Enum) else setting.value
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    lines = [f"{setting.key} = {shown}   ({setting.kind})", *_indented(setting.text, 2)]
    for name, text in setting.choices.items():
        lines += _indented(f"{name}: {text}" if text else "", 4)
    return "\n".join(lines)


def _indented(text: str, by: int) -> list[str]:
    return textwrap.wrap(text, width=110, initial_indent=" " * by, subsequent_indent=" " * by)


def _entry(group: str, options: list[str]) -> str:
    return textwrap.fill(
        ", ".join(options),
        width=100,
        initial_indent=f"  {group:<18}",
        subsequent_indent=" " * 20,
        break_on_hyphens=False,
    )


def _headline(name: str) -> str:
    """The second comment line of an experiment file says what it is."""
    comments = [line for line in experiment_files()[name].read_text(encoding="utf-8").splitlines() if line[:1] == "#"]
    return comments[1].lstrip("# ").partition("   ")[0] if len(comments) > 1 else ""
