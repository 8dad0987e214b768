"""How the command ends, and what it says when it refuses."""

from __future__ import annotations

import sys

from rl.config.schema import ConfigError

DONE = 0
FAILED = 1
REFUSED = 2
INTERRUPTED = 130


def refused(error: ConfigError) -> int:
    print(f"rl: {error}", file=sys.stderr)
    return REFUSED
