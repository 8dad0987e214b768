"""Secrets of the environment: which they are, how they are masked, and that no run's config holds one.

Secret are the values of variables whose name says so (API key, token, password and the like), and passwords in URLs.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from rl.config.flat import flat
from rl.config.load import to_plain
from rl.config.schema import ConfigError, RunConfig

MASK = "***"
_SECRET_NAME = re.compile(
    r"(^|_)(\w*KEY|\w*TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|AUTH)(_|$)", re.IGNORECASE
)
_NAME_OF_NO_SECRET = re.compile(r"_(MODE|METHOD|TYPE|SOCK)$", re.IGNORECASE)
_PASSWORD_IN_URL = re.compile(r"(?<=://)([^/\s:@]*):([^/\s@]+)@")
_MIN_CHARACTERS = 4
"""A shorter value is no secret: `1` is part of too much."""
_MIN_CHARACTERS_INSIDE = 6
"""A shorter value is masked only where it stands alone, as a whole or after `=`."""
_MIN_CHARACTERS_REFUSED = 8
"""A shorter value may be in a config by chance."""


def mask_secrets(value: Any) -> Any:
    """The same value, or structure of values, with every secret in its texts replaced by `***`."""
    return _mask(value, _secrets())


def check_no_secret(config: RunConfig) -> None:
    """A run keeps its config in its folder and may upload it, so a secret may not be in it. The error names the key."""
    secrets = [secret for secret in _secrets() if len(secret) >= _MIN_CHARACTERS_REFUSED]
    for key, value in flat(to_plain(config)).items():
        if any(secret in f"{key}={value}" for secret in secrets) or _PASSWORD_IN_URL.search(str(value)):
            raise ConfigError(
                f"{_mask(key, secrets)} holds a secret: the value of an environment variable such as HF_TOKEN, or a "
                "password in a URL. A run folder keeps its config, and trackers upload it. Leave the secret in the "
                "environment, where libraries read it, or in ~/.netrc."
            )


class MaskingFormatter(logging.Formatter):
    """Masks secrets in what a library logs, too, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return mask_secrets(super().format(record))


def is_secret_name(variable: str) -> bool:
    return bool(_SECRET_NAME.search(variable)) and not _NAME_OF_NO_SECRET.search(variable)


def _secrets() -> list[str]:
    """Longest first, so that none is left in part. A URL holds a secret as it is or percent-encoded."""
    found = {text for name, text in os.environ.items() if is_secret_name(name)}
    found |= {match[2] for text in os.environ.values() for match in _PASSWORD_IN_URL.finditer(text)}
    found = {text for text in found if len(text) >= _MIN_CHARACTERS}
    return sorted(found | {quote(text, safe="") for text in found}, key=len, reverse=True)


def _mask(value: Any, secrets: Sequence[str]) -> Any:
    if isinstance(value, str):
        for secret in secrets:
            if len(secret) >= _MIN_CHARACTERS_INSIDE:
                value = value.replace(secret, MASK)
            elif value == secret or value.endswith(f"={secret}"):
                value = value.removesuffix(secret) + MASK
        return _PASSWORD_IN_URL.sub(rf"\1:{MASK}@", value)
    if isinstance(value, Mapping):
        return {_mask(key, secrets): _mask(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mask(item, secrets) for item in value]
    return value
