"""The process of one point: a run, and what became of it in point.json."""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rl import exit_codes
from rl.config.load import load_run_yaml
from rl.config.schema import ConfigError, Mode
from rl.sweeps import ledger

_PR_SET_PDEATHSIG = 1


def run_point(folder: Path, words: Sequence[str]) -> int:
    """Runs the point, from its last checkpoint if it has one. Returns the exit code."""
    ledger.begin(folder)
    why = ""
    try:
        from rl.driver import drive

        config = load_run_yaml(folder / "run.yaml")
        if config.mode is Mode.eval:
            shutil.rmtree(folder / "model", ignore_errors=True)  # of an evaluation that was interrupted
        exit_code = drive(config, folder, overrides=words)
    except ConfigError as error:
        why, exit_code = str(error), exit_codes.refused(error)
    except KeyboardInterrupt:
        print("stopped before the run began", file=sys.stderr)
        exit_code = exit_codes.INTERRUPTED
    ledger.end(folder, exit_code, why)
    return exit_code


def stop_with_parent(parent: int) -> None:
    """Has the kernel send SIGTERM when the sweep's process is gone: the run then ends with a checkpoint."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(exit_codes.INTERRUPTED)


def main(arguments: Sequence[str]) -> int:
    """`python -m rl.sweeps.child PARENT FOLDER [WORD ...]`; PARENT 0: none to end with."""
    parent, folder, *words = arguments
    if int(parent):
        stop_with_parent(int(parent))
    return run_point(Path(folder), words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
