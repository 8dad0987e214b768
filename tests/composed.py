"""Configs for tests, each composed once in a process: composing takes most of a second."""

from __future__ import annotations

from copy import deepcopy
from functools import cache

from rl.config.compose import compose_run_config
from rl.config.schema import RunConfig


@cache
def _composed(words: tuple[str, ...]) -> RunConfig:
    return compose_run_config(list(words))


def config_of(*words: str) -> RunConfig:
    """Of a command line; the caller's own, to change. Not for tests with files of their own in conf or experiments."""
    return deepcopy(_composed(words))
