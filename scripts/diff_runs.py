"""What differs between two runs or experiments, and where two runs part.

    python scripts/diff_runs.py RUN_A RUN_B                 # settings, code, packages; first step and stage that differ
    python scripts/diff_runs.py EXPERIMENT_A EXPERIMENT_B   # settings
    python scripts/diff_runs.py RUN_OR_EXPERIMENT --locked  # against experiments/resolved/<experiment>.yaml
    python scripts/diff_runs.py --explain KEY RUN_OR_EXPERIMENT   # where a value came from, level by level

exit codes: 0 nothing that decides an outcome differs (or KEY is explained); 1 something does; 2 the command cannot run
as given.
"""

from __future__ import annotations

import argparse
import sys

from rl import exit_codes
from rl.comparison.differences import diff_lines
from rl.comparison.origins import explain
from rl.comparison.settings import read_lock, read_settings
from rl.config.schema import ConfigError


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", metavar="RUN_OR_EXPERIMENT", help="run folder, experiment, or YAML file")
    parser.add_argument("--locked", action="store_true", help="compare one with its experiment's lock")
    parser.add_argument("--explain", metavar="KEY", help="say where the value of this setting came from")
    words = parser.parse_args()
    if len(words.names) != (1 if words.locked or words.explain else 2):
        parser.error("give two runs or experiments, or one with --locked or --explain KEY")
    try:
        first = read_settings(words.names[0])
        if words.explain:
            print("\n".join(explain(words.explain, first)))
            return exit_codes.DONE
        second = read_lock(first) if words.locked else read_settings(words.names[1])
        lines, differs = diff_lines(first, second)
    except ConfigError as error:
        return exit_codes.refused(error)
    print("\n".join(lines))
    return exit_codes.FAILED if differs else exit_codes.DONE


if __name__ == "__main__":
    sys.exit(main())
