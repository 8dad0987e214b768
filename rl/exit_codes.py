"""How the command ends, and what it says when it refuses."""

from __future__ import annotations

import sys

from rl.config.schema import ConfigError
from rl.config.secrets import mask_secrets

DONE = 0
FAILED = 1
REFUSED = 2
INTERRUPTED = 130


def refused(error: ConfigError) -> int:
    print(mask_secrets(f"rl: {error}"), file=sys.stderr)
    return REFUSED
