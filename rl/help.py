"""`rl --help`: commands, config groups with their options, experiments, on one screen."""

from __future__ import annotations

import textwrap

from rl.config.register import GROUPS, experiment_files, option_names

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
  eval "$(rl -sc install=bash)"                   TAB completion

Top-level keys: experiment, mode (train, eval, plan), seed, steps (stop after so many), output_dir, clean.
"""


def help_text() -> str:
    groups = [*GROUPS]
    groups.insert(groups.index("backend/trainer"), "backend")
    lines = ["Groups (group=option):"]
    lines += [_entry(group, option_names(group)) for group in groups]
    lines += ["", "Experiments (experiment=NAME):"]
    width = max(len(name) for name in experiment_files()) + 2
    lines += [f"  {name:<{width}}{_headline(name)}" for name in experiment_files()]
    return COMMANDS + "\n" + "\n".join(lines)


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
