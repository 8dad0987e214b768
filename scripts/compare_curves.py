"""The verdict on a run: what is claimed, what it did, difference and tolerance, claim by claim, and a picture.

    python scripts/compare_curves.py RUN                                  # against what its experiment publishes
    python scripts/compare_curves.py RUN --versus RUN_OF_THE_OTHER_MODE   # with the ratios between two runs
    python scripts/compare_curves.py RUN --against OTHER_RUN --metric eval/arithmetic/greedy=0.03
    python scripts/compare_curves.py RUN --against export.csv --rename critic/rewards/mean=reward/mean
    python scripts/compare_curves.py RUN --record                         # for the table in experiments/README.md

A difference within the tolerance is reproduced, from twice of it on failed, in between partial; of several points all,
none or some must be within. OTHER_RUN and an export of W&B are judged at the claims' own statistics and windows; for a
metric of --metric that is the median over the last quarter. Points tabled in a file (step, prompts, metric, value,
read_from; see experiments/curves) are judged one by one, by the tolerance of a claim on that metric or of --metric.

--record keeps in experiments/results what is comparable with the published claims, with commit, digest of the settings
and GPU-hours. A run whose settings are not the locked ones is told as modified there.

exit codes:
    0  everything is reproduced
    1  at least one claim failed
    2  the command cannot run as given
    3  nothing failed, but something is partial or not comparable
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from rl import exit_codes
from rl.comparison.curves import Axis
from rl.comparison.report import print_findings
from rl.comparison.results import record
from rl.comparison.runs import PUBLISHED, Request, compare
from rl.comparison.verdict import exit_code
from rl.config.schema import ConfigError


def main() -> int:
    summary, _, rest = (__doc__ or "").partition("\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=rest, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("--against", default=PUBLISHED, help="published (default), a run folder, or a CSV file")
    parser.add_argument(
        "--versus", type=Path, nargs="+", default=[], metavar="RUN", help="runs that claimed ratios divide by"
    )
    parser.add_argument(
        "--metric", nargs="+", default=[], metavar="KEY=TOLERANCE", help="judge these metrics instead of the claims"
    )
    parser.add_argument("--rename", nargs="+", default=[], metavar="THEIRS=OURS", help="names of metrics in the export")
    parser.add_argument("--run", dest="run_name", metavar="NAME", help="which run of an export that holds several")
    parser.add_argument(
        "--x",
        type=Axis,
        choices=list(Axis),
        default=Axis.PROMPTS,
        help="what curves are compared by (default: prompts)",
    )
    parser.add_argument("--picture", type=Path, help="PNG file (default: verdict.png in the run folder)")
    parser.add_argument(
        "--record", action="store_true", help="keep the verdict on published claims in experiments/results"
    )
    words = parser.parse_args()
    if words.record and (words.against != PUBLISHED or words.metric):
        parser.error("--record is of what is published: leave out --against and --metric")
    try:
        request = Request(
            run=words.run,
            against=words.against,
            versus=words.versus,
            metrics=words.metric,
            renamed=words.rename,
            run_name=words.run_name,
            axis=words.x,
            picture=words.picture or words.run / "verdict.png",
        )
        findings = compare(request)
        print_findings(findings, picture=request.picture)
        if words.record:
            print(f"recorded in {record(request.run, findings)}; scripts/lock_experiments.py puts it into the table")
    except ConfigError as error:
        return exit_codes.refused(error)
    return exit_code(findings)


if __name__ == "__main__":
    sys.exit(main())
